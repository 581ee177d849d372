//! Many tokens: a block of them from queries to the layer's output, a block a task.
//!
//! Queries of all tokens, and what they attend to, would be written to memory and read again. Here a task takes the
//! rows that each expert has in its block through the layer, expert by expert, and adds their products to the output
//! before it goes on, in the order of [`crate::output_projection`]. Each block reads all weights once.

use std::ops::Range;

use crate::attention::{Attending, Rows};
use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::key_panels::{Panels, Visible};
use crate::output_projection::begin;
use crate::packed::{Geometry, Packed};
use crate::pool::Stage;
use crate::query_projection::{QueryInputs, row_stride};
use crate::routing::Routing;
use crate::rows::{RowProduct, TILE_ROWS, even};
use crate::simd::{Isa, Left, ROWS};

/// Elements of what all slots attend to that caches near the cores hold: stages that share it are faster up to here.
const NEAR: usize = 1 << 20;

/// Rows of an expert on average that a block aims at, from the best on: its weights are read once for all of them.
const ROWS_OF_EXPERT: [usize; 2] = [128, 64];

/// Elements of the weights of an expert that do not cost more to read for every block than blocks save.
const WEIGHTS: usize = 1 << 19;

/// Most tokens of a block, whose output stays near.
const MOST: usize = 256;

/// Blocks that are enough for threads to share.
const BLOCKS: usize = 8;

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
    pub(crate) routing: &'a Routing,
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

/// Tokens of a block, for the sizes that blocks serve: `[B, T, k]`, and `[E, G * D, C]` of the output weights. Products
/// on AMX tiles want the rows of the whole batch together.
pub(crate) fn block(isa: Isa, [batch, tokens, top_k]: [usize; 3], weights: Geometry) -> Option<usize> {
    let Geometry { matrices: experts, inner, columns, .. } = weights;
    let slots = tokens.saturating_mul(top_k);
    let attended = batch.saturating_mul(slots).saturating_mul(row_stride(inner));
    if isa.has_tiles() || attended <= NEAR || inner.saturating_mul(columns) > WEIGHTS / 2 {
        return None;
    }
    let blocks = |rows: usize| (rows.saturating_mul(experts) / top_k).clamp(1, MOST.min(tokens));
    let serves = |block: &usize| batch * tokens.div_ceil(*block) >= BLOCKS && block * top_k >= ROWS * experts;
    ROWS_OF_EXPERT.into_iter().map(blocks).find(serves)
}

impl ManyScratch {
    /// Prepares the stage for blocks of `block` tokens.
    pub(crate) fn stage<'a>(
        &'a mut self,
        inputs: ManyInputs<'a>,
        block: usize,
        output: &'a mut [f32],
    ) -> ManyTokens<'a> {
        let QueryInputs { kv_heads, head, width, .. } = inputs.queries;
        self.bounds.clear();
        for first in (0..inputs.batch).map(|row| row * inputs.tokens) {
            self.bounds.extend((0..inputs.tokens).step_by(block).map(|token| first + token));
        }
        self.bounds.push(inputs.batch * inputs.tokens);
        cut(&mut self.tasks, self.bounds.len() - 1, 1);
        let row_len = block.min(TILE_ROWS) * (head + row_stride(kv_heads * head));
        let rows = self.rows.take((self.bounds.len() - 1) * row_len);
        let [row_claims, claims] = &mut self.claims;
        ManyTokens {
            inputs,
            rows: Grid::new(rows, Layout::whole(row_len), &self.tasks, row_claims),
            out: Grid::new(output, Layout::whole(width), &self.bounds, claims),
        }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        self.rows.bytes() + (self.bounds.capacity() + self.tasks.capacity()) * size_of::<usize>()
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
        for (expert, own) in routing.experts() {
            for own in even(routing.within(own, &block), TILE_ROWS) {
                self.take(expert, own, rows, &mut out);
            }
        }
    }
}

impl ManyTokens<'_> {
    /// Takes at most [`TILE_ROWS`] rows of an expert through the layer and adds them to the output.
    fn take(&self, expert: usize, own: Range<usize>, memory: &mut [f32], out: &mut Tile<'_, f32>) {
        let ManyInputs { queries: QueryInputs { isa, kv_heads, head, .. }, routing, output_weights, .. } = self.inputs;
        let (count, stride, first) = (own.len(), row_stride(kv_heads * head), out.first_row());
        let (mut tokens, mut starts, mut factors) = ([0; TILE_ROWS], [0; TILE_ROWS], [0.0; TILE_ROWS]);
        for (row, pair) in own.map(|row| routing.pair(row)).enumerate() {
            (tokens[row], starts[row]) = (pair / routing.top_k, row * stride);
            factors[row] = routing.topk_weights[pair];
        }
        let (queries, attended) = memory.split_at_mut(count * head);
        let attended = &mut attended[..count * stride];
        for group in 0..kv_heads {
            self.attend(expert, group, &tokens[..count], queries, attended);
        }
        let rows = tokens.map(|token| token.saturating_sub(first));
        RowProduct {
            left: Left { data: attended, starts: &starts[..count], inner: kv_heads * head },
            weights: output_weights,
            matrix: expert,
            block: 0,
            first_column: 0,
            columns: out.columns(),
            rows: &rows[..count],
            factors: Some(&factors[..count]),
            next: None,
            epoch: None,
        }
        .compute(isa, out);
    }

    /// Fills the columns of a head in `attended`, a row for each token: 0 where it may see no key.
    fn attend(&self, expert: usize, group: usize, tokens: &[usize], queries: &mut [f32], attended: &mut [f32]) {
        let ManyInputs { queries: inputs, panels, visible, causal_past, tokens: per_row, .. } = self.inputs;
        let QueryInputs { isa, kv_heads, head, .. } = inputs;
        inputs.project(expert, group, tokens, None, &mut Tile::dense(queries, head));
        let mut out = Tile::columns_of(attended, row_stride(kv_heads * head), group * head, head);
        let batch = tokens[0] / per_row;
        let mut rows = Rows::new(batch * kv_heads + group);
        for (row, token) in tokens.iter().enumerate() {
            match visible.up_to(causal_past.map(|past| past + token % per_row), batch).len() {
                0 => out.row(row).fill(0.0),
                seen => rows.push(row * head, row, seen),
            }
        }
        rows.attend(&Attending { isa, queries, panels, head }, &mut out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Instructions;

    /// Sizes of layers, `[B, T, k]` and `[E, G * D, C]`, and the tokens of a block.
    #[test]
    fn blocks_of_known_layers() {
        let isa = Isa::at_most(Instructions::Portable);
        for (sizes, [matrices, inner, columns], tokens) in [
            ([1, 128, 8], [8, 128, 512], None),
            ([1, 128, 16], [32, 256, 512], None),
            ([4, 128, 16], [32, 256, 512], None),
            ([8, 128, 16], [32, 256, 512], Some(128)),
            ([8, 256, 8], [32, 128, 512], Some(256)),
            ([1, 2048, 8], [8, 128, 512], Some(128)),
            ([1, 512, 8], [8, 128, 512], None),
            ([1, 600, 16], [16, 128, 512], Some(64)),
            ([1, 2048, 2], [8, 2048, 2048], None),
            ([64, 40, 8], [64, 256, 512], None),
        ] {
            assert_eq!(block(isa, sizes, Geometry { matrices, blocks: 1, inner, columns }), tokens, "{sizes:?}");
        }
    }
}
