//! Few tokens with few keys: the rows of an expert from queries to products with its output weights, an expert a task.
//!
//! As in [`crate::single_token`], a task keeps its rows to itself, so that threads neither wait for each other between
//! these steps nor read what another core has just written, and it begins before all keys and values are there. The
//! products, `C` elements a row, are summed at the end, in the order in which [`crate::output_projection`] adds them.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::ThreadPool;
use crate::buffer::Buffer;
use crate::cached::{CacheRows, Cached};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::output_projection::begin;
use crate::pool::{Awaited, Stage, run_in_order};
use crate::query_projection::QueryInputs;
use crate::routing::{ByExpert, ExpertTiles, Routing};
use crate::rows::{IN_ORDER, RowProduct, TILE_ROWS, even, may_meet_tiles};
use crate::simd::{Element, FewSlots, Isa, Left, OneToken};
use crate::terms::Terms;
use crate::waiting_inputs::WaitingInputs;

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
    experts: ExpertScratch,
    tokens: Vec<usize>,
    claims: Claims,
}

/// Memory of the experts' tasks.
#[derive(Debug, Default)]
struct ExpertScratch {
    rows: Buffer,
    products: Buffer,
    tiles: ExpertTiles,
    tasks: Vec<usize>,
    claims: [Claims; 2],
}

/// The stage that cuts the other stages' work once the tokens are routed.
struct Plan<'a> {
    inputs: WaitingInputs<'a>,
    /// Taken by the only task.
    memory: Mutex<Option<(&'a mut ByExpert, &'a mut ExpertScratch)>>,
    experts: OnceLock<Experts<'a>>,
}

/// The chosen experts: the attended rows of each, times its output weights.
struct Experts<'a> {
    inputs: WaitingInputs<'a>,
    routing: Routing<'a>,
    experts: &'a [usize],
    /// For each expert queries, then what they attended to.
    rows: Grid<'a, f32>,
    /// `[rows of the routing, C]`.
    products: Grid<'a, f32>,
}

/// The stage of [`Experts`], of as many tasks as there may be at most.
struct Products<'s, 'a> {
    plan: &'s Awaited<Plan<'a>>,
}

/// The stage that fills `output [T, C]`: the bias, then weight times product for the chosen experts in rising order; 0
/// for a token that is not routed.
struct Sums<'s, 'a> {
    products: &'s Awaited<Products<'s, 'a>>,
    output: Grid<'s, f32>,
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
    /// Runs the stages that are waited for, and fills `output [T, C]`.
    pub(crate) fn run(
        &mut self,
        pool: &dyn ThreadPool,
        inputs: WaitingInputs<'_>,
        by_expert: &mut ByExpert,
        output: &mut [f32],
    ) {
        let WaitingInputs { router, keys_and_values, tokens, .. } = inputs;
        let Geometry { columns: width, .. } = inputs.output_weights.geometry();
        let Self { experts, tokens: bounds, claims } = self;
        // Two threads share an even number of tasks evenly.
        cut(bounds, tokens, tokens.div_ceil(tokens.div_ceil(SUMMED).next_multiple_of(2)));
        let memory = Mutex::new(Some((by_expert, experts)));
        let plan = Awaited::new(Plan { inputs, memory, experts: OnceLock::new() });
        let products = Awaited::new(Products { plan: &plan });
        let sums = Sums { products: &products, output: Grid::new(output, Layout::whole(width), bounds, claims) };
        run_in_order(pool, &[router, keys_and_values, &plan, &products, &sums]);
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let ExpertScratch { rows, products, tiles, tasks, claims } = &self.experts;
        let words = tasks.capacity() + self.tokens.capacity();
        let claims = Claims::bytes(claims.iter().chain([&self.claims]));
        rows.bytes() + products.bytes() + tiles.bytes() + words * size_of::<usize>() + claims
    }
}

/// Most experts that the tokens may choose.
fn most_experts(inputs: &WaitingInputs<'_>) -> usize {
    inputs.output_weights.geometry().matrices.min(inputs.tokens * inputs.top_k)
}

impl ExpertScratch {
    fn experts<'a>(&'a mut self, inputs: WaitingInputs<'a>, routing: Routing<'a>) -> Experts<'a> {
        let WaitingInputs { queries: QueryInputs { head, .. }, tokens, top_k, .. } = inputs;
        let Geometry { columns: width, .. } = inputs.output_weights.geometry();
        self.tiles.fill(routing, TILE_ROWS);
        let ExpertTiles { experts, bounds } = &self.tiles;
        cut(&mut self.tasks, experts.len(), 1);
        let row_len = 2 * tokens * head;
        let [row_claims, claims] = &mut self.claims;
        let rows = self.rows.take(most_experts(&inputs) * row_len);
        let products = self.products.take(tokens * top_k * width);
        Experts {
            inputs,
            routing,
            experts,
            rows: Grid::new(rows, Layout::whole(row_len), &self.tasks, row_claims),
            products: Grid::new(products, Layout::whole(width), bounds, claims),
        }
    }
}

