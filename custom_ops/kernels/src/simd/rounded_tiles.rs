//! Products on tiles of rows that are rounded to bf16: one product of parts, or two where weights have two.
//!
//! There are as many loads as products then, and they go on side by side only where loads meet the nearest cache. So
//! inner steps are taken in slices, of which a panel stays there while strips of rows pass, and so do its sums.
//!
//! Nobody judges values here as where rows are split: tiles take subnormal ones as 0, as AVX512_BF16 does, and what
//! rounds to infinity is infinite.

use half::bf16;

use super::product::{Left, Right};
use super::tiles::{Block, FETCHED, ROW_LIMIT, STEP, STRIP, SUM_STRIDE, Scratch, TILE, Unit, parts_len, strips_of};
use super::{Element, Epoch, PANEL};
use crate::simd::magnitudes::Magnitudes;

/// Inner steps of a panel that are multiplied with all rows before the next ones.
const SLICE: usize = 256;

/// As [`SLICE`] of integers beside one strip, which are fetched as others are paired: there are few products to do so
/// beside.
const SHORT_SLICE: usize = 128;

impl Unit {
    /// [`Unit::multiply`] of rows that are rounded.
    pub(super) fn multiply_rounded<W: Element>(
        &mut self,
        left: Left<'_>,
        right: Right<'_, W>,
        panels: usize,
        epoch: Option<Epoch>,
    ) {
        assert!(right.stride == PANEL, "whole panels");
        const { assert!(SLICE.is_multiple_of(W::STEPS), "whole groups of rows") };
        let integers = W::integers(right.data).is_some();
        let slice = if integers && left.starts.len() <= STRIP { SHORT_SLICE } else { SLICE };
        let most = strips_of(1, STEP) / left.starts.len().div_ceil(STRIP).max(1) / (SLICE / STEP) * SLICE;
        for pass in (0..left.inner).step_by(most) {
            let inner = (left.inner - pass).min(most);
            self.split_left(left, pass, inner, epoch, &mut [Magnitudes::default(); ROW_LIMIT]);
            for panel in 0..panels {
                for first in (0..inner).step_by(slice) {
                    let group = W::group(pass + first, PANEL);
                    let data = &right.data[panel * right.panel_stride + group..];
                    let steps = (inner - first).min(slice);
                    self.multiply_slice((data, steps), [left.starts.len(), inner], panel, [first, pass + first]);
                }
            }
        }
    }

    /// The rows, rounded in `inner` steps, from step `first` of these on, times the slice of `steps` steps of panel
    /// `panel` that begins at `data`; it is added to the sums where it is not the first of all.
    fn multiply_slice<W: Element>(
        &mut self,
        (data, steps): (&[W], usize),
        [rows, inner]: [usize; 2],
        panel: usize,
        [first, of_all]: [usize; 2],
    ) {
        let Scratch { left, right: [made, _], sums, .. } = &mut self.scratch;
        let made = made.filled_mut();
        let (right, parts): (&[bf16], _) = match (W::pairs(data), W::integers(data)) {
            (Some(pairs), _) if steps.is_multiple_of(STEP) => (pairs, 1),
            (Some(pairs), _) => (with_zeros(made, steps, |made| made.copy_from_slice(&pairs[..made.len()])), 1),
            (_, Some(integers)) => {
                let integers = &integers[..steps * PANEL];
                let pair = |made: &mut [bf16]| match rows > STRIP {
                    true => self.tiles.pair_integers::<false>(integers, made),
                    false => self.tiles.pair_integers::<true>(integers, made),
                };
                (with_zeros(made, steps, pair), 1)
            }
            _ => {
                self.tiles.split_panel(Right { data, stride: PANEL, panel_stride: 0 }, steps, made, 0..TILE);
                (made, W::PARTS)
            }
        };
        let next = data.as_ptr().wrapping_add(W::rows(steps) * PANEL);
        let strips = left.filled().chunks_exact(parts_len(1, inner));
        for (row, strip) in (0..rows).step_by(STRIP).zip(strips) {
            let (left, sums) =
                (&strip[parts_len(1, first)..], &mut sums.filled_mut()[row * SUM_STRIDE + panel * PANEL..]);
            let block = Block { left, left_parts: 1, right, parts, inner: steps, sums, add: of_all > 0 };
            let rows = (rows - row).min(STRIP);
            let ahead = next.wrapping_byte_add(row / STRIP * (steps / STEP) * FETCHED);
            self.tiles.multiply_fetching(rows, block, ahead.cast());
        }
    }
}

/// Pairs of `steps` inner steps of a panel as `fill` makes them, and zeros up to a whole [`STEP`].
fn with_zeros(made: &mut [bf16], steps: usize, fill: impl FnOnce(&mut [bf16])) -> &[bf16] {
    let (pairs, rest) = made[..parts_len(1, steps)].split_at_mut(steps.next_multiple_of(2) * PANEL);
    fill(pairs);
    rest.fill(bf16::ZERO);
    made
}
