//! Panels of weights in fewer bytes as f32 in memory.
//!
//! A microkernel widens a vector of weights each time that a block of rows meets it. Many rows are many blocks, for
//! which panels can be widened once.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::vst1q_f32;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_mm256_storeu_ps, _mm512_storeu_ps};
use std::cell::Cell;

#[cfg(target_arch = "aarch64")]
use super::neon::WIDTH;
use super::{Element, Isa, PANEL, Right};
#[cfg(target_arch = "x86_64")]
use super::{LANES, avx2::WIDTH};
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
    let whole = right.stride == PANEL || right.stride > PANEL && W::ROWS == 1;
    let fits = whole && end.is_some_and(|end| end <= right.data.len());
    assert!(fits && out.len() == inner * PANEL, "size of a panel");
    match (isa.has_wide_vectors(), isa.has_narrow_vectors()) {
        // SAFETY: `out` has `inner` rows, and as many steps of the panel are in bounds; `Isa` proves that the processor
        // has the instructions.
        #[cfg(target_arch = "x86_64")]
        (true, _) => return unsafe { widen16(right, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        (_, true) => return unsafe { widen8(right, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "aarch64")]
        (_, true) => return unsafe { widen4(right, out) },
        _ => {}
    }
    for (step, out) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
        let group = right.data[W::group(step, right.stride)..].as_ptr();
        for (column, out) in out.iter_mut().enumerate() {
            // SAFETY: every row of the panel has [`PANEL`] elements in bounds, and `inner` steps are in these rows.
            *out = unsafe { W::load(group.add(column), step) };
        }
    }
}

/// Widens a panel in vectors of 16 lanes.
///
/// # Safety
///
/// The panel must have a step for every row of [`PANEL`] elements of `out`, in rows of as many elements; the processor
/// must have AVX-512 F.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn widen16<W: Element>(right: Right<'_, W>, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(W::EACH * PANEL).enumerate() {
        let first = index * W::EACH;
        let row = right.data.as_ptr().wrapping_add(W::group(first, right.stride));
        for column in (0..PANEL).step_by(LANES) {
            // SAFETY: by the caller's promise.
            let mut lanes = unsafe { W::row16(row.wrapping_add(column), first) };
            for out in out.as_chunks_mut::<PANEL>().0 {
                // SAFETY: as above; `out` has whole vectors.
                unsafe { _mm512_storeu_ps(out[column..].as_mut_ptr(), W::next16(&mut lanes)) };
            }
        }
    }
}

/// Widens a panel in vectors of 8 lanes.
///
/// # Safety
///
/// As [`widen16`]; the processor must have AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen8<W: Element>(right: Right<'_, W>, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(W::EACH * PANEL).enumerate() {
        let first = index * W::EACH;
        let row = right.data.as_ptr().wrapping_add(W::group(first, right.stride));
        for column in (0..PANEL).step_by(WIDTH) {
            // SAFETY: by the caller's promise.
            let mut lanes = unsafe { W::row8(row.wrapping_add(column), first) };
            for out in out.as_chunks_mut::<PANEL>().0 {
                // SAFETY: as above; `out` has whole vectors.
                unsafe { _mm256_storeu_ps(out[column..].as_mut_ptr(), W::next8(&mut lanes)) };
            }
        }
    }
}

/// Widens a panel in vectors of 4 lanes.
///
/// # Safety
///
/// The panel must have a step for every row of [`PANEL`] elements of `out`, in rows of as many elements; the processor
/// must have NEON.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn widen4<W: Element>(right: Right<'_, W>, out: &mut [f32]) {
    for (index, out) in out.chunks_mut(W::EACH * PANEL).enumerate() {
        let first = index * W::EACH;
        let row = right.data.as_ptr().wrapping_add(W::group(first, right.stride));
        for column in (0..PANEL).step_by(WIDTH) {
            // SAFETY: by the caller's promise.
            let mut lanes = unsafe { W::row4(row.wrapping_add(column), first) };
            for out in out.as_chunks_mut::<PANEL>().0 {
                // SAFETY: as above; `out` has whole vectors.
                unsafe { vst1q_f32(out[column..].as_mut_ptr(), W::next4(&mut lanes)) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use moa_schema::BLOCK;

    use super::super::{Instructions, every_isa};
    use super::*;
    use crate::geometry::Geometry;
    use crate::packed::{Packed, Panels};
    use crate::weight_data::{Int4, WeightData};

    /// Two panels of `inner` steps, some elements apart, whose elements `element` makes of a number.
    fn all_are_widened<W: Element>(inner: usize, element: impl Fn(usize) -> W) {
        let (stride, panel_stride) = (PANEL + 3, W::rows(inner) * (PANEL + 3) + 5);
        let data: Vec<W> = (0..2 * panel_stride).map(element).collect();
        for isa in every_isa() {
            with_widened(isa, Right { data: &data, stride, panel_stride }, inner, 2, |wide| {
                for (index, value) in wide.data.iter().enumerate() {
                    let (panel, step, column) = (index / PANEL / inner, index / PANEL % inner, index % PANEL);
                    let from = &data[panel * panel_stride + W::group(step, stride) + column];
                    // SAFETY: there is one row in a group.
                    let from = unsafe { W::load(from, step) };
                    assert_eq!(value.to_bits(), from.to_bits(), "{isa:?} {panel} {step} {column}");
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
    fn every_group_is_widened_to_its_place() {
        let (inner, columns) = (70, 2 * PANEL);
        let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
        let values: Vec<u8> = (0..inner * columns / 2).map(|i| (i * 151 % 256) as u8).collect();
        let scales: Vec<bf16> = (0..3 * columns).map(|i| bf16::from_f32(i as f32 - 50.5)).collect();
        let packed = Packed::new(geometry, WeightData::I4(Int4 { values: &values, scales: &scales })).unwrap();
        let Panels::I4(panels) = packed.panels() else { panic!("not packed as it is stored") };
        for isa in every_isa() {
            with_widened(isa, geometry.right(panels, 0, 0, 0), inner, 2, |wide| {
                for (index, value) in wide.data.iter().enumerate() {
                    let (panel, row, column) = (index / (inner * PANEL), index / PANEL % inner, index % PANEL);
                    let place = row * columns + panel * PANEL + column;
                    let integer = (values[place / 2] << (4 - place % 2 * 4)).cast_signed() >> 4;
                    let scale = scales[row / BLOCK * columns + panel * PANEL + column].to_f32();
                    assert_eq!(*value, f32::from(integer) * scale, "{isa:?} {panel} {row} {column}");
                }
            });
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
