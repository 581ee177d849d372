//! One token alone: its slots from queries to products with the output weights.
//!
//! Threads that share a token stage by stage wait for each other, and read what another core has just written. Here a
//! thread takes a group of slots, few enough to be attended to together, through all steps. Other threads that have
//! nothing left to do take parts of the group's queries and products away from it. The products, `C` elements each, are
//! summed by one thread at the end, in the order in which [`crate::output_projection`] adds them, so that the bits are
//! the same. Routing and the caches are tasks of the same run of the pool: a task of slots waits for the experts before
//! it projects, and for keys and values before it attends, while other threads may still be routing or copying the
//! past.

use std::ops::RangeInclusive;

use crate::ThreadPool;
use crate::buffer::Buffer;
use crate::cached::{CacheRows, Cached};
use crate::geometry::Geometry;
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::output_projection::begin;
use crate::pool::{Stage, run_in_order, wait_for};
use crate::query_projection::QueryInputs;
use crate::routing::{ByExpert, Routing};
use crate::rows::RowProduct;
use crate::simd::{Element, FewKeys, FewSlots, Isa, Left, OneToken};
use crate::terms::Terms;
use crate::waiting_inputs::WaitingInputs;

/// Fewest slots.
const SLOTS: usize = 4;

/// Parts of a group, and tasks, each of which does whatever is left of it.
const PARTS: usize = 2;

/// Elements of the chosen experts' weights: with fewer, handing out tasks of so few slots takes longer than waiting for
/// each other; with more, further tasks are worth it.
const WEIGHTS: RangeInclusive<usize> = 1 << 18..=1 << 21;

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct SingleScratch {
    queries: Buffer,
    attended: Buffer,
    products: Buffer,
    /// Of groups, and of their parts.
    bounds: [Vec<usize>; 2],
    claims: [Claims; 3],
}

/// The stage that fills products `[k, C]` of what each slot attended to and its expert's output weights; nothing where
/// the token is not routed.
struct SingleToken<'a> {
    inputs: WaitingInputs<'a>,
    /// Where each group of slots begins.
    groups: &'a [usize],
    /// `[k, D]`, as what the slots attend to.
    queries: Grid<'a, f32>,
    attended: Grid<'a, f32>,
    products: Grid<'a, f32>,
}

/// Whether the stage serves a call of these sizes.
pub(crate) fn serves(isa: Isa, [batch, tokens, kv_heads]: [usize; 3], top_k: usize, output: Geometry) -> bool {
    let Geometry { inner: head, columns: width, .. } = output;
    let weights = [2, head, width].iter().fold(top_k, |all, size| all.saturating_mul(*size));
    [batch, tokens, kv_heads] == [1; 3]
        && top_k >= SLOTS
        && WEIGHTS.contains(&weights)
        && FewSlots::serves(isa, 1, head)
}

/// Cuts slots into an even number of groups, so that two threads get the same, and these into parts; all as even as can
/// be.
fn cut_groups(top_k: usize, groups: &mut Vec<usize>, parts: &mut Vec<usize>) {
    let count = top_k.div_ceil(FewSlots::MOST).next_multiple_of(2);
    groups.clear();
    groups.extend((0..=count).map(|group| group * top_k / count));
    parts.clear();
    for (first, slots) in groups.windows(2).map(|group| (group[0], group[1] - group[0])) {
        parts.extend((0..PARTS).map(|part| first + (part * slots).div_ceil(PARTS)));
    }
    parts.push(top_k);
}

impl SingleScratch {
    /// Routes the token, fills keys and values, and `output [C]`, nothing where the token cannot be routed.
    pub(crate) fn run(
        &mut self,
        pool: &dyn ThreadPool,
        inputs: WaitingInputs<'_>,
        by_expert: &mut ByExpert,
        output: &mut [f32],
    ) {
        self.multiply(pool, inputs);
        if let Some(routing) = inputs.router.stage().routing(by_expert) {
            self.sum(inputs, routing, output);
        }
    }

    /// Computes the products of the token's slots, and what they wait for.
    fn multiply(&mut self, pool: &dyn ThreadPool, inputs: WaitingInputs<'_>) {
        let (top_k, head) = (inputs.top_k, inputs.queries.head);
        let width = inputs.output_weights.geometry().columns;
        let Self { queries, attended, products, bounds: [groups, parts], claims: [first, second, third] } = self;
        cut_groups(top_k, groups, parts);
        let [queries, attended] = [queries, attended].map(|rows| rows.take(top_k * head));
        let products = products.take(top_k * width);
        let (head, width) = (Layout::whole(head), Layout::whole(width));
        let stage = SingleToken {
            inputs,
            groups,
            queries: Grid::new(queries, head, parts, first),
            attended: Grid::new(attended, head, groups, second),
            products: Grid::new(products, width, parts, third),
        };
        run_in_order(pool, &[inputs.router, inputs.keys_and_values, &stage]);
    }

