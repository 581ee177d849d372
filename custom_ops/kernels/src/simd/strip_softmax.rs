//! Attention on tiles, a strip of query rows and a tile of keys at a time, with the softmax of one strip done in pieces
//! beside the products of others.
//!
//! A product of tiles takes 16 cycles, in which the vector units have nothing to do. So while one strip is multiplied
//! with values, and the one after the next with keys, the scores of the next become weights, and weights parts.

use std::ops::Range;

use half::bf16;

use super::amx::Tiles;
use super::tiles::{Block, PARTS, STEP, STRIP, SUM_STRIDE, Unit, parts_len};
use super::{LANES, PANEL};

/// Scores of one row that one piece turns into weights.
pub(super) const PIECE_LEN: usize = 64;

/// The softmax of a strip of rows over the keys that were visited, and that of one more tile of keys as far as it is
/// done: for each row its maximum first, then its weights.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) struct StripSoftmax {
    rows: usize,
    /// How many of all keys each row sees.
    sees: [usize; STRIP],
    /// The keys of the tile.
    keys: Range<usize>,
    /// The row that is next; behind the last, what all rows have; behind that, nothing.
    pub(super) row: usize,
    /// The first score of the next piece.
    pub(super) first: usize,
    /// Sums of the weights of the row so far.
    pub(super) lanes: [f32; LANES],
    /// Maxima of the rows, with those of the tile.
    pub(super) new: [f32; STRIP],
    /// Sums of the weights of the tile.
    pub(super) added: [f32; STRIP],
    /// Maxima of the rows, those of the tile when it is done.
    pub(crate) max: [f32; STRIP],
    /// Sums of weights of the rows, those of the tile when it is done.
    pub(crate) sum: [f32; STRIP],
    /// By how much what was summed before shrinks, when the tile is done.
    pub(crate) factors: [f32; STRIP],
    pace: Pace,
}

/// How many pieces stand beside how many steps of products, evenly.
#[derive(Clone, Copy, Default)]
struct Pace {
    pieces: usize,
    steps: usize,
    /// Of a piece, in parts of which a whole one has `steps`.
    rest: usize,
    /// Pieces that the steps so far should have had and had not.
    due: usize,
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
impl StripSoftmax {
    /// Of rows of which each sees so many keys, before any of these was visited.
    ///
    /// # Panics
    ///
    /// If there are more rows than a strip has.
    pub(crate) fn new(seen: &[usize]) -> Self {
        let (mut sees, zeros) = ([0; STRIP], [0.0; STRIP]);
        sees[..seen.len()].copy_from_slice(seen);
        Self {
            rows: seen.len(),
            sees,
            keys: 0..0,
            row: STRIP + 1,
            first: 0,
            lanes: [0.0; LANES],
            new: zeros,
            added: zeros,
            max: [f32::NEG_INFINITY; STRIP],
            sum: zeros,
            factors: zeros,
            pace: Pace::default(),
        }
    }

    /// Goes on to the keys `keys`, of heads of `head` elements.
    pub(crate) fn begin(&mut self, keys: Range<usize>, head: usize) {
        let steps = 2 * keys.len().div_ceil(STEP) * head.div_ceil(STEP);
        self.pace = Pace { pieces: self.rows * keys.len().div_ceil(PIECE_LEN) + 1, steps, rest: 0, due: 0 };
        (self.row, self.first, self.keys) = (0, 0, keys);
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// The most keys that one of the rows sees.
    pub(crate) fn longest(&self) -> usize {
        self.sees.into_iter().max().unwrap_or(0)
    }

    /// Keys of the tile.
    pub(super) fn keys(&self) -> usize {
        self.keys.len()
    }

    /// How many of these a row sees.
    #[inline]
    pub(super) fn seen(&self, row: usize) -> usize {
        self.sees[row].clamp(self.keys.start, self.keys.end) - self.keys.start
    }

    /// Whether all pieces are done.
    pub(super) fn done(&self) -> bool {
        self.row > self.rows
    }

    /// Counts a step: some more pieces are due.
    #[inline]
    pub(super) fn count_step(&mut self) {
        let Pace { pieces, steps, rest, due } = &mut self.pace;
        *rest += *pieces;
        while *rest >= *steps {
            *rest -= *steps;
            *due += 1;
        }
    }

    /// The pieces that are due, which are so no longer.
    #[inline]
    pub(super) fn take_due(&mut self) -> usize {
        std::mem::take(&mut self.pace.due)
    }

    /// Whether so many pieces of one row that sees all of their keys are next.
    #[inline]
    pub(super) fn are_whole(&self, pieces: usize) -> bool {
        self.row < self.rows && self.seen(self.row) >= self.first + pieces * PIECE_LEN
    }

    /// Takes so many pieces, if they are due and [whole](Self::are_whole).
    #[inline]
    pub(super) fn take_whole(&mut self, pieces: usize) -> bool {
        let take = self.pace.due >= pieces && self.are_whole(pieces);
        if take {
            self.pace.due -= pieces;
        }
        take
    }
}

/// A softmax, the scores that it is of, and where the parts of its weights go.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(super) struct Beside<'a> {
    pub(super) softmax: &'a mut StripSoftmax,
    /// Rows [`SUM_STRIDE`] apart.
    pub(super) scores: &'a [f32],
    pub(super) parts: &'a mut [bf16],
}

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
impl Beside<'_> {
    /// # Panics
    ///
    /// If the scores or the parts do not fit their slices.
    pub(super) fn check(&self) {
        let (rows, keys) = (self.softmax.rows, self.softmax.keys().next_multiple_of(PIECE_LEN));
        assert!(keys <= SUM_STRIDE && self.scores.len() + SUM_STRIDE >= rows * SUM_STRIDE + keys, "scores of a strip");
        assert!(rows <= STRIP && self.parts.len() >= parts_len(PARTS, keys), "room for a strip");
    }
}

