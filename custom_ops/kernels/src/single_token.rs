//! One token alone: its slots from queries to products with the output weights, a few of them a task.
//!
//! Threads that share a token stage by stage wait for each other, and read what another core has just written. Here a
//! task keeps its slots to itself, and only their products, `C` elements each, are summed by one thread at the end, in
//! the order in which [`crate::output_projection`] adds them, so that the bits are the same. Routing and the
//! caches are tasks of the same run of the pool: a task of slots waits for the experts before it projects, and for keys
//! and values before it attends, while other threads may still be routing or copying the past.

use std::ops::RangeInclusive;

use crate::buffer::Buffer;
use crate::cached::{CacheRows, Cached, KeysAndValues};
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::key_panels::Visible;
use crate::output_projection::begin;
use crate::packed::{Geometry, Packed};
use crate::pool::{Awaited, Stage};
use crate::query_projection::QueryInputs;
use crate::routing::{Router, Routing};
use crate::rows::RowProduct;
use crate::simd::{Element, FewKeys, FewSlots, Isa, Left, OneToken};

/// Tasks that are enough for threads to share, where keys and values stay near and where they do not: each task reads
/// all of them.
const TASKS: [usize; 2] = [4, 2];

/// Elements of keys that stay near with their values.
const NEAR: usize = 1 << 16;

/// Elements of the chosen experts' weights: with fewer, handing out tasks of so few slots takes longer than waiting for
/// each other; with more, further tasks are worth it.
const WEIGHTS: RangeInclusive<usize> = 1 << 18..=1 << 21;

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct SingleScratch {
    rows: Buffer,
    products: Buffer,
    bounds: [Vec<usize>; 2],
    claims: [Claims; 2],
}

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct SingleInputs<'a> {
    pub(crate) queries: QueryInputs<'a>,
    pub(crate) routes: &'a Awaited<Router<'a>>,
    pub(crate) top_k: usize,
    /// `[rows, D]`, of which the first `S` rows are keys.
    pub(crate) keys_and_values: &'a dyn KeysAndValues,
    pub(crate) keys: usize,
    pub(crate) visible: &'a Visible,
    /// `Some(P)`: the token sees the keys `0 ..= P` only.
    pub(crate) causal_past: Option<usize>,
    /// `[E, D, C]`.
    pub(crate) output_weights: &'a Packed,
}

/// The stage that fills products `[k, C]` of what each slot attended to and its expert's output weights; nothing where
/// the token is not routed.
pub(crate) struct SingleToken<'a> {
    inputs: SingleInputs<'a>,
    /// For each task `[2, slots, D]`: queries, and what they attended to.
    rows: Grid<'a, f32>,
    products: Grid<'a, f32>,
}

/// Whether the stage serves a call of these sizes.
pub(crate) fn serves(isa: Isa, [batch, tokens, kv_heads]: [usize; 3], top_k: usize, output: Geometry) -> bool {
    let Geometry { inner: head, columns: width, .. } = output;
    let weights = [2, head, width].iter().fold(top_k, |all, size| all.saturating_mul(*size));
    [batch, tokens, kv_heads] == [1; 3]
        && top_k >= TASKS[0]
        && WEIGHTS.contains(&weights)
        && FewSlots::serves(isa, 1, head)
}

impl SingleScratch {
    /// Prepares the stage.
    pub(crate) fn stage<'a>(&'a mut self, inputs: SingleInputs<'a>) -> SingleToken<'a> {
        let (top_k, head) = (inputs.top_k, inputs.queries.head);
        let width = inputs.output_weights.geometry().columns;
        let far = inputs.keys.saturating_mul(head) > NEAR;
        let slots = top_k.div_ceil(TASKS[usize::from(far)]).min(FewSlots::MOST);
        let [tasks, bounds] = &mut self.bounds;
        cut(bounds, top_k, slots);
        cut(tasks, bounds.len() - 1, 1);
        let [row_claims, claims] = &mut self.claims;
        let row_len = 2 * slots * head;
        let (rows, products) = (self.rows.take((tasks.len() - 1) * row_len), self.products.take(top_k * width));
        SingleToken {
            inputs,
            rows: Grid::new(rows, Layout::whole(row_len), tasks, row_claims),
            products: Grid::new(products, Layout::whole(width), bounds, claims),
        }
    }

