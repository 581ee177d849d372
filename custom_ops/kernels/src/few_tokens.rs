//! Few tokens with few keys: the rows of an expert from queries to products with its output weights, an expert a task.
//!
//! As in [`crate::single_token`], a task keeps its rows to itself, so that threads neither wait for each other between
//! these steps nor read what another core has just written. The products, `C` elements a row, are summed at the end, in
//! the order in which [`crate::output_projection`] adds them.

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::key_panels::Cache;
use crate::output_projection::begin;
use crate::packed::{Geometry, Packed};
use crate::pool::Stage;
use crate::query_projection::QueryInputs;
use crate::routing::Routing;
use crate::rows::{IN_ORDER, RowProduct, TILE_ROWS, even, may_meet_tiles};
use crate::simd::{FewSlots, Isa, Left, OneToken};
use crate::terms::Terms;

/// Most elements of all products: they are written once and read once more than where rows are added as they come.
const PRODUCTS: usize = 1 << 17;

/// Most keys: each row reads them anew.
const KEYS: usize = 64;

/// Fewest slots of a token.
const SLOTS: usize = 4;

/// Most tokens that one task sums.
const SUMMED: usize = 6;

/// Memory that the stages keep between calls.
#[derive(Debug, Default)]
pub(crate) struct FewScratch {
    rows: Buffer,
    products: Buffer,
    experts: Vec<usize>,
    bounds: Vec<usize>,
    tasks: Vec<usize>,
    tokens: Vec<usize>,
    claims: [Claims; 3],
}

/// What the first stage reads.
#[derive(Clone, Copy)]
pub(crate) struct FewInputs<'a> {
    pub(crate) queries: QueryInputs<'a>,
    pub(crate) routing: &'a Routing,
    pub(crate) cache: Cache<'a>,
    /// `Some(P)`: token `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    /// `[E, D, C]`.
    pub(crate) output_weights: &'a Packed,
}

/// The stage that fills products `[rows, C]` of what each row of the routing attended to and its expert's output
/// weights.
pub(crate) struct FewTokens<'a> {
    inputs: FewInputs<'a>,
    experts: &'a [usize],
    /// For each task `[2, T, D]`: queries, and what they attended to.
    rows: Grid<'a, f32>,
    products: Grid<'a, f32>,
}

/// The stage that sums the products of each token.
pub(crate) struct SumProducts<'a> {
    isa: Isa,
    routing: &'a Routing,
    products: &'a [f32],
    bias: Option<&'a [f32]>,
    grid: Grid<'a, f32>,
}

/// Whether the stages serve a call of these sizes.
pub(crate) fn serves(isa: Isa, sizes: [usize; 3], keys: usize, top_k: usize, output: Geometry) -> bool {
    let ([batch, tokens, kv_heads], Geometry { inner: head, columns: width, .. }) = (sizes, output);
    let products = [top_k, width].iter().fold(tokens, |all, size| all.saturating_mul(*size));
    [batch, kv_heads] == [1; 2]
        && (2..=TILE_ROWS).contains(&tokens)
        && keys <= KEYS
        && top_k >= SLOTS
        && products <= PRODUCTS
        && FewSlots::serves(isa, 1, head)
        && !may_meet_tiles(isa, tokens)
}

impl FewScratch {
    /// Prepares the first stage.
    pub(crate) fn stage<'a>(&'a mut self, inputs: FewInputs<'a>) -> FewTokens<'a> {
        let FewInputs { queries: QueryInputs { head, .. }, routing, .. } = inputs;
        let Geometry { matrices, columns: width, .. } = inputs.output_weights.geometry();
        let (tokens, pairs) = (routing.tokens(), routing.tokens() * routing.top_k);
        self.experts.clear();
        self.experts.extend(routing.tiles(TILE_ROWS).map(|(_, expert)| expert));
        self.bounds.clear();
        self.bounds.extend(routing.tiles(TILE_ROWS).map(|(start, _)| start));
        self.bounds.push(routing.rows());
        let row_len = 2 * tokens * head;
        cut(&mut self.tasks, self.experts.len(), 1);
        let [row_claims, claims, _] = &mut self.claims;
        let rows = self.rows.take(pairs.min(matrices) * row_len);
        let products = self.products.take(pairs * width);
        FewTokens {
            inputs,
            experts: &self.experts,
            rows: Grid::new(rows, Layout::whole(row_len), &self.tasks, row_claims),
            products: Grid::new(products, Layout::whole(width), &self.bounds, claims),
        }
    }

