//! Attention of the chosen experts' queries over shared keys and values, with an online softmax.
//!
//! One task handles the `k` slots of a few tokens for one key/value head. It walks the visible keys in tiles; inside a
//! tile it walks blocks of query rows, so that the scores of one block and one tile are all that is ever stored. Every
//! query sees a prefix of the visible keys; tiles after it are skipped, and values after it are not read for it.
//! `stick_breaking` walks the tiles from the last one to the first.

use std::ops::Range;

use moa_schema::AttentionMode;

use crate::attention_tiles;
use crate::buffer::emptied;
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::key_panels::{KEYS_PER_TILE, Panels, Visible};
use crate::pool::Stage;
use crate::routing::Routing;
use crate::row_stride::row_stride;
use crate::rows::{IN_ORDER, blocks};
use crate::simd::pairs::nearest_bf16;
use crate::simd::{Element, Form, Isa, Left, PANEL, Product, ROWS, Right, Write, with_rounded};

/// Query rows (tokens times slots) that one task on vectors aims at.
const QUERY_ROWS: usize = 64;

/// The same on tiles; the latter where as many tasks are left as [`TASKS_ON_TILES`], since keys are read once a task.
const QUERY_ROWS_ON_TILES: [usize; 2] = [128, ATTENDED_ROWS];

const TASKS_ON_TILES: usize = 32;

/// Most query rows that walk the keys together.
pub(crate) const ATTENDED_ROWS: usize = 256;

/// Tasks on vectors that are enough for threads to share.
const TASKS: usize = 4;

/// Inputs of the attention of one call.
#[derive(Clone, Copy)]
pub(crate) struct AttentionInputs<'a> {
    pub(crate) isa: Isa,
    pub(crate) routing: Routing<'a>,
    /// `[B * T * k, G * D]`, rotated, with rows `row_stride` apart; scaled where the keys are not.
    pub(crate) queries: &'a [f32],
    pub(crate) visible: &'a Visible,
    pub(crate) mode: AttentionMode,
    /// Whether one token attends to f32 as it does to f16.
    pub(crate) as_stored: bool,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl AttentionInputs<'_> {
    /// Rows of queries, a tile for each head.
    pub(crate) fn layout(&self) -> Layout {
        let columns = self.kv_heads * self.head;
        Layout { stride: row_stride(columns), columns, tile_columns: self.head }
    }

    /// How many visible keys a token sees.
    fn seen(&self, batch: usize, token: usize) -> usize {
        self.visible.up_to(self.causal_past.map(|past| past + token), batch).len()
    }
}

/// Cuts the pairs `[B, T, k]` at groups of whole tokens of one row of the batch, as even as can be but on tiles.
pub(crate) fn cut_pairs(bounds: &mut Vec<usize>, inputs: &AttentionInputs<'_>, on_tiles: bool) {
    let AttentionInputs { batch, tokens, kv_heads, routing: Routing { top_k, .. }, .. } = *inputs;
    let rows = if on_tiles { rows_on_tiles(inputs) } else { QUERY_ROWS };
    let most = (rows / top_k).max(1);
    let fair = tokens.div_ceil(TASKS.div_ceil((batch * kv_heads).max(1))).max(1);
    let groups = tokens.div_ceil(if on_tiles { most } else { most.min(fair) });
    let start = |group: usize| if on_tiles { group * most } else { group * tokens / groups };
    emptied(bounds, batch * groups + 1);
    for batch in 0..batch {
        bounds.extend((0..groups).map(|group| (batch * tokens + start(group)) * top_k));
    }
    bounds.push(batch * tokens * top_k);
}

/// Query rows of a task on tiles.
fn rows_on_tiles(inputs: &AttentionInputs<'_>) -> usize {
    let [narrow, wide] = QUERY_ROWS_ON_TILES;
    let tasks = inputs.batch * inputs.kv_heads * (inputs.tokens * inputs.routing.top_k).div_ceil(wide);
    match attention_tiles::most_rows(inputs.head) >= wide && tasks >= TASKS_ON_TILES {
        true => wide,
        false => narrow,
    }
}

/// The stage that fills `attended [B * T * k, G * D]`, with rows `row_stride` apart: 0 where a token may see no key;
/// what stands where a token is not routed is unspecified.
pub(crate) struct Attention<'a> {
    inputs: AttentionInputs<'a>,
    panels: Panels<'a>,
    grid: Grid<'a, f32>,
    on_tiles: bool,
}

impl<'a> Attention<'a> {
    /// Prepares the stage; `bounds` comes from [`cut_pairs`].
    pub(crate) fn new(
        inputs: AttentionInputs<'a>,
        panels: Panels<'a>,
        attended: &'a mut [f32],
        bounds: &'a [usize],
        claims: &'a mut Claims,
        on_tiles: bool,
    ) -> Self {
        Self { inputs, panels, grid: Grid::new(attended, inputs.layout(), bounds, claims), on_tiles }
    }
}

