//! Products on tiles of rows that are split with weights of one part: pairs of inner steps in bf16, and integers.

use half::bf16;

use super::magnitudes::Magnitudes;
use super::product::Left;
use super::tiles::{Block, INNER_LIMIT, PARTS, STEP, STREAM_LIMIT, STRIP, SUM_STRIDE, Scratch, Unit, parts_len};
use super::{Epoch, PANEL};

impl Unit {
    /// Rows times panels of bf16 in pairs of inner steps, `panel_stride` apart, which are read where they stand.
    pub(super) fn multiply_pairs(
        &mut self,
        left: Left<'_>,
        right: &[bf16],
        panel_stride: usize,
        panels: usize,
        epoch: Option<Epoch>,
        found: &mut [Magnitudes],
    ) {
        let rows = left.starts.len();
        let most = STREAM_LIMIT / rows.div_ceil(STRIP).max(1) / STEP * STEP;
        for first in (0..left.inner).step_by(most) {
            let inner = (left.inner - first).min(most);
            self.split_left(left, first, inner, epoch, found);
            for panel in 0..panels {
                let data = &right[panel * panel_stride + first * PANEL..];
                self.multiply_panel_of_pairs(rows, inner, data, panel, first > 0);
            }
        }
    }

    /// Rows times panels of integers, `panel_stride` apart, each of which is made pairs of bf16 first: these hold them.
    pub(super) fn multiply_integers(
        &mut self,
        left: Left<'_>,
        right: &[i8],
        panel_stride: usize,
        panels: usize,
        epoch: Option<Epoch>,
        found: &mut [Magnitudes],
    ) {
        let rows = left.starts.len();
        for first in (0..left.inner).step_by(INNER_LIMIT) {
            let inner = (left.inner - first).min(INNER_LIMIT);
            self.split_left(left, first, inner, epoch, found);
            let mut pairs = std::mem::take(&mut self.scratch.right[1]);
            for panel in 0..panels {
                let integers = &right[panel * panel_stride + first * PANEL..][..inner * PANEL];
                let pairs = &mut pairs.filled_mut()[..inner.next_multiple_of(2) * PANEL];
                self.tiles.pair_integers::<false>(integers, pairs);
                self.multiply_panel_of_pairs(rows, inner, pairs, panel, first > 0);
            }
            self.scratch.right[1] = pairs;
        }
    }

    /// The strips that are split times `inner` steps of a panel of pairs; steps after the last whole [`STEP`] are
    /// copied, with zeros behind them.
    fn multiply_panel_of_pairs(&mut self, rows: usize, inner: usize, data: &[bf16], panel: usize, add: bool) {
        let Scratch { left, right: [rest, _], sums, .. } = &mut self.scratch;
        let (whole, rest) = (inner / STEP * STEP, &mut rest.filled_mut()[..STEP * PANEL]);
        let (data, last) = data.split_at(whole * PANEL);
        if whole < inner {
            let len = (inner - whole).next_multiple_of(2) * PANEL;
            rest[..len].copy_from_slice(&last[..len]);
            rest[len..].fill(bf16::ZERO);
        }
        let left_parts = PARTS;
        let strips = left.filled().chunks_exact(parts_len(left_parts, inner));
        for (first, left) in (0..rows).step_by(STRIP).zip(strips) {
            let (rows, place) = ((rows - first).min(STRIP), first * SUM_STRIDE + panel * PANEL);
            let sums = &mut sums.filled_mut()[place..];
            if whole > 0 {
                let block = Block { left, left_parts, right: data, parts: 1, inner: whole, sums: &mut *sums, add };
                self.tiles.multiply(rows, block);
            }
            if whole < inner {
                let left = &left[parts_len(left_parts, whole)..];
                let block =
                    Block { left, left_parts, right: &*rest, parts: 1, inner: STEP, sums, add: add || whole > 0 };
                self.tiles.multiply(rows, block);
            }
        }
    }
}
