//! Products of many rows on tiles of bf16, as accurate as those in f32.
//!
//! Both factors are split exactly into three bf16 parts, `x = high + middle + low`, and six of the nine products of
//! parts are added in f32: those of high with all, and of middle with high and middle (Henry, Tang and Heinecke,
//! "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations", 2019).
//!
//! # Error
//!
//! Let `u = 2^-24`, `k` the inner size and `S` the sum of `|a · b|` over it. With `|middle| ≤ 2^-8 |x|` and
//! `|low| < 2^-16 |x|`, the products left out are below `(2^-23 + 2^-32) |a · b|`, together `2.01 u S`. A product of
//! parts is exact in f32. One instruction adds 16 of them in each of two chains from 0, joins the chains and adds the
//! result to the sum: 17 roundings of a term and one of the sum. So the error is below
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
//! Tiles take subnormal numbers as 0, before and after, and rounding to a part may overflow. [`Magnitudes::suit`]
//! admits a row and a panel only where no sum can overflow, and where the smallest product, `m`, is at least 2^-96:
//! each of at most 8 flushes of a term loses less than 2^-126, so `8 · 2^-30 m`, `0.13 u S`. Everything else
//! (infinities and NaN too) is multiplied by fused multiply-adds. Each row is judged alone, so that no row changes the
//! bits of another.
//!
//! # Memory
//!
//! Each thread that multiplies on tiles keeps [`THREAD_BYTES`] bytes, whatever it multiplies.

use std::cell::Cell;

use half::bf16;

use super::amx::Tiles;
use super::known_rows::{Epoch, KnownRows};
use super::magnitudes::Magnitudes;
use super::product::{Left, Right};
use super::{Element, Isa, LANES, PANEL};
use crate::buffer::Buffer;

/// Parts of an f32.
pub(crate) const PARTS: usize = 3;

/// Rows of a tile.
pub(crate) const TILE: usize = 16;

/// Rows that one call of the microkernel multiplies.
pub(crate) const STRIP: usize = 2 * TILE;

/// Inner steps of a tile.
pub(crate) const STEP: usize = 32;

/// Bytes that a block of one part fetches beside each step, eight lines of a cache.
pub(super) const FETCHED: usize = 512;

/// Elements of a tile of parts.
pub(super) const TILE_LEN: usize = TILE * STEP;

/// Most rows of a product on tiles.
pub(crate) const ROW_LIMIT: usize = 128;

/// Most columns of a product on tiles.
pub(crate) const COLUMN_LIMIT: usize = 512;

/// Most inner steps whose parts are in memory at one time.
pub(crate) const INNER_LIMIT: usize = 512;

/// As [`INNER_LIMIT`] for rows that are rounded, of which there are [`ROW_LIMIT`].
pub(super) const ROUNDED_LIMIT: usize = 2048;

/// As [`INNER_LIMIT`] for one strip of rows.
pub(super) const STREAM_LIMIT: usize = INNER_LIMIT * (ROW_LIMIT / STRIP);

/// Elements between two rows of sums; the gap keeps rows from meeting in the same few sets of a cache.
pub(crate) const SUM_STRIDE: usize = COLUMN_LIMIT + LANES;

/// Elements of the parts of [`STRIP`] rows, or of [`PANEL`] columns, of `inner` steps.
pub(crate) const fn parts_len(parts: usize, inner: usize) -> usize {
    inner.div_ceil(STEP) * parts * 2 * TILE_LEN
}

/// One strip times one panel.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Block<'a> {
    /// Parts of a strip.
    pub(super) left: &'a [bf16],
    /// Parts of a value of the strip: [`PARTS`], or 1 where it is rounded.
    pub(super) left_parts: usize,
    /// Parts of a panel; where there is one part, pairs of inner steps in rows of [`PANEL`].
    pub(super) right: &'a [bf16],
    /// Parts of a value of the panel.
    pub(super) parts: usize,
    pub(super) inner: usize,
    /// Rows [`SUM_STRIDE`] apart.
    pub(super) sums: &'a mut [f32],
    /// Whether the product is added to the sums.
    pub(super) add: bool,
}

/// Some pairs of rows of every step of a panel of f32, split while a block is multiplied.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Job<'a> {
    /// Rows of [`PANEL`] elements, whole steps of them.
    pub(super) from: &'a [f32],
    /// Parts of the panel.
    pub(super) to: &'a mut [bf16],
    /// The first pair.
    pub(super) first: usize,
    /// Number of pairs: [`QUARTER`], twice as many, or all [`TILE`].
    pub(super) pairs: usize,
}

