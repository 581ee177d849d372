//! Attention of few slots that see the same keys, of one token or of several, in vectors of 16 lanes.
//!
//! Lane `l` of a vector multiplies the elements `l, l + 16, …` of a query and a key; the lanes of 16 keys are summed
//! together. Keys and values are read once for each four slots, those of f16 widened in registers. Where rows come
//! from far away, values are fetched while their keys are read, and the keys of the next tile while values are mixed.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_storeu_ps,
    _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

#[cfg(target_arch = "x86_64")]
use super::product::LINE;
use super::{Element, Instructions, Isa, LANES, OneToken, ROWS};
use crate::grid::Tile;

const FEW: usize = FewSlots::MOST;

/// Keys between two updates of the softmax.
const KEYS: usize = 128;

/// Keys that are multiplied together: four slots have so many sums under way that none waits for itself.
#[cfg(target_arch = "x86_64")]
const TOGETHER: usize = 4;

/// Vectors of a value that are mixed together.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 4;

/// One token that has few slots.
pub(crate) struct FewSlots<'a, T = f32> {
    pub(crate) token: OneToken<'a, T>,
    /// The first keys and values once more, read in place of those of the token.
    pub(crate) past: Option<[&'a [T]; 2]>,
    /// Whether rows come from far away, so that they are fetched early.
    pub(crate) far: bool,
}

/// Scores `[slot][key]` of some keys, then their weights.
#[repr(align(64))]
struct Scores([f32; FEW * KEYS]);

impl FewSlots<'_> {
    /// Most slots.
    pub(crate) const MOST: usize = 4;

    /// Whether these sizes are served with the instructions of `isa`.
    pub(crate) fn serves(isa: Isa, slots: usize, head: usize) -> bool {
        isa.0 >= Instructions::Avx512 && (1..=FEW).contains(&slots) && head > 0 && head.is_multiple_of(LANES)
    }
}

impl<T: Element> FewSlots<'_, T> {
    /// Fills the rows from `first_row` on, one for each slot, with the values weighted by the softmax of query times
    /// key.
    ///
    /// # Panics
    ///
    /// If the sizes are not served, there is no key, a query, a key, a value or a row of `out` is not there, or the
    /// past has not as many keys as values.
    pub(crate) fn attend(&self, isa: Isa, out: &mut Tile<'_, f32>, first_row: usize) {
        match self.far {
            true => self.attend_from::<true>(isa, out, first_row),
            false => self.attend_from::<false>(isa, out, first_row),
        }
    }

    fn attend_from<const FAR: bool>(&self, isa: Isa, out: &mut Tile<'_, f32>, first_row: usize) {
        let Self { token, past, .. } = *self;
        let OneToken { slots, head, key, value, places, .. } = token;
        assert!(FewSlots::serves(isa, slots, head) && !places.is_empty(), "sizes of few slots");
        token.check(out);
        let [past_key, past_value] = past.unwrap_or_default();
        assert!(past_key.len() == past_value.len(), "keys and values of the past");
        let mut block = Block::<T, FAR> {
            queries: [std::ptr::null(); FEW],
            out: [std::ptr::null_mut(); FEW],
            past: past_key.len() / head,
            keys: [past_key.as_ptr(), key.as_ptr()],
            values: [past_value.as_ptr(), value.as_ptr()],
            head,
        };
        let rows: [usize; FEW] = std::array::from_fn(|slot| first_row + slot);
        out.starts(&rows[..slots], 0, &mut block.out);
        for (slot, query) in block.queries.iter_mut().enumerate().take(slots) {
            *query = token.query(slot);
        }
        let (mut max, mut sum) = ([f32::NEG_INFINITY; FEW], [0.0; FEW]);
        let mut scores = Scores([0.0; FEW * KEYS]);
        for (tile, later) in (0..places.len()).step_by(KEYS).map(|first| &places[first..]).enumerate() {
            let (places, later) = later.split_at(KEYS.min(later.len()));
            block.score(slots, places, &mut scores);
            let seen = [places.len(); ROWS];
            let factors = isa.softmax_rows(&mut scores.0, KEYS, &seen, &mut max[..slots], &mut sum[..slots]);
            block.mix(slots, [places, later], &scores, (tile > 0).then_some(&factors));
        }
        (0..slots).for_each(|slot| isa.scale(out.row(first_row + slot), 1.0 / sum[slot]));
    }
}

