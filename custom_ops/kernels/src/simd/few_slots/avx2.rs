//! Kernels of 8 lanes.

use std::arch::x86_64::{
    __m256, _mm256_add_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps,
    _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps, _mm256_unpackhi_pd,
    _mm256_unpackhi_ps, _mm256_unpacklo_pd, _mm256_unpacklo_ps,
};

use super::super::avx2::WIDTH;
use super::{Block, Element, KEYS, ROWS, Scores};

/// Vectors of columns that every head has a multiple of.
const NARROW: usize = 2;

/// As [`Block::score`].
///
/// # Safety
///
/// As [`score`].
pub(super) unsafe fn scores<T: Element, const FAR: bool>(
    block: &Block<T, FAR>,
    slots: usize,
    places: &[usize],
    scores: &mut Scores,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        match slots {
            1 => score::<T, FAR, 1, 8>(block, places, scores),
            2 => score::<T, FAR, 2, 4>(block, places, scores),
            3 => score::<T, FAR, 3, 4>(block, places, scores),
            _ => score::<T, FAR, 4, 2>(block, places, scores),
        }
    }
}

/// As [`Block::mix`].
///
/// # Safety
///
/// As [`mix_columns`], for every column of a head.
pub(super) unsafe fn mix<T: Element, const FAR: bool>(
    block: &Block<T, FAR>,
    slots: usize,
    places: [&[usize]; 2],
    scores: &Scores,
    factors: Option<&[f32; ROWS]>,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        match slots {
            1 => mix_heads::<T, FAR, 1, 8>(block, places[0], scores, factors),
            2 => mix_heads::<T, FAR, 2, 4>(block, places[0], scores, factors),
            3 => mix_heads::<T, FAR, 3, 4>(block, places[0], scores, factors),
            _ => mix_heads::<T, FAR, 4, 2>(block, places[0], scores, factors),
        }
    }
}

/// For each half of the lanes, the sums of it in four vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn half_sums(v: [__m256; 4]) -> __m256 {
    let first = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1])));
    let second = _mm256_castps_pd(_mm256_add_ps(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3])));
    let (low, high) = (_mm256_unpacklo_pd(first, second), _mm256_unpackhi_pd(first, second));
    _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high))
}

/// The sums of the lanes of each of 8 vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sums_of_lanes(v: &[__m256; WIDTH]) -> __m256 {
    let (first, second) = (half_sums([v[0], v[1], v[2], v[3]]), half_sums([v[4], v[5], v[6], v[7]]));
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(first, second), _mm256_permute2f128_ps::<0x31>(first, second))
}

/// As [`Block::score`], `K` keys at a time; what stands past the last key, up to a whole vector, are scores of others.
///
/// # Safety
///
/// `S` queries must hold a head, `places` must be 1 to [`KEYS`] rows of keys; the processor must have AVX2, FMA and
/// F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score<T: Element, const FAR: bool, const S: usize, const K: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &mut Scores,
) {
    let mut lanes = [[_mm256_setzero_ps(); WIDTH]; S];
    for (group, places) in places.chunks(WIDTH).enumerate() {
        for from in (0..places.len()).step_by(K) {
            let near: [usize; K] = std::array::from_fn(|key| (from + key).min(places.len() - 1));
            let rows = near.map(|key| block.row(block.keys, places[key]));
            let mut sums = [[_mm256_setzero_ps(); K]; S];
            for first in (0..block.head).step_by(WIDTH) {
                // SAFETY: by the caller's promise.
                unsafe {
                    let queries: [__m256; S] =
                        std::array::from_fn(|slot| _mm256_loadu_ps(block.queries[slot].add(first)));
                    for (key, row) in rows.into_iter().enumerate() {
                        let key_lanes = T::load8(row.add(first), 0);
                        for (sums, query) in sums.iter_mut().zip(queries) {
                            sums[key] = _mm256_fmadd_ps(query, key_lanes, sums[key]);
                        }
                    }
                }
            }
            for (lanes, sums) in lanes.iter_mut().zip(sums) {
                near.into_iter().zip(sums).for_each(|(key, sum)| lanes[key] = sum);
            }
        }
        for (slot, lanes) in lanes.iter().enumerate() {
            let place = slot * KEYS + group * WIDTH;
            // SAFETY: a slot has room for whole vectors of its keys.
            unsafe { _mm256_storeu_ps(scores.0.as_mut_ptr().add(place), sums_of_lanes(lanes)) };
        }
    }
}

/// As [`Block::mix`] for `S` slots, `V` vectors of columns at a time.
///
/// # Safety
///
/// As [`mix_columns`], for every column of a head.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn mix_heads<T: Element, const FAR: bool, const S: usize, const V: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &Scores,
    factors: Option<&[f32; ROWS]>,
) {
    let wide = block.head / (V * WIDTH) * V * WIDTH;
    // SAFETY: by the caller's promise; a head is a multiple of `NARROW` vectors.
    unsafe {
        for column in (0..wide).step_by(V * WIDTH) {
            mix_columns::<T, FAR, S, V>(block, places, scores, (column, factors));
        }
        for column in (wide..block.head).step_by(NARROW * WIDTH) {
            mix_columns::<T, FAR, S, NARROW>(block, places, scores, (column, factors));
        }
    }
}

/// As [`Block::mix`] for `S` slots and `V` vectors from a column on.
///
/// # Safety
///
/// `S` destinations must hold the columns, `places` must be up to [`KEYS`] rows of values; the processor must have
/// AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn mix_columns<T: Element, const FAR: bool, const S: usize, const V: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &Scores,
    (column, factors): (usize, Option<&[f32; ROWS]>),
) {
    let mut sums = [[_mm256_setzero_ps(); V]; S];
    // SAFETY: by the caller's promise.
    unsafe {
        if let Some(factors) = factors {
            for (slot, sums) in sums.iter_mut().enumerate() {
                let (factor, out) = (_mm256_set1_ps(factors[slot]), block.out[slot].add(column));
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm256_mul_ps(_mm256_loadu_ps(out.add(vector * WIDTH)), factor);
                }
            }
        }
        for (key, place) in places.iter().enumerate() {
            let row = block.row(block.values, *place).wrapping_add(column);
            let weights: [__m256; S] = std::array::from_fn(|slot| _mm256_set1_ps(scores.0[slot * KEYS + key]));
            for vector in 0..V {
                let value = T::load8(row.add(vector * WIDTH), 0);
                for (sums, weight) in sums.iter_mut().zip(weights) {
                    sums[vector] = _mm256_fmadd_ps(weight, value, sums[vector]);
                }
            }
        }
        for (slot, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                _mm256_storeu_ps(block.out[slot].add(column + vector * WIDTH), *sum);
            }
        }
    }
}
