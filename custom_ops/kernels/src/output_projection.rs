//! The weighted sum of the experts' products, added where it belongs.

use std::ops::Range;

use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, cut};
use crate::packed::Packed;
use crate::pool::Stage;
use crate::routing::Routing;
use crate::rows::{Next, RowProduct, TILE_ROWS, even};
use crate::simd::{Epoch, Isa, Left, PANEL, RoundedRows, StepOrder};

/// Elements of one expert's weights that a task of few tokens keeps in a near cache.
const STRIP: usize = 16384;

/// Tasks that are enough; twice as many are made where each has much work.
const TASKS: usize = 8;

/// Multiply-adds of a task that has much work: handing it out costs little beside them.
const WORK: usize = 1 << 23;

/// Rows of an expert, on average, from which on its weights are read for many at once.
const MANY: usize = 32;

/// Rows that an expert has on average in the tokens of a task, and panels of columns, from the best on: with many
/// columns the expert rows are read less often, with many rows the weights.
const SHARES: [(usize, usize); 6] = [(64, 16), (64, 8), (MANY, 16), (MANY, 8), NARROW, (MANY, 4)];

/// Without AVX-512 alone, and where fewer rows would not be all tokens: there weights that are read once for all rows
/// of an expert are worth more than rows that are read less often.
const NARROW: (usize, usize) = (64, 2);

/// Columns of a wide task on tiles; a narrow one has half as many.
const WIDE: usize = 16 * PANEL;

/// Wide tasks on tiles that each thread should have: with one fewer, one thread may wait for as long as another works.
const SHARE: usize = 2;

/// Most tokens of a task.
const MOST: usize = 256;

/// What is multiplied: `tokens` times `top_k` rows of `inner` elements, with `width` columns.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    tokens: usize,
    top_k: usize,
    experts: usize,
    inner: usize,
    width: usize,
    threads: usize,
}

impl Sizes {
    /// Tokens and columns that one task sums.
    fn task(&self, isa: Isa) -> (usize, usize) {
        let Self { tokens, top_k, experts, inner, width, .. } = *self;
        if isa.has_tiles() {
            return self.task_on_tiles();
        }
        if tokens * top_k < MANY * experts {
            return self.narrow_task();
        }
        let size = |(rows, panels): (usize, usize)| ((rows * experts).div_ceil(top_k).min(MOST), panels * PANEL);
        let tasks = |(rows, columns): (usize, usize)| tokens.div_ceil(rows) * width.div_ceil(columns);
        let narrow = !isa.has_wide_vectors() && MANY * experts < tokens * top_k;
        let shares = SHARES.into_iter().filter(|share| narrow || *share != NARROW).map(size);
        let first = |wanted: usize| shares.clone().find(|share| tasks(*share) >= wanted);
        let work = [top_k, inner, width].iter().fold(tokens, |work, size| work.saturating_mul(*size));
        first((work / WORK).clamp(TASKS, 2 * TASKS)).or_else(|| first(TASKS)).unwrap_or_else(|| self.narrow_task())
    }

    /// As [`Self::task`]: on tiles an expert should have many rows, and rows that are split many columns.
    fn task_on_tiles(&self) -> (usize, usize) {
        match self.tokens {
            tokens if tokens > MOST => {
                // How wide the last task is decides whether tiles serve it, and so its bits, which threads must not.
                let same_last = self.width % WIDE <= WIDE / 2;
                let enough = tokens.div_ceil(MOST) * self.width.div_ceil(WIDE) >= SHARE * self.threads;
                (MOST, if same_last && enough { WIDE } else { WIDE / 2 })
            }
            96.. => {
                let wide = self.tokens.div_ceil(128) * self.width.div_ceil(8 * PANEL) >= TASKS;
                (128, if wide { 8 * PANEL } else { 4 * PANEL })
            }
            _ => self.narrow_task(),
        }
    }

    /// As [`Self::task`], where an expert has few rows.
    fn narrow_task(&self) -> (usize, usize) {
        let columns = (STRIP / self.inner.max(1) / PANEL).clamp(2, 4) * PANEL;
        (8192 / columns, columns)
    }
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
    pub(crate) routing: Routing<'a>,
    /// Rows of `inner` elements, `stride` apart, in `order`.
    pub(crate) expert_rows: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) order: Order,
    /// How rows are quantized where they stand, if they are.
    pub(crate) in_place: Option<StepOrder>,
    /// `[E, inner, C]`.
    pub(crate) weights: &'a Packed,
    /// `[C]`.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) width: usize,
    /// Threads that may be expected to take part.
    pub(crate) threads: usize,
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
        let Geometry { matrices: experts, inner, .. } = inputs.weights.geometry();
        let (tokens, top_k) = (inputs.routing.tokens(), inputs.routing.top_k);
        let (step, tile_columns) =
            Sizes { tokens, top_k, experts, inner, width: inputs.width, threads: inputs.threads }.task(inputs.isa);
        cut(&mut self.bounds, tokens, step);
        let layout = Layout { stride: inputs.width, columns: inputs.width, tile_columns };
        let grid = Grid::new(output, layout, &self.bounds, &mut self.claims);
        OutputProjection { inputs, grid, epoch: Epoch::new() }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.bounds.capacity() * size_of::<usize>() + Claims::bytes([&self.claims])
    }
}

