//! Microkernels of 8 lanes; a block is cut into pieces whose sums take at most 12 of the 16 registers.

use std::arch::x86_64::{
    __m256, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps,
    _mm256_setzero_ps, _mm256_setzero_si256, _mm256_storeu_ps,
};
use std::ptr::null;

use super::partial_vectors::through_lanes;
use super::product::{Fetch, Kernel, LINE, Mode, PAGE, Raw, STEPS};
use super::{Element, PANEL};

/// Elements of one vector.
pub(super) const WIDTH: usize = 8;

/// Vectors that the processor names.
const REGISTERS: usize = 16;

/// Rows of the largest piece, which has two vectors of columns: elements of several inner steps stay in registers until
/// the last of these, and so do their scales.
const fn most_rows<W: Element>() -> usize {
    match (W::STEPS, W::ROWS) {
        (1, _) => 6,
        (_, 1) => 5,
        _ => 4,
    }
}

/// What a piece fetches on the way.
#[derive(Clone, Copy)]
pub(super) struct Fetches {
    /// Whether it is what the piece itself reads, a page before.
    pub(super) own: bool,
    /// Memory that is read later; it may lie anywhere.
    later: *const u8,
    /// Cache lines of that, one for each [`STEPS`] inner steps as long as they last.
    lines: usize,
}

impl Fetches {
    const NOTHING: Self = Self { own: false, later: null(), lines: 0 };

    /// Share `index` of `total` of what a block fetches for later; what it reads itself is for pieces that are the
    /// `first` to read it.
    pub(super) fn share(fetch: &Fetch, [index, total]: [usize; 2], first: bool) -> Self {
        if fetch.next {
            return Self { own: first, ..Self::NOTHING };
        }
        let most = fetch.all.div_ceil(total);
        let before = (index * most).min(fetch.all);
        let later = fetch.from.wrapping_add(before * LINE);
        Self { own: false, later, lines: most.min(fetch.all - before) }
    }

    /// Fetches a line that is read later into the second cache, which keeps it until then.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    pub(super) fn take_line(&mut self) {
        if self.lines > 0 {
            _mm_prefetch::<_MM_HINT_T1>(self.later.cast());
            self.later = self.later.wrapping_add(LINE);
            self.lines -= 1;
        }
    }
}

/// The microkernel for `rows` rows and `vectors` vectors of 16 columns, at most as many columns as
/// [`through_lanes`] takes.
pub(super) fn kernel<W: Element>(rows: usize, vectors: usize) -> Kernel<W> {
    match (rows, vectors) {
        (1, ..3) => few::<W, 1, 4>,
        (1, _) => few::<W, 1, 8>,
        // Rows of elements stay in registers beside the sums, which leaves those of two vectors.
        _ if W::ROWS > 1 => block::<W>,
        (2, _) => few::<W, 2, 4>,
        (3, _) => few::<W, 3, 4>,
        _ => block::<W>,
    }
}

/// Blocks of more rows than [`few`] serves: as few pieces as there can be, as even as can be, so of two rows or more.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block<W: Element>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns.is_multiple_of(2 * WIDTH) {
            true => pieces(raw),
            false => through_lanes(raw, pieces),
        }
    }
}

/// All rows times all columns, two vectors at a time; whole vectors are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pieces<W: Element>(raw: &Raw<W>) {
    let pieces = raw.rows.div_ceil(most_rows::<W>());
    let across = raw.columns.div_ceil(2 * WIDTH);
    for (place, column) in (0..raw.columns).step_by(2 * WIDTH).enumerate() {
        for index in 0..pieces {
            let (first, end) = (index * raw.rows / pieces, (index + 1) * raw.rows / pieces);
            let fetches = Fetches::share(&raw.fetch, [place * pieces + index, across * pieces], index == 0);
            // SAFETY: by the caller's promise.
            unsafe {
                match (end - first, fetches.lines) {
                    (..=2, 0) => piece::<W, 2, 2, false>(raw, first, column, fetches),
                    (..=2, _) => piece::<W, 2, 2, true>(raw, first, column, fetches),
                    (3, 0) => piece::<W, 3, 2, false>(raw, first, column, fetches),
                    (3, _) => piece::<W, 3, 2, true>(raw, first, column, fetches),
                    (4, 0) => piece::<W, 4, 2, false>(raw, first, column, fetches),
                    (4, _) => piece::<W, 4, 2, true>(raw, first, column, fetches),
                    (5, 0) => piece::<W, 5, 2, false>(raw, first, column, fetches),
                    (5, _) => piece::<W, 5, 2, true>(raw, first, column, fetches),
                    (_, 0) => piece::<W, 6, 2, false>(raw, first, column, fetches),
                    (_, _) => piece::<W, 6, 2, true>(raw, first, column, fetches),
                }
            }
        }
    }
}

