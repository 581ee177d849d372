//! Queries of the chosen experts.

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::hidden_states::HiddenStates;
use crate::packed::Packed;
use crate::pool::Stage;
use crate::rope::Rotary;
use crate::routing::{ExpertTiles, Routing};
use crate::row_stride::row_stride;
use crate::rows::{IN_ORDER, Next, RowProduct, TILE_ROWS, task_columns};
use crate::simd::{Epoch, Isa, PANEL, ROWS};

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct QueryScratch {
    queries: Buffer,
    tiles: ExpertTiles,
    claims: Claims,
}

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct QueryInputs<'a> {
    pub(crate) isa: Isa,
    /// `[B * T, C]`.
    pub(crate) hidden_states: HiddenStates<'a>,
    /// `[E, C, G * D]`, a block for each head.
    pub(crate) weights: &'a Packed,
    pub(crate) rotary: Option<Rotary<'a>>,
    /// What queries are multiplied with; `None` where the keys are, see [`crate::key_panels`].
    pub(crate) scale: Option<f32>,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl QueryInputs<'_> {
    /// Fills `out` with queries of one expert, from the head `group` on, rotated, and scaled where they are: a row for
    /// each of up to [`TILE_ROWS`] tokens; `next` is multiplied then.
    pub(crate) fn project(
        &self,
        expert: usize,
        group: usize,
        tokens: &[usize],
        epoch: Option<Epoch>,
        next: Option<Next<'_>>,
        out: &mut Tile<'_, f32>,
    ) {
        let Self { isa, hidden_states, head, .. } = *self;
        // A single row feels how long it takes to clear more.
        let (count, mut few, mut many) = (tokens.len(), [0; ROWS], None);
        let starts = match few.get_mut(..count) {
            Some(starts) => starts,
            None => &mut many.insert([0; TILE_ROWS])[..count],
        };
        starts.iter_mut().zip(tokens).for_each(|(start, token)| *start = hidden_states.start(*token));
        RowProduct {
            matrix: expert,
            block: group,
            next,
            epoch,
            ..RowProduct::new(hidden_states.rows(starts), self.weights, &IN_ORDER[..count], out.columns())
        }
        .compute(isa, out);
        for (row, token) in tokens.iter().enumerate() {
            let queries = out.row(row);
            if let Some(rotary) = self.rotary {
                queries.chunks_exact_mut(head).for_each(|query| rotary.rotate(*token, query));
            }
            if let Some(scale) = self.scale {
                isa.scale(queries, scale);
            }
        }
    }
}

/// The stage that fills queries `[B * T * k, G * D]`, as [`QueryInputs::project`] does, with rows [`row_stride`] apart;
/// those of tokens that are not routed are unspecified.
pub(crate) struct QueryProjection<'a> {
    inputs: QueryInputs<'a>,
    routing: Routing<'a>,
    experts: &'a [usize],
    grid: Grid<'a, f32>,
    epoch: Epoch,
}

impl QueryScratch {
    /// Prepares the stage.
    pub(crate) fn stage<'a>(&'a mut self, inputs: QueryInputs<'a>, routing: Routing<'a>) -> QueryProjection<'a> {
        self.tiles.fill(routing, TILE_ROWS);
        let ExpertTiles { experts, bounds } = &self.tiles;
        let columns = inputs.kv_heads * inputs.head;
        let tile_columns = if inputs.head.is_multiple_of(PANEL) {
            task_columns(inputs.isa, routing.rows(), experts.len(), columns, inputs.head)
        } else {
            inputs.head
        };
        let layout = Layout { stride: row_stride(columns), columns, tile_columns };
        let queries = self.queries.take(routing.tokens() * routing.top_k * layout.stride);
        let grid = Grid::scattered(queries, layout, routing.order(), bounds, &mut self.claims);
        QueryProjection { inputs, routing, experts, grid, epoch: Epoch::new() }
    }

    /// What the stage has filled.
    pub(crate) fn queries(&self) -> &[f32] {
        self.queries.filled()
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.queries.bytes() + self.tiles.bytes() + Claims::bytes([&self.claims])
    }
}

/// Tile `index` of `tiles`, `across` of them beside each other, in an order in which the experts take turns: those of
/// one row of tiles each, then those of the next.
fn in_turn(index: usize, experts: usize, across: usize, tiles: usize) -> usize {
    let (place, column, down) = (index / across, index % across, tiles / across / experts);
    (place % experts * down + place / experts) * across + column
}

impl QueryProjection<'_> {
    /// The tile of a task: on AMX tiles, where every token has every expert, rows are split once for all of these.
    fn by_rows(&self, index: usize) -> usize {
        let experts = self.inputs.weights.geometry().matrices;
        match self.inputs.isa.has_tiles() && self.routing.top_k == experts {
            true => in_turn(index, experts, self.grid.across(), self.grid.len()),
            false => index,
        }
    }
}

impl Stage for QueryProjection<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let index = self.by_rows(index);
        let Some(mut out) = self.grid.tile(index) else { return };
        let (routing, first, count) = (self.routing, out.first_row(), out.rows());
        let mut tokens = [0; TILE_ROWS];
        let rows = first..first + count;
        tokens.iter_mut().zip(rows).for_each(|(token, row)| *token = routing.pair(row) / routing.top_k);
        let expert = self.experts[index / self.grid.across()];
        let group = out.first_column() / self.inputs.head;
        self.inputs.project(expert, group, &tokens[..count], Some(self.epoch), None, &mut out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_take_turns_and_no_tile_is_left_out() {
        let order: Vec<_> = (0..12).map(|index| in_turn(index, 3, 2, 12)).collect();
        assert_eq!(order, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
    }
}
