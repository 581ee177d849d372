//! The weighted sum of the experts' products, added where it belongs.

use std::ops::Range;

use crate::grid::{Claims, Grid, Layout, cut};
use crate::packed::Packed;
use crate::pool::Stage;
use crate::routing::Routing;
use crate::rows::{RowProduct, TILE_ROWS, even};
use crate::simd::{Epoch, Isa, Left, PANEL};

/// Elements of one expert's weights that a task of few tokens keeps in a near cache.
const STRIP: usize = 16384;

/// Tasks that are enough.
const TASKS: usize = 8;

/// Tokens and columns that one task sums: where there are many tokens, wide strips read the expert rows less often; on
/// tiles an expert should have many rows, and rows that are split many columns.
fn task_size(isa: Isa, tokens: usize, [inner, width]: [usize; 2]) -> (usize, usize) {
    if tokens > 256 {
        return (256, 8 * PANEL);
    }
    if isa.has_tiles() && tokens >= 96 {
        let wide = tokens.div_ceil(128) * width.div_ceil(8 * PANEL) >= TASKS;
        return (128, if wide { 8 * PANEL } else { 4 * PANEL });
    }
    let columns = (STRIP / inner.max(1) / PANEL).clamp(2, 4) * PANEL;
    (8192 / columns, columns)
}

/// In which order the expert rows stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// By pair `token * k + slot`.
    Pairs,
    /// By row of the routing.
    Rows,
}

/// What the stage reads.
pub(crate) struct OutputInputs<'a> {
    pub(crate) isa: Isa,
    pub(crate) routing: &'a Routing,
    /// Rows of `inner` elements, `stride` apart, in `order`.
    pub(crate) expert_rows: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) order: Order,
    /// `[E, inner, C]`.
    pub(crate) weights: &'a Packed,
    /// `[C]`.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) width: usize,
}

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct OutputScratch {
    bounds: Vec<usize>,
    claims: Claims,
}

/// The stage that fills `output [B * T, C]`: the bias, then weight times product for the chosen experts in rising
/// order; 0 for a token that is not routed.
pub(crate) struct OutputProjection<'a> {
    inputs: OutputInputs<'a>,
    grid: Grid<'a, f32>,
    epoch: Epoch,
}

impl OutputScratch {
    /// Prepares the stage.
    pub(crate) fn stage<'a>(&'a mut self, inputs: OutputInputs<'a>, output: &'a mut [f32]) -> OutputProjection<'a> {
        let (tokens, tile_columns) =
            task_size(inputs.isa, inputs.routing.tokens(), [inputs.weights.geometry().inner, inputs.width]);
        cut(&mut self.bounds, inputs.routing.tokens(), tokens);
        let layout = Layout { stride: inputs.width, columns: inputs.width, tile_columns };
        let grid = Grid::new(output, layout, &self.bounds, &mut self.claims);
        OutputProjection { inputs, grid, epoch: Epoch::new() }
    }
}

impl OutputProjection<'_> {
    /// The tile of a task: neighbours share a strip of columns, and so the weights that they read.
    fn by_strip(&self, index: usize) -> usize {
        let (across, down) = (self.grid.across(), self.grid.len() / self.grid.across());
        index % down * across + index / down
    }
}

impl Stage for OutputProjection<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(self.by_strip(index)) else { return };
        let OutputInputs { isa, routing, order, stride, weights, .. } = self.inputs;
        let (tokens, first_column) = (out.first_row()..out.first_row() + out.rows(), out.first_column());
        let (inner, columns) = (weights.geometry().inner, out.columns());
        for token in tokens.clone() {
            let row = out.row(token - tokens.start);
            match self.inputs.bias.filter(|_| routing.routed[token]) {
                Some(bias) => row.copy_from_slice(&bias[first_column..first_column + columns]),
                None => row.fill(0.0),
            }
        }
        let (mut starts, mut rows, mut factors) = ([0; TILE_ROWS], [0; TILE_ROWS], [0.0; TILE_ROWS]);
        let chosen = routing.experts().map(|(expert, own)| (expert, routing.within(own, &tokens)));
        let mut chosen = chosen.filter(|(_, own)| !own.is_empty()).peekable();
        while let Some((expert, own)) = chosen.next() {
            let next = chosen.peek().map(|(next, _)| *next);
            for Range { start: first, end } in even(own, TILE_ROWS) {
                let count = end - first;
                for place in 0..count {
                    let pair = routing.pair(first + place);
                    starts[place] = if order == Order::Pairs { pair } else { first + place } * stride;
                    rows[place] = pair / routing.top_k - tokens.start;
                    factors[place] = routing.topk_weights[pair];
                }
                RowProduct {
                    left: Left { data: self.inputs.expert_rows, starts: &starts[..count], inner },
                    weights,
                    matrix: expert,
                    block: 0,
                    first_column,
                    columns,
                    rows: &rows[..count],
                    factors: Some(&factors[..count]),
                    next,
                    epoch: Some(self.epoch),
                }
                .compute(isa, &mut out);
            }
        }
    }
}
