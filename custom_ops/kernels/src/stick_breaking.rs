//! Attention by stick-breaking (Shen et al., "ModuleFormer", 2023).
//!
//! A key takes the share `sigmoid(score)` of what the later keys have left of the row's stick, so tiles of keys are
//! walked from the last one to the first, and nothing is divided by a sum at the end.

use std::ops::Range;

use crate::attention::{ATTENDED_ROWS, Attending, Rows, Scores};
use crate::grid::Tile;
use crate::key_panels::KEYS_PER_TILE;
use crate::rows::blocks;
use crate::simd::{LANES, ROWS, Write};

/// What one block of rows and one tile of keys need.
struct Sticks {
    scores: Scores,
    /// The scores, and then what each key takes, `[key][row]`.
    by_key: [[f32; LANES]; KEYS_PER_TILE],
}

impl Rows {
    /// [`Rows::attend`] by stick-breaking.
    pub(crate) fn attend_by_sticks(&mut self, with: &Attending<'_>, out: &mut Tile<'_, f32>) {
        let count = std::mem::take(&mut self.count);
        self.places[..count].iter().for_each(|place| out.row(*place).fill(0.0));
        let mut left = [1.0; ATTENDED_ROWS];
        let mut sticks = Sticks { scores: Scores([0.0; ROWS * KEYS_PER_TILE]), by_key: [[0.0; LANES]; KEYS_PER_TILE] };
        let longest = self.seen[..count].iter().copied().max().unwrap_or(0);
        for first in (0..longest).step_by(KEYS_PER_TILE).rev() {
            for block in blocks(count) {
                let longest = self.seen[block.clone()].iter().copied().max().unwrap_or(0);
                let left = &mut left[block.clone()];
                if first < longest && left.iter().any(|left| *left != 0.0) {
                    self.break_off(with, block, first..longest.min(first + KEYS_PER_TILE), left, &mut sticks, out);
                }
            }
        }
    }

    /// Gives one tile of keys what it takes of the sticks of one block of rows.
    fn break_off(
        &self,
        with: &Attending<'_>,
        block: Range<usize>,
        keys: Range<usize>,
        left: &mut [f32],
        Sticks { scores, by_key }: &mut Sticks,
        out: &mut Tile<'_, f32>,
    ) {
        self.score(with, block.clone(), &keys, scores);
        let by_key = &mut by_key[..keys.len()];
        with.isa.interleave(&scores.0, KEYS_PER_TILE, block.len(), by_key.as_flattened_mut());
        let seen = self.seen_of(block.clone(), &keys);
        let (mut seen_lanes, mut left_lanes) = ([0; LANES], [0.0; LANES]);
        seen_lanes.iter_mut().zip(seen).for_each(|(lane, seen)| *lane = seen as u32);
        left_lanes[..left.len()].copy_from_slice(left);
        with.isa.break_sticks(by_key, &seen_lanes, &mut left_lanes);
        left.copy_from_slice(&left_lanes[..left.len()]);
        for (row, weights) in scores.0.as_chunks_mut::<KEYS_PER_TILE>().0.iter_mut().enumerate().take(block.len()) {
            weights.iter_mut().zip(&*by_key).for_each(|(weight, key)| *weight = key[row]);
        }
        self.mix_seen(with, block, keys, &scores.0, Write::Resume(&[1.0; ROWS]), out);
    }
}
