//! Microkernels of 16 lanes.

use std::arch::x86_64::{
    __m512, __mmask16, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_fmadd_ps, _mm512_mask_storeu_ps,
    _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
};
use std::marker::PhantomData;

use super::product::{Fetch, Kernel, LINE, Mode, PAGE, Raw, STEPS, streams};
use super::{Element, LANES, PANEL, ROWS};

/// The microkernels of one type of weights.
struct Kernels<W>(PhantomData<W>);

impl<W: Element> Kernels<W> {
    /// Those of one panel, by rows and vectors.
    const BLOCKS: [[Kernel<W>; 2]; ROWS] = [
        [wide::<W, 1, 1>, wide::<W, 1, 2>],
        [block::<W, 2, 1>, block::<W, 2, 2>],
        [block::<W, 3, 1>, block::<W, 3, 2>],
        [block::<W, 4, 1>, block::<W, 4, 2>],
        [block::<W, 5, 1>, block::<W, 5, 2>],
        [block::<W, 6, 1>, block::<W, 6, 2>],
        [block::<W, 7, 1>, block::<W, 7, 2>],
        [block::<W, 8, 1>, block::<W, 8, 2>],
        [block::<W, 9, 1>, block::<W, 9, 2>],
        [block::<W, 10, 1>, block::<W, 10, 2>],
        [block::<W, 11, 1>, block::<W, 11, 2>],
        [block::<W, 12, 1>, block::<W, 12, 2>],
    ];
}

/// The microkernel for `rows` rows and `vectors` vectors of columns, which are more than a panel's only where
/// [`super::panels_at_once`] says so.
pub(super) fn kernel<W: Element>(rows: usize, vectors: usize) -> Kernel<W> {
    match (rows, vectors) {
        (_, ..3) => Kernels::<W>::BLOCKS[rows - 1][vectors - 1],
        (1, 3 | 4) => wide::<W, 1, 4>,
        (1, 5 | 6) => wide::<W, 1, 6>,
        (1, 7..) => wide::<W, 1, 8>,
        (2, 3 | 4) => wide::<W, 2, 4>,
        (2, 5..) => wide::<W, 2, 8>,
        (_, 3 | 4) => wide::<W, 3, 4>,
        (_, 5..) => wide::<W, 3, 8>,
    }
}

/// Lanes of vector `vector` that hold one of `columns` columns.
pub(super) fn mask(columns: usize, vector: usize) -> __mmask16 {
    let count = columns.saturating_sub(vector * LANES).min(LANES);
    ((1u32 << count) - 1) as __mmask16
}

/// Fetches what is due for [`STEPS`] inner steps, from `ahead` on: what comes then.
///
/// What is read next goes to the nearest cache. One line of it a page further goes to the second-level cache, where the
/// processor looks ahead from there on: all of these would keep lines waiting that are needed before.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn fetch(fetch: &Fetch, mut ahead: *const i8) -> *const i8 {
    if fetch.next {
        _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(PAGE));
        for _ in 0..fetch.lines {
            _mm_prefetch::<_MM_HINT_T0>(ahead);
            ahead = ahead.wrapping_add(LINE);
        }
    } else {
        for _ in 0..fetch.lines {
            _mm_prefetch::<_MM_HINT_T1>(ahead);
            ahead = ahead.wrapping_add(LINE);
        }
    }
    ahead
}

/// The first term of a chain.
///
/// # Safety
///
/// The lanes of `mask` at `out` and the row's factor, where the mode needs one, must be readable; the processor must
/// have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn first_term<W>(raw: &Raw<W>, row: usize, out: *const f32, mask: __mmask16) -> __m512 {
    if raw.mode != Mode::Resume {
        return _mm512_setzero_ps();
    }
    // SAFETY: by the caller's promise.
    unsafe { _mm512_mul_ps(_mm512_set1_ps(*raw.factors.add(row)), _mm512_maskz_loadu_ps(mask, out)) }
}

/// Ends a chain.
///
/// # Safety
///
/// The lanes of `mask` at `out` must be ours to read and write, and the row's factor, where the mode needs one,
/// readable; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn store<W>(raw: &Raw<W>, row: usize, out: *mut f32, mask: __mmask16, sum: __m512) {
    // SAFETY: by the caller's promise.
    unsafe {
        let sum = match raw.mode {
            Mode::AddScaled => {
                _mm512_fmadd_ps(_mm512_set1_ps(*raw.factors.add(row)), sum, _mm512_maskz_loadu_ps(mask, out))
            }
            _ => sum,
        };
        _mm512_mask_storeu_ps(out, mask, sum);
    }
}

/// Multiplies sums with the scales of their columns, where there are any.
///
/// # Safety
///
/// The scales of `raw`, where there are any, must be readable for all of its columns; the processor must have AVX-512
/// F.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn scale<W, const M: usize, const V: usize>(raw: &Raw<W>, sums: &mut [[__m512; V]; M]) {
    if raw.scales.is_null() {
        return;
    }
    for vector in 0..V {
        let scales = raw.scales.wrapping_add(raw.first + vector * LANES);
        // SAFETY: by the caller's promise; no lane past the last column is read.
        let scales = unsafe { _mm512_maskz_loadu_ps(mask(raw.columns, vector), scales) };
        sums.iter_mut().for_each(|sums| sums[vector] = _mm512_mul_ps(sums[vector], scales));
    }
}