/// Slots whose queries and destinations hold a head, and keys and values, all in bounds; `FAR` where these are fetched,
/// known to the compiler: another branch for each vector takes 1 to 2 % of a short call.
struct Block<T, const FAR: bool> {
    queries: [*const f32; FEW],
    out: [*mut f32; FEW],
    /// Keys and values of the past, and those from there on; each has its place among all.
    past: usize,
    keys: [*const T; 2],
    values: [*const T; 2],
    head: usize,
}

#[cfg(target_arch = "x86_64")]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    /// Where the row `place` of keys or values begins.
    fn row(&self, rows: [*const T; 2], place: usize) -> *const T {
        rows[usize::from(place >= self.past)].wrapping_add(place * self.head)
    }
}

#[cfg(not(target_arch = "x86_64"))]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    fn score(&self, _: usize, _: &[usize], _: &mut Scores) {}

    fn mix(&self, _: usize, _: [&[usize]; 2], _: &Scores, _: Option<&[f32; ROWS]>) {}
}

#[cfg(target_arch = "x86_64")]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    /// Products of the queries and up to [`KEYS`] keys.
    fn score(&self, slots: usize, places: &[usize], scores: &mut Scores) {
        // SAFETY: `FewSlots::attend` proved the bounds and the instructions.
        unsafe {
            match slots {
                1 => score::<T, FAR, 1>(self, places, scores),
                2 => score::<T, FAR, 2>(self, places, scores),
                3 => score::<T, FAR, 3>(self, places, scores),
                _ => score::<T, FAR, 4>(self, places, scores),
            }
        }
    }

    /// Adds the weighted values to what the destinations hold times `factors`; `None` where they hold nothing. Fetches
    /// the keys that come next, at the second `places`.
    fn mix(&self, slots: usize, places: [&[usize]; 2], scores: &Scores, factors: Option<&[f32; ROWS]>) {
        // SAFETY: as above; `column` stays inside a head.
        unsafe {
            for column in (0..self.head / (WIDE * LANES)).map(|wide| wide * WIDE * LANES) {
                mix_columns::<T, FAR, WIDE>(self, slots, places, scores, (column, factors));
            }
            for column in (self.head / (WIDE * LANES) * WIDE * LANES..self.head).step_by(LANES) {
                mix_columns::<T, FAR, 1>(self, slots, places, scores, (column, factors));
            }
        }
    }
}

/// For each quarter of the lanes, the sums of it in four vectors.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn quarter_sums(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    let first = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    let second = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    let (low, high) = (_mm512_unpacklo_pd(first, second), _mm512_unpackhi_pd(first, second));
    _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
}

/// The sums of neighbouring quarters of `a`, then those of `b`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn join(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
}

/// The sums of the lanes of each of 16 vectors. Without closures: the compiler would call them, with vectors in memory.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn sums_of_lanes(v: &[__m512; LANES]) -> __m512 {
    let first = join(quarter_sums(v[0], v[1], v[2], v[3]), quarter_sums(v[4], v[5], v[6], v[7]));
    let second = join(quarter_sums(v[8], v[9], v[10], v[11]), quarter_sums(v[12], v[13], v[14], v[15]));
    join(first, second)
}

/// As [`Block::score`]; what stands past the last key, up to a whole vector, are scores of others.
///
/// # Safety
///
/// `S` queries must hold a head, `places` must be 1 to [`KEYS`] rows of keys; the processor must have AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn score<T: Element, const FAR: bool, const S: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &mut Scores,
) {
    let mut lanes = [[_mm512_setzero_ps(); LANES]; S];
    for (group, places) in places.chunks(LANES).enumerate() {
        for from in (0..places.len()).step_by(TOGETHER) {
            let near: [usize; TOGETHER] = std::array::from_fn(|key| (from + key).min(places.len() - 1));
            let rows = near.map(|key| block.row(block.keys, places[key]));
            let values = near.map(|key| block.row(block.values, places[key]));
            let mut sums = [[_mm512_setzero_ps(); TOGETHER]; S];
            for first in (0..block.head).step_by(LANES) {
                // SAFETY: by the caller's promise.
                unsafe {
                    if FAR && (first * size_of::<T>()).is_multiple_of(LINE) {
                        values.iter().for_each(|row| _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(first).cast()));
                    }
                    let keys = rows.map(|row| T::load16(row.add(first), 0));
                    for (sums, query) in sums.iter_mut().zip(block.queries) {
                        let query = _mm512_loadu_ps(query.add(first));
                        for (sum, key) in sums.iter_mut().zip(keys) {
                            *sum = _mm512_fmadd_ps(query, key, *sum);
                        }
                    }
                }
            }
            for (lanes, sums) in lanes.iter_mut().zip(sums) {
                near.into_iter().zip(sums).for_each(|(key, sum)| lanes[key] = sum);
            }
        }
        for (slot, lanes) in lanes.iter().enumerate() {
            let place = slot * KEYS + group * LANES;
            // SAFETY: a slot has room for whole vectors of its keys.
            unsafe { _mm512_storeu_ps(scores.0.as_mut_ptr().add(place), sums_of_lanes(lanes)) };
        }
    }
}

