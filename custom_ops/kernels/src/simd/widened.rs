//! Panels of weights in two bytes as f32 in memory.
//!
//! A microkernel widens a vector of weights each time that a block of rows meets it. Many rows are many blocks, for
//! which panels can be widened once.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::_mm256_storeu_ps;
use std::cell::Cell;

use super::{Element, Isa, PANEL, Right};
#[cfg(target_arch = "x86_64")]
use super::{Instructions, avx2::WIDTH};
use crate::buffer::Buffer;

/// Most bytes of widened panels at a time.
const MOST: usize = 262_144;

/// Bytes that a thread keeps, whatever it multiplies: panels, and what aligns them.
pub(crate) const THREAD_BYTES: usize = MOST + 64;

/// Bytes of a widened panel.
pub(crate) fn bytes(inner: usize) -> usize {
    inner * PANEL * size_of::<f32>()
}

/// Whether the memory of a thread holds a panel.
pub(crate) fn fits(inner: usize) -> bool {
    bytes(inner) <= MOST
}

thread_local! {
    static PANELS: Cell<Buffer> = Cell::default();
}

/// Calls `multiply` with `panels` panels of `inner` steps as f32, in memory of this thread.
///
/// # Panics
///
/// If a panel does not fit its slice, or all together do not fit the memory of a thread.
pub(crate) fn with_widened<W: Element>(
    isa: Isa,
    right: Right<'_, W>,
    inner: usize,
    panels: usize,
    multiply: impl FnOnce(Right<'_>),
) {
    let mut buffer = PANELS.take();
    let len = inner * PANEL;
    let wide = &mut buffer.take(MOST / size_of::<f32>())[..panels * len];
    for (panel, wide) in wide.chunks_exact_mut(len.max(1)).enumerate() {
        widen(isa, right.panels_from(panel), inner, wide);
    }
    multiply(Right { data: wide, stride: PANEL, panel_stride: len });
    PANELS.set(buffer);
}

/// Widens a panel of `inner` steps.
fn widen<W: Element>(isa: Isa, right: Right<'_, W>, inner: usize, out: &mut [f32]) {
    let rows = W::rows(inner);
    let end = rows.saturating_sub(1).checked_mul(right.stride).and_then(|last| last.checked_add(PANEL));
    let fits = right.stride >= PANEL && end.is_some_and(|end| end <= right.data.len());
    assert!(fits && out.len() == inner * PANEL, "size of a panel");
    #[cfg(target_arch = "x86_64")]
    if isa.0 >= Instructions::Avx2 {
        // SAFETY: `out` has `inner` rows, and as many steps of the panel are in bounds; `Isa` proves that the processor
        // has the instructions.
        return unsafe { widen8(right, out) };
    }
    let _ = isa;
    for (row, out) in right.data.chunks(right.stride).zip(out.chunks_mut(W::STEPS * PANEL)) {
        for (step, out) in out.chunks_exact_mut(PANEL).enumerate() {
            out.iter_mut().zip(row).for_each(|(out, element)| *out = element.widen(step));
        }
    }
}

/// Widens a panel in vectors of 8 lanes.
///
/// # Safety
///
/// The panel must have a step for every row of [`PANEL`] elements of `out`; the processor must have AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen8<W: Element>(right: Right<'_, W>, out: &mut [f32]) {
    let mut row = right.data.as_ptr();
    for out in out.chunks_mut(W::STEPS * PANEL) {
        for (step, out) in out.chunks_exact_mut(PANEL).enumerate() {
            for (vector, out) in out.chunks_exact_mut(WIDTH).enumerate() {
                // SAFETY: by the caller's promise.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), W::load8(row.add(vector * WIDTH), step)) };
            }
        }
        row = row.wrapping_add(right.stride);
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::super::{Instructions, every_isa};
    use super::*;

    /// Two panels of `inner` steps, some elements apart, whose elements `element` makes of a number.
    fn all_are_widened<W: Element>(inner: usize, element: impl Fn(usize) -> W) {
        let (stride, panel_stride) = (PANEL + 3, W::rows(inner) * (PANEL + 3) + 5);
        let data: Vec<W> = (0..2 * panel_stride).map(element).collect();
        for isa in every_isa() {
            with_widened(isa, Right { data: &data, stride, panel_stride }, inner, 2, |wide| {
                for (index, value) in wide.data.iter().enumerate() {
                    let (panel, step, column) = (index / PANEL / inner, index / PANEL % inner, index % PANEL);
                    let from = data[panel * panel_stride + step / W::STEPS * stride + column];
                    assert_eq!(value.to_bits(), from.widen(step).to_bits(), "{isa:?} {panel} {step} {column}");
                }
                assert_eq!(
                    (wide.data.len(), wide.stride, wide.panel_stride),
                    (2 * inner * PANEL, PANEL, inner * PANEL)
                );
            });
        }
    }

    #[test]
    fn every_element_is_widened_to_its_place() {
        for inner in [1, 2, 7] {
            all_are_widened(inner, |number| f16::from_f32_const(number as f32 - 100.5));
            all_are_widened(inner, |number| [number, number + 1000].map(|number| bf16::from_f32(number as f32)));
        }
    }

    #[test]
    fn a_thread_keeps_what_is_stated() {
        all_are_widened(3, |_| f16::ONE);
        let buffer = PANELS.take();
        assert_eq!(buffer.bytes(), THREAD_BYTES);
    }

    #[test]
    #[should_panic(expected = "size of a panel")]
    fn a_short_panel_is_refused() {
        let right = Right { data: &[f16::ONE; 3 * PANEL], stride: PANEL, panel_stride: 0 };
        with_widened(Isa::at_most(Instructions::Portable), right, 4, 1, |_| {});
    }
}
