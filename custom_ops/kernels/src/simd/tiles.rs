//! Products of many rows on tiles of bf16, as accurate as those in f32.
//!
//! Both factors are split exactly into three bf16 parts, `x = high + middle + low`, and six of the nine products of parts
//! are added in f32: those of high with all, and of middle with high and middle (Henry, Tang and Heinecke, "Leveraging the
//! bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019).
//!
//! # Error
//!
//! Let `u = 2^-24`, `k` the inner size and `S` the sum of `|a · b|` over it. With `|middle| ≤ 2^-8 |x|` and
//! `|low| < 2^-16 |x|`, the products left out are below `(2^-23 + 2^-32) |a · b|`, together `2.01 u S`. A product of parts
//! is exact in f32. One instruction adds 16 of them in each of two chains from 0, joins the chains and adds the result to
//! the sum: 17 roundings of a term and one of the sum. So the error is below
//!
//! ```text
//! (6 · ceil(k / 32) + 17 + 2.01 + 0.13) · (1 + 2^-6) · u · S
//! ```
//!
//! where the last term is what flushing costs (below). That is less than the `k · u · S` of a chain of `k` fused
//! multiply-adds from `k = 32` on.
//!
//! # Values that do not suit
//!
//! Tiles take subnormal numbers as 0, before and after, and rounding to a part may overflow. [`Magnitudes::suit`] admits a
//! row and a panel only where no sum can overflow, and where the smallest product, `m`, is at least 2^-96: each of at most
//! 8 flushes of a term loses less than 2^-126, so `8 · 2^-30 m`, `0.13 u S`. Everything else (infinities and NaN too) is
//! multiplied by fused multiply-adds. Each row is judged alone, so that no row changes the bits of another.

use std::cell::Cell;

use super::amx::{self, Block, LEFT_STEP, Tiles};
use super::product::{Left, Right};
use super::{Element, Isa, LANES, PANEL, amx_split};

/// Parts of an f32.
pub(super) const PARTS: usize = 3;

/// Rows of a tile.
pub(super) const TILE: usize = 16;

/// Bytes of a tile.
pub(super) const TILE_BYTES: usize = 1024;

/// Rows that one call of the microkernel multiplies.
pub(super) const STRIP: usize = 2 * TILE;

/// Inner steps of a tile.
pub(super) const STEP: usize = 32;

/// Most rows of a product on tiles.
pub(crate) const TILE_ROW_LIMIT: usize = 128;

/// Most columns of a product on tiles.
pub(crate) const TILE_COLUMN_LIMIT: usize = 256;

/// Inner steps whose parts are in memory at one time.
const INNER_BLOCK: usize = 256;

/// Elements between two rows of sums; the gap keeps rows from meeting in the same few sets of a cache.
const SUM_STRIDE: usize = TILE_COLUMN_LIMIT + LANES;

/// A cache line, a row of a tile.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// The largest magnitude among values, and the smallest that is not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Magnitudes {
    /// Bits of the largest magnitude; those of a NaN are larger than all others.
    pub(super) largest: u32,
    /// Bits of the smallest magnitude that is not 0, less 1.
    pub(super) below_smallest: u32,
}

impl Magnitudes {
    /// Of no values.
    pub(crate) const NONE: Self = Self { largest: 0, below_smallest: u32::MAX };

    /// Of both.
    fn join(self, other: Self) -> Self {
        Self {
            largest: self.largest.max(other.largest),
            below_smallest: self.below_smallest.min(other.below_smallest),
        }
    }

    fn largest(self) -> f32 {
        f32::from_bits(self.largest)
    }

    /// Infinite where every value is 0.
    fn smallest(self) -> f32 {
        self.below_smallest.checked_add(1).map_or(f32::INFINITY, f32::from_bits)
    }

    /// Whether tiles multiply `inner` of such values as accurately as fused multiply-adds.
    fn suit(self, other: Self, inner: usize) -> bool {
        const SMALLEST: f32 = f32::from_bits((127 - 96) << 23);
        const LARGEST: f32 = f32::from_bits((127 + 126) << 23);
        let all_at_most = |bound| self.largest() <= bound && other.largest() <= bound;
        let (least, most) = (self.smallest() * other.smallest(), self.largest() * other.largest());
        all_at_most(LARGEST)
            && most * inner as f32 <= LARGEST
            && least >= SMALLEST
            && self.smallest() >= SMALLEST
            && other.smallest() >= SMALLEST
    }
}

/// Memory of one thread for products on tiles; its size does not depend on theirs.
#[derive(Debug, Default)]
struct Scratch {
    left: Vec<Line>,
    right: Vec<Line>,
    sums: Vec<Line>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Scratch {
    fn reserve(&mut self) {
        let lines = |bytes: usize| bytes / size_of::<Line>();
        let steps = INNER_BLOCK / STEP;
        self.left.resize(lines(TILE_ROW_LIMIT / STRIP * steps * LEFT_STEP), Line([0; 64]));
        self.right.resize(lines(steps * PARTS * 2 * TILE_BYTES), Line([0; 64]));
        self.sums.resize(lines(TILE_ROW_LIMIT * SUM_STRIDE * size_of::<f32>()), Line([0; 64]));
    }
}

/// What [`multiply`] has computed.
pub(crate) struct Products<'a> {
    sums: &'a [Line],
    inner: usize,
    left: [Magnitudes; TILE_ROW_LIMIT],
    right: [Magnitudes; TILE_COLUMN_LIMIT / PANEL],
}

