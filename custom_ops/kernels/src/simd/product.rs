//! The door to the microkernels: checked views in, one block of a product out.
#![allow(unsafe_code)]

use std::ptr::{null, null_mut};

#[cfg(target_arch = "aarch64")]
use super::neon;
use super::quantized::{self, QUANTIZED_ROWS};
use super::{
    Element, FEW_ROWS, Instructions, Isa, LANES, PANEL, ROW_PANELS, ROW_PANELS_OF_NARROW, ROWS, RoundedRows, portable,
};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::grid::Tile;

/// Up to [`ROWS`] rows of the left factor, anywhere in one slice.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: &'a [f32],
    /// Where each row begins.
    pub(crate) starts: &'a [usize],
    /// Elements of a row: the inner dimension.
    pub(crate) inner: usize,
    /// Where rows are [`quantized`](super::quantized), elements from one block to the next.
    pub(crate) blocks: Option<usize>,
    /// The same rows in another form, where somebody has rounded them.
    pub(crate) rounded: Option<RoundedRows<'a>>,
}

impl<'a> Left<'a> {
    /// Rows that nobody has rounded.
    pub(crate) fn new(data: &'a [f32], starts: &'a [usize], inner: usize) -> Self {
        Self { data, starts, inner, blocks: None, rounded: None }
    }

    /// Most rows that a microkernel takes.
    pub(crate) fn most(&self) -> usize {
        if self.blocks.is_some() { QUANTIZED_ROWS } else { ROWS }
    }
}

impl Left<'_> {
    /// Sets `rows` to where the rows stand.
    ///
    /// # Panics
    ///
    /// If one of them is not in the slice.
    pub(super) fn rows(&self, rows: &mut [*const f32; ROWS]) {
        let len = self.blocks.map_or(self.inner, |blocks| quantized::span(self.inner, blocks));
        let last = self.data.len().checked_sub(len);
        let mut highest = 0;
        for (row, start) in rows.iter_mut().zip(self.starts) {
            highest = highest.max(*start);
            *row = self.data.as_ptr().wrapping_add(*start);
        }
        assert!(last.is_some_and(|last| highest <= last), "left row out of bounds");
    }
}

/// The right factor: panels of [`PANEL`] columns, with [`Element::ROWS`] rows of elements for each [`Element::STEPS`]
/// inner steps; of the last panel, only the lanes in use are read.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a, W = f32> {
    pub(crate) data: &'a [W],
    /// Elements between two rows of a panel.
    pub(crate) stride: usize,
    /// Elements between two panels; not read where there is one panel.
    pub(crate) panel_stride: usize,
}

impl<W> Right<'_, W> {
    /// From panel `panel` on.
    pub(crate) fn panels_from(self, panel: usize) -> Self {
        Self { data: &self.data[panel * self.panel_stride..], ..self }
    }
}

/// What happens to the destination.
#[derive(Clone, Copy)]
pub(crate) enum Write<'a> {
    /// `out = left · right`.
    Replace,
    /// `out = factor · out + left · right`, one factor a row; the scaled destination is the first term of the chain.
    Resume(&'a [f32]),
    /// `out += factor · (left · right)`, one factor a row.
    AddScaled(&'a [f32]),
}

/// A block of a product: `columns` columns for each row of `left`, written to the rows `rows` of `out`.
pub(crate) struct Product<'a, W = f32> {
    pub(crate) left: Left<'a>,
    pub(crate) right: Right<'a, W>,
    /// Row of the destination for each row of `left`.
    pub(crate) rows: &'a [usize],
    /// First column of the destination.
    pub(crate) first_column: usize,
    /// Columns, from the first of the first panel on.
    pub(crate) columns: usize,
    pub(crate) write: Write<'a>,
    /// `Some`: each sum is multiplied with the scale of its column before it is written; none where a sum is resumed.
    pub(crate) scales: Option<&'a [f32]>,
    /// What is fetched on the way.
    pub(crate) ahead: Option<Ahead>,
}