impl Stage for Plan<'_> {
    fn tasks(&self) -> usize {
        1
    }

    fn run(&self, _: usize) {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((by_expert, scratch)) = memory else { return };
        let Some(routing) = self.inputs.router.wait().routing(by_expert) else { return };
        self.experts.get_or_init(|| scratch.experts(self.inputs, routing));
    }
}

impl Stage for Products<'_, '_> {
    fn tasks(&self) -> usize {
        most_experts(&self.plan.stage().inputs)
    }

    fn run(&self, index: usize) {
        if let Some(experts) = self.plan.wait().experts.get()
            && index < experts.experts.len()
        {
            experts.multiply(index);
        }
    }
}

impl Stage for Sums<'_, '_> {
    fn tasks(&self) -> usize {
        self.output.len()
    }

    fn run(&self, index: usize) {
        let experts = self.products.wait().plan.stage().experts.get();
        let (Some(experts), Some(mut out)) = (experts, self.output.tile(index)) else { return };
        experts.sum(&mut out);
    }
}

impl Experts<'_> {
    fn multiply(&self, index: usize) {
        let (Some(mut rows), Some(mut products)) = (self.rows.tile(index), self.products.tile(index)) else { return };
        let QueryInputs { isa, head, .. } = self.inputs.queries;
        let (first, count, expert) = (products.first_row(), products.rows(), self.experts[index]);
        let (mut tokens, mut starts) = ([0; TILE_ROWS], [0; TILE_ROWS]);
        for row in 0..count {
            (tokens[row], starts[row]) = (self.routing.pair(first + row) / self.routing.top_k, row * head);
        }
        let rows = rows.row(0);
        let (queries, attended) = rows.split_at_mut(rows.len() / 2);
        self.inputs.queries.project(expert, 0, &tokens[..count], None, None, &mut Tile::dense(queries, head));
        match self.inputs.keys_and_values.wait() {
            Some(Cached::F32(rows)) => self.attend(rows, queries, &tokens[..count], &mut Tile::dense(attended, head)),
            Some(Cached::F16(rows)) => self.attend(rows, queries, &tokens[..count], &mut Tile::dense(attended, head)),
            None => return,
        }
        RowProduct {
            matrix: expert,
            ..RowProduct::new(
                Left::new(attended, &starts[..count], head),
                self.inputs.output_weights,
                &IN_ORDER[..count],
                products.columns(),
            )
        }
        .compute(isa, &mut products);
    }

    /// Fills `out [tokens, D]`; tokens that see the same keys attend to them a few at a time.
    fn attend<T: Element>(&self, rows: CacheRows<'_, T>, queries: &[f32], tokens: &[usize], out: &mut Tile<'_, f32>) {
        let WaitingInputs { queries: QueryInputs { isa, head, .. }, keys, visible, causal_past, .. } = self.inputs;
        let CacheRows { key, value, past } = rows.of(0, 1, keys * head);
        let places = |token: usize| visible.up_to(causal_past.map(|past| past + token), 0);
        let mut first = 0;
        for alike in tokens.chunk_by(|a, b| places(*a).len() == places(*b).len()) {
            for rows in even(first..first + alike.len(), FewSlots::MOST) {
                let (queries, slots, places) = (&queries[rows.start * head..], rows.len(), places(alike[0]));
                let token = OneToken { queries, stride: head, slots, head, key, value, places };
                match places.len() {
                    0 => rows.for_each(|row| out.row(row).fill(0.0)),
                    _ => FewSlots { token, past, far: false }.attend(isa, out, rows.start),
                }
            }
            first += alike.len();
        }
    }

    /// Fills rows of the output, `[tokens, C]`, once all products are there.
    fn sum(&self, out: &mut Tile<'_, f32>) {
        let Some(products) = self.products.finished() else { return };
        let WaitingInputs { queries: QueryInputs { isa, .. }, top_k, bias, .. } = self.inputs;
        let (tokens, width) = (out.first_row()..out.first_row() + out.rows(), out.columns());
        for token in tokens.clone() {
            begin(out.row(token - tokens.start), bias, self.routing.routed[token]);
        }
        let own = tokens.start * top_k..tokens.end * top_k;
        let mut terms = [Terms::new(isa); SUMMED];
        let rows = self.routing.order().numbers().iter().enumerate();
        for (row, pair) in rows.filter(|(_, pair)| own.contains(pair)) {
            let (place, product) = (pair / top_k - tokens.start, &products[row * width..][..width]);
            terms[place].push(self.routing.topk_weights[*pair], product, out.row(place));
        }
        (0..tokens.len()).for_each(|place| terms[place].add_to(out.row(place)));
    }
}