/// As [`Block::mix`] for `V` vectors from a column on.
///
/// # Safety
///
/// `slots` destinations must hold the columns, the first `places` must be up to [`KEYS`] rows of values; the processor
/// must have AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn mix_columns<T: Element, const FAR: bool, const V: usize>(
    block: &Block<T, FAR>,
    slots: usize,
    places: [&[usize]; 2],
    scores: &Scores,
    (column, factors): (usize, Option<&[f32; ROWS]>),
) {
    let mut sums = [[_mm512_setzero_ps(); V]; FEW];
    // SAFETY: by the caller's promise.
    unsafe {
        if let Some(factors) = factors {
            for (slot, sums) in sums.iter_mut().enumerate().take(slots) {
                let (factor, out) = (_mm512_set1_ps(factors[slot]), block.out[slot].add(column));
                *sums = std::array::from_fn(|vector| _mm512_mul_ps(_mm512_loadu_ps(out.add(vector * LANES)), factor));
            }
        }
        match slots {
            1 => add_values::<T, FAR, V, 1>(block, places, scores, column, &mut sums),
            2 => add_values::<T, FAR, V, 2>(block, places, scores, column, &mut sums),
            3 => add_values::<T, FAR, V, 3>(block, places, scores, column, &mut sums),
            _ => add_values::<T, FAR, V, 4>(block, places, scores, column, &mut sums),
        }
        for (slot, sums) in sums.iter().enumerate().take(slots) {
            for (vector, sum) in sums.iter().enumerate() {
                _mm512_storeu_ps(block.out[slot].add(column + vector * LANES), *sum);
            }
        }
    }
}

/// Adds weight times value to the sums of `S` slots.
///
/// # Safety
///
/// As for [`mix_columns`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn add_values<T: Element, const FAR: bool, const V: usize, const S: usize>(
    block: &Block<T, FAR>,
    [places, later]: [&[usize]; 2],
    scores: &Scores,
    column: usize,
    all: &mut [[__m512; V]; FEW],
) {
    let mut sums: [[__m512; V]; S] = std::array::from_fn(|slot| all[slot]);
    for (key, place) in places.iter().enumerate() {
        let row = block.row(block.values, *place).wrapping_add(column);
        if FAR && let Some(later) = later.get(key) {
            let row = block.row(block.keys, *later).wrapping_add(column).cast::<i8>();
            for byte in (0..V * LANES * size_of::<T>()).step_by(LINE) {
                _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(byte));
            }
        }
        // SAFETY: by the caller's promise.
        let value: [__m512; V] = std::array::from_fn(|vector| unsafe { T::load16(row.add(vector * LANES), 0) });
        for (slot, sums) in sums.iter_mut().enumerate() {
            let weight = _mm512_set1_ps(scores.0[slot * KEYS + key]);
            for (sum, value) in sums.iter_mut().zip(value) {
                *sum = _mm512_fmadd_ps(weight, value, *sum);
            }
        }
    }
    all[..S].copy_from_slice(&sums);
}