/// Memory that is read soon.
#[derive(Clone, Copy)]
pub(crate) enum Ahead {
    /// What the product itself reads, a page before. With AVX-512 a single row then reads [`streams`] panels at a time.
    Own,
    /// What is read after more than the nearest cache holds.
    Later(Memory),
}

/// Where values lie, whatever their type is; they are fetched and not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    from: *const u8,
    bytes: usize,
    /// Bytes from what is fetched beside a panel to what is fetched beside the next one.
    step: usize,
}

impl Memory {
    /// For a product of one panel.
    pub(crate) fn of<T>(values: &[T]) -> Self {
        Self { from: values.as_ptr().cast(), bytes: size_of_val(values), step: 0 }
    }

    /// The first `bytes` bytes, and beside each further panel as many that lie `bytes` bytes further.
    pub(crate) fn panels(self, bytes: usize) -> Self {
        Self { bytes: self.bytes.min(bytes), step: bytes, ..self }
    }

    /// Share `index` of `total`.
    pub(crate) fn share(self, index: usize, total: usize) -> Self {
        let [before, end] = [index, index + 1].map(|index| self.bytes * index / total);
        Self { from: self.from.wrapping_add(before), bytes: end - before, ..self }
    }
}

/// How a microkernel ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Replace,
    Resume,
    AddScaled,
}

/// A block as a microkernel gets it: every pointer that it reaches is in bounds.
pub(crate) struct Raw<W> {
    pub(super) rows: usize,
    pub(super) left: [*const f32; ROWS],
    pub(super) inner: usize,
    /// Elements of a quantized row from one block to the next.
    pub(super) blocks: usize,
    pub(super) right: *const W,
    pub(super) stride: usize,
    pub(super) panel_stride: usize,
    pub(super) out: [*mut f32; ROWS],
    /// First column of `out`; 0 where all columns are multiplied at once.
    pub(super) first: usize,
    pub(super) columns: usize,
    pub(super) mode: Mode,
    /// One factor a row; null where [`Mode::Replace`] needs none.
    pub(super) factors: *const f32,
    /// A factor for each column, whole vectors of them from the first column on; null where there is none.
    pub(super) scales: *const f32,
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) fetch: Fetch,
}

/// What a microkernel fetches; it may lie anywhere.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Fetch {
    pub(super) from: *const u8,
    /// Cache lines for each [`STEPS`] inner steps.
    pub(super) lines: usize,
    /// Cache lines in all.
    pub(super) all: usize,
    /// Whether it is read next, so that the nearest cache takes it.
    pub(super) next: bool,
}

/// Bytes between what a product reads and what it fetches: a page, where the processor's own look ahead ends.
pub(super) const PAGE: usize = 4096;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Bytes of a panel of which several rows read more than one at once.
const SHORT: usize = 16384;

/// Inner steps between two looks ahead.
pub(super) const STEPS: usize = 4;

/// A microkernel for a number of rows and of vectors.
pub(crate) type Kernel<W> = unsafe fn(&Raw<W>);

