//! Kernels of 16 lanes.

use std::arch::x86_64::{
    __m512, _MM_HINT_T1, _mm_prefetch, _mm512_add_ps, _mm512_castpd_ps, _mm512_castps_pd, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_storeu_ps,
    _mm512_unpackhi_pd, _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use super::super::product::LINE;
use super::{Block, Element, FEW, KEYS, LANES, ROWS, Scores};

/// Keys that are multiplied together: four slots have so many sums under way that none waits for itself.
const TOGETHER: usize = 4;

/// Vectors of a value that are mixed together.
const WIDE: usize = 4;

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
            1 => score::<T, FAR, 1>(block, places, scores),
            2 => score::<T, FAR, 2>(block, places, scores),
            3 => score::<T, FAR, 3>(block, places, scores),
            _ => score::<T, FAR, 4>(block, places, scores),
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
    // SAFETY: by the caller's promise; `column` stays inside a head.
    unsafe {
        for column in (0..block.head / (WIDE * LANES)).map(|wide| wide * WIDE * LANES) {
            mix_columns::<T, FAR, WIDE>(block, slots, places, scores, (column, factors));
        }
        for column in (block.head / (WIDE * LANES) * WIDE * LANES..block.head).step_by(LANES) {
            mix_columns::<T, FAR, 1>(block, slots, places, scores, (column, factors));
        }
    }
}
/// For each quarter of the lanes, the sums of it in four vectors. Without closures: the compiler would call them, with
/// vectors in memory.
#[target_feature(enable = "avx512f")]
#[inline]
fn quarter_sums(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    let first = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    let second = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    let (low, high) = (_mm512_unpacklo_pd(first, second), _mm512_unpackhi_pd(first, second));
    _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
}

/// The sums of neighbouring quarters of `a`, then those of `b`.
#[target_feature(enable = "avx512f")]
#[inline]
fn join(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_shuffle_f32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
}

/// As [`Block::score`]; what stands past the last key, up to a whole vector, are scores of others.
///
/// # Safety
///
/// `S` queries must hold a head, `places` must be 1 to [`KEYS`] rows of keys; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn score<T: Element, const FAR: bool, const S: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &mut Scores,
) {
    let mut quarters = [[_mm512_setzero_ps(); LANES / TOGETHER]; S];
    for (group, places) in places.chunks(LANES).enumerate() {
        for (quarter, from) in (0..places.len()).step_by(TOGETHER).enumerate() {
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
            for (quarters, [a, b, c, d]) in quarters.iter_mut().zip(sums) {
                quarters[quarter] = quarter_sums(a, b, c, d);
            }
        }
        for (slot, [a, b, c, d]) in quarters.into_iter().enumerate() {
            let (place, sums) = (slot * KEYS + group * LANES, join(join(a, b), join(c, d)));
            // SAFETY: a slot has room for whole vectors of its keys.
            unsafe { _mm512_storeu_ps(scores.0.as_mut_ptr().add(place), sums) };
        }
    }
}

/// As [`Block::mix`] for `V` vectors from a column on.
///
/// # Safety
///
/// `slots` destinations must hold the columns, the first `places` must be up to [`KEYS`] rows of values; the processor
/// must have AVX-512 F.
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
