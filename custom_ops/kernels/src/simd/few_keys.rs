//! Attention of one token to few keys, in vectors of 16 lanes.
//!
//! Four slots share a vector: a quarter of it belongs to each, and lane `l` of a quarter multiplies the elements
//! `l, l + 4, …` of a query and a key.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_loadu_ps, _mm_prefetch, _mm512_add_ps, _mm512_broadcast_f32x4, _mm512_castps128_ps512,
    _mm512_div_ps, _mm512_fmadd_ps, _mm512_insertf32x4, _mm512_loadu_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_permute_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_storeu_ps, _mm512_sub_ps,
};

use std::ptr::{null, null_mut};

#[cfg(target_arch = "x86_64")]
use super::avx512_softmax::exp;
use super::{Instructions, Isa, LANES, OneToken};
use crate::grid::Tile;

/// Most keys of a [`FewKeys`].
const FEW: usize = 2 * LANES;

/// Slots that share a vector.
const SLOTS: usize = 4;

/// One token before the few keys that it sees.
pub(crate) struct FewKeys<'a> {
    pub(crate) token: OneToken<'a>,
    /// Elements from a key or value to the one in its place for the next token, which is fetched.
    pub(crate) next: usize,
}

impl FewKeys<'_> {
    /// Whether these sizes are served with the instructions of `isa`.
    pub(crate) fn serves(isa: Isa, keys: usize, head: usize) -> bool {
        isa.0 >= Instructions::Avx512 && (1..=FEW).contains(&keys) && matches!(head, 32 | 64 | 128)
    }

    /// Fills the rows from `first_row` on, one for each slot, with the values weighted by the softmax of query times
    /// key.
    ///
    /// # Panics
    ///
    /// If the sizes are not served, or a query, a key, a value or a row of `out` is not there.
    pub(crate) fn attend(&self, isa: Isa, out: &mut Tile<'_, f32>, first_row: usize) {
        let Self { token, next } = *self;
        let OneToken { slots, head, key, value, places, .. } = token;
        assert!(Self::serves(isa, places.len(), head), "sizes of few keys");
        token.check(out);
        let mut block = Block { queries: [null(); SLOTS], key, value, places, next, out: [null_mut(); SLOTS] };
        for first in (0..slots).step_by(SLOTS) {
            let count = SLOTS.min(slots - first);
            let rows: [usize; SLOTS] = std::array::from_fn(|place| first_row + first + place.min(count - 1));
            out.starts(&rows, 0, &mut block.out);
            for (place, query) in block.queries.iter_mut().enumerate() {
                *query = token.query(first + place.min(count - 1));
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: queries and destinations hold `head` elements, a destination that stands twice is written one row
            // after the other, every place is a row of keys and values, and there are 1 to `FEW` of them; the
            // destination is borrowed mutably, so it meets no input. `serves` proved the instructions.
            unsafe {
                match head {
                    32 => attend::<8>(&block),
                    64 => attend::<16>(&block),
                    _ => attend::<32>(&block),
                }
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = &block;
        }
    }
}

/// Slots of one vector, every pointer in bounds; slots past the last one repeat it.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
struct Block<'a> {
    queries: [*const f32; SLOTS],
    key: &'a [f32],
    value: &'a [f32],
    places: &'a [usize],
    next: usize,
    out: [*mut f32; SLOTS],
}

/// The quarters of `lanes`, each of which holds one number four times, as vectors of that number.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn quarters(lanes: __m512) -> [__m512; SLOTS] {
    [
        _mm512_shuffle_f32x4::<0x00>(lanes, lanes),
        _mm512_shuffle_f32x4::<0x55>(lanes, lanes),
        _mm512_shuffle_f32x4::<0xAA>(lanes, lanes),
        _mm512_shuffle_f32x4::<0xFF>(lanes, lanes),
    ]
}