    /// Fills `out [C]` with the bias and the products of the stage, each times its weight; 0 where the token is not
    /// routed.
    pub(crate) fn sum(&self, isa: Isa, routing: &Routing, bias: Option<&[f32]>, out: &mut [f32]) {
        begin(out, bias, routing.routed[0]);
        for pair in routing.order().numbers() {
            let product = &self.products.filled()[pair * out.len()..][..out.len()];
            isa.add_scaled(out, routing.topk_weights[*pair], product);
        }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let bounds: usize = self.bounds.iter().map(Vec::capacity).sum();
        self.rows.bytes() + self.products.bytes() + bounds * size_of::<usize>()
    }
}

impl Stage for SingleToken<'_> {
    fn tasks(&self) -> usize {
        self.products.len()
    }

    fn run(&self, index: usize) {
        let (Some(mut rows), Some(mut products)) = (self.rows.tile(index), self.products.tile(index)) else { return };
        let QueryInputs { isa, head, .. } = self.inputs.queries;
        let Some(experts) = self.inputs.routes.wait().experts_of(0) else { return };
        let experts = &experts[products.first_row()..][..products.rows()];
        let rows = rows.row(0);
        let (queries, attended) = rows.split_at_mut(rows.len() / 2);
        for (query, expert) in queries.chunks_mut(head).zip(experts) {
            self.inputs.queries.project(*expert as usize, 0, &[0], None, &mut Tile::dense(query, head));
        }
        self.attend(queries, experts.len(), &mut Tile::dense(attended, head));
        for (slot, expert) in experts.iter().enumerate() {
            RowProduct {
                left: Left { data: attended, starts: &[slot * head], inner: head },
                weights: self.inputs.output_weights,
                matrix: *expert as usize,
                block: 0,
                first_column: 0,
                columns: products.columns(),
                rows: &[slot],
                factors: None,
                next: None,
                epoch: None,
            }
            .compute(isa, &mut products);
        }
    }
}

impl SingleToken<'_> {
    /// Fills a row of `out` for each slot.
    fn attend(&self, queries: &[f32], slots: usize, out: &mut Tile<'_, f32>) {
        let SingleInputs { queries: QueryInputs { isa, head, .. }, visible, causal_past, .. } = self.inputs;
        let Some(cached) = self.inputs.keys_and_values.wait() else { return };
        let seen = visible.up_to(causal_past, 0).len();
        match cached {
            _ if seen == 0 => (0..slots).for_each(|slot| out.row(slot).fill(0.0)),
            Cached::F32(rows) if FewKeys::serves(isa, seen, head) => {
                FewKeys { token: self.one_token(rows, queries, slots), next: 0 }.attend(isa, out, 0);
            }
            Cached::F32(rows) => self.few_slots(rows, queries, slots, out),
            Cached::F16(rows) => self.few_slots(rows, queries, slots, out),
        }
    }

    fn few_slots<T: Element>(&self, rows: CacheRows<'_, T>, queries: &[f32], slots: usize, out: &mut Tile<'_, f32>) {
        let token = self.one_token(rows, queries, slots);
        let far = CacheRows::<T>::is_far(self.inputs.keys * token.head);
        FewSlots { token, past: rows.past, far }.attend(self.inputs.queries.isa, out, 0);
    }

    fn one_token<'b, T>(&'b self, rows: CacheRows<'b, T>, queries: &'b [f32], slots: usize) -> OneToken<'b, T> {
        let SingleInputs { queries: QueryInputs { head, .. }, keys, visible, causal_past, .. } = self.inputs;
        let CacheRows { key, value, .. } = rows.of(0, 1, keys * head);
        OneToken { queries, stride: head, slots, head, key, value, places: visible.up_to(causal_past, 0) }
    }
}