/// One strip times whole steps of a panel of f32; while a step is multiplied, the one after it is split.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Stream<'a> {
    /// Parts of a strip, from the first step on.
    pub(super) left: &'a [bf16],
    /// Parts of two steps: the one that is multiplied, and the one after it.
    pub(super) slots: &'a mut [bf16],
    /// Which slot holds the first step; after `n` steps, the one after the last is in the slot `n` further.
    pub(super) slot: usize,
    /// Rows of [`PANEL`] elements, from the second step to the one after the last.
    pub(super) from: &'a [f32],
    pub(super) steps: usize,
    /// Rows [`SUM_STRIDE`] apart.
    pub(super) sums: &'a mut [f32],
    /// Whether the product is added to the sums.
    pub(super) add: bool,
}

/// Fewest pairs of rows of a job.
pub(super) const QUARTER: usize = TILE / 4;

/// Memory of one thread for products on tiles.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) left: Buffer<bf16>,
    /// What `left` holds the parts of.
    known: KnownRows,
    /// One that is multiplied and one that is split.
    pub(super) right: [Buffer<bf16>; 2],
    pub(super) sums: Buffer,
}

/// Elements of the three parts of [`Scratch`].
const SCRATCH_LEN: [usize; 3] =
    [ROW_LIMIT / STRIP * parts_len(1, ROUNDED_LIMIT), parts_len(PARTS, INNER_LIMIT), ROW_LIMIT * SUM_STRIDE];

/// How many strips of `inner` elements of so many parts a thread has room for.
pub(crate) const fn strips_of(parts: usize, inner: usize) -> usize {
    SCRATCH_LEN[0] / parts_len(parts, inner)
}

/// Bytes that a thread keeps.
pub(crate) const THREAD_BYTES: usize = {
    let [left, right, sums] = SCRATCH_LEN;
    (left + 2 * right) * size_of::<bf16>() + sums * size_of::<f32>() + 4 * 64 + KnownRows::BYTES
};

thread_local! {
    /// `None` while a [`Unit`] has it.
    static SCRATCH: Cell<Option<Scratch>> = Cell::new(Some(Scratch::default()));
}

/// How many pairs of rows of a panel are split beside each strip of `rows` rows, until all are.
fn job_pairs(rows: usize) -> usize {
    match rows.saturating_sub(TILE).div_ceil(STRIP) {
        0 | 1 => TILE,
        2 | 3 => 2 * QUARTER,
        _ => QUARTER,
    }
}

/// The tiles of this thread and their memory.
pub(crate) struct Unit {
    pub(super) scratch: Scratch,
    pub(super) tiles: Tiles,
    /// Parts of a value of the left factor, and in attention of both: 1 where these are rounded, [`PARTS`] else.
    pub(super) parts: usize,
}

impl Drop for Unit {
    fn drop(&mut self) {
        SCRATCH.set(Some(std::mem::take(&mut self.scratch)));
    }
}