impl Stage for Attention<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let AttentionInputs { routing, tokens, kv_heads, head, .. } = self.inputs;
        let (batch, group) = (out.first_row() / (tokens * routing.top_k), index % kv_heads);
        let stride = self.inputs.layout().stride;
        let most = if self.on_tiles { attention_tiles::most_rows(head) } else { ATTENDED_ROWS };
        let mut rows = Rows::new(batch * kv_heads + group);
        for row in 0..out.rows() {
            let pair = out.first_row() + row;
            let token = pair / routing.top_k;
            if !routing.routed[token] {
                continue;
            }
            let seen = self.inputs.seen(batch, token % tokens);
            if seen == 0 {
                out.row(row).fill(0.0);
                continue;
            }
            rows.push(pair * stride + group * head, row, seen);
            if rows.count == most {
                self.attend(&mut rows, &mut out);
            }
        }
        self.attend(&mut rows, &mut out);
    }
}

impl Attention<'_> {
    fn attend(&self, rows: &mut Rows, out: &mut Tile<'_, f32>) {
        let AttentionInputs { isa, queries, head, .. } = self.inputs;
        let with = Attending { isa, queries, panels: self.panels, head };
        match self.inputs.mode {
            AttentionMode::StickBreaking => rows.attend_by_sticks(&with, out),
            AttentionMode::Softmax if self.on_tiles => rows.attend_on_tiles(&with, out),
            AttentionMode::Softmax => rows.attend(&with, out),
        }
    }
}

/// Where queries, keys and values of some rows stand.
#[derive(Clone, Copy)]
pub(crate) struct Attending<'a> {
    pub(crate) isa: Isa,
    pub(crate) queries: &'a [f32],
    pub(crate) panels: Panels<'a>,
    pub(crate) head: usize,
}

/// Query rows of one task and their running softmax.
pub(crate) struct Rows {
    /// The (batch, head) pair.
    pub(crate) pair: usize,
    pub(crate) count: usize,
    /// Where each query begins.
    pub(crate) starts: [usize; ATTENDED_ROWS],
    /// Row of the tile where each result goes.
    pub(crate) places: [usize; ATTENDED_ROWS],
    /// How many of the visible keys each row sees; at least 1.
    pub(crate) seen: [usize; ATTENDED_ROWS],
    pub(crate) max: [f32; ATTENDED_ROWS],
    pub(crate) sum: [f32; ATTENDED_ROWS],
}

/// Scores of one block of rows and one tile of keys.
#[repr(align(64))]
pub(crate) struct Scores(pub(crate) [f32; ROWS * KEYS_PER_TILE]);

impl Rows {
    pub(crate) fn new(pair: usize) -> Self {
        let (indices, values) = ([0; ATTENDED_ROWS], [0.0; ATTENDED_ROWS]);
        Self { pair, count: 0, starts: indices, places: indices, seen: indices, max: values, sum: values }
    }

    pub(crate) fn push(&mut self, start: usize, place: usize, seen: usize) {
        self.starts[self.count] = start;
        self.places[self.count] = place;
        self.seen[self.count] = seen;
        self.count += 1;
    }

    /// Attends with all rows, writes the results and forgets the rows.
    pub(crate) fn attend(&mut self, with: &Attending<'_>, out: &mut Tile<'_, f32>) {
        let count = std::mem::take(&mut self.count);
        self.max[..count].fill(f32::NEG_INFINITY);
        self.sum[..count].fill(0.0);
        let mut scores = Scores([0.0; ROWS * KEYS_PER_TILE]);
        let longest = self.seen[..count].iter().copied().max().unwrap_or(0);
        for first in (0..longest).step_by(KEYS_PER_TILE) {
            for block in blocks(count) {
                let longest = self.seen[block.clone()].iter().copied().max().unwrap_or(0);
                if first < longest {
                    self.visit(with, block, first..longest.min(first + KEYS_PER_TILE), &mut scores, out);
                }
            }
        }
        for row in 0..count {
            with.isa.scale(out.row(self.places[row]), 1.0 / self.sum[row]);
        }
    }

    /// Takes one tile of keys into the softmax of one block of rows.
    fn visit(
        &mut self,
        with: &Attending<'_>,
        block: Range<usize>,
        keys: Range<usize>,
        scores: &mut Scores,
        out: &mut Tile<'_, f32>,
    ) {
        self.score(with, block.clone(), &keys, scores);
        let seen = self.seen_of(block.clone(), &keys);
        let (max, sum) = (&mut self.max[block.clone()], &mut self.sum[block.clone()]);
        let factors = with.isa.softmax_rows(&mut scores.0, KEYS_PER_TILE, &seen, max, sum);
        let write = if keys.start == 0 { Write::Replace } else { Write::Resume(&factors) };
        self.mix_seen(with, block, keys, &scores.0, write, out);
    }

