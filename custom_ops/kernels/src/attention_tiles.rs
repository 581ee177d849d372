//! The attention of `attention` with its products on AMX tiles.
//!
//! A tile of keys stays in a near cache while strips of queries pass: their scores are computed, taken into the online
//! softmax, and multiplied with the values before the next strip.

use std::ops::Range;

use crate::attention::{Attention, Rows};
use crate::grid::Tile;
use crate::key_panels::KEYS_PER_TILE;
use crate::rows::TILE_ROWS;
use crate::simd::magnitudes::Magnitudes;
use crate::simd::tiles::{COLUMN_LIMIT, INNER_LIMIT, STRIP, SUM_STRIDE, Unit};
use crate::simd::{Isa, Left, PANEL, ROWS};

/// Fewest query rows, keys and elements of a head for which tiles are faster than vectors.
const FEWEST: [usize; 3] = [STRIP, 64, 64];

/// Elements of the longest head whose parts, and whose row of sums, a thread has room for.
const LONGEST_HEAD: usize = if INNER_LIMIT < COLUMN_LIMIT { INNER_LIMIT } else { COLUMN_LIMIT };

/// Whether tiles serve attention of these sizes.
pub(crate) fn serves(isa: Isa, rows: usize, keys: usize, head: usize) -> bool {
    let enough = [rows, keys, head].iter().zip(FEWEST).all(|(size, fewest)| *size >= fewest);
    isa.has_tiles() && enough && head <= LONGEST_HEAD
}

impl Rows {
    /// [`Rows::attend`] on tiles; rows whose values do not suit, and all where keys or values do not, go to vectors.
    pub(crate) fn attend_on_tiles(&mut self, stage: &Attention<'_>, out: &mut Tile<'_, f32>) {
        let [keys, values] = stage.panels.magnitudes(self.pair);
        let suit = self.count > 0 && values.suit_weights();
        let Some(mut unit) = suit.then(|| Unit::new(stage.inputs.isa)).flatten() else {
            return self.attend(&stage.attending(), out);
        };
        let (count, head) = (std::mem::take(&mut self.count), stage.inputs.head);
        self.max[..count].fill(f32::NEG_INFINITY);
        self.sum[..count].fill(0.0);
        let mut found = [Magnitudes::default(); TILE_ROWS];
        let left = Left { data: stage.inputs.queries, starts: &self.starts[..count], inner: head };
        unit.split_left(left, 0, head, None, &mut found);
        let suits: [bool; TILE_ROWS] = std::array::from_fn(|row| found[row].suit(keys, head));
        let longest = self.longest(0..count);
        for first in (0..longest).step_by(KEYS_PER_TILE) {
            for (strip, row) in (0..count).step_by(STRIP).enumerate() {
                let rows = row..count.min(row + STRIP);
                let longest = self.longest(rows.clone());
                if first < longest {
                    let keys = first..longest.min(first + KEYS_PER_TILE);
                    self.visit_strip(stage, &mut unit, strip, rows, keys, &suits, out);
                }
            }
        }
        drop(unit);
        for row in (0..count).filter(|row| suits[*row]) {
            stage.inputs.isa.scale(out.row(self.places[row]), 1.0 / self.sum[row]);
        }
        let mut others = Rows::new(self.pair);
        for row in (0..count).filter(|row| !suits[*row]) {
            others.push(self.starts[row], self.places[row], self.seen[row]);
        }
        others.attend(&stage.attending(), out);
    }

    /// The most keys that one of the rows sees.
    fn longest(&self, rows: Range<usize>) -> usize {
        self.seen[rows].iter().copied().max().unwrap_or(0)
    }

    /// Takes one tile of keys into the softmax of one strip of rows.
    #[allow(clippy::too_many_arguments)]
    fn visit_strip(
        &mut self,
        stage: &Attention<'_>,
        unit: &mut Unit,
        strip: usize,
        rows: Range<usize>,
        keys: Range<usize>,
        suits: &[bool; TILE_ROWS],
        out: &mut Tile<'_, f32>,
    ) {
        let (isa, head) = (stage.inputs.isa, stage.inputs.head);
        for column in (0..keys.len()).step_by(PANEL) {
            let panel = stage.panels.key_parts(self.pair, (keys.start + column) / PANEL);
            unit.multiply_strip(strip, rows.len(), head, panel, column);
        }
        let factors = self.softmax(isa, unit.sums(), rows.clone(), &keys);
        unit.split_sums(rows.len(), keys.len());
        for column in (0..head).step_by(PANEL) {
            let panel = stage.panels.value_parts(self.pair, column / PANEL, keys.start);
            unit.multiply_sums(rows.len(), keys.len(), panel, column);
        }
        let products = unit.sums()[STRIP * SUM_STRIDE..].chunks(SUM_STRIDE);
        for ((row, factor), product) in rows.zip(factors).zip(products).filter(|((row, _), _)| suits[*row]) {
            match keys.start {
                0 => isa.replace(out.row(self.places[row]), product),
                _ => isa.resume(out.row(self.places[row]), factor, product),
            }
        }
    }

    /// The softmax of a strip of scores, with 0 for keys that a row does not see; by how much earlier sums shrink.
    fn softmax(&mut self, isa: Isa, scores: &mut [f32], rows: Range<usize>, keys: &Range<usize>) -> [f32; STRIP] {
        let mut factors = [0.0; STRIP];
        for (first, factors) in rows.clone().step_by(ROWS).zip(factors.chunks_mut(ROWS)) {
            let block = first..rows.end.min(first + ROWS);
            let scores = &mut scores[(first - rows.start) * SUM_STRIDE..];
            let mut seen = [0; ROWS];
            for (row, (seen, total)) in seen.iter_mut().zip(&self.seen[block.clone()]).enumerate() {
                *seen = (*total).clamp(keys.start, keys.end) - keys.start;
                scores[row * SUM_STRIDE..][*seen..keys.len()].fill(0.0);
            }
            let (max, sum) = (&mut self.max[block.clone()], &mut self.sum[block.clone()]);
            let shrunk = isa.softmax_rows(scores, SUM_STRIDE, &seen, max, sum);
            factors.copy_from_slice(&shrunk[..factors.len()]);
        }
        factors
    }
}