impl Unit {
    /// Takes the tiles of this thread; `None` where `isa` has none, or the thread has a unit: vectors serve then.
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        if !isa.has_tiles() {
            return None;
        }
        let scratch = SCRATCH.take()?;
        // SAFETY: `Isa` proves that this process may use tiles, and the memory that the thread has no other unit.
        let tiles = unsafe { Tiles::configure() }?;
        let (mut unit, [left, right, sums]) = (Self { scratch, tiles, parts: PARTS }, SCRATCH_LEN);
        unit.scratch.known.make_room();
        unit.scratch.left.take(left);
        unit.scratch.right.iter_mut().for_each(|buffer| _ = buffer.take(right));
        unit.scratch.sums.take(sums);
        Some(unit)
    }

    /// The tiles of this thread for attention, whose factors `isa` may round.
    pub(crate) fn of_attention(isa: Isa) -> Option<Self> {
        let mut unit = Self::new(isa)?;
        unit.parts = isa.parts_of_attention();
        Some(unit)
    }

    /// The same, whose left factors are rounded to bf16.
    pub(crate) fn rounding(mut self) -> Self {
        self.parts = 1;
        self
    }

    /// Splits a panel of keys or values, of `inner` rows, into `out`, or rounds it.
    ///
    /// # Panics
    ///
    /// If the panel does not fit its slice, or the parts do not fit `out`.
    pub(crate) fn split_panel(&self, right: Right<'_>, inner: usize, out: &mut [bf16]) {
        match self.parts {
            1 => self.tiles.round_panel(&right.data[..inner * PANEL], out),
            _ => self.tiles.split_panel(right, inner, out, 0..TILE),
        }
    }

    /// Magnitudes of whole rows of panels.
    pub(crate) fn magnitudes<W: Element>(&self, values: &[W]) -> Magnitudes {
        self.tiles.magnitudes(values)
    }

    /// Splits `inner` elements of rows from element `first` on, and takes them into `found`, or rounds them; whole rows
    /// are not split again while they are those that were split last, within `epoch`, of which there may be
    /// [`ROW_LIMIT`].
    ///
    /// # Panics
    ///
    /// If there are more strips than [`strips_of`] such elements.
    pub(crate) fn split_left(
        &mut self,
        left: Left<'_>,
        first: usize,
        inner: usize,
        epoch: Option<Epoch>,
        found: &mut [Magnitudes],
    ) {
        assert!(left.starts.len().div_ceil(STRIP) <= strips_of(self.parts, inner), "room for strips");
        let Scratch { left: parts, known, .. } = &mut self.scratch;
        let epoch = epoch.filter(|_| first == 0 && inner == left.inner);
        if let Some(known) = known.find(epoch, left) {
            return found[..known.len()].copy_from_slice(known);
        }
        let strips = parts.filled_mut().chunks_exact_mut(parts_len(self.parts, inner));
        let rows = left.starts.chunks(STRIP).zip(found.chunks_mut(STRIP));
        for ((starts, found), strip) in rows.zip(strips) {
            let left = Left { starts, ..left };
            match self.parts {
                1 => self.tiles.round_strip(left, first, inner, strip),
                _ => self.tiles.split_strip::<true>(left, first, inner, strip, found),
            }
        }
        known.remember(epoch, left, found);
    }

    /// The sums, in rows [`SUM_STRIDE`] apart.
    pub(crate) fn sums(&mut self) -> &mut [f32] {
        self.scratch.sums.filled_mut()
    }

    /// Multiplies up to [`ROW_LIMIT`] rows, which do not change within `epoch`, with up to [`COLUMN_LIMIT`] columns of
    /// whole panels; gives the magnitudes of the rows. The products are read with [`Unit::sums`].
    ///
    /// # Panics
    ///
    /// If a row or a panel does not fit its slice.
    pub(crate) fn multiply<W: Element>(
        &mut self,
        left: Left<'_>,
        right: Right<'_, W>,
        columns: usize,
        epoch: Option<Epoch>,
    ) -> [Magnitudes; ROW_LIMIT] {
        assert!(left.starts.len() <= ROW_LIMIT && columns <= COLUMN_LIMIT, "size of a product on tiles");
        let (mut rows, panels) = ([Magnitudes::default(); ROW_LIMIT], columns.div_ceil(PANEL));
        if self.parts == 1 {
            self.multiply_rounded(left, right, panels, epoch);
            return rows;
        }
        if let Some(data) = W::pairs(right.data) {
            assert!(right.stride == PANEL, "whole panels");
            self.multiply_pairs(left, data, 2 * right.panel_stride, panels, epoch, &mut rows);
            return rows;
        }
        if let Some(integers) = W::integers(right.data) {
            assert!(right.stride == PANEL, "whole panels");
            self.multiply_integers(left, integers, right.panel_stride, panels, epoch, &mut rows);
            return rows;
        }
        let streams = left.starts.len() <= STRIP && left.inner.is_multiple_of(STEP) && right.stride == PANEL;
        if let Some(data) = W::direct(right.data).filter(|_| streams) {
            let right = Right { data, stride: right.stride, panel_stride: right.panel_stride };
            self.stream_panels(left, right, panels, epoch, &mut rows);
            return rows;
        }
        const { assert!(INNER_LIMIT.is_multiple_of(W::STEPS), "whole groups of rows") };
        for first in (0..left.inner).step_by(INNER_LIMIT) {
            let inner = (left.inner - first).min(INNER_LIMIT);
            self.split_left(left, first, inner, epoch, &mut rows);
            let at = |panel: usize| {
                let data = &right.data[panel * right.panel_stride + W::group(first, right.stride)..];
                Right { data, ..right }
            };
            self.tiles.split_panel(at(0), inner, self.scratch.right[0].filled_mut(), 0..TILE);
            for panel in 0..panels {
                let next = (panel + 1 < panels).then(|| at(panel + 1));
                self.multiply_strips(left.starts.len(), inner, panel, first > 0, next);
            }
        }
        rows
    }

    /// One strip of rows times panels of f32 that are split on the way, so that their parts never leave the nearest
    /// cache.
    fn stream_panels(
        &mut self,
        left: Left<'_>,
        right: Right<'_>,
        panels: usize,
        epoch: Option<Epoch>,
        found: &mut [Magnitudes],
    ) {
        let Some(last) = panels.checked_sub(1) else { return };
        for first in (0..left.inner).step_by(STREAM_LIMIT) {
            let inner = (left.inner - first).min(STREAM_LIMIT);
            self.split_left(left, first, inner, epoch, found);
            let in_a_row = right.panel_stride == inner * PANEL;
            let mut slot = None;
            for panel in 0..panels {
                let data = &right.data[panel * right.panel_stride + first * PANEL..];
                let steps = inner / STEP + usize::from(in_a_row && panel < last);
                slot =
                    self.stream_panel(left.starts.len(), inner, &data[..steps * STEP * PANEL], panel, first > 0, slot);
            }
        }
    }

    /// One strip of rows times panel `panel`, whose first step is in a slot or in none; gives the slot that the step
    /// after its last is in, if `data` has one.
    fn stream_panel(
        &mut self,
        rows: usize,
        inner: usize,
        data: &[f32],
        panel: usize,
        add: bool,
        slot: Option<usize>,
    ) -> Option<usize> {
        const LEN: usize = parts_len(PARTS, STEP);
        let Scratch { left, right: [slots, _], sums, .. } = &mut self.scratch;
        let (left, slots, sums) = (left.filled(), slots.filled_mut(), &mut sums.filled_mut()[panel * PANEL..]);
        let (first, later) = data.split_at(STEP * PANEL);
        let slot = slot.unwrap_or_else(|| {
            let right = Right { data: first, stride: PANEL, panel_stride: 0 };
            self.tiles.split_panel(right, STEP, &mut slots[..LEN], 0..TILE);
            0
        });
        let steps = later.len() / (STEP * PANEL);
        if steps > 0 {
            let stream = Stream { left, slots: &mut slots[..2 * LEN], slot, from: later, steps, sums, add };
            self.tiles.multiply_stream(rows, stream);
        }
        let slot = (slot + steps) % 2;
        if steps * STEP == inner {
            return Some(slot);
        }
        let (left, right) = (&left[steps * LEN..], &slots[slot * LEN..]);
        let (left_parts, parts, add) = (PARTS, PARTS, add || steps > 0);
        self.tiles.multiply(rows, Block { left, left_parts, right, parts, inner: STEP, sums, add });
        None
    }

    /// Every strip of `rows` rows times panel `panel`, which is split, while the next one is split, all of `inner`
    /// steps.
    fn multiply_strips<W: Element>(
        &mut self,
        rows: usize,
        inner: usize,
        panel: usize,
        add: bool,
        next: Option<Right<'_, W>>,
    ) {
        let Scratch { left, right: [even, odd], sums, .. } = &mut self.scratch;
        let (right, to) = if panel.is_multiple_of(2) { (even, odd) } else { (odd, even) };
        let (right, to, sums) = (right.filled(), to.filled_mut(), sums.filled_mut());
        let aside = next.as_ref().filter(|next| inner.is_multiple_of(STEP) && next.stride == PANEL);
        let aside = aside.and_then(|next| W::direct(next.data));
        let (pairs, mut done) = (job_pairs(rows), 0);
        let left_parts = PARTS;
        for (first, left) in (0..rows).step_by(STRIP).zip(left.filled().chunks_exact(parts_len(left_parts, inner))) {
            let (rows, sums) = ((rows - first).min(STRIP), &mut sums[first * SUM_STRIDE + panel * PANEL..]);
            let block = Block { left, left_parts, right, parts: W::PARTS, inner, sums, add };
            match aside.filter(|_| rows > TILE && done < TILE) {
                Some(from) => {
                    self.tiles.multiply_and_split(rows, block, Job { from, to, first: done, pairs });
                    done += pairs;
                }
                None => self.tiles.multiply(rows, block),
            }
        }
        if let Some(next) = next {
            self.tiles.split_panel(next, inner, to, done..TILE);
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::super::Instructions;
    use super::*;
    use crate::skip::skip;

    #[test]
    fn a_thread_keeps_what_is_stated() {
        let isa = Isa::at_most(Instructions::Amx);
        let Some(unit) = Unit::new(isa) else {
            return skip("no AMX tiles");
        };
        assert!(Unit::new(isa).is_none(), "two units of one thread");
        let Scratch { left, known, right: [even, odd], sums } = &unit.scratch;
        let buffers = left.bytes() + even.bytes() + odd.bytes() + sums.bytes();
        assert_eq!(buffers + known.bytes(), THREAD_BYTES);
    }
}
