//! Many tokens: a block of them from queries to the layer's output, a block a task.
//!
//! Queries of all tokens, and what they attend to, would be written to memory and read again. Here a task takes the
//! rows that each expert has in its block through the layer, expert by expert, and adds their products to the output
//! before it goes on, in the order of [`crate::output_projection`]. Each block reads all weights once.

use std::ops::Range;

use crate::attention::{Attending, Rows};
use crate::buffer::{Buffer, emptied};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::key_panels::{Panels, Visible};
use crate::output_projection::begin;
use crate::packed::Packed;
use crate::pool::Stage;
use crate::query_projection::QueryInputs;
use crate::routing::Routing;
use crate::row_stride::row_stride;
use crate::rows::{Next, RowProduct, TILE_ROWS, are_far, even};
use crate::simd::{Isa, Left};

/// Elements of what all slots attend to up to which stages that share it are faster, on processors that multiply a near
/// row as fast as they read it.
const NEAR: usize = 1 << 20;

/// Most rows of an expert on average, which read its weights once.
const MOST_ROWS: usize = 128;

/// Most tokens of a block, whose output stays near.
const MOST_TOKENS: usize = 256;

/// Rows of an expert that blocks have where there are many of them.
const ROWS: usize = 64;

/// Blocks of each thread that are many: none of them waits long for another.
const MANY: usize = 4;

/// As [`ROWS`] where there are few blocks, on processors that take longer to multiply with a weight than to read it.
const FEWEST: usize = 24;

/// Most rows of an expert whose products fetch far weights of the next one: more rows wait too seldom for weights.
const HURRIED: usize = 48;

/// Where more than one place in so many would stay empty, threads wait for longer than blocks save.
const IDLE: usize = 25;

/// Elements of the weights of an expert, of its queries or its output, that do not cost more to read for every block
/// than blocks save.
const WEIGHTS: usize = 1 << 18;

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct ManyScratch {
    rows: Buffer,
    bounds: Vec<usize>,
    tasks: Vec<usize>,
    claims: [Claims; 2],
}

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct ManyInputs<'a> {
    pub(crate) queries: QueryInputs<'a>,
    pub(crate) routing: Routing<'a>,
    pub(crate) panels: Panels<'a>,
    pub(crate) visible: &'a Visible,
    /// `Some(P)`: token `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    /// `[E, G * D, C]`.
    pub(crate) output_weights: &'a Packed,
    /// `[C]`.
    pub(crate) bias: Option<&'a [f32]>,
}

/// The stage that fills `output [B * T, C]`: 0 for a token that is not routed.
pub(crate) struct ManyTokens<'a> {
    inputs: ManyInputs<'a>,
    /// For each task queries `[rows, D]`, and what they attend to, `[rows, G * D]`, with rows [`row_stride`] apart.
    rows: Grid<'a, f32>,
    out: Grid<'a, f32>,
}

/// What decides whether blocks serve, and how many.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) top_k: usize,
    /// Whether all rows of the batch have as many tokens that are routed.
    pub(crate) alike: bool,
    pub(crate) threads: usize,
}

/// Into how many blocks each row of the batch is cut where blocks serve; `weights` are those of the output. Products on
/// AMX tiles want the rows of the whole batch together.
pub(crate) fn blocks(isa: Isa, sizes: Sizes, weights: Geometry) -> Option<usize> {
    let (Sizes { batch, tokens, top_k, alike, threads }, Geometry { matrices, inner, columns, .. }) = (sizes, weights);
    let attended = [tokens, top_k, row_stride(inner)].iter().fold(batch, |all, size| all.saturating_mul(*size));
    let near = isa.multiplies_whole_vectors() && attended <= NEAR;
    if isa.has_tiles() || near || inner.saturating_mul(columns) > WEIGHTS {
        return None;
    }
    let tokens_of = |rows: usize| rows.saturating_mul(matrices).div_ceil(top_k);
    let fewest_blocks = tokens.div_ceil(tokens_of(MOST_ROWS).clamp(1, MOST_TOKENS));
    let shared = |blocks: usize| blocks.next_multiple_of(threads) - blocks <= blocks / IDLE;
    let first = |rows: usize, least: usize| {
        let mut large = (fewest_blocks..).take_while(|count| tokens / count >= tokens_of(rows));
        large.find(|count| batch * count >= least && shared(batch * count))
    };
    let fewest_rows = if isa.multiplies_whole_vectors() { ROWS } else { FEWEST };
    first(ROWS, MANY * threads).or_else(|| first(fewest_rows, threads).filter(|_| alike))
}