/// Sum of the lanes of each quarter, in all of its lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn quarter_sums(lanes: __m512) -> __m512 {
    let pairs = _mm512_add_ps(lanes, _mm512_permute_ps::<0b10_11_00_01>(lanes));
    _mm512_add_ps(pairs, _mm512_permute_ps::<0b01_00_11_10>(pairs))
}

/// Fetches `4 * STEPS` elements, which may lie anywhere.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn fetch<const STEPS: usize>(from: *const f32) {
    for element in (0..4 * STEPS).step_by(LANES) {
        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(element).cast());
    }
}

/// A block of heads of `4 * STEPS` elements.
///
/// # Safety
///
/// Queries and destinations must hold a head, `places` must be 1 to [`FEW`] rows of keys and values; the processor must
/// have AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn attend<const STEPS: usize>(block: &Block<'_>) {
    let Block { queries, key, value, places, next, out } = *block;
    let head = 4 * STEPS;
    let mut query = [_mm512_setzero_ps(); STEPS];
    let mut weights = [_mm512_setzero_ps(); FEW];
    let (mut max, mut total) = (_mm512_set1_ps(f32::NEG_INFINITY), _mm512_setzero_ps());
    // SAFETY: by the caller's promise.
    unsafe {
        for (step, lanes) in query.iter_mut().enumerate() {
            let [a, b, c, d] = queries.map(|query| _mm_loadu_ps(query.add(4 * step)));
            let halves = _mm512_insertf32x4::<1>(_mm512_castps128_ps512(a), b);
            *lanes = _mm512_insertf32x4::<3>(_mm512_insertf32x4::<2>(halves, c), d);
        }
        for (weight, place) in weights.iter_mut().zip(places) {
            let key = key.as_ptr().add(place * head);
            fetch::<STEPS>(key.wrapping_add(next));
            let mut sums = [_mm512_setzero_ps(); 2];
            for (step, query) in query.into_iter().enumerate() {
                let key = _mm512_broadcast_f32x4(_mm_loadu_ps(key.add(4 * step)));
                sums[step % 2] = _mm512_fmadd_ps(query, key, sums[step % 2]);
            }
            *weight = quarter_sums(_mm512_add_ps(sums[0], sums[1]));
            // The second operand is the result where one is NaN.
            max = _mm512_max_ps(*weight, max);
        }
        for weight in &mut weights[..places.len()] {
            *weight = exp(_mm512_sub_ps(*weight, max));
            total = _mm512_add_ps(total, *weight);
        }
        let factors = quarters(_mm512_div_ps(_mm512_set1_ps(1.0), total));
        for column in (0..head).step_by(2 * LANES) {
            let mut sums = [[_mm512_setzero_ps(); 2]; SLOTS];
            for (weight, place) in weights.iter().zip(places) {
                let value = value.as_ptr().add(place * head + column);
                fetch::<{ 2 * LANES / 4 }>(value.wrapping_add(next));
                let value = [_mm512_loadu_ps(value), _mm512_loadu_ps(value.add(LANES))];
                for (sums, weight) in sums.iter_mut().zip(quarters(*weight)) {
                    *sums = [_mm512_fmadd_ps(weight, value[0], sums[0]), _mm512_fmadd_ps(weight, value[1], sums[1])];
                }
            }
            for ((sums, factor), out) in sums.into_iter().zip(factors).zip(out) {
                _mm512_storeu_ps(out.add(column), _mm512_mul_ps(sums[0], factor));
                _mm512_storeu_ps(out.add(column + LANES), _mm512_mul_ps(sums[1], factor));
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::simd::{every_isa, every_isa_where};

    fn serving(keys: usize, head: usize) -> Vec<Isa> {
        every_isa_where(|isa| FewKeys::serves(isa, keys, head), "no AVX-512")
    }

    pub(in super::super) fn numbers(count: usize, seed: f32) -> Vec<f32> {
        (0..count).map(|i| ((i as f32 * 0.37 + seed).sin() * 43.7).fract() * 3.0).collect()
    }

    /// The same in f64, for one slot.
    pub(in super::super) fn exact(query: &[f32], key: &[f32], value: &[f32], places: &[usize]) -> Vec<f64> {
        let head = query.len();
        let dot = |place: &usize| -> f64 {
            key[place * head..][..head].iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
        };
        let scores: Vec<f64> = places.iter().map(dot).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mean = |column: usize| -> f64 {
            places.iter().zip(&weights).map(|(place, w)| w * f64::from(value[place * head + column])).sum()
        };
        (0..head).map(|column| mean(column) / sum).collect()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no maximum of AVX-512")]
    fn every_slot_gets_the_mean_of_its_softmax() {
        if serving(1, 32).is_empty() {
            return;
        }
        for (head, slots, count) in
            [(32, 4, 1), (32, 4, 9), (32, 1, 2), (32, 6, 32), (64, 3, 16), (64, 8, 17), (128, 2, 31), (128, 4, 7)]
        {
            let (key, value, stride) = (numbers(40 * head, 1.0), numbers(40 * head, 2.0), head + 16);
            let queries: Vec<f32> = numbers(slots * stride, 3.0).iter().map(|q| q * 0.2).collect();
            let places: Vec<usize> = (0..count).map(|key| key + key / 5).collect();
            for isa in serving(count, head) {
                let token =
                    OneToken { queries: &queries, stride, slots, head, key: &key, value: &value, places: &places };
                let token = FewKeys { token, next: 9 };
                let mut out = vec![7.0; (slots + 2) * head];
                token.attend(isa, &mut Tile::dense(&mut out, head), 1);
                assert!(out[..head].iter().chain(&out[(slots + 1) * head..]).all(|other| *other == 7.0));
                for (slot, found) in out[head..].chunks(head).take(slots).enumerate() {
                    let wanted = exact(&queries[slot * stride..][..head], &key, &value, &places);
                    let close = |(found, wanted): (&f32, &f64)| (f64::from(*found) - wanted).abs() < 1e-5;
                    assert!(found.iter().zip(&wanted).all(close), "{head} {slots} {count}: {slot}");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no maximum of AVX-512")]
    fn only_a_key_that_is_seen_can_spoil_the_mean() {
        let (mut key, value, mut out) = (numbers(3 * 32, 1.0), numbers(3 * 32, 2.0), [0.0; 32]);
        key[32] = f32::NAN;
        for isa in serving(2, 32) {
            for (places, spoilt) in [([0, 1], true), ([0, 2], false)] {
                let queries = &[1.0; 32];
                let (key, value, places) = (&key, &value, &places);
                FewKeys { token: OneToken { queries, stride: 32, slots: 1, head: 32, key, value, places }, next: 0 }
                    .attend(isa, &mut Tile::dense(&mut out, 32), 0);
                assert!(out.iter().all(|value| value.is_nan() == spoilt), "{isa:?}");
            }
        }
    }

    #[test]
    fn sizes_are_bounded() {
        for isa in every_isa() {
            assert!(!FewKeys::serves(isa, 0, 32) && !FewKeys::serves(isa, FEW + 1, 32) && !FewKeys::serves(isa, 1, 48));
        }
    }

    #[test]
    fn a_key_out_of_bounds_is_refused() {
        let rows = &[0.0; 32];
        let token = OneToken { queries: rows, stride: 32, slots: 1, head: 32, key: rows, value: rows, places: &[1] };
        for isa in serving(1, 32) {
            let attend = || FewKeys { token, next: 0 }.attend(isa, &mut Tile::dense(&mut [0.0; 32], 32), 0);
            let refused = std::panic::catch_unwind(attend).unwrap_err();
            assert_eq!(refused.downcast_ref(), Some(&"key out of bounds"), "{isa:?}");
        }
    }
}