/// Elements of the sums of a strip.
const STRIP_LEN: usize = STRIP * SUM_STRIDE;

/// Two places for the scores of a strip and the parts of its weights, used in turn, and sums of values behind them.
impl Unit {
    /// The scores of strip `strip` of the rows that are split, of `head` elements, with keys in panels, into place
    /// `place`, while `beside`, whose scores are in the other place, goes on.
    pub(crate) fn score<'a>(
        &mut self,
        [strip, rows, head]: [usize; 3],
        panels: impl Iterator<Item = &'a [bf16]>,
        place: usize,
        beside: Option<&mut StripSoftmax>,
    ) {
        let len = parts_len(self.parts, head);
        let left = &self.scratch.left.filled()[strip * len..][..len];
        let (even, odd) = self.scratch.sums.filled_mut().split_at_mut(STRIP_LEN);
        let (sums, scores) = if place == 0 { (even, odd) } else { (odd, even) };
        let parts = self.scratch.right[1 - place].filled_mut();
        let beside = beside.map(|softmax| Beside { softmax, scores, parts });
        multiply_panels(&self.tiles, self.parts, rows, (left, head), panels, sums, beside);
    }

    /// Does what is left of `softmax`, whose scores are in place `place`.
    pub(crate) fn finish(&mut self, softmax: &mut StripSoftmax, place: usize) {
        let scores = &self.scratch.sums.filled()[place * STRIP_LEN..][..STRIP_LEN];
        let parts = self.scratch.right[place].filled_mut();
        self.tiles.finish(&mut Beside { softmax, scores, parts }, self.parts);
    }

    /// The weights of `rows` rows in place `place` times `keys` values in panels, while `beside`, whose scores are in
    /// the other place, goes on; gives the sums, in rows [`SUM_STRIDE`] apart.
    pub(crate) fn mix<'a>(
        &mut self,
        [rows, keys]: [usize; 2],
        panels: impl Iterator<Item = &'a [bf16]>,
        place: usize,
        beside: Option<&mut StripSoftmax>,
    ) -> &[f32] {
        let (scores, sums) = self.scratch.sums.filled_mut().split_at_mut(2 * STRIP_LEN);
        let scores = &scores[(1 - place) * STRIP_LEN..][..STRIP_LEN];
        let [even, odd] = &mut self.scratch.right;
        let (left, parts) = if place == 0 { (even, odd) } else { (odd, even) };
        let (left, parts) = (left.filled(), parts.filled_mut());
        let beside = beside.map(|softmax| Beside { softmax, scores, parts });
        multiply_panels(&self.tiles, self.parts, rows, (left, keys), panels, sums, beside);
        sums
    }
}

/// `rows` rows of a strip of so many elements times panels, of so many parts both, into the sums, while `beside` goes
/// on.
fn multiply_panels<'a>(
    tiles: &Tiles,
    parts: usize,
    rows: usize,
    (left, inner): (&[bf16], usize),
    panels: impl Iterator<Item = &'a [bf16]>,
    sums: &mut [f32],
    mut beside: Option<Beside<'_>>,
) {
    for (column, right) in panels.enumerate() {
        let sums = &mut sums[column * PANEL..];
        let block = Block { left, left_parts: parts, right, parts, inner, sums, add: false };
        tiles.multiply_beside(rows, block, beside.as_mut());
    }
}

#[cfg(test)]
mod tests {
    use super::super::magnitudes::Magnitudes;
    use super::super::product::Left;
    use super::super::{Instructions, Isa, ROWS};
    use super::*;
    use crate::skip::skip;