impl ManyScratch {
    /// Prepares the stage for rows of the batch that are cut into `count` blocks of much the same work.
    pub(crate) fn stage<'a>(
        &'a mut self,
        inputs: ManyInputs<'a>,
        count: usize,
        output: &'a mut [f32],
    ) -> ManyTokens<'a> {
        let QueryInputs { kv_heads, head, hidden_states, .. } = inputs.queries;
        emptied(&mut self.bounds, inputs.batch * count + 1);
        for row in 0..inputs.batch {
            cut_evenly(&mut self.bounds, row * inputs.tokens, inputs.tokens, count, |token| inputs.work(row, token));
        }
        self.bounds.push(inputs.batch * inputs.tokens);
        cut(&mut self.tasks, self.bounds.len() - 1, 1);
        let longest = self.bounds.windows(2).map(|bounds| bounds[1] - bounds[0]).max().unwrap_or(0);
        let row_len = longest.min(TILE_ROWS) * (head + row_stride(kv_heads * head));
        let rows = self.rows.take((self.bounds.len() - 1) * row_len);
        let [row_claims, claims] = &mut self.claims;
        ManyTokens {
            inputs,
            rows: Grid::new(rows, Layout::whole(row_len), &self.tasks, row_claims),
            out: Grid::new(output, Layout::whole(hidden_states.width()), &self.bounds, claims),
        }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let words = self.bounds.capacity() + self.tasks.capacity();
        self.rows.bytes() + words * size_of::<usize>() + Claims::bytes(&self.claims)
    }
}

impl ManyInputs<'_> {
    /// How many of the keys a token of a row of the batch sees.
    fn seen(&self, row: usize, token: usize) -> usize {
        self.visible.up_to(self.causal_past.map(|past| past + token), row).len()
    }

    /// Work of a token, in products of a slot and an element of a head.
    fn work(&self, row: usize, token: usize) -> usize {
        match self.routing.routed[row * self.tokens + token] {
            true => self.queries.hidden_states.width() + self.seen(row, token),
            false => 0,
        }
    }
}

/// Cuts `tokens` tokens from `first` on into at most `count` blocks of much the same work: where each begins.
fn cut_evenly(bounds: &mut Vec<usize>, first: usize, tokens: usize, count: usize, work: impl Fn(usize) -> usize) {
    let work = |token: usize| work(token).saturating_add(1);
    let all = (0..tokens).map(work).fold(0, usize::saturating_add);
    let (mut begun, mut done) = (0, 0usize);
    for token in 0..tokens {
        if done as u128 * count as u128 >= begun as u128 * all as u128 {
            bounds.push(first + token);
            begun += 1;
        }
        done = done.saturating_add(work(token));
    }
}

impl Stage for ManyTokens<'_> {
    fn tasks(&self) -> usize {
        self.out.len()
    }

    fn run(&self, index: usize) {
        let (Some(mut rows), Some(mut out)) = (self.rows.tile(index), self.out.tile(index)) else { return };
        let ManyInputs { routing, bias, .. } = self.inputs;
        let block = out.first_row()..out.first_row() + out.rows();
        for token in block.clone() {
            begin(out.row(token - block.start), bias, routing.routed[token]);
        }
        let rows = rows.row(0);
        let chosen = routing.experts().map(|(expert, own)| (expert, routing.within(own, &block)));
        let mut chosen = chosen.filter(|(_, own)| !own.is_empty()).peekable();
        while let Some((expert, own)) = chosen.next() {
            let then = chosen.peek().map(|(then, _)| *then);
            for own in even(own, TILE_ROWS) {
                self.take(expert, then, own, rows, &mut out);
            }
        }
    }
}

impl ManyTokens<'_> {
    /// Takes at most [`TILE_ROWS`] rows of an expert through the layer and adds them to the output; another expert may
    /// come `then`.
    fn take(&self, expert: usize, then: Option<usize>, own: Range<usize>, memory: &mut [f32], out: &mut Tile<'_, f32>) {
        let ManyInputs { queries: inputs, routing, output_weights, .. } = self.inputs;
        let QueryInputs { isa, kv_heads, head, .. } = inputs;
        let (count, stride, first) = (own.len(), row_stride(kv_heads * head), out.first_row());
        let (mut tokens, mut starts, mut factors) = ([0; TILE_ROWS], [0; TILE_ROWS], [0.0; TILE_ROWS]);
        for (row, pair) in own.map(|row| routing.pair(row)).enumerate() {
            (tokens[row], starts[row]) = (pair / routing.top_k, row * stride);
            factors[row] = routing.topk_weights[pair];
        }
        let (queries, attended) = memory.split_at_mut(count * head);
        let attended = &mut attended[..count * stride];
        for group in 0..kv_heads {
            let next = match group + 1 < kv_heads {
                true => next(count, inputs.weights, expert, group + 1),
                false => next(count, output_weights, expert, 0),
            };
            inputs.project(expert, group, &tokens[..count], None, next, &mut Tile::dense(queries, head));
            self.attend(group, &tokens[..count], queries, attended);
        }
        let rows = tokens.map(|token| token.saturating_sub(first));
        RowProduct {
            matrix: expert,
            factors: Some(&factors[..count]),
            next: then.and_then(|then| next(count, inputs.weights, then, 0)),
            ..RowProduct::new(
                Left::new(attended, &starts[..count], kv_heads * head),
                output_weights,
                &rows[..count],
                out.columns(),
            )
        }
        .compute(isa, out);
    }

    /// Fills the columns of a head in `attended`, a row for each token: 0 where it may see no key.
    fn attend(&self, group: usize, tokens: &[usize], queries: &[f32], attended: &mut [f32]) {
        let ManyInputs { queries: QueryInputs { isa, kv_heads, head, .. }, panels, tokens: per_row, .. } = self.inputs;
        let mut out = Tile::columns_of(attended, row_stride(kv_heads * head), group * head, head);
        let batch = tokens[0] / per_row;
        let mut rows = Rows::new(batch * kv_heads + group);
        for (row, token) in tokens.iter().enumerate() {
            match self.inputs.seen(batch, token % per_row) {
                0 => out.row(row).fill(0.0),
                seen => rows.push(row * head, row, seen),
            }
        }
        rows.attend(&Attending { isa, queries, panels, head }, &mut out);
    }
}

