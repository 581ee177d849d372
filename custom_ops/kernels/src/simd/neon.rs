//! Microkernels of 4 lanes; a block is cut into pieces whose sums take at most 24 of the 32 registers.
//!
//! Four inner steps of a row are read as one vector, each lane of which multiplies a step of the columns; beside
//! elements of several rows of a group, one at a time.

use std::arch::aarch64::{
    float32x4_t, vdupq_n_f32, vfmaq_f32, vfmaq_laneq_f32, vfmaq_n_f32, vld1q_f32, vmulq_f32, vmulq_n_f32, vst1q_f32,
};

use super::partial_vectors::through_lanes;
use super::product::{Kernel, Mode, Raw};
use super::{Element, LANES, PANEL};

/// Elements of one vector.
pub(super) const WIDTH: usize = 4;

/// Rows of the largest piece: what is widened needs registers beside the sums, where there are those of 16 columns.
const fn most_rows<W: Element>() -> usize {
    if is_f32::<W>() || W::ROWS > 1 { 6 } else { 5 }
}

/// Whether elements are multiplied as they are read.
const fn is_f32<W: Element>() -> bool {
    size_of::<W>() == size_of::<f32>() && W::STEPS == 1
}

/// Vectors of 16 columns.
const SOME: usize = LANES / WIDTH;

/// Vectors of a panel.
const ALL: usize = PANEL / WIDTH;

/// The microkernel for `rows` rows.
pub(super) fn kernel<W: Element>(rows: usize) -> Kernel<W> {
    match rows {
        1 => few::<W, 1>,
        2 => few::<W, 2>,
        3 => few::<W, 3>,
        _ => block::<W>,
    }
}

/// Blocks of more rows than [`few`] serves: as few pieces as there can be, as even as can be, so of three rows or more.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds.
#[target_feature(enable = "neon")]
unsafe fn block<W: Element>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(LANES) {
            true => pieces(raw),
            false => through_lanes(raw, pieces),
        }
    }
}

/// As [`block`]; whole vectors of 16 columns are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "neon")]
unsafe fn pieces<W: Element>(raw: &Raw<W>) {
    let pieces = raw.rows.div_ceil(const { most_rows::<W>() });
    for column in (0..raw.columns).step_by(LANES) {
        for index in 0..pieces {
            let (first, end) = (index * raw.rows / pieces, (index + 1) * raw.rows / pieces);
            // SAFETY: by the caller's promise.
            unsafe {
                match end - first {
                    ..=3 => some_columns::<W, 3>(raw, first, column),
                    4 => some_columns::<W, 4>(raw, first, column),
                    5 => some_columns::<W, 5>(raw, first, column),
                    _ => some_columns::<W, 6>(raw, first, column),
                }
            }
        }
    }
}

/// The rows `first .. first + M` times 16 columns from `column` on. Elements of several rows of a group stay in
/// registers beside the sums, which leaves those of two vectors.
///
/// # Safety
///
/// As [`block`], where every destination holds the columns.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn some_columns<W: Element, const M: usize>(raw: &Raw<W>, first: usize, column: usize) {
    // SAFETY: by the caller's promise.
    unsafe {
        if W::ROWS == 1 {
            return piece::<W, M, SOME>(raw, first, column);
        }
        piece::<W, M, { SOME / 2 }>(raw, first, column);
        piece::<W, M, { SOME / 2 }>(raw, first, column + LANES / 2);
    }
}

/// `M` rows, all there are.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "neon")]
unsafe fn few<W: Element, const M: usize>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(LANES) {
            true => few_rows::<W, M>(raw),
            false => through_lanes(raw, few_rows::<W, M>),
        }
    }
}

/// As [`few`]; whole vectors of 16 columns are written. As many columns at once as leave enough registers, since every
/// sum waits for the one before.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "neon")]
unsafe fn few_rows<W: Element, const M: usize>(raw: &Raw<W>) {
    let mut column = 0;
    while column < raw.columns {
        let vectors = (raw.columns - column) / WIDTH;
        // SAFETY: by the caller's promise; a piece begins with a panel, but for the last one of half of it.
        let taken = unsafe {
            if M == 1 && is_f32::<W>() && vectors >= 2 * ALL {
                piece::<W, M, { 2 * ALL }>(raw, 0, column);
                2 * ALL
            } else if (M == 1 || is_f32::<W>()) && vectors >= ALL {
                piece::<W, M, ALL>(raw, 0, column);
                ALL
            } else {
                piece::<W, M, SOME>(raw, 0, column);
                SOME
            }
        };
        column += taken * WIDTH;
    }
}

/// The rows `first .. first + M` times `V` vectors from `column` on; whole vectors are written.
///
/// # Safety
///
/// As [`block`], where every destination holds the vectors, and where these do not cross from one panel to the next but
/// at multiples of [`ALL`].
#[target_feature(enable = "neon")]
#[inline]
unsafe fn piece<W: Element, const M: usize, const V: usize>(raw: &Raw<W>, first: usize, column: usize) {
    let left: [*const f32; M] = std::array::from_fn(|row| raw.left[first + row]);
    let out: [*mut f32; M] = std::array::from_fn(|row| raw.out[first + row].wrapping_add(raw.first + column));
    let right = raw.right.wrapping_add(column / PANEL * raw.panel_stride + column % PANEL);
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        let mut sums = first_terms::<W, M, V>(raw, first, &out);
        match W::ROWS {
            1 => panel_sums(&mut sums, &left, raw, right),
            _ => row_sums(&mut sums, &left, raw, right),
        }
        finish(raw, first, column, &out, sums);
    }
}