/// One inner step of a block, `step` of those of an element.
///
/// # Safety
///
/// Element `inner` of every left row and `V` vectors at `right` must be readable; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn multiply_add<W: Element, const M: usize, const V: usize>(
    sums: &mut [[__m512; V]; M],
    left: &[*const f32; M],
    [inner, step]: [usize; 2],
    right: *const W,
) {
    let mut panel = [_mm512_setzero_ps(); V];
    // SAFETY: by the caller's promise.
    unsafe {
        for (vector, lanes) in panel.iter_mut().enumerate() {
            *lanes = W::load16(right.add(vector * LANES), step);
        }
        for (sums, left) in sums.iter_mut().zip(left) {
            let value = _mm512_set1_ps(*left.add(inner));
            for (sum, lanes) in sums.iter_mut().zip(panel) {
                *sum = W::multiply_add16(value, lanes, *sum);
            }
        }
    }
}

/// `M` rows times `V` vectors of one panel.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX-512 F.
#[target_feature(enable = "avx512f")]
unsafe fn block<W: Element, const M: usize, const V: usize>(raw: &Raw<W>) {
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                let out = raw.out[row].wrapping_add(raw.first + vector * LANES);
                *sum = first_term(raw, row, out, mask(raw.columns, vector));
            }
        }
        match W::ROWS {
            1 => panel_sums(&mut sums, raw),
            _ => row_sums(&mut sums, raw, std::array::from_fn(|vector| vector * LANES)),
        }
        scale(raw, &mut sums);
        for (row, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                let out = raw.out[row].wrapping_add(raw.first + vector * LANES);
                store(raw, row, out, mask(raw.columns, vector), sum);
            }
        }
    }
}

/// Adds the terms of `M` rows to `V` vectors of one panel.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn panel_sums<W: Element, const M: usize, const V: usize>(sums: &mut [[__m512; V]; M], raw: &Raw<W>) {
    let mut left = [raw.left[0]; M];
    left.copy_from_slice(&raw.left[..M]);
    let (mut right, mut ahead, mut inner) = (raw.right, raw.fetch.from.cast::<i8>(), 0);
    // SAFETY: every pointer is in bounds by the caller's promise.
    unsafe {
        while inner + STEPS <= raw.inner {
            ahead = fetch(&raw.fetch, ahead);
            for step in 0..STEPS {
                multiply_add(sums, &left, [inner + step, step], right);
                right = right.wrapping_add(W::passed(step, raw.stride));
            }
            inner += STEPS;
        }
        for inner in inner..raw.inner {
            multiply_add(sums, &left, [inner, inner], right);
            right = right.wrapping_add(W::passed(inner, raw.stride));
        }
    }
}

/// `M` rows times `V` vectors, two of each panel: few rows have too few chains in one panel to keep the processor busy.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx512f")]
unsafe fn wide<W: Element, const M: usize, const V: usize>(raw: &Raw<W>) {
    let mut sums = [[_mm512_setzero_ps(); V]; M];
    let mut offsets = [0; V];
    let last = raw.columns.div_ceil(LANES) - 1;
    // SAFETY: every pointer is in bounds by the caller's promise; a vector past the last column reads the last one.
    unsafe {
        for (vector, offset) in offsets.iter_mut().enumerate() {
            let column = vector.min(last) * LANES;
            *offset = column / PANEL * raw.panel_stride + column % PANEL;
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            for (vector, sum) in sums.iter_mut().enumerate() {
                let out = raw.out[row].wrapping_add(raw.first + vector * LANES);
                *sum = first_term(raw, row, out, mask(raw.columns, vector));
            }
        }
        if W::ROWS > 1 {
            row_sums(&mut sums, raw, offsets);
        } else if M == 1 && V <= streams::<W>() * PANEL / LANES && raw.fetch.next {
            few_streams(&mut sums[0], raw, offsets);
        } else {
            wide_sums(&mut sums, raw, offsets);
        }
        scale(raw, &mut sums);
        for (row, sums) in sums.into_iter().enumerate() {
            for (vector, sum) in sums.into_iter().enumerate() {
                store(raw, row, raw.out[row].wrapping_add(raw.first + vector * LANES), mask(raw.columns, vector), sum);
            }
        }
    }
}