/// What `rows` rows fetch of the weights that are multiplied next.
fn next(rows: usize, weights: &Packed, matrix: usize, block: usize) -> Option<Next<'_>> {
    (rows <= HURRIED && are_far(weights)).then_some(Next { weights, matrix, block, first_column: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::every_isa;

    /// Sizes of layers, `[B, T, k]`, `[E, G * D, C]` of the output weights and threads, and how many blocks each row of
    /// the batch is then cut into, on processors that need many rows and on others.
    #[test]
    fn blocks_of_known_layers() {
        for (sizes, weights, threads, counts) in [
            ([1, 128, 8], [8, 128, 512], 2, [None, Some(2)]),
            ([1, 128, 8], [8, 128, 512], 3, [None, Some(3)]),
            ([1, 128, 8], [8, 128, 512], 4, [None, Some(4)]),
            ([1, 128, 8], [8, 128, 512], 5, [None, Some(5)]),
            ([1, 128, 8], [8, 128, 512], 6, [None; 2]),
            ([1, 128, 16], [32, 256, 512], 2, [None, Some(2)]),
            ([1, 128, 16], [32, 256, 512], 4, [None; 2]),
            ([4, 128, 16], [32, 256, 512], 2, [Some(1); 2]),
            ([8, 128, 16], [32, 256, 512], 2, [Some(1); 2]),
            ([8, 128, 16], [32, 256, 512], 3, [None; 2]),
            ([8, 128, 16], [32, 256, 512], 16, [None, Some(2)]),
            ([8, 256, 8], [32, 128, 512], 2, [Some(1); 2]),
            ([1, 2048, 8], [8, 128, 512], 2, [Some(16); 2]),
            ([1, 2048, 8], [8, 128, 512], 16, [Some(16); 2]),
            ([1, 512, 8], [8, 128, 512], 2, [None, Some(8)]),
            ([4, 512, 8], [8, 128, 512], 2, [Some(4); 2]),
            ([1, 40, 8], [8, 128, 512], 2, [None; 2]),
            ([1, 2048, 2], [8, 2048, 2048], 2, [None; 2]),
            ([64, 40, 8], [64, 256, 512], 2, [None; 2]),
        ] {
            let ([batch, tokens, top_k], [matrices, inner, columns]) = (sizes, weights);
            let sizes = Sizes { batch, tokens, top_k, alike: true, threads };
            let geometry = Geometry { matrices, blocks: 1, inner, columns };
            for isa in every_isa().into_iter().filter(|isa| !isa.has_tiles()) {
                let expected = counts[usize::from(!isa.multiplies_whole_vectors())];
                assert_eq!(blocks(isa, sizes, geometry), expected, "{sizes:?} {weights:?} {isa:?}");
            }
        }
    }

    /// Rows of which some are padding are cut into many blocks, or into none.
    #[test]
    fn few_blocks_need_rows_that_are_alike() {
        let isa = Isa::at_most(crate::Instructions::Portable);
        let geometry = Geometry { matrices: 8, blocks: 1, inner: 128, columns: 512 };
        let count = |batch, alike| blocks(isa, Sizes { batch, tokens: 128, top_k: 8, alike, threads: 2 }, geometry);
        assert_eq!([count(2, true), count(2, false)], [Some(1), None]);
        assert_eq!([count(4, true), count(4, false)], [Some(2), Some(2)]);
    }

    #[test]
    fn blocks_have_much_the_same_work() {
        let cut = |tokens, count, work: &dyn Fn(usize) -> usize| {
            let mut bounds = Vec::new();
            cut_evenly(&mut bounds, 100, tokens, count, work);
            bounds
        };
        assert_eq!(cut(8, 4, &|_| 50), [100, 102, 104, 106]);
        assert_eq!(cut(9, 2, &|_| 50), [100, 105]);
        assert_eq!(cut(8, 2, &|token| if token < 4 { 1000 } else { 0 }), [100, 103]);
        assert_eq!(cut(100, 2, &|token| token), [100, 171]);
        assert_eq!(cut(4, 3, &|token| if token == 0 { 1000 } else { 0 }), [100, 101, 102]);
        assert_eq!(cut(3, 2, &|_| 0), [100, 102]);
    }
}