impl<W: Element> Product<'_, W> {
    /// Computes the block.
    ///
    /// # Panics
    ///
    /// If a row, a panel or the destination does not fit its slice.
    pub(crate) fn compute(&self, isa: Isa, out: &mut Tile<'_, f32>) {
        if self.columns == 0 || self.left.starts.is_empty() {
            return;
        }
        let count = self.left.starts.len();
        let (mode, factors) = match self.write {
            Write::Replace => (Mode::Replace, None),
            Write::Resume(factors) => (Mode::Resume, Some(factors)),
            Write::AddScaled(factors) => (Mode::AddScaled, Some(factors)),
        };
        let inner = self.left.inner;
        let quantized = self.left.blocks.is_some();
        let most = match panels_at_once::<W>(isa, (count, quantized), W::rows(inner) * PANEL * size_of::<W>()) {
            usize::MAX => usize::MAX,
            _ if count == 1
                && !quantized
                && isa.0 >= Instructions::Avx512
                && matches!(self.ahead, Some(Ahead::Own)) =>
            {
                streams::<W>() * PANEL
            }
            panels => panels * PANEL,
        };
        let mut raw = Raw {
            rows: count,
            left: [null(); ROWS],
            inner,
            blocks: self.left.blocks.unwrap_or(0),
            right: self.right.data.as_ptr(),
            stride: self.right.stride,
            panel_stride: self.right.panel_stride,
            out: [null_mut(); ROWS],
            first: 0,
            columns: self.columns,
            mode,
            factors: factors.map_or(null(), <[f32]>::as_ptr),
            scales: self.scales.map_or(null(), <[f32]>::as_ptr),
            fetch: self.fetch(),
        };
        self.check(isa, out, factors);
        self.left.rows(&mut raw.left);
        out.starts(&self.rows[..count], self.first_column, &mut raw.out);
        let step = match self.ahead {
            Some(Ahead::Later(memory)) => memory.step,
            _ => self.right.panel_stride * size_of::<W>(),
        };
        for column in (0..self.columns).step_by(most) {
            (raw.first, raw.columns) = (column, most.min(self.columns - column));
            let vectors = raw.columns.div_ceil(LANES);
            let of_integers = if quantized { W::quantized_kernel(isa, count, vectors) } else { None };
            let kernel = of_integers.unwrap_or_else(|| kernel(isa, count, vectors));
            // SAFETY: `Left::rows` proved that `inner` elements of every left row are in bounds, or the blocks that
            // hold them, `check` that `inner` rows of whole vectors of every panel, or of all of it where rows are
            // quantized, and that it holds integers then, one factor for each row and whole vectors of scales are,
            // `Tile::starts` and `check` that `columns` elements of every destination row are; the destination is
            // borrowed mutably, so it meets nothing that is read. `Isa` proves that the processor has the instructions.
            unsafe { kernel(&raw) };
            let passed = raw.columns / PANEL;
            raw.right = raw.right.wrapping_add(passed * self.right.panel_stride);
            raw.fetch.from = raw.fetch.from.wrapping_add(passed * step);
        }
    }

    /// What the first call of the microkernel fetches.
    fn fetch(&self) -> Fetch {
        let (next, from, bytes) = match self.ahead {
            None => (false, null(), 0),
            Some(Ahead::Later(memory)) => (false, memory.from, memory.bytes),
            Some(Ahead::Own) => {
                let bytes = W::rows(self.left.inner) * self.right.stride * size_of::<W>();
                (true, self.right.data.as_ptr().cast::<u8>().wrapping_add(PAGE), bytes)
            }
        };
        let lines = bytes.div_ceil(LINE * (self.left.inner / STEPS).max(1));
        Fetch { from, lines, all: bytes.div_ceil(LINE), next }
    }

    /// Proves the bounds of everything but the rows of both sides.
    fn check(&self, isa: Isa, out: &Tile<'_, f32>, factors: Option<&[f32]>) {
        let (left, right, count) = (self.left, self.right, self.left.starts.len());
        let steps = W::rows(left.inner);
        assert!(count <= left.most(), "block size");
        assert!(self.rows.len() >= count, "destination rows");
        assert!(factors.is_none_or(|factors| factors.len() >= count), "one factor a row");
        let enough = |scales: &[f32]| scales.len() >= self.columns.next_multiple_of(LANES);
        assert!(self.scales.is_none_or(enough), "whole vectors of scales");
        assert!(self.scales.is_none() || !matches!(self.write, Write::Resume(_)), "scales of a sum that is resumed");
        let panels = self.columns.div_ceil(PANEL);
        let lanes = (self.columns - (panels - 1) * PANEL).next_multiple_of(LANES);
        let quantized = left.blocks.is_some();
        let lanes = if quantized { PANEL } else { lanes };
        let last = (steps.saturating_sub(1)).checked_mul(right.stride).and_then(|rows| rows.checked_add(lanes));
        let end = (panels - 1).checked_mul(right.panel_stride).zip(last).and_then(|(a, b)| a.checked_add(b));
        let whole = panels == 1 || right.stride >= PANEL || left.inner == 0;
        let side_by_side = W::ROWS > 1 || quantized;
        assert!(!side_by_side || right.stride == PANEL, "rows of a group side by side");
        assert!(!quantized || W::quantized_kernel(isa, 1, 1).is_some(), "quantized rows times integers");
        assert!(left.inner == 0 || whole && end.is_some_and(|end| end <= right.data.len()), "right out of bounds");
        let full_panel = (steps.saturating_sub(1)) * right.stride + PANEL;
        let before = panels == 1 || (panels - 2) * right.panel_stride + full_panel <= right.data.len();
        assert!(left.inner == 0 || before, "right out of bounds");
        let columns = self.first_column.checked_add(self.columns);
        assert!(columns.is_some_and(|end| end <= out.columns()), "destination columns");
    }
}