/// Adds the terms of `M` rows to `V` vectors at `offsets` of each row of the panels.
///
/// # Safety
///
/// As [`block`], where a vector at each offset is in bounds.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn wide_sums<W: Element, const M: usize, const V: usize>(
    sums: &mut [[__m512; V]; M],
    raw: &Raw<W>,
    offsets: [usize; V],
) {
    let mut left = [raw.left[0]; M];
    left.copy_from_slice(&raw.left[..M]);
    let (mut right, mut ahead) = (raw.right, raw.fetch.from.cast::<i8>());
    let mut one = |inner: usize, step: usize| {
        // SAFETY: by the caller's promise; what is fetched may lie anywhere.
        unsafe {
            if inner.is_multiple_of(STEPS) {
                ahead = fetch(&raw.fetch, ahead);
            }
            let values: [__m512; M] = left.map(|left| _mm512_set1_ps(*left.add(inner)));
            for (vector, offset) in offsets.into_iter().enumerate() {
                let lanes = W::load16(right.add(offset), step);
                for (sums, value) in sums.iter_mut().zip(values) {
                    sums[vector] = W::multiply_add16(value, lanes, sums[vector]);
                }
            }
        }
        right = right.wrapping_add(W::passed(step, raw.stride));
    };
    match W::IS_PAIR {
        true => (0..raw.inner).for_each(|inner| one(inner, 0)),
        false => in_pairs(raw.inner, &mut one),
    }
}

/// [`wide_sums`] of one row and [`streams`] panels, which are fetched a page ahead.
///
/// # Safety
///
/// As [`wide_sums`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn few_streams<W: Element, const V: usize>(sums: &mut [__m512; V], raw: &Raw<W>, offsets: [usize; V]) {
    let (left, mut right) = (raw.left[0], raw.right);
    let mut one = |inner: usize, step: usize| {
        // SAFETY: by the caller's promise; what is fetched may lie anywhere.
        unsafe {
            let value = _mm512_set1_ps(*left.add(inner));
            for (vector, (sum, offset)) in sums.iter_mut().zip(offsets).enumerate() {
                let lanes = right.add(offset);
                let place = (step / W::STEPS * PANEL + vector * LANES % PANEL) * size_of::<W>();
                if place.is_multiple_of(LINE) && step.is_multiple_of(W::STEPS) {
                    _mm_prefetch::<_MM_HINT_T0>(lanes.wrapping_byte_add(PAGE).cast());
                }
                *sum = W::multiply_add16(value, W::load16(lanes, step), *sum);
            }
        }
        right = right.wrapping_add(W::passed(step, raw.stride));
    };
    in_pairs(raw.inner, &mut one);
}

/// Calls `one` for each of `inner` steps, with a place in a pair that the compiler knows.
#[target_feature(enable = "avx512f")]
#[inline]
fn in_pairs(inner: usize, one: &mut impl FnMut(usize, usize)) {
    let even = inner & !1;
    for inner in (0..even).step_by(2) {
        one(inner, 0);
        one(inner + 1, 1);
    }
    if even < inner {
        one(even, 0);
    }
}

/// Adds the terms of `M` rows to `V` vectors at `offsets` of each row of the panels, all steps of a row of elements
/// while its elements are in registers.
///
/// # Safety
///
/// As [`wide_sums`].
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn row_sums<W: Element, const M: usize, const V: usize>(
    sums: &mut [[__m512; V]; M],
    raw: &Raw<W>,
    offsets: [usize; V],
) {
    let mut left = [raw.left[0]; M];
    left.copy_from_slice(&raw.left[..M]);
    let (mut right, mut ahead) = (raw.right, raw.fetch.from.cast::<i8>());
    let whole = raw.inner - raw.inner % W::EACH;
    for first in (0..whole).step_by(W::EACH) {
        // SAFETY: by the caller's promise; what is fetched may lie anywhere.
        unsafe {
            if M == 1 && raw.fetch.next {
                for row in W::begun(first) {
                    for offset in offsets {
                        let next = right.wrapping_add(offset + row * raw.stride).wrapping_byte_add(PAGE);
                        _mm_prefetch::<_MM_HINT_T0>(next.cast());
                    }
                }
            } else {
                for _ in 0..W::EACH / STEPS {
                    ahead = fetch(&raw.fetch, ahead);
                }
            }
            let mut rows = [[_mm512_setzero_si512(); 2]; V];
            for (row, offset) in rows.iter_mut().zip(offsets) {
                *row = W::row16(right.add(offset), first);
            }
            for step in 0..W::EACH {
                let mut lanes = [_mm512_setzero_ps(); V];
                for (lanes, row) in lanes.iter_mut().zip(&mut rows) {
                    *lanes = W::next16(row);
                }
                for (sums, left) in sums.iter_mut().zip(left) {
                    let value = _mm512_set1_ps(*left.add(first + step));
                    for (sum, lanes) in sums.iter_mut().zip(lanes) {
                        *sum = W::multiply_add16(value, lanes, *sum);
                    }
                }
            }
        }
        right = right.wrapping_add(W::passed(first + W::EACH - 1, raw.stride));
    }
    for inner in whole..raw.inner {
        // SAFETY: by the caller's promise; the last steps are in one group.
        unsafe {
            for (vector, offset) in offsets.into_iter().enumerate() {
                let lanes = W::load16(right.add(offset), inner);
                for (sums, left) in sums.iter_mut().zip(left) {
                    sums[vector] = W::multiply_add16(_mm512_set1_ps(*left.add(inner)), lanes, sums[vector]);
                }
            }
        }
    }
}