    /// How many of `keys` each row of the block sees.
    pub(crate) fn seen_of(&self, block: Range<usize>, keys: &Range<usize>) -> [usize; ROWS] {
        let mut seen = [0; ROWS];
        for (seen, total) in seen.iter_mut().zip(&self.seen[block]) {
            *seen = (*total).clamp(keys.start, keys.end) - keys.start;
        }
        seen
    }

    /// Adds the values of those of `keys` that each row of the block sees.
    pub(crate) fn mix_seen(
        &self,
        with: &Attending<'_>,
        block: Range<usize>,
        keys: Range<usize>,
        weights: &[f32],
        write: Write<'_>,
        out: &mut Tile<'_, f32>,
    ) {
        let seen = self.seen_of(block.clone(), &keys);
        let least = seen[..block.len()].iter().copied().min().unwrap_or(0);
        // No pair of values is cut, so that what a row adds does not depend on its block.
        let common = if with.panels.rounded() { least & !1 } else { least };
        self.mix(with, block.clone(), keys.start..keys.start + common, weights, write, out);
        let mut first = 0;
        for alike in seen[..block.len()].chunk_by(|a, b| a == b) {
            if alike[0] > common {
                let rest = keys.start + common..keys.start + alike[0];
                let rows = block.start + first..block.start + first + alike.len();
                let weights = &weights[first * KEYS_PER_TILE + common..];
                self.mix(with, rows, rest, weights, Write::Resume(&[1.0; ROWS]), out);
            }
            first += alike.len();
        }
    }

    /// Products of queries and keys.
    pub(crate) fn score(&self, with: &Attending<'_>, block: Range<usize>, keys: &Range<usize>, scores: &mut Scores) {
        let left = Left::new(with.queries, &self.starts[block], with.head);
        let right = with.panels.key(self.pair, keys.start / PANEL);
        let write = (Write::Replace, &IN_ORDER[..], keys.len());
        let mut out = Tile::dense(&mut scores.0, KEYS_PER_TILE);
        match with.panels.rounded() {
            true => with_rounded((with.isa, Form::Pairs), left, None, |left| {
                multiply(with.isa, left, right.of_pairs(), write, &mut out);
            }),
            false => multiply(with.isa, left, right, write, &mut out),
        }
    }

    /// Adds the values of `keys`, which every row of the block sees.
    fn mix(
        &self,
        with: &Attending<'_>,
        block: Range<usize>,
        keys: Range<usize>,
        weights: &[f32],
        write: Write<'_>,
        out: &mut Tile<'_, f32>,
    ) {
        let starts: [usize; ROWS] = std::array::from_fn(|row| row * KEYS_PER_TILE);
        let (starts, places) = (&starts[..block.len()], &self.places[block]);
        if with.panels.rounded() {
            return self.mix_pairs(with, (weights, starts), keys, (write, places), out);
        }
        let left = Left::new(weights, starts, keys.len());
        multiply(with.isa, left, with.panels.value(self.pair, keys.start), (write, places, with.head), out);
    }

    /// [`Self::mix`] of pairs of values. A last one that stands alone is added by itself: beside it may stand a value
    /// that these rows do not see.
    fn mix_pairs(
        &self,
        with: &Attending<'_>,
        (weights, starts): (&[f32], &[usize]),
        keys: Range<usize>,
        (write, places): (Write<'_>, &[usize]),
        out: &mut Tile<'_, f32>,
    ) {
        let even = keys.len() & !1;
        if keys.len() != 1 {
            with_rounded((with.isa, Form::Pairs), Left::new(weights, starts, even), None, |left| {
                let right = with.panels.value(self.pair, keys.start).of_pairs();
                multiply(with.isa, left, right, (write, places, with.head), out);
            });
        }
        if even < keys.len() {
            let mut last = [0.0; ROWS];
            last.iter_mut().zip(starts).for_each(|(last, start)| *last = nearest_bf16(weights[start + even]));
            let right = with.panels.value(self.pair, keys.start + even).of_both();
            let write = if even > 0 { Write::Resume(&[1.0; ROWS]) } else { write };
            let left = Left::new(&last, &IN_ORDER[..starts.len()], 1);
            multiply(with.isa, left, right, (write, places, with.head), out);
        }
    }
}

/// Rows times panels, as many columns as are written to the rows `rows`.
fn multiply<W: Element>(
    isa: Isa,
    left: Left<'_>,
    right: Right<'_, W>,
    (write, rows, columns): (Write<'_>, &[usize], usize),
    out: &mut Tile<'_, f32>,
) {
    Product { left, right, rows, first_column: 0, columns, write, scales: None, ahead: None }.compute(isa, out);
}