    /// Fills `out [C]` with the bias and the products of the slots, each times its weight; 0 where the token is not
    /// routed.
    fn sum(&self, inputs: WaitingInputs<'_>, routing: Routing<'_>, out: &mut [f32]) {
        begin(out, inputs.bias, routing.routed[0]);
        let mut terms = Terms::new(inputs.queries.isa);
        for pair in routing.order().numbers() {
            let product = &self.products.filled()[pair * out.len()..][..out.len()];
            terms.push(routing.topk_weights[*pair], product, out);
        }
        terms.add_to(out);
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let bounds: usize = self.bounds.iter().map(Vec::capacity).sum();
        let rows = [&self.queries, &self.attended, &self.products].map(Buffer::bytes);
        rows.iter().sum::<usize>() + bounds * size_of::<usize>() + Claims::bytes(&self.claims)
    }
}

impl Stage for SingleToken<'_> {
    fn tasks(&self) -> usize {
        self.attended.len() * PARTS
    }

    fn run(&self, index: usize) {
        let Some(experts) = self.inputs.router.wait().experts_of(0) else { return };
        let group = index % self.attended.len();
        let parts = group * PARTS..(group + 1) * PARTS;
        for part in parts.clone() {
            self.project(part, experts);
        }
        if let Some(mut out) = self.attended.tile(group) {
            self.attend(wait_for(|| self.queries.finished_rows(parts.clone())), &mut out);
        }
        let attended = wait_for(|| self.attended.finished_rows(group..group + 1));
        for part in parts {
            self.multiply(part, experts, attended, self.groups[group]);
        }
    }
}

impl SingleToken<'_> {
    /// Fills the queries of a part.
    fn project(&self, part: usize, experts: &[i64]) {
        let Some(mut out) = self.queries.tile(part) else { return };
        let head = out.columns();
        for (row, expert) in experts[out.first_row()..][..out.rows()].iter().enumerate() {
            let mut query = Tile::dense(out.row(row), head);
            self.inputs.queries.project(*expert as usize, 0, &[0], None, None, &mut query);
        }
    }

    /// Fills a row of `out` for each query.
    fn attend(&self, queries: &[f32], out: &mut Tile<'_, f32>) {
        let WaitingInputs { queries: QueryInputs { isa, head, .. }, as_stored, visible, causal_past, .. } = self.inputs;
        let Some(cached) = self.inputs.keys_and_values.wait() else { return };
        let seen = visible.up_to(causal_past, 0).len();
        match cached {
            _ if seen == 0 => (0..out.rows()).for_each(|slot| out.row(slot).fill(0.0)),
            Cached::F32(rows) if !as_stored && FewKeys::serves(isa, seen, head) => {
                FewKeys { token: self.one_token(rows, queries), next: 0 }.attend(isa, out, 0);
            }
            Cached::F32(rows) => self.few_slots(rows, queries, out),
            Cached::F16(rows) => self.few_slots(rows, queries, out),
        }
    }

    fn few_slots<T: Element>(&self, rows: CacheRows<'_, T>, queries: &[f32], out: &mut Tile<'_, f32>) {
        let token = self.one_token(rows, queries);
        let far = CacheRows::<T>::is_far(self.inputs.keys * token.head);
        FewSlots { token, past: rows.past, far }.attend(self.inputs.queries.isa, out, 0);
    }

    fn one_token<'b, T>(&'b self, rows: CacheRows<'b, T>, queries: &'b [f32]) -> OneToken<'b, T> {
        let WaitingInputs { queries: QueryInputs { head, .. }, keys, visible, causal_past, .. } = self.inputs;
        let CacheRows { key, value, .. } = rows.of(0, 1, keys * head);
        let places = visible.up_to(causal_past, 0);
        OneToken { queries, stride: head, slots: queries.len() / head, head, key, value, places }
    }

    /// Fills the products of a part; what its slots attend to is in `attended`, from the slot `first` on.
    fn multiply(&self, part: usize, experts: &[i64], attended: &[f32], first: usize) {
        let Some(mut out) = self.products.tile(part) else { return };
        let QueryInputs { isa, head, .. } = self.inputs.queries;
        let slots = out.first_row()..out.first_row() + out.rows();
        for (row, slot) in slots.enumerate() {
            RowProduct {
                matrix: experts[slot] as usize,
                ..RowProduct::new(
                    Left::new(attended, &[(slot - first) * head], head),
                    self.inputs.output_weights,
                    &[row],
                    out.columns(),
                )
            }
            .compute(isa, &mut out);
        }
    }
}