/// What a row of the output is before products are added: the bias, or 0 where the token is not routed.
pub(crate) fn begin(row: &mut [f32], bias: Option<&[f32]>, routed: bool) {
    match bias.filter(|_| routed) {
        Some(bias) => row.copy_from_slice(bias),
        None => row.fill(0.0),
    }
}

impl OutputProjection<'_> {
    /// The tile of a task. Neighbours share tokens: a thread that takes tasks in a row has attended to most of them, so
    /// that little of what it reads was written by another core. On AMX tiles they share columns, and so weights.
    fn tile(&self, index: usize) -> usize {
        let (across, down) = (self.grid.across(), self.grid.len() / self.grid.across());
        match self.inputs.isa.has_tiles() {
            true => index % down * across + index / down,
            false => index,
        }
    }
}

impl Stage for OutputProjection<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(self.tile(index)) else { return };
        let OutputInputs { isa, routing, order, stride, weights, .. } = self.inputs;
        let (tokens, first_column) = (out.first_row()..out.first_row() + out.rows(), out.first_column());
        let (inner, columns) = (weights.geometry().inner, out.columns());
        let rounded = self.inputs.in_place.map(|order| RoundedRows::in_place(order, self.inputs.expert_rows, stride));
        for token in tokens.clone() {
            let bias = self.inputs.bias.map(|bias| &bias[first_column..first_column + columns]);
            begin(out.row(token - tokens.start), bias, routing.routed[token]);
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
                    matrix: expert,
                    first_column,
                    factors: Some(&factors[..count]),
                    next: next.map(|matrix| Next { weights, matrix, block: 0, first_column }),
                    epoch: Some(self.epoch),
                    ..RowProduct::new(
                        Left { rounded, ..Left::new(self.inputs.expert_rows, &starts[..count], inner) },
                        weights,
                        &rows[..count],
                        columns,
                    )
                }
                .compute(isa, &mut out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Instructions;
    use crate::kernel_scratch::Scratch;

    /// 65 tiles take a word of claims more than a grid has itself.
    #[test]
    fn bounds_and_claims_count_as_scratch() {
        let (mut scratch, mut output) = (Scratch::default(), [0.0; 65]);
        let OutputScratch { bounds, claims } = &mut scratch.output;
        cut(bounds, output.len(), 1);
        let least = bounds.capacity() * size_of::<usize>();
        assert_eq!(Grid::new(&mut output, Layout::whole(1), bounds, claims).len(), 65);
        let held = scratch.bytes();
        assert!(held > least, "{held} {least}");
        for claims in scratch.cache.claims.as_flattened_mut().iter_mut().chain([&mut scratch.layer.claims]) {
            assert_eq!(Grid::new(&mut output, Layout::whole(1), &scratch.output.bounds, claims).len(), 65);
        }
        assert_eq!(scratch.bytes() - held, 5 * (held - least));
    }

    /// Sizes of layers, and the tokens and columns of a task.
    #[test]
    fn tasks_of_known_layers() {
        let isa = Isa::at_most(Instructions::Portable);
        for (layer, tokens, task) in [
            ((8, 8, 128, 512), 1, (64, 128)),
            ((8, 8, 128, 512), 10, (64, 128)),
            ((8, 8, 128, 512), 128, (32, 256)),
            ((8, 8, 128, 512), 2048, (64, 512)),
            ((16, 32, 256, 512), 128, (128, 64)),
            ((16, 32, 256, 512), 1024, (128, 256)),
            ((2, 8, 2048, 2048), 1, (128, 64)),
            ((2, 8, 2048, 2048), 128, (128, 128)),
            ((2, 8, 2048, 2048), 1024, (256, 512)),
            ((1, 64, 128, 512), 4096, (256, 512)),
        ] {
            let (top_k, experts, inner, width) = layer;
            let sizes = Sizes { tokens, top_k, experts, inner, width, threads: 2 };
            assert_eq!(sizes.task(isa), task, "{layer:?} {tokens}");
        }
    }

    /// On tiles: tokens, width and threads, and the tokens and columns of a task.
    #[test]
    fn tasks_on_tiles_are_wide_where_threads_have_two_each() {
        for ([tokens, width, threads], task) in [
            ([1024, 512, 2], (256, 512)),
            ([1024, 512, 3], (256, 256)),
            ([2048, 512, 4], (256, 512)),
            ([2048, 512, 5], (256, 256)),
            ([512, 2048, 4], (256, 512)),
            ([257, 512, 3], (256, 256)),
            ([257, 512, 2], (256, 256)),
            ([256, 512, 2], (128, 128)),
            ([256, 2048, 2], (128, 256)),
            ([95, 512, 2], (64, 128)),
        ] {
            let sizes = Sizes { tokens, top_k: 8, experts: 8, inner: 128, width, threads };
            assert_eq!(sizes.task_on_tiles(), task, "{tokens} {width} {threads}");
        }
    }

    #[test]
    fn threads_change_no_width_that_decides_about_tiles() {
        for (tokens, width) in (1..=2100).flat_map(|width| [96, 257, 512, 2048].map(|tokens| (tokens, width))) {
            let last = |threads| {
                let sizes = Sizes { tokens, top_k: 2, experts: 8, inner: 64, width, threads };
                let (rows, columns) = sizes.task_on_tiles();
                (rows, ((width - 1) % columns + 1).min(WIDE / 2))
            };
            (3..=17).for_each(|threads| assert_eq!(last(threads), last(2), "{tokens} {width} {threads}"));
        }
    }
}