#[cfg(test)]
mod tests {
    use super::super::{every_isa, few_keys::tests::exact, few_keys::tests::numbers};
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no maximum of AVX-512")]
    fn every_slot_gets_the_mean_of_its_softmax() {
        let mut served = 0;
        for (head, slots, count) in [
            (16, 1, 1),
            (16, 4, 33),
            (48, 2, 127),
            (64, 3, 128),
            (80, 4, 129),
            (128, 2, 15),
            (128, 1, 302),
            (144, 2, 256),
            (272, 3, 17),
        ] {
            let (key, value, stride) = (numbers(400 * head, 1.0), numbers(400 * head, 2.0), head + 16);
            let queries: Vec<f32> = numbers(slots * stride, 3.0).iter().map(|q| q * 0.2).collect();
            let places: Vec<usize> = (0..count).map(|key| key + key / 5).collect();
            for isa in every_isa().into_iter().filter(|isa| FewSlots::serves(*isa, slots, head)) {
                let token =
                    OneToken { queries: &queries, stride, slots, head, key: &key, value: &value, places: &places };
                let mut out = vec![f32::NAN; (slots + 2) * head];
                FewSlots { token, past: None, far: true }.attend(isa, &mut Tile::dense(&mut out, head), 1);
                assert!(out[..head].iter().chain(&out[(slots + 1) * head..]).all(|other| other.is_nan()));
                for (slot, found) in out[head..].chunks(head).take(slots).enumerate() {
                    let wanted = exact(&queries[slot * stride..][..head], &key, &value, &places);
                    let close = |(found, wanted): (&f32, &f64)| (f64::from(*found) - wanted).abs() < 1e-5;
                    assert!(found.iter().zip(&wanted).all(close), "{head} {slots} {count}: {slot}");
                }
                served += 1;
            }
        }
        if served == 0 {
            println!("skipped: no AVX-512");
        }
    }

    /// What a slot gets depends on its own query alone, and on the keys that are seen.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no maximum of AVX-512")]
    fn slots_and_unseen_keys_do_not_change_each_other() {
        let (head, count) = (48, 140);
        let (mut key, mut value) = (numbers(160 * head, 1.0), numbers(160 * head, 2.0));
        let mut queries = numbers(4 * head, 3.0);
        let places: Vec<usize> = (0..160).filter(|key| *key != 7).take(count).collect();
        for isa in every_isa().into_iter().filter(|isa| FewSlots::serves(*isa, 4, head)) {
            let attend = |queries: &[f32], key: &[f32], value: &[f32]| {
                let mut out = vec![0.0; 4 * head];
                let token = OneToken { queries, stride: head, slots: 4, head, key, value, places: &places };
                FewSlots { token, past: None, far: true }.attend(isa, &mut Tile::dense(&mut out, head), 0);
                out
            };
            let plain = attend(&queries, &key, &value);
            key[7 * head] = f32::NAN;
            value[7 * head..][..head].fill(f32::INFINITY);
            queries[2 * head] = f32::NAN;
            let spoilt = attend(&queries, &key, &value);
            for (slot, (found, wanted)) in spoilt.chunks(head).zip(plain.chunks(head)).enumerate() {
                assert!(if slot == 2 { found.iter().all(|value| value.is_nan()) } else { found == wanted }, "{slot}");
            }
            queries[2 * head] = 0.0;
            key[7 * head] = 0.0;
            value[7 * head..][..head].fill(0.0);
        }
    }

    /// Of a past that stands elsewhere too, only the copy elsewhere is read.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no maximum of AVX-512")]
    fn the_past_is_read_where_it_is_said_to_be() {
        let (head, count) = (32, 150);
        let (key, value, queries) = (numbers(count * head, 1.0), numbers(count * head, 2.0), numbers(3 * head, 3.0));
        let places: Vec<usize> = (0..count).filter(|key| *key != 7).collect();
        let served: Vec<Isa> = every_isa().into_iter().filter(|isa| FewSlots::serves(*isa, 3, head)).collect();
        if served.is_empty() {
            println!("skipped: no AVX-512");
        }
        for isa in served {
            let attend = |key: &[f32], value: &[f32], past, far| {
                let mut out = vec![0.0; 3 * head];
                let token = OneToken { queries: &queries, stride: head, slots: 3, head, key, value, places: &places };
                FewSlots { token, past, far }.attend(isa, &mut Tile::dense(&mut out, head), 0);
                out
            };
            let plain = attend(&key, &value, None, false);
            for past in [0, 1, 128, 149, 150] {
                let [mut new_key, mut new_value] = [key.clone(), value.clone()];
                [&mut new_key, &mut new_value].into_iter().for_each(|rows| rows[..past * head].fill(f32::NAN));
                let past = Some([&key[..past * head], &value[..past * head]]);
                assert_eq!(attend(&new_key, &new_value, past, false), plain);
                assert_eq!(attend(&new_key, &new_value, past, true), plain);
            }
        }
    }

    #[test]
    fn sizes_are_bounded() {
        for isa in every_isa() {
            assert!(!FewSlots::serves(isa, 0, 32) && !FewSlots::serves(isa, FEW + 1, 32));
            assert!(!FewSlots::serves(isa, 1, 0) && !FewSlots::serves(isa, 1, 40));
        }
    }
}
