//! Kernels of 4 lanes.

use std::arch::aarch64::{
    float32x4_t, vdupq_n_f32, vfmaq_f32, vfmaq_n_f32, vld1q_f32, vmulq_n_f32, vpaddq_f32, vst1q_f32,
};

use super::super::neon::WIDTH;
use super::{Block, Element, KEYS, ROWS, Scores};

/// Vectors of columns that every head has a multiple of.
const NARROW: usize = 4;

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
            1 => score::<T, FAR, 1, 4>(block, places, scores),
            2 => score::<T, FAR, 2, 2>(block, places, scores),
            3 => score::<T, FAR, 3, 1>(block, places, scores),
            _ => score::<T, FAR, 4, 1>(block, places, scores),
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
    places: &[usize],
    scores: &Scores,
    factors: Option<&[f32; ROWS]>,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        match slots {
            1 => mix_heads::<T, FAR, 1, 16>(block, places, scores, factors),
            2 => mix_heads::<T, FAR, 2, 8>(block, places, scores, factors),
            3 => mix_heads::<T, FAR, 3, 4>(block, places, scores, factors),
            _ => mix_heads::<T, FAR, 4, 4>(block, places, scores, factors),
        }
    }
}

/// As [`Block::score`], `G` times four keys at once; what stands past the last key, up to as many, are scores of
/// others.
///
/// # Safety
///
/// `S` queries must hold a head, `places` must be 1 to [`KEYS`] rows of keys; the processor must have NEON.
#[target_feature(enable = "neon")]
unsafe fn score<T: Element, const FAR: bool, const S: usize, const G: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &mut Scores,
) {
    for from in (0..places.len()).step_by(G * WIDTH) {
        let near = |key: usize| block.row(block.keys, places[(from + key).min(places.len() - 1)]);
        let rows: [[*const T; WIDTH]; G] =
            std::array::from_fn(|group| std::array::from_fn(|key| near(group * WIDTH + key)));
        let mut sums = [[[vdupq_n_f32(0.0); WIDTH]; G]; S];
        // SAFETY: by the caller's promise; a slot has room for whole groups of its keys.
        unsafe {
            for first in (0..block.head).step_by(WIDTH) {
                let queries: [float32x4_t; S] = std::array::from_fn(|slot| vld1q_f32(block.queries[slot].add(first)));
                for (group, rows) in rows.iter().enumerate() {
                    for (key, row) in rows.iter().enumerate() {
                        let lanes = T::load4(row.add(first), 0);
                        for (sums, query) in sums.iter_mut().zip(queries) {
                            sums[group][key] = vfmaq_f32(sums[group][key], query, lanes);
                        }
                    }
                }
            }
            for (slot, sums) in sums.into_iter().enumerate() {
                for (group, [a, b, c, d]) in sums.into_iter().enumerate() {
                    let of_lanes = vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
                    vst1q_f32(scores.0.as_mut_ptr().add(slot * KEYS + from + group * WIDTH), of_lanes);
                }
            }
        }
    }
}

/// As [`Block::mix`] for `S` slots, `V` vectors of columns at a time.
///
/// # Safety
///
/// As [`mix_columns`], for every column of a head.
#[target_feature(enable = "neon")]
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
/// NEON.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn mix_columns<T: Element, const FAR: bool, const S: usize, const V: usize>(
    block: &Block<T, FAR>,
    places: &[usize],
    scores: &Scores,
    (column, factors): (usize, Option<&[f32; ROWS]>),
) {
    let mut sums = [[vdupq_n_f32(0.0); V]; S];
    // SAFETY: by the caller's promise.
    unsafe {
        if let Some(factors) = factors {
            for (slot, sums) in sums.iter_mut().enumerate() {
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = vmulq_n_f32(vld1q_f32(block.out[slot].add(column + vector * WIDTH)), factors[slot]);
                }
            }
        }
        for (key, place) in places.iter().enumerate() {
            let row = block.row(block.values, *place).wrapping_add(column);
            for vector in 0..V {
                let value = T::load4(row.add(vector * WIDTH), 0);
                for (slot, sums) in sums.iter_mut().enumerate() {
                    sums[vector] = vfmaq_n_f32(sums[vector], value, scores.0[slot * KEYS + key]);
                }
            }
        }
        for (slot, sums) in sums.iter().enumerate() {
            for (vector, sum) in sums.iter().enumerate() {
                vst1q_f32(block.out[slot].add(column + vector * WIDTH), *sum);
            }
        }
    }
}
