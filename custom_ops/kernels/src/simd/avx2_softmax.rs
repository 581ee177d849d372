//! The online softmax of a block of rows in vectors of 8 lanes, two of which stand for the lanes of [`super::lanes`]:
//! the bits are the same.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_LT_OQ, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_andnot_ps, _mm256_blendv_ps,
    _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cmpgt_epi32, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_maskload_ps, _mm256_maskstore_ps, _mm256_max_ps, _mm256_mul_ps, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setzero_ps, _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use super::avx2::WIDTH;
use super::lanes::{LN2, ROUND, SMALLEST, TERMS, in_pairs, larger};
use super::{LANES, ROWS};

/// Vectors that stand for all lanes.
const PAIR: usize = LANES / WIDTH;

/// Vectors of a row whose exponentials are taken together: steps of one wait for each other.
pub(super) const VECTORS: usize = 2 * PAIR;

/// Scores of these.
pub(super) const STEP: usize = VECTORS * WIDTH;

/// `exp(x)` of some vectors, as [`super::lanes`] takes it.
#[target_feature(enable = "avx2,fma")]
#[inline]
pub(super) fn exps<const N: usize>(x: [__m256; N]) -> [__m256; N] {
    let round = _mm256_set1_ps(ROUND);
    let shifted = x.map(|x| _mm256_fmadd_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E), round));
    let powers = shifted.map(|shifted| _mm256_sub_ps(shifted, round));
    let rests = pairs(powers, x, |power, x| _mm256_fmadd_ps(power, _mm256_set1_ps(-LN2[0]), x));
    let rests = pairs(powers, rests, |power, rest| _mm256_fmadd_ps(power, _mm256_set1_ps(-LN2[1]), rest));
    let mut sums = [_mm256_set1_ps(TERMS[4]); N];
    for term in [TERMS[3], TERMS[2], TERMS[1], TERMS[0]] {
        sums = pairs(sums, rests, |sum, rest| _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(term)));
    }
    let sums = pairs(sums, rests, |sum, rest| _mm256_fmadd_ps(sum, _mm256_mul_ps(rest, rest), rest));
    let values = sums.map(|sum| _mm256_add_ps(sum, _mm256_set1_ps(1.0)));
    let scaled = pairs(values, shifted, |value, shifted| {
        let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
        _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_add_epi32(power, _mm256_set1_epi32(127 << 23))))
    });
    pairs(scaled, x, |scaled, x| _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(SMALLEST)), scaled))
}

/// What `join` makes of each pair of vectors.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn pairs<const N: usize>(a: [__m256; N], b: [__m256; N], join: impl Fn(__m256, __m256) -> __m256) -> [__m256; N] {
    let mut joined = a;
    for (joined, b) in joined.iter_mut().zip(b) {
        *joined = join(*joined, b);
    }
    joined
}

/// The first `count` lanes of each vector of a pair, whose lanes follow each other.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn first_lanes(count: usize) -> [__m256i; PAIR] {
    const PLACES: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let count = _mm256_set1_epi32(count as i32);
    // SAFETY: the places are as many as the lanes of a pair.
    std::array::from_fn(|vector| unsafe {
        _mm256_cmpgt_epi32(count, _mm256_loadu_si256(PLACES.as_ptr().add(vector * WIDTH).cast()))
    })
}

/// What `join` makes of all lanes.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn reduce(pair: [__m256; PAIR], join: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    for (lanes, vector) in lanes.as_chunks_mut::<WIDTH>().0.iter_mut().zip(pair) {
        // SAFETY: a chunk holds a vector.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), vector) };
    }
    in_pairs(lanes, join)
}

/// Vectors from `place` on.
///
/// # Safety
///
/// They must be readable; the processor must have AVX2.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn load<const N: usize>(place: *const f32) -> [__m256; N] {
    // SAFETY: by the caller's promise.
    std::array::from_fn(|vector| unsafe { _mm256_loadu_ps(place.add(vector * WIDTH)) })
}

/// The largest of `seen` scores and `max`.
///
/// # Safety
///
/// The scores must be readable at `place`; the processor must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn largest(place: *const f32, seen: usize, max: f32) -> f32 {
    let (mut lanes, whole, rest) = ([_mm256_set1_ps(max); PAIR], seen / LANES * LANES, seen % LANES);
    // SAFETY: by the caller's promise; masks keep to the scores.
    unsafe {
        for first in (0..whole).step_by(LANES) {
            // The second operand is the result where one is NaN.
            lanes = pairs(load(place.add(first)), lanes, |part, lanes| _mm256_max_ps(part, lanes));
        }
        if rest > 0 {
            for (vector, mask) in first_lanes(rest).into_iter().enumerate() {
                let part = _mm256_maskload_ps(place.add(whole + vector * WIDTH), mask);
                let joined = _mm256_max_ps(part, lanes[vector]);
                lanes[vector] = _mm256_blendv_ps(lanes[vector], joined, _mm256_castsi256_ps(mask));
            }
        }
    }
    reduce(lanes, larger)
}