/// `M` rows, all there are, times at most `V` vectors of columns.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few<W: Element, const M: usize, const V: usize>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe {
        match raw.columns == V * WIDTH {
            true => few_rows::<W, M, V>(raw),
            false => through_lanes(raw, few_rows::<W, M, V>),
        }
    }
}

/// As [`few`]; whole vectors are written.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_rows<W: Element, const M: usize, const V: usize>(raw: &Raw<W>) {
    // SAFETY: by the caller's promise.
    unsafe { piece::<W, M, V, false>(raw, 0, 0, Fetches { own: raw.fetch.next, ..Fetches::NOTHING }) };
}

/// The rows `first .. first + M` times `V` vectors from `column` on; whole vectors are written. `LATER` says whether
/// there are lines to fetch later; to ask in the loop where there are none costs 1 to 2 % of it.
///
/// # Safety
///
/// As [`block`], where every destination holds the vectors.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn piece<W: Element, const M: usize, const V: usize, const LATER: bool>(
    raw: &Raw<W>,
    first: usize,
    column: usize,
    mut fetches: Fetches,
) {
    let last = last_vector(raw, column);
    let offsets: [usize; V] = std::array::from_fn(|vector| {
        let column = column + vector.min(last) * WIDTH;
        column / PANEL * raw.panel_stride + column % PANEL
    });
    let (mut left, mut out) = ([raw.left[first]; M], [raw.out[first]; M]);
    left.copy_from_slice(&raw.left[first..first + M]);
    out.copy_from_slice(&raw.out[first..first + M]);
    let out = out.map(|row| row.wrapping_add(raw.first + column));
    // SAFETY: every pointer is in bounds by the caller's promise; whole pairs of vectors of the right factor are
    // readable, and a vector past these reads the last one.
    unsafe {
        let mut sums = first_terms::<W, M, V>(raw, first, &out);
        match W::ROWS {
            1 => panel_sums::<W, M, V, LATER>(&mut sums, &left, raw, &offsets, &mut fetches),
            _ => row_sums::<W, M, V, LATER>(&mut sums, &left, raw, &offsets, &mut fetches),
        }
        finish(raw, first, column, &out, sums);
    }
}

/// The last vector of those from `column` on that may be read.
fn last_vector<W>(raw: &Raw<W>, column: usize) -> usize {
    (raw.columns - column).div_ceil(2 * WIDTH) * 2 - 1
}

