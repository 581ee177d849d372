//! Attention of few slots that see the same keys, of one token or of several, in vectors of `L` lanes, 4, 8 or 16.
//!
//! Lane `l` of a vector multiplies the elements `l, l + L, …` of a query and a key; the lanes of `L` keys are summed
//! together. Keys and values are read once for each four slots, those of f16 widened in registers. Where rows come
//! from far away, with 16 lanes values are fetched while their keys are read, and the keys of the next tile while
//! values are mixed.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use super::{Element, Instructions, Isa, LANES, OneToken, ROWS};
use crate::grid::Tile;

const FEW: usize = FewSlots::MOST;

/// Keys between two updates of the softmax.
const KEYS: usize = 128;

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
        isa.0 > Instructions::Portable && (1..=FEW).contains(&slots) && head > 0 && head.is_multiple_of(LANES)
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
            block.score(isa, slots, places, &mut scores);
            let seen = [places.len(); ROWS];
            let factors = isa.softmax_rows(&mut scores.0, KEYS, &seen, &mut max[..slots], &mut sum[..slots]);
            block.mix(isa, slots, [places, later], &scores, (tile > 0).then_some(&factors));
        }
        (0..slots).for_each(|slot| isa.scale(out.row(first_row + slot), 1.0 / sum[slot]));
    }
}

/// Slots whose queries and destinations hold a head, and keys and values, all in bounds; `FAR` where these are fetched,
/// known to the compiler: another branch for each vector takes 1 to 2 % of a short call.
#[cfg_attr(not(any(target_arch = "aarch64", target_arch = "x86_64")), allow(dead_code))]
struct Block<T, const FAR: bool> {
    queries: [*const f32; FEW],
    out: [*mut f32; FEW],
    /// Keys and values of the past, and those from there on; each has its place among all.
    past: usize,
    keys: [*const T; 2],
    values: [*const T; 2],
    head: usize,
}

#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    /// Where the row `place` of keys or values begins.
    fn row(&self, rows: [*const T; 2], place: usize) -> *const T {
        rows[usize::from(place >= self.past)].wrapping_add(place * self.head)
    }
}

#[cfg(target_arch = "aarch64")]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    /// Products of the queries and up to [`KEYS`] keys.
    fn score(&self, _: Isa, slots: usize, places: &[usize], scores: &mut Scores) {
        // SAFETY: `FewSlots::attend` proved the bounds, and `Isa` the instructions.
        unsafe { neon::scores(self, slots, places, scores) }
    }

    /// Adds the weighted values to what the destinations hold times `factors`; `None` where they hold nothing.
    fn mix(&self, _: Isa, slots: usize, places: [&[usize]; 2], scores: &Scores, factors: Option<&[f32; ROWS]>) {
        // SAFETY: as above.
        unsafe { neon::mix(self, slots, places[0], scores, factors) }
    }
}

#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    fn score(&self, _: Isa, _: usize, _: &[usize], _: &mut Scores) {}

    fn mix(&self, _: Isa, _: usize, _: [&[usize]; 2], _: &Scores, _: Option<&[f32; ROWS]>) {}
}

#[cfg(target_arch = "x86_64")]
impl<T: Element, const FAR: bool> Block<T, FAR> {
    /// Products of the queries and up to [`KEYS`] keys.
    fn score(&self, isa: Isa, slots: usize, places: &[usize], scores: &mut Scores) {
        // SAFETY: `FewSlots::attend` proved the bounds, and `Isa` the instructions.
        unsafe {
            match isa.0 >= Instructions::Avx512 {
                true => avx512::scores(self, slots, places, scores),
                false => avx2::scores(self, slots, places, scores),
            }
        }
    }

    /// Adds the weighted values to what the destinations hold times `factors`; `None` where they hold nothing. Fetches
    /// the keys that come next, at the second `places`.
    fn mix(&self, isa: Isa, slots: usize, places: [&[usize]; 2], scores: &Scores, factors: Option<&[f32; ROWS]>) {
        // SAFETY: as above.
        unsafe {
            match isa.0 >= Instructions::Avx512 {
                true => avx512::mix(self, slots, places, scores, factors),
                false => avx2::mix(self, slots, places, scores, factors),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{every_isa, every_isa_where, few_keys::tests::exact, few_keys::tests::numbers};
    use super::*;

    fn serving(slots: usize, head: usize) -> Vec<Isa> {
        every_isa_where(|isa| FewSlots::serves(isa, slots, head), "neither AVX2 nor NEON")
    }

    #[test]
    fn every_slot_gets_the_mean_of_its_softmax() {
        if serving(1, 16).is_empty() {
            return;
        }
        let cases = [
            (16, 1, 1),
            (16, 4, 33),
            (48, 2, 127),
            (64, 3, 128),
            (80, 4, 129),
            (128, 2, 15),
            (128, 1, 302),
            (144, 2, 256),
            (272, 3, 17),
        ];
        for (head, slots, count) in cases.into_iter().step_by(if cfg!(miri) { 4 } else { 1 }) {
            let rows = count + count / 5;
            let (key, value, stride) = (numbers(rows * head, 1.0), numbers(rows * head, 2.0), head + 16);
            let queries: Vec<f32> = numbers(slots * stride, 3.0).iter().map(|q| q * 0.2).collect();
            let places: Vec<usize> = (0..count).map(|key| key + key / 5).collect();
            for isa in serving(slots, head) {
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
            }
        }
    }

    /// What a slot gets depends on its own query alone, and on the keys that are seen.
    #[test]
    fn slots_and_unseen_keys_do_not_change_each_other() {
        let (head, count) = (if cfg!(miri) { 16 } else { 48 }, 140);
        let (mut key, mut value) = (numbers(160 * head, 1.0), numbers(160 * head, 2.0));
        let mut queries = numbers(4 * head, 3.0);
        let places: Vec<usize> = (0..160).filter(|key| *key != 7).take(count).collect();
        for isa in serving(4, head) {
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
    fn the_past_is_read_where_it_is_said_to_be() {
        let (head, count) = (32, 150);
        let (key, value, queries) = (numbers(count * head, 1.0), numbers(count * head, 2.0), numbers(3 * head, 3.0));
        let places: Vec<usize> = (0..count).filter(|key| *key != 7).collect();
        for isa in serving(3, head) {
            let attend = |key: &[f32], value: &[f32], past, far| {
                let mut out = vec![0.0; 3 * head];
                let token = OneToken { queries: &queries, stride: head, slots: 3, head, key, value, places: &places };
                FewSlots { token, past, far }.attend(isa, &mut Tile::dense(&mut out, head), 0);
                out
            };
            let plain = attend(&key, &value, None, false);
            for past in [128, 1, 0, 149, 150].into_iter().take(if cfg!(miri) { 1 } else { 5 }) {
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
