//! The attention of `attention` with its products on AMX tiles.
//!
//! A tile of keys stays in a near cache while strips of queries pass. A strip is scored while the softmax of the one
//! before goes on, which has begun beside the values of the one before that.

use std::ops::Range;

use half::bf16;

use crate::attention::{Attention, Rows};
use crate::grid::Tile;
use crate::key_panels::KEYS_PER_TILE;
use crate::rows::TILE_ROWS;
use crate::simd::magnitudes::Magnitudes;
use crate::simd::strip_softmax::StripSoftmax;
use crate::simd::tiles::{COLUMN_LIMIT, INNER_LIMIT, STRIP, SUM_STRIDE, Unit};
use crate::simd::{Isa, Left, PANEL};

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
        self.visit_strips(stage, &mut unit, count, &suits, out);
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

    /// Takes all keys into the softmax of `count` rows, a tile of keys and a strip of rows at a time.
    fn visit_strips(
        &mut self,
        stage: &Attention<'_>,
        unit: &mut Unit,
        count: usize,
        suits: &[bool; TILE_ROWS],
        out: &mut Tile<'_, f32>,
    ) {
        let (pair, head) = (self.pair, stage.inputs.head);
        let mut visits = Visits { seen: self.seen, count, keys: 0, row: 0 };
        let (mut visit, mut place) = (visits.next(), 0);
        let mut softmax = visit.as_ref().map(|visit| self.softmax(visit, head));
        if let Some(visit) = &visit {
            unit.score(visit.queries(head), visit.keys(stage, pair), place, None);
        }
        while let Some((now, mut done)) = visit.zip(softmax) {
            visit = visits.next();
            if let Some(next) = &visit {
                unit.score(next.queries(head), next.keys(stage, pair), 1 - place, Some(&mut done));
            }
            unit.finish(&mut done, place);
            self.max[now.rows()].copy_from_slice(&done.max[..now.count]);
            self.sum[now.rows()].copy_from_slice(&done.sum[..now.count]);
            softmax = visit.as_ref().map(|next| self.softmax(next, head));
            let sums = unit.mix([now.count, now.keys.len()], now.values(stage, pair), place, softmax.as_mut());
            let results = now.rows().zip(done.factors).zip(sums.chunks(SUM_STRIDE));
            for ((row, factor), sums) in results.filter(|((row, _), _)| suits[*row]) {
                match now.keys.start {
                    0 => stage.inputs.isa.replace(out.row(self.places[row]), sums),
                    _ => stage.inputs.isa.resume(out.row(self.places[row]), factor, sums),
                }
            }
            place = 1 - place;
        }
    }

    /// The softmax of what a visit scores, before any of it is done.
    fn softmax(&self, visit: &Visit, head: usize) -> StripSoftmax {
        let Visit { keys, count, .. } = visit;
        let mut seen = [0; STRIP];
        for (seen, total) in seen.iter_mut().zip(&self.seen[visit.rows()]) {
            *seen = (*total).clamp(keys.start, keys.end) - keys.start;
        }
        StripSoftmax::new(&seen[..*count], keys.len(), head, &self.max[visit.rows()], &self.sum[visit.rows()])
    }
}

/// A strip of rows and the keys of a tile that one of them sees.
struct Visit {
    row: usize,
    count: usize,
    keys: Range<usize>,
}

impl Visit {
    fn rows(&self) -> Range<usize> {
        self.row..self.row + self.count
    }

    /// The strip, its rows and the elements of a query.
    fn queries(&self, head: usize) -> [usize; 3] {
        [self.row / STRIP, self.count, head]
    }

    /// The panels of the keys.
    fn keys<'a>(&self, stage: &'a Attention<'_>, pair: usize) -> impl Iterator<Item = &'a [bf16]> {
        (self.keys.start / PANEL..self.keys.end.div_ceil(PANEL)).map(move |panel| stage.panels.key_parts(pair, panel))
    }

    /// The panels of their values.
    fn values<'a>(&self, stage: &'a Attention<'_>, pair: usize) -> impl Iterator<Item = &'a [bf16]> {
        let (panels, first) = (stage.inputs.head.div_ceil(PANEL), self.keys.start);
        (0..panels).map(move |panel| stage.panels.value_parts(pair, panel, first))
    }
}

/// All visits of `count` rows: the strips of one tile of keys before the next tile.
struct Visits {
    seen: [usize; TILE_ROWS],
    count: usize,
    keys: usize,
    row: usize,
}

impl Visits {
    /// The most keys that one of the rows sees.
    fn longest(&self, rows: Range<usize>) -> usize {
        self.seen[rows].iter().copied().max().unwrap_or(0)
    }
}

impl Iterator for Visits {
    type Item = Visit;

    fn next(&mut self) -> Option<Visit> {
        while self.keys < self.longest(0..self.count) {
            let (first, row) = (self.keys, self.row);
            let rows = row..self.count.min(row + STRIP);
            self.row = rows.end;
            if self.row == self.count {
                (self.row, self.keys) = (0, first + KEYS_PER_TILE);
            }
            let longest = self.longest(rows.clone());
            if first < longest {
                return Some(Visit { row, count: rows.len(), keys: first..longest.min(first + KEYS_PER_TILE) });
            }
        }
        None
    }
}