/// What the sums of the rows `first .. first + M` begin with, whose destinations are `out`.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn first_terms<W, const M: usize, const V: usize>(
    raw: &Raw<W>,
    first: usize,
    out: &[*mut f32; M],
) -> [[float32x4_t; V]; M] {
    let mut sums = [[vdupq_n_f32(0.0); V]; M];
    if raw.mode == Mode::Resume {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                // SAFETY: by the caller's promise.
                *sum = unsafe { vmulq_n_f32(vld1q_f32(out[row].add(vector * WIDTH)), *raw.factors.add(first + row)) };
            }
        }
    }
    sums
}

/// Writes the sums of the rows `first .. first + M` and the vectors from `column` on to `out`.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "neon")]
#[inline]
pub(super) unsafe fn finish<W, const M: usize, const V: usize>(
    raw: &Raw<W>,
    first: usize,
    column: usize,
    out: &[*mut f32; M],
    mut sums: [[float32x4_t; V]; M],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        if !raw.scales.is_null() {
            for vector in 0..V {
                let scales = vld1q_f32(raw.scales.add(raw.first + column + vector * WIDTH));
                sums.iter_mut().for_each(|sums| sums[vector] = vmulq_f32(sums[vector], scales));
            }
        }
        for (row, (out, sums)) in out.iter().zip(sums).enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                let out = out.add(vector * WIDTH);
                let sum = match raw.mode {
                    Mode::AddScaled => vfmaq_n_f32(vld1q_f32(out), sum, *raw.factors.add(first + row)),
                    _ => sum,
                };
                vst1q_f32(out, sum);
            }
        }
    }
}

/// Adds the terms of `M` rows to `V` vectors of columns, the first of which is at `right`.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "neon")]
#[inline]
unsafe fn panel_sums<W: Element, const M: usize, const V: usize>(
    sums: &mut [[float32x4_t; V]; M],
    left: &[*const f32; M],
    raw: &Raw<W>,
    mut right: *const W,
) {
    let whole = raw.inner - raw.inner % WIDTH;
    let next = |right: *const W, step| right.wrapping_add(W::passed(step, raw.stride));
    // SAFETY: by the caller's promise.
    unsafe {
        for first in (0..whole).step_by(WIDTH) {
            let values = left.map(|left| vld1q_f32(left.add(first)));
            multiply_add::<W, M, V, 0>(sums, &values, raw, right, 0);
            right = next(right, 0);
            multiply_add::<W, M, V, 1>(sums, &values, raw, right, 1);
            right = next(right, 1);
            multiply_add::<W, M, V, 2>(sums, &values, raw, right, 2);
            right = next(right, 2);
            multiply_add::<W, M, V, 3>(sums, &values, raw, right, 3);
            right = next(right, 3);
        }
        for inner in whole..raw.inner {
            let values = left.map(|left| vdupq_n_f32(*left.add(inner)));
            multiply_add::<W, M, V, 0>(sums, &values, raw, right, inner);
            right = next(right, inner);
        }
    }
}

/// One inner step of a piece, `step` of those of a group, whose factors of the rows stand in lane `LANE`.
///
/// # Safety
///
/// Vectors of the columns from `right` on must be readable.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn multiply_add<W: Element, const M: usize, const V: usize, const LANE: i32>(
    sums: &mut [[float32x4_t; V]; M],
    values: &[float32x4_t; M],
    raw: &Raw<W>,
    right: *const W,
    step: usize,
) {
    for vector in 0..V {
        let right = right.wrapping_add(vector / ALL * raw.panel_stride + vector % ALL * WIDTH);
        // SAFETY: by the caller's promise.
        let lanes = unsafe { W::load4(right, step) };
        for (sums, value) in sums.iter_mut().zip(values) {
            sums[vector] = vfmaq_laneq_f32::<LANE>(sums[vector], lanes, *value);
        }
    }
}

/// As [`panel_sums`], all steps of a row of elements while its elements are in registers.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "neon")]
#[inline]
unsafe fn row_sums<W: Element, const M: usize, const V: usize>(
    sums: &mut [[float32x4_t; V]; M],
    left: &[*const f32; M],
    raw: &Raw<W>,
    mut right: *const W,
) {
    for first in (0..raw.inner).step_by(W::EACH) {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut rows: [_; V] = std::array::from_fn(|vector| W::row4(right.wrapping_add(vector * WIDTH), first));
            for inner in first..raw.inner.min(first + W::EACH) {
                let values = left.map(|left| vdupq_n_f32(*left.add(inner)));
                for (vector, row) in rows.iter_mut().enumerate() {
                    let lanes = W::next4(row);
                    for (sums, value) in sums.iter_mut().zip(values) {
                        sums[vector] = vfmaq_f32(sums[vector], lanes, value);
                    }
                }
            }
        }
        right = right.wrapping_add(W::passed(first + W::EACH - 1, raw.stride));
    }
}