    /// Scores that have nothing in common, with one in ten far below the others.
    fn score(place: usize) -> f32 {
        let bits = (place as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        let value = bits as f32 / (1 << 20) as f32 - 8.0;
        if bits.is_multiple_of(10) { value * 20.0 } else { value }
    }

    #[test]
    fn pieces_give_the_bits_of_rows() {
        for isa in [Isa::at_most(Instructions::Amx), Isa::at_most(Instructions::Amx).rounding()] {
            for head in [None, Some(64), Some(128), Some(512)] {
                let Some(unit) = Unit::of_attention(isa) else {
                    return skip("no AMX tiles");
                };
                pieces_of(unit, isa, head);
            }
        }
    }

    /// Goes through the products that stand beside a softmax of heads of `head` elements.
    fn multiply_beside(unit: &mut Unit, softmax: &mut StripSoftmax, place: usize, keys: usize, head: usize) {
        let keys_by_panel = vec![vec![bf16::ONE; parts_len(unit.parts, head)]; keys.div_ceil(PANEL)];
        let values_by_panel = vec![vec![bf16::ONE; parts_len(unit.parts, keys)]; head.div_ceil(PANEL)];
        unit.score([0, STRIP, head], keys_by_panel.iter().map(Vec::as_slice), 1 - place, Some(softmax));
        assert!(softmax.row > 0 || softmax.rows() == 1, "some rows are done beside products");
        unit.mix([STRIP, keys], values_by_panel.iter().map(Vec::as_slice), 1 - place, Some(softmax));
        assert!(softmax.row + 1 >= softmax.rows(), "no more than the last row is left");
    }

    /// Of whole and of cut strips and tiles of keys, beside products or not.
    fn pieces_of(mut unit: Unit, isa: Isa, head: Option<usize>) {
        for (rows, tiles) in [
            (1, [1, 1]),
            (3, [64, 1]),
            (12, [65, 200]),
            (16, [100, 64]),
            (17, [256, 255]),
            (31, [256, 33]),
            (32, [256; 2]),
        ] {
            let all: usize = tiles.iter().sum();
            let seen: Vec<usize> = (0..rows).map(|row| if row % 3 == 0 { all } else { row * 97 % all + 1 }).collect();
            let mut softmax = StripSoftmax::new(&seen);
            let (mut max, mut sum) = (vec![f32::NEG_INFINITY; rows], vec![0.0; rows]);
            for (place, keys) in [0..tiles[0], tiles[0]..all].into_iter().enumerate() {
                let sums = unit.scratch.sums.filled_mut();
                sums.iter_mut().enumerate().for_each(|(place, sum)| *sum = score(place));
                let mut expected = sums[place * STRIP_LEN..][..STRIP_LEN].to_vec();
                softmax.begin(keys.clone(), head.unwrap_or(128));
                if let Some(head) = head {
                    multiply_beside(&mut unit, &mut softmax, place, keys.len(), head);
                }
                unit.finish(&mut softmax, place);
                let own: Vec<usize> =
                    seen.iter().map(|seen| (*seen).clamp(keys.start, keys.end) - keys.start).collect();
                for first in (0..rows).step_by(ROWS) {
                    let block = first..rows.min(first + ROWS);
                    let mut seen = [0; ROWS];
                    seen[..block.len()].copy_from_slice(&own[block.clone()]);
                    let scores = &mut expected[first * SUM_STRIDE..];
                    let (max, sum) = (&mut max[block.clone()], &mut sum[block.clone()]);
                    let factors = isa.softmax_rows(scores, SUM_STRIDE, &seen, max, sum);
                    assert_eq!(softmax.factors[block.clone()], factors[..block.len()], "{rows} {keys:?}");
                }
                assert_eq!((&softmax.max[..rows], &softmax.sum[..rows]), (&max[..], &sum[..]), "{rows} {keys:?}");
                for (row, seen) in own.iter().enumerate() {
                    expected[row * SUM_STRIDE + seen..(row + 1) * SUM_STRIDE].fill(0.0);
                }
                let starts: Vec<usize> = (0..rows).map(|row| row * SUM_STRIDE).collect();
                let left = Left::new(&expected, &starts, keys.len());
                let parts = unit.scratch.right[place].filled()[..parts_len(unit.parts, keys.len())].to_vec();
                let (mut others, mut found) = (parts.clone(), [Magnitudes::default(); STRIP]);
                match unit.parts {
                    1 => unit.tiles.round_strip(left, 0, keys.len(), &mut others),
                    _ => unit.tiles.split_strip::<false>(left, 0, keys.len(), &mut others, &mut found),
                }
                assert!(parts == others, "{rows} {keys:?}: parts of weights");
                let weighs = parts.iter().any(|part| *part != bf16::ZERO);
                assert!(weighs || keys.start > 0, "{rows} {keys:?}: no weights");
            }
        }
    }

    /// As many pieces are due as there are, and half of them after the first of two products.
    #[test]
    fn pieces_are_spread_over_all_steps() {
        for (rows, keys, head) in [(32, 256, 128), (32, 256, 64), (17, 64, 256), (32, 100, 512)] {
            let mut softmax = StripSoftmax::new(&vec![keys; rows]);
            softmax.begin(0..keys, head);
            let half = keys.div_ceil(STEP) * head.div_ceil(STEP);
            let mut due = || {
                (0..half).for_each(|_| softmax.count_step());
                softmax.take_due()
            };
            let halves = [due(), due()];
            let all: usize = halves.iter().sum();
            assert_eq!(all, rows * keys.div_ceil(PIECE_LEN) + 1);
            assert!(halves[0] == all / 2, "{halves:?}");
        }
    }
}