impl Products<'_> {
    /// Whether the product of a row and a panel is as accurate as it should be.
    pub(crate) fn suits(&self, row: usize, panel: usize) -> bool {
        self.left[row].suit(self.right[panel], self.inner)
    }

    /// The sums of one row.
    pub(crate) fn row(&self, row: usize) -> &[f32] {
        let sums = &self.sums[row * SUM_STRIDE / LANES..(row + 1) * SUM_STRIDE / LANES];
        // SAFETY: lines are bytes without padding at a multiple of the alignment of f32, and every value is a float.
        unsafe { std::slice::from_raw_parts(sums.as_ptr().cast(), SUM_STRIDE) }
    }
}

/// Multiplies the rows of `left`, at most [`TILE_ROW_LIMIT`], with `columns` columns of whole panels, at most
/// [`TILE_COLUMN_LIMIT`], and gives the products to `read`.
///
/// # Panics
///
/// If a row or a panel does not fit its slice, or `isa` has no tiles.
pub(crate) fn multiply<W: Element>(
    isa: Isa,
    left: Left<'_>,
    right: Right<'_, W>,
    columns: usize,
    read: impl FnOnce(&Products<'_>),
) {
    check(isa, left, right, columns);
    let mut scratch = SCRATCH.take();
    scratch.reserve();
    let mut products = Products {
        sums: &[],
        inner: left.inner,
        left: [Magnitudes::NONE; TILE_ROW_LIMIT],
        right: [Magnitudes::NONE; TILE_COLUMN_LIMIT / PANEL],
    };
    // SAFETY: `check` proved that this process may use tiles; they are released before anything else runs here.
    let tiles = unsafe { Tiles::configure() };
    for first in (0..left.inner).step_by(INNER_BLOCK) {
        let inner = (left.inner - first).min(INNER_BLOCK);
        split_rows(&mut scratch.left, left, first, inner, &mut products.left);
        for panel in 0..columns.div_ceil(PANEL) {
            // SAFETY: `check` proved the panel's bounds and the instructions; `reserve` made room for `INNER_BLOCK` steps.
            let magnitudes = unsafe {
                let from = right.data.as_ptr().add(panel * right.panel_stride + first * right.stride);
                amx_split::panel(from, right.stride, inner, scratch.right.as_mut_ptr())
            };
            products.right[panel] = products.right[panel].join(magnitudes);
            // SAFETY: as above; both factors are split.
            unsafe { multiply_panel::<W>(&mut scratch, left.starts.len(), inner, panel * PANEL, first > 0) };
        }
    }
    drop(tiles);
    products.sums = &scratch.sums;
    read(&products);
    SCRATCH.set(scratch);
}

/// Splits `inner` elements of every row from element `first` on.
fn split_rows(
    strips: &mut [Line],
    left: Left<'_>,
    first: usize,
    inner: usize,
    magnitudes: &mut [Magnitudes; TILE_ROW_LIMIT],
) {
    let strip_lines = inner.div_ceil(STEP) * LEFT_STEP / size_of::<Line>();
    for (row, (start, magnitudes)) in left.starts.iter().zip(magnitudes).enumerate() {
        let from = left.data[start + first..][..inner].as_ptr();
        let strip = strips[row / STRIP * strip_lines..][..strip_lines].as_mut_ptr();
        // SAFETY: the slices prove the bounds, the callers that the processor has the instructions.
        let found = unsafe { amx_split::row(from, inner, strip, row % STRIP) };
        *magnitudes = magnitudes.join(found);
    }
}

/// Every strip of `rows` rows times the panel that is split.
///
/// # Safety
///
/// Tiles are configured, both factors split, `rows` at most [`TILE_ROW_LIMIT`], and `column + PANEL` at most
/// [`TILE_COLUMN_LIMIT`].
unsafe fn multiply_panel<W: Element>(scratch: &mut Scratch, rows: usize, inner: usize, column: usize, add: bool) {
    let steps = inner.div_ceil(STEP);
    let sums = scratch.sums.as_mut_ptr().cast::<f32>();
    for first in (0..rows).step_by(STRIP) {
        let block = Block {
            left: scratch.left.as_ptr().cast::<u8>().wrapping_add(first / STRIP * steps * LEFT_STEP),
            right: scratch.right.as_ptr().cast(),
            steps,
            out: sums.wrapping_add(first * SUM_STRIDE + column),
            stride: SUM_STRIDE,
            add,
        };
        // SAFETY: by the caller's promise; `reserve` made room for whole strips.
        unsafe { amx::multiply((rows - first).min(STRIP), W::PARTS, &block) };
    }
}

/// Proves the bounds and the instructions.
fn check<W>(isa: Isa, left: Left<'_>, right: Right<'_, W>, columns: usize) {
    assert!(isa.has_tiles(), "tiles");
    let fits = |start: &usize| start.checked_add(left.inner).is_some_and(|end| end <= left.data.len());
    assert!(left.starts.len() <= TILE_ROW_LIMIT && left.starts.iter().all(fits), "left row out of bounds");
    assert!((1..=TILE_COLUMN_LIMIT).contains(&columns) && left.inner > 0, "size of a product on tiles");
    let panels = columns.div_ceil(PANEL);
    let last = (left.inner - 1).checked_mul(right.stride).and_then(|rows| rows.checked_add(PANEL));
    let end = (panels - 1).checked_mul(right.panel_stride).zip(last).and_then(|(a, b)| a.checked_add(b));
    assert!(end.is_some_and(|end| end <= right.data.len()), "right out of bounds");
}