/// Panels that one call of a microkernel multiplies with `rows` rows, which may be quantized; each has `bytes` bytes.
pub(crate) fn panels_at_once<W: Element>(isa: Isa, (rows, quantized): (usize, bool), bytes: usize) -> usize {
    match isa.0 {
        _ if quantized => 1,
        Instructions::Portable => usize::MAX,
        _ if isa.has_narrow_vectors() && rows == 1 && W::ROWS == 1 => ROW_PANELS_OF_NARROW,
        Instructions::Neon | Instructions::Avx2 | Instructions::AvxVnni => 1,
        // Two sums keep vectors busy that take two passes, and short panels come faster one after the other.
        Instructions::Avx512 if rows == 1 && bytes <= SHORT && !isa.multiplies_whole_vectors() => 1,
        Instructions::Avx512 | Instructions::Amx if rows == 1 => ROW_PANELS,
        // Rows of elements stay in registers beside the sums.
        Instructions::Avx512 | Instructions::Amx if rows <= FEW_ROWS && W::ROWS > 1 => ROW_PANELS / 2,
        Instructions::Avx512 | Instructions::Amx if rows <= FEW_ROWS && bytes <= SHORT => ROW_PANELS,
        Instructions::Avx512 | Instructions::Amx => 1,
    }
}

/// Panels that a single row reads side by side where they come from memory: one stream comes faster than several, but
/// the two sums of a panel of integers take as long as memory does.
pub(super) const fn streams<W: Element>() -> usize {
    if are_integers::<W>() { 2 } else { 1 }
}

/// Whether elements are integers.
pub(crate) const fn are_integers<W: Element>() -> bool {
    size_of::<W>() == 1 || W::ROWS > 1
}

/// The microkernel of a level.
#[cfg(target_arch = "x86_64")]
fn kernel<W: Element>(isa: Isa, rows: usize, vectors: usize) -> Kernel<W> {
    match isa.0 {
        _ if W::IS_PAIR && isa.multiplies_pairs() => avx512::kernel(rows, vectors),
        _ if W::IS_PAIR => portable::block,
        Instructions::Portable | Instructions::Neon => portable::block,
        Instructions::Avx2 | Instructions::AvxVnni => avx2::kernel(rows, vectors),
        Instructions::Avx512 | Instructions::Amx => avx512::kernel(rows, vectors),
    }
}

/// The microkernel of a level.
#[cfg(not(target_arch = "x86_64"))]
fn kernel<W: Element>(isa: Isa, rows: usize, _: usize) -> Kernel<W> {
    #[cfg(target_arch = "aarch64")]
    if isa.0 == Instructions::Neon && !W::IS_PAIR {
        return neon::kernel(rows);
    }
    let _ = (isa, rows);
    portable::block
}

#[cfg(test)]
#[path = "product_tests.rs"]
mod tests;