    /// Prepares the second stage, which fills `output [T, C]`.
    pub(crate) fn sum<'a>(
        &'a mut self,
        isa: Isa,
        routing: &'a Routing,
        bias: Option<&'a [f32]>,
        output: &'a mut [f32],
    ) -> SumProducts<'a> {
        let (tokens, width) = (routing.tokens(), output.len() / routing.tokens());
        // Even numbers of tasks are shared evenly by two threads.
        cut(&mut self.tokens, tokens, tokens.div_ceil(tokens.div_ceil(SUMMED).next_multiple_of(2)));
        let grid = Grid::new(output, Layout::whole(width), &self.tokens, &mut self.claims[2]);
        SumProducts { isa, routing, products: self.products.filled(), bias, grid }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let words = [&self.experts, &self.bounds, &self.tasks, &self.tokens];
        self.rows.bytes() + self.products.bytes() + words.map(Vec::capacity).iter().sum::<usize>() * size_of::<usize>()
    }
}

impl Stage for FewTokens<'_> {
    fn tasks(&self) -> usize {
        self.products.len()
    }

    fn run(&self, index: usize) {
        let (Some(mut rows), Some(mut products)) = (self.rows.tile(index), self.products.tile(index)) else { return };
        let FewInputs { queries: QueryInputs { isa, head, .. }, routing, .. } = self.inputs;
        let (first, count, expert) = (products.first_row(), products.rows(), self.experts[index]);
        let (mut tokens, mut starts) = ([0; TILE_ROWS], [0; TILE_ROWS]);
        for row in 0..count {
            (tokens[row], starts[row]) = (routing.pair(first + row) / routing.top_k, row * head);
        }
        let rows = rows.row(0);
        let (queries, attended) = rows.split_at_mut(rows.len() / 2);
        self.inputs.queries.project(expert, 0, &tokens[..count], None, None, &mut Tile::dense(queries, head));
        self.attend(queries, &tokens[..count], &mut Tile::dense(attended, head));
        RowProduct {
            left: Left { data: attended, starts: &starts[..count], inner: head },
            weights: self.inputs.output_weights,
            matrix: expert,
            block: 0,
            first_column: 0,
            columns: products.columns(),
            rows: &IN_ORDER[..count],
            factors: None,
            next: None,
            epoch: None,
        }
        .compute(isa, &mut products);
    }
}

impl FewTokens<'_> {
    /// Fills a row of `out` for each query, which belongs to a token of `tokens`.
    fn attend(&self, queries: &[f32], tokens: &[usize], out: &mut Tile<'_, f32>) {
        let FewInputs { queries: QueryInputs { isa, head, .. }, cache, causal_past, .. } = self.inputs;
        let [key, value] = [cache.key, cache.value].map(|rows| &rows[..cache.keys * head]);
        let places = |token: usize| cache.visible.up_to(causal_past.map(|past| past + token), 0);
        let mut first = 0;
        for alike in tokens.chunk_by(|a, b| places(*a).len() == places(*b).len()) {
            for rows in even(first..first + alike.len(), FewSlots::MOST) {
                let (queries, slots, places) = (&queries[rows.start * head..], rows.len(), places(alike[0]));
                let token = OneToken { queries, stride: head, slots, head, key, value, places };
                match places.len() {
                    0 => rows.for_each(|row| out.row(row).fill(0.0)),
                    _ => FewSlots { token, past: None, far: false }.attend(isa, out, rows.start),
                }
            }
            first += alike.len();
        }
    }
}

impl Stage for SumProducts<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let tokens = out.first_row()..out.first_row() + out.rows();
        for token in tokens.clone() {
            begin(out.row(token - tokens.start), self.bias, self.routing.routed[token]);
        }
        let (top_k, width) = (self.routing.top_k, out.columns());
        let own = tokens.start * top_k..tokens.end * top_k;
        let mut terms = [Terms::new(self.isa); SUMMED];
        let rows = self.routing.order().numbers().iter().enumerate();
        for (row, pair) in rows.filter(|(_, pair)| own.contains(pair)) {
            let (place, product) = (pair / top_k - tokens.start, &self.products[row * width..][..width]);
            terms[place].push(self.routing.topk_weights[*pair], product, out.row(place));
        }
        (0..tokens.len()).for_each(|place| terms[place].add_to(out.row(place)));
    }
}