/// What the sums of the rows `first .. first + M` begin with, whose destinations are `out`.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn first_terms<W, const M: usize, const V: usize>(
    raw: &Raw<W>,
    first: usize,
    out: &[*mut f32; M],
) -> [[__m256; V]; M] {
    let mut sums = [[_mm256_setzero_ps(); V]; M];
    if raw.mode == Mode::Resume {
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: by the caller's promise.
            let factor = unsafe { _mm256_set1_ps(*raw.factors.add(first + row)) };
            for (vector, sum) in sums.iter_mut().enumerate() {
                // SAFETY: by the caller's promise.
                *sum = unsafe { _mm256_mul_ps(factor, _mm256_loadu_ps(out[row].add(vector * WIDTH))) };
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
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(super) unsafe fn finish<W, const M: usize, const V: usize>(
    raw: &Raw<W>,
    first: usize,
    column: usize,
    out: &[*mut f32; M],
    mut sums: [[__m256; V]; M],
) {
    let last = last_vector(raw, column);
    // SAFETY: by the caller's promise.
    unsafe {
        if !raw.scales.is_null() {
            for vector in 0..V {
                let scales = _mm256_loadu_ps(raw.scales.add(raw.first + column + vector.min(last) * WIDTH));
                sums.iter_mut().for_each(|sums| sums[vector] = _mm256_mul_ps(sums[vector], scales));
            }
        }
        if raw.mode == Mode::AddScaled {
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = _mm256_set1_ps(*raw.factors.add(first + row));
                for (vector, sum) in sums.iter_mut().enumerate() {
                    *sum = _mm256_fmadd_ps(factor, *sum, _mm256_loadu_ps(out[row].add(vector * WIDTH)));
                }
            }
        }
        for (out, sums) in out.iter().zip(sums) {
            for (vector, sum) in sums.into_iter().enumerate() {
                _mm256_storeu_ps(out.add(vector * WIDTH), sum);
            }
        }
    }
}

/// Adds the terms of `M` rows to `V` vectors at `offsets`.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn panel_sums<W: Element, const M: usize, const V: usize, const LATER: bool>(
    sums: &mut [[__m256; V]; M],
    left: &[*const f32; M],
    raw: &Raw<W>,
    offsets: &[usize; V],
    fetches: &mut Fetches,
) {
    let (mut right, mut inner) = (raw.right, 0);
    // SAFETY: by the caller's promise.
    unsafe {
        while inner + STEPS <= raw.inner {
            if LATER {
                fetches.take_line();
            }
            for step in 0..STEPS {
                if !LATER && fetches.own && step.is_multiple_of(W::STEPS) {
                    fetch(right, offsets);
                }
                multiply_add(sums, left, [inner + step, step], right, offsets);
                right = right.wrapping_add(W::passed(step, raw.stride));
            }
            inner += STEPS;
        }
        for inner in inner..raw.inner {
            multiply_add(sums, left, [inner, inner], right, offsets);
            right = right.wrapping_add(W::passed(inner, raw.stride));
        }
    }
}

/// As [`panel_sums`], all steps of a row of elements while its elements are in registers.
///
/// # Safety
///
/// As [`piece`].
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn row_sums<W: Element, const M: usize, const V: usize, const LATER: bool>(
    sums: &mut [[__m256; V]; M],
    left: &[*const f32; M],
    raw: &Raw<W>,
    offsets: &[usize; V],
    fetches: &mut Fetches,
) {
    let mut right = raw.right;
    let whole = raw.inner - raw.inner % W::EACH;
    for first in (0..whole).step_by(W::EACH) {
        // SAFETY: by the caller's promise.
        unsafe {
            for _ in 0..if LATER { W::EACH / STEPS } else { 0 } {
                fetches.take_line();
            }
            if !LATER && fetches.own {
                W::begun(first).for_each(|row| fetch(right.wrapping_add(row * raw.stride), offsets));
            }
            let mut rows = [[_mm256_setzero_si256(); 2]; V];
            for (row, offset) in rows.iter_mut().zip(offsets) {
                *row = W::row8(right.add(*offset), first);
            }
            for step in 0..W::EACH {
                let mut lanes = [_mm256_setzero_ps(); V];
                for (lanes, row) in lanes.iter_mut().zip(&mut rows) {
                    *lanes = W::next8(row);
                }
                for (sums, left) in sums.iter_mut().zip(left) {
                    let value = _mm256_set1_ps(*left.add(first + step));
                    for (sum, lanes) in sums.iter_mut().zip(lanes) {
                        *sum = _mm256_fmadd_ps(value, lanes, *sum);
                    }
                }
            }
        }
        right = right.wrapping_add(W::passed(first + W::EACH - 1, raw.stride));
    }
    for inner in whole..raw.inner {
        // SAFETY: by the caller's promise; the last steps are in one group.
        unsafe { multiply_add(sums, left, [inner, inner], right, offsets) };
    }
}

/// Fetches what is read a page later, into the nearest cache.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn fetch<W: Element, const V: usize>(right: *const W, offsets: &[usize; V]) {
    for offset in offsets.iter().step_by(LINE / (WIDTH * size_of::<W>())) {
        _mm_prefetch::<_MM_HINT_T0>(right.wrapping_add(*offset).wrapping_byte_add(PAGE).cast());
    }
}

/// One inner step of a piece, `step` of those of a group.
///
/// # Safety
///
/// Element `inner` of every left row and vectors at every offset from `right` on must be readable; the processor must
/// have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn multiply_add<W: Element, const M: usize, const V: usize>(
    sums: &mut [[__m256; V]; M],
    left: &[*const f32; M],
    [inner, step]: [usize; 2],
    right: *const W,
    offsets: &[usize; V],
) {
    // SAFETY: by the caller's promise.
    unsafe {
        if M * V + V >= REGISTERS {
            let values = left.map(|left| _mm256_set1_ps(*left.add(inner)));
            for (vector, offset) in offsets.iter().enumerate() {
                let lanes = W::load8(right.add(*offset), step);
                for (sums, value) in sums.iter_mut().zip(values) {
                    sums[vector] = _mm256_fmadd_ps(value, lanes, sums[vector]);
                }
            }
            return;
        }
        let mut panel = [_mm256_setzero_ps(); V];
        for (lanes, offset) in panel.iter_mut().zip(offsets) {
            *lanes = W::load8(right.add(*offset), step);
        }
        for (sums, left) in sums.iter_mut().zip(left) {
            let value = _mm256_set1_ps(*left.add(inner));
            for (sum, lanes) in sums.iter_mut().zip(panel) {
                *sum = _mm256_fmadd_ps(value, lanes, *sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fetch_every_line_once() {
        for (all, total) in [(0, 1), (1, 4), (205, 16), (256, 16), (7, 7), (10, 4)] {
            let fetch = Fetch { from: null(), lines: 0, all, next: false };
            let shares = (0..total).map(|index| Fetches::share(&fetch, [index, total], index == 0));
            let lines: Vec<usize> =
                shares.flat_map(|share| (0..share.lines).map(move |line| share.later.addr() / LINE + line)).collect();
            assert_eq!(lines, (0..all).collect::<Vec<_>>(), "{all} {total}");
        }
    }
}
