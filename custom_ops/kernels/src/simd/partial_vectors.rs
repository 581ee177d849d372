//! Destinations that do not end with a whole vector.

use std::ptr::null;

use super::product::{Kernel, Raw};
use super::{Element, PANEL, ROW_PANELS_OF_NARROW, ROWS};

/// Most columns of one call.
const MOST_COLUMNS: usize = ROW_PANELS_OF_NARROW * PANEL;

/// Runs a kernel that writes whole vectors where the destination does not end with one.
///
/// # Safety
///
/// As `Kernel`s are called: `raw` describes a block of at most [`MOST_COLUMNS`] columns that is in bounds, and the
/// processor must have what `kernel` needs, which must write no more than whole vectors of 16 of these columns.
#[cold]
pub(super) unsafe fn through_lanes<W: Element>(raw: &Raw<W>, kernel: Kernel<W>) {
    let mut lanes = [[0.0f32; MOST_COLUMNS]; ROWS];
    let scales = if raw.scales.is_null() { null() } else { raw.scales.wrapping_add(raw.first) };
    let out = lanes.each_mut().map(|row| row.as_mut_ptr());
    let rows = || raw.out.into_iter().map(|row| row.wrapping_add(raw.first)).zip(out).take(raw.rows);
    // SAFETY: by the caller's promise the destination holds the columns, which are at most `MOST_COLUMNS`.
    unsafe {
        rows().for_each(|(row, lanes)| std::ptr::copy_nonoverlapping(row, lanes, raw.columns));
        kernel(&Raw { out, first: 0, scales, ..*raw });
        rows().for_each(|(row, lanes)| std::ptr::copy_nonoverlapping(lanes, row, raw.columns));
    }
}
