//! The attention of `attention` with its products on AMX tiles.
//!
//! A tile of keys stays in a near cache while strips of queries pass. A strip is scored while the softmax of the one
//! before goes on, which has begun beside the values of the one before that.

use std::ops::Range;

use crate::attention::{ATTENDED_ROWS, Attending, Rows};
use crate::grid::Tile;
use crate::key_panels::KEYS_PER_TILE;
use crate::simd::magnitudes::Magnitudes;
use crate::simd::strip_softmax::StripSoftmax;
use crate::simd::tiles::{COLUMN_LIMIT, INNER_LIMIT, PARTS, STRIP, SUM_STRIDE, Unit, strips_of};
use crate::simd::{Isa, Left, PANEL};

/// Fewest query rows, keys and elements of a head for which tiles are faster than vectors.
const FEWEST: [usize; 3] = [STRIP, 64, 64];

/// Strips of the rows that attend together.
const STRIPS: usize = ATTENDED_ROWS / STRIP;

/// Elements of the longest head whose parts, and whose row of sums, a thread has room for.
const LONGEST_HEAD: usize = if INNER_LIMIT < COLUMN_LIMIT { INNER_LIMIT } else { COLUMN_LIMIT };

/// Whether tiles serve attention of these sizes.
pub(crate) fn serves(isa: Isa, rows: usize, keys: usize, head: usize) -> bool {
    let enough = [rows, keys, head].iter().zip(FEWEST).all(|(size, fewest)| *size >= fewest);
    isa.has_tiles() && enough && head <= LONGEST_HEAD
}

/// Most rows of so many elements whose parts a thread has room for.
pub(crate) fn most_rows(head: usize) -> usize {
    (strips_of(PARTS, head) * STRIP).min(ATTENDED_ROWS)
}

impl Rows {
    /// [`Rows::attend`] on tiles; rows whose values do not suit, and all where keys or values do not, go to vectors.
    pub(crate) fn attend_on_tiles(&mut self, with: &Attending<'_>, out: &mut Tile<'_, f32>) {
        let [keys, values] = with.panels.magnitudes(self.pair);
        let suit = self.count > 0 && values.suit_weights();
        let Some(mut unit) = suit.then(|| Unit::of_attention(with.isa)).flatten() else {
            return self.attend(with, out);
        };
        let (count, head) = (std::mem::take(&mut self.count), with.head);
        let mut found = [Magnitudes::default(); ATTENDED_ROWS];
        let left = Left::new(with.queries, &self.starts[..count], head);
        unit.split_left(left, 0, head, None, &mut found);
        let suits: [bool; ATTENDED_ROWS] = std::array::from_fn(|row| found[row].suit(keys, head));
        let strip =
            |strip: usize| StripSoftmax::new(&self.seen[count.min(strip * STRIP)..count.min((strip + 1) * STRIP)]);
        let mut strips: [StripSoftmax; STRIPS] = std::array::from_fn(strip);
        self.visit_strips(with, &mut unit, &mut strips, &suits, out);
        drop(unit);
        for row in (0..count).filter(|row| suits[*row]) {
            with.isa.scale(out.row(self.places[row]), 1.0 / strips[row / STRIP].sum[row % STRIP]);
        }
        let mut others = Rows::new(self.pair);
        for row in (0..count).filter(|row| !suits[*row]) {
            others.push(self.starts[row], self.places[row], self.seen[row]);
        }
        others.attend(with, out);
    }

    /// Takes all keys into the softmax of the strips, and writes the sums of values.
    fn visit_strips(
        &self,
        with: &Attending<'_>,
        unit: &mut Unit,
        strips: &mut [StripSoftmax; STRIPS],
        suits: &[bool; ATTENDED_ROWS],
        out: &mut Tile<'_, f32>,
    ) {
        let (pair, Attending { isa, panels: stored, head, .. }) = (self.pair, *with);
        let key_parts = |keys: &Range<usize>| {
            let panels = keys.start / PANEL..keys.end.div_ceil(PANEL);
            panels.map(|panel| stored.key_parts(pair, panel))
        };
        let mut visits = visits(strips.each_ref().map(StripSoftmax::longest));
        let (mut visit, mut place) = (visits.next(), 0);
        if let Some((strip, keys)) = &visit {
            unit.score([*strip, strips[*strip].rows(), head], key_parts(keys), place, None);
            strips[*strip].begin(keys.clone(), head);
        }
        while let Some((strip, keys)) = visit {
            visit = visits.next();
            if let Some((next, keys)) = &visit {
                let sizes = [*next, strips[*next].rows(), head];
                unit.score(sizes, key_parts(keys), 1 - place, Some(&mut strips[strip]));
            }
            unit.finish(&mut strips[strip], place);
            let (rows, factors) = (strips[strip].rows(), strips[strip].factors);
            let next = visit.as_ref().map(|(next, keys)| {
                strips[*next].begin(keys.clone(), head);
                &mut strips[*next]
            });
            let value_parts = (0..head.div_ceil(PANEL)).map(|panel| stored.value_parts(pair, panel, keys.start));
            let sums = unit.mix([rows, keys.len()], value_parts, place, next);
            for ((row, factor), sums) in (strip * STRIP..).zip(&factors[..rows]).zip(sums.chunks(SUM_STRIDE)) {
                match keys.start {
                    _ if !suits[row] => {}
                    0 => isa.replace(out.row(self.places[row]), sums),
                    _ => isa.resume(out.row(self.places[row]), *factor, sums),
                }
            }
            place = 1 - place;
        }
    }
}

/// Strips and keys that some of their rows see, of which strips see so many: all strips of one tile of keys before the
/// next tile.
fn visits(longest: [usize; STRIPS]) -> impl Iterator<Item = (usize, Range<usize>)> {
    let most = longest.into_iter().max().unwrap_or(0);
    let tile = move |first: usize| {
        let seeing = longest.into_iter().enumerate().filter(move |(_, longest)| first < *longest);
        seeing.map(move |(strip, longest)| (strip, first..longest.min(first + KEYS_PER_TILE)))
    };
    (0..most).step_by(KEYS_PER_TILE).flat_map(tile)
}
