//! Microkernels of 8 lanes; a block is cut into pieces of 4 rows and 16 columns.

use std::arch::x86_64::{
    __m256, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_ps, _mm256_setzero_ps, _mm256_storeu_ps,
};

use super::product::{Mode, Raw};
use super::{Element, LANES, PANEL};

/// Elements of one vector.
const WIDTH: usize = 8;

/// Rows of one piece.
const PIECE: usize = 4;

/// All rows times all columns.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds; the processor must have AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn block<W: Element>(raw: &Raw<W>) {
    for column in (0..raw.columns).step_by(LANES) {
        for first in (0..raw.rows).step_by(PIECE) {
            // SAFETY: by the caller's promise.
            unsafe {
                match raw.rows - first {
                    1 => piece::<W, 1>(raw, first, column),
                    2 => piece::<W, 2>(raw, first, column),
                    3 => piece::<W, 3>(raw, first, column),
                    _ => piece::<W, PIECE>(raw, first, column),
                }
            }
        }
    }
}

/// The rows `first .. first + M` times the 16 columns from `column`.
///
/// # Safety
///
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn piece<W: Element, const M: usize>(raw: &Raw<W>, first: usize, column: usize) {
    let count = (raw.columns - column).min(LANES);
    let mut sums = [[_mm256_setzero_ps(); 2]; M];
    // SAFETY: every pointer is in bounds by the caller's promise; whole vectors of the right factor are readable.
    unsafe {
        if raw.mode == Mode::Resume {
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = _mm256_set1_ps(*raw.factors.add(first + row));
                let before = load(raw.out[first + row].add(column), count);
                *sums = [_mm256_mul_ps(factor, before[0]), _mm256_mul_ps(factor, before[1])];
            }
        }
        let mut left = [raw.left[first]; M];
        left.copy_from_slice(&raw.left[first..first + M]);
        let mut right = raw.right.add(column / PANEL * raw.panel_stride + column % PANEL);
        let mut step = |inner: usize, within: usize| {
            let lanes = [W::load8(right, within), W::load8(right.add(WIDTH), within)];
            for (sums, left) in sums.iter_mut().zip(left) {
                let value = _mm256_set1_ps(*left.add(inner));
                for (sum, lanes) in sums.iter_mut().zip(lanes) {
                    *sum = _mm256_fmadd_ps(value, lanes, *sum);
                }
            }
            right = right.wrapping_add(W::passed(within, raw.stride));
        };
        let even = raw.inner & !1;
        for inner in (0..even).step_by(2) {
            step(inner, 0);
            step(inner + 1, 1);
        }
        if even < raw.inner {
            step(even, 0);
        }
        for (row, mut sums) in sums.into_iter().enumerate() {
            let out = raw.out[first + row].add(column);
            if raw.mode == Mode::AddScaled {
                let (factor, before) = (_mm256_set1_ps(*raw.factors.add(first + row)), load(out, count));
                sums = [_mm256_fmadd_ps(factor, sums[0], before[0]), _mm256_fmadd_ps(factor, sums[1], before[1])];
            }
            let mut lanes = [0.0; LANES];
            _mm256_storeu_ps(lanes.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(lanes.as_mut_ptr().add(WIDTH), sums[1]);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out, count);
        }
    }
}

/// `count` elements and zeros after them.
///
/// # Safety
///
/// `count` elements, at most [`LANES`], must be readable at `from`; the processor must have AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load(from: *const f32, count: usize) -> [__m256; 2] {
    let mut lanes = [0.0; LANES];
    // SAFETY: by the caller's promise.
    unsafe {
        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count);
        [_mm256_loadu_ps(lanes.as_ptr()), _mm256_loadu_ps(lanes.as_ptr().add(WIDTH))]
    }
}