/// Replaces `seen` scores by `exp(score - max)`; returns their sum.
///
/// # Safety
///
/// As [`largest`], where the scores are ours to write.
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn exponentials(place: *mut f32, seen: usize, max: f32) -> f32 {
    let (mut lanes, whole, rest) = ([_mm256_setzero_ps(); PAIR], seen / LANES * LANES, seen % LANES);
    let (together, shift) = (whole / STEP * STEP, _mm256_set1_ps(max));
    // SAFETY: by the caller's promise; masks keep to the scores.
    unsafe {
        for first in (0..together).step_by(STEP) {
            let parts = exps(load::<VECTORS>(place.add(first)).map(|part| _mm256_sub_ps(part, shift)));
            for (vector, part) in parts.into_iter().enumerate() {
                _mm256_storeu_ps(place.add(first + vector * WIDTH), part);
                lanes[vector % PAIR] = _mm256_add_ps(lanes[vector % PAIR], part);
            }
        }
        if together < whole {
            let parts = exps(load::<PAIR>(place.add(together)).map(|part| _mm256_sub_ps(part, shift)));
            for (vector, part) in parts.into_iter().enumerate() {
                _mm256_storeu_ps(place.add(together + vector * WIDTH), part);
                lanes[vector] = _mm256_add_ps(lanes[vector], part);
            }
        }
        if rest > 0 {
            for (vector, mask) in first_lanes(rest).into_iter().enumerate() {
                let place = place.add(whole + vector * WIDTH);
                let [part] = exps([_mm256_sub_ps(_mm256_maskload_ps(place, mask), shift)]);
                _mm256_maskstore_ps(place, mask, part);
                lanes[vector] = _mm256_add_ps(lanes[vector], _mm256_and_ps(part, _mm256_castsi256_ps(mask)));
            }
        }
    }
    reduce(lanes, |a, b| a + b)
}

/// [`super::Isa::softmax_rows`] for slices that are long enough.
///
/// # Safety
///
/// Row `r` of `scores` must hold `seen[r]` elements for every element of `max`; there must be as many of `sum`, at most
/// [`ROWS`]; the processor must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn softmax_rows(
    scores: &mut [f32],
    stride: usize,
    seen: &[usize; ROWS],
    max: &mut [f32],
    sum: &mut [f32],
) -> [f32; ROWS] {
    let scores = scores.as_mut_ptr();
    let (mut before, mut after, mut added) = ([0.0; LANES], [0.0; LANES], [0.0; ROWS]);
    for (row, max) in max.iter_mut().enumerate() {
        // SAFETY: by the caller's promise.
        unsafe {
            let place = scores.add(row * stride);
            (before[row], after[row]) = (*max, largest(place, seen[row], *max));
            added[row] = exponentials(place, seen[row], after[row]);
        }
        *max = after[row];
    }
    let mut factors = [0.0; LANES];
    // SAFETY: there are as many lanes as a pair of vectors has.
    unsafe {
        let changes = pairs(load::<PAIR>(before.as_ptr()), load(after.as_ptr()), |a, b| _mm256_sub_ps(a, b));
        for (lanes, factor) in factors.as_chunks_mut::<WIDTH>().0.iter_mut().zip(exps(changes)) {
            _mm256_storeu_ps(lanes.as_mut_ptr(), factor);
        }
    }
    for ((sum, factor), added) in sum.iter_mut().zip(factors).zip(added) {
        *sum = *sum * factor + added;
    }
    std::array::from_fn(|row| factors[row])
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, every_isa_where};
    use super::*;

    /// Rows of every length, some with NaN, infinities and maxima from before.
    #[test]
    fn bits_are_those_of_lanes() {
        let (stride, step) = (110, if cfg!(miri) { 17 } else { 1 });
        let mut start: Vec<f32> = (0..ROWS * stride).map(|i| (i as f32 * 0.37).sin() * 60.0).collect();
        (start[3 * stride + 2], start[4 * stride + 20], start[5 * stride + 1]) =
            (f32::NAN, f32::NEG_INFINITY, f32::INFINITY);
        for isa in every_isa_where(Isa::has_narrow_vectors, "no AVX2") {
            for first in (0..=stride).step_by(step) {
                let seen: [usize; ROWS] = std::array::from_fn(|row| (first + row * 7) % (stride + 1));
                let maxima: Vec<f32> = (0..ROWS).map(|row| [f32::NEG_INFINITY, 70.0, -3.0][row % 3]).collect();
                let compute = |in_lanes: bool| {
                    let (mut scores, mut max, mut sum) = (start.clone(), maxima.clone(), vec![0.25; ROWS]);
                    let factors = match in_lanes {
                        true => isa.softmax_rows_in_lanes(&mut scores, stride, &seen, &mut max, &mut sum),
                        false => isa.softmax_rows(&mut scores, stride, &seen, &mut max, &mut sum),
                    };
                    let all = scores.into_iter().chain(max).chain(sum).chain(factors);
                    all.map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect::<Vec<_>>()
                };
                assert!(compute(false) == compute(true), "{seen:?}");
            }
        }
    }
}
