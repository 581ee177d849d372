//! Rows of one expert, from their queries to what they attended to.
//!
//! Where an expert has many rows in a row of the batch, a task projects some of them and attends with them before the
//! next ones: queries stay in a near cache, where those of all tokens would be written to memory and read again.

use crate::attention::{Attending, Rows};
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::key_panels::{Panels, Visible};
use crate::pool::Stage;
use crate::query_projection::{QueryInputs, row_stride};
use crate::routing::Routing;
use crate::rows::{TILE_ROWS, even};
use crate::simd::{Isa, ROWS};

/// Elements of queries that a task keeps, on its stack.
const QUERIES: usize = 16384;

/// Rows that an expert has on average in a row of the batch, from which on they fill blocks.
const MANY: usize = ROWS;

/// Elements of what all slots attend to that caches near the cores hold: up to here, neighbours in the output's order
/// are better off, since a core then reads what it has written itself.
const NEAR: usize = 1 << 20;

/// Tasks that are enough for threads to share evenly.
const TASKS: usize = 16;

/// Fewest rows of a task, where there are as many: the weights of the expert are read once for all of them.
const FEWEST: usize = 4 * ROWS;

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct ExpertScratch {
    experts: Vec<usize>,
    bounds: Vec<usize>,
    claims: Claims,
}

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct ExpertInputs<'a> {
    pub(crate) queries: QueryInputs<'a>,
    pub(crate) routing: &'a Routing,
    pub(crate) panels: Panels<'a>,
    pub(crate) visible: &'a Visible,
    /// `Some(P)`: token `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
}

/// The stage that fills `attended [rows, G * D]`, a row for each of the routing, [`row_stride`] apart; 0 where a token
/// may see no key.
pub(crate) struct ExpertAttention<'a> {
    inputs: ExpertInputs<'a>,
    experts: &'a [usize],
    grid: Grid<'a, f32>,
}

/// Most rows of a task.
fn most_rows(head: usize) -> usize {
    (QUERIES / head.max(1)).min(TILE_ROWS)
}

/// Whether the stage serves a call whose slots attend to `attended` elements, and where an expert has `rows` rows on
/// average in a row of the batch. Products on AMX tiles want those of the whole batch together.
pub(crate) fn serves(isa: Isa, attended: usize, rows: usize, head: usize) -> bool {
    !isa.has_tiles() && attended > NEAR && rows >= MANY && most_rows(head) >= 2 * ROWS
}

impl ExpertScratch {
    /// Prepares the stage.
    pub(crate) fn stage<'a>(&'a mut self, inputs: ExpertInputs<'a>, attended: &'a mut [f32]) -> ExpertAttention<'a> {
        let ExpertInputs { queries: QueryInputs { kv_heads, head, .. }, routing, batch, tokens, .. } = inputs;
        let fair = (routing.rows() * kv_heads).div_ceil(TASKS);
        let most = fair.max(FEWEST).min(most_rows(head));
        self.experts.clear();
        self.bounds.clear();
        for (expert, rows) in routing.experts() {
            for first in (0..batch).map(|row| row * tokens) {
                for tile in even(routing.within(rows.clone(), &(first..first + tokens)), most) {
                    self.experts.push(expert);
                    self.bounds.push(tile.start);
                }
            }
        }
        self.bounds.push(routing.rows());
        let columns = kv_heads * head;
        let layout = Layout { stride: row_stride(columns), columns, tile_columns: head };
        let grid = Grid::new(attended, layout, &self.bounds, &mut self.claims);
        ExpertAttention { inputs, experts: &self.experts, grid }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        (self.experts.capacity() + self.bounds.capacity()) * size_of::<usize>()
    }
}

impl Stage for ExpertAttention<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let ExpertInputs { queries: inputs, routing, panels, visible, causal_past, tokens, .. } = self.inputs;
        let QueryInputs { isa, kv_heads, head, .. } = inputs;
        let (count, group) = (out.rows(), index % kv_heads);
        let mut own = [0; TILE_ROWS];
        own.iter_mut()
            .zip(out.first_row()..)
            .take(count)
            .for_each(|(token, row)| *token = routing.pair(row) / routing.top_k);
        let mut queries = [0.0; QUERIES];
        let queries = &mut queries[..count * head];
        inputs.project(self.experts[index / kv_heads], group, &own[..count], None, &mut Tile::dense(queries, head));
        let batch = own[0] / tokens;
        let mut rows = Rows::new(batch * kv_heads + group);
        for (row, token) in own[..count].iter().enumerate() {
            match visible.up_to(causal_past.map(|past| past + token % tokens), batch).len() {
                0 => out.row(row).fill(0.0),
                seen => rows.push(row * head, row, seen),
            }
        }
        rows.attend(&Attending { isa, queries, panels, head }, &mut out);
    }
}
