//! Microkernels in plain arithmetic, for the compiler to vectorise.

use super::product::{Mode, Raw};
use super::{Element, LANES, PANEL};

/// `a · b + c`; fused where the architecture always has the instruction.
pub(super) fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
}

/// `a · b + c`, rounded once. That of MinGW rounds twice.
pub(super) fn fused(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(all(windows, target_env = "gnu")) { libm::fmaf(a, b, c) } else { a.mul_add(b, c) }
}

/// All rows times all columns, 16 at a time.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block that is in bounds.
pub(super) unsafe fn block<W: Element>(raw: &Raw<W>) {
    for column in (0..raw.columns).step_by(LANES) {
        let count = (raw.columns - column).min(LANES);
        let offset = column / PANEL * raw.panel_stride + column % PANEL;
        for row in 0..raw.rows {
            let mut sums = [0.0f32; LANES];
            // SAFETY: every pointer is in bounds by the caller's promise; whole vectors of the right factor are
            // readable.
            unsafe {
                let out = std::slice::from_raw_parts_mut(raw.out[row].add(raw.first + column), count);
                if raw.mode == Mode::Resume {
                    sums.iter_mut().zip(&*out).for_each(|(sum, before)| *sum = *raw.factors.add(row) * before);
                }
                let mut right = raw.right.wrapping_add(offset);
                for inner in 0..raw.inner {
                    let value = *raw.left[row].add(inner);
                    let lanes: [f32; LANES] = std::array::from_fn(|lane| W::load(right.add(lane), inner));
                    for (sum, lane) in sums.iter_mut().zip(lanes) {
                        *sum = W::multiply_add(value, lane, *sum);
                    }
                    right = right.wrapping_add(W::passed(inner, raw.stride));
                }
                if !raw.scales.is_null() {
                    let scales = &*raw.scales.add(raw.first + column).cast::<[f32; LANES]>();
                    sums.iter_mut().zip(scales).for_each(|(sum, scale)| *sum *= scale);
                }
                for (out, sum) in out.iter_mut().zip(sums) {
                    match raw.mode {
                        Mode::AddScaled => *out = multiply_add(*raw.factors.add(row), sum, *out),
                        _ => *out = sum,
                    }
                }
            }
        }
    }
}
