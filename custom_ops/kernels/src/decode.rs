//! Attention of one token a row of the batch: keys and values are read where they stand, once.
//!
//! One task handles the `k` slots of some tokens for one key/value head, token by token. It multiplies blocks of keys
//! with the queries of a token, which stand side by side as lanes. Where a token has few keys, four slots share a
//! vector instead, and where it has few slots, a vector holds elements of one key, so that fewer lanes are idle.

use moa_schema::AttentionMode;

use crate::attention::AttentionInputs;
use crate::buffer::Buffer;
use crate::cached::{CacheRows, Cached};
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::pool::Stage;
use crate::routing::Routing;
use crate::rows::{IN_ORDER, TILE_ROWS, blocks, even};
use crate::scalar::Scalar;
use crate::simd::{
    Ahead, Element, FewKeys, FewSlots, Isa, LANES, Left, Memory, OneToken, PANEL, Product, ROWS, Right, Write,
};

/// Keys of one tile.
const KEYS: usize = TILE_ROWS;

/// Most tokens of a task: they share the memory that holds queries as lanes, which so stays in the nearest cache.
const MOST_TOKENS: usize = 8;

/// Fewest tasks that are made of enough tokens, for threads to share.
const FEWEST_TASKS: usize = 16;

/// Memory that the stage keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct DecodeScratch {
    queries: Buffer,
    near: Buffer,
    bounds: [Vec<usize>; 2],
    claims: [Claims; 3],
}

/// The stage that fills `attended [B * k, G * D]` of `B` tokens.
pub(crate) struct Decode<'a> {
    inputs: AttentionInputs<'a>,
    cached: Cached<'a>,
    keys: usize,
    queries: Grid<'a, f32>,
    /// For each task a tile of keys or values as f32, where sticks are broken over caches of f16.
    near: Option<Grid<'a, f32>>,
    grid: Grid<'a, f32>,
}

/// Whether the stage serves a call of these sizes.
pub(crate) fn serves(tokens: usize, top_k: usize, head: usize) -> bool {
    tokens == 1 && top_k <= LANES && head.is_multiple_of(LANES)
}

impl DecodeScratch {
    /// Prepares the stage; of what is cached, each head has `keys` rows.
    pub(crate) fn stage<'a>(
        &'a mut self,
        inputs: AttentionInputs<'a>,
        cached: Cached<'a>,
        keys: usize,
        attended: &'a mut [f32],
    ) -> Decode<'a> {
        let AttentionInputs { routing: Routing { top_k, .. }, batch, kv_heads, head, .. } = inputs;
        let tokens = (batch * kv_heads / FEWEST_TASKS).clamp(1, MOST_TOKENS);
        let tasks = batch.div_ceil(tokens) * kv_heads;
        cut(&mut self.bounds[0], tasks, 1);
        cut(&mut self.bounds[1], batch * top_k, tokens * top_k);
        let [query_claims, near_claims, claims] = &mut self.claims;
        let widens = inputs.mode == AttentionMode::StickBreaking && matches!(cached, Cached::F16(_));
        let (near_len, near) = (KEYS * head, &mut self.near);
        let near = widens
            .then(|| Grid::new(near.take(tasks * near_len), Layout::whole(near_len), &self.bounds[0], near_claims));
        let (query_len, queries) = (head * LANES, self.queries.take(tasks * head * LANES));
        Decode {
            inputs,
            cached,
            keys,
            queries: Grid::new(queries, Layout::whole(query_len), &self.bounds[0], query_claims),
            near,
            grid: Grid::new(attended, inputs.layout(), &self.bounds[1], claims),
        }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let bounds: usize = self.bounds.iter().map(Vec::capacity).sum();
        self.queries.bytes() + self.near.bytes() + bounds * size_of::<usize>() + Claims::bytes(&self.claims)
    }
}

impl Stage for Decode<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let (Some(mut out), Some(mut queries)) = (self.grid.tile(index), self.queries.tile(index)) else { return };
        let AttentionInputs { routing, visible, mode, kv_heads, head, causal_past, .. } = self.inputs;
        let mut near = self.near.as_ref().and_then(|near| near.tile(index));
        let near = near.as_mut().map_or(&mut [][..], |near| near.row(0));
        let (group, top_k, stride) = (index % kv_heads, routing.top_k, self.inputs.layout().stride);
        let mut lanes = Lanes { queries: queries.row(0), scores: None, near };
        for first_row in (0..out.rows()).step_by(top_k) {
            let batch = (out.first_row() + first_row) / top_k;
            if !routing.routed[batch] {
                continue;
            }
            let places = visible.up_to(causal_past, batch);
            let token = Token {
                pair: batch * kv_heads + group,
                queries: &self.inputs.queries[batch * top_k * stride + group * head..],
                places,
                first_row,
            };
            match self.cached {
                _ if places.is_empty() => (0..top_k).for_each(|slot| out.row(first_row + slot).fill(0.0)),
                Cached::F32(rows) => self.attend_to_wide(rows, &token, &mut lanes, &mut out),
                Cached::F16(rows) if mode == AttentionMode::StickBreaking => {
                    self.attend_by_sticks(self.of(rows, &token), &token, &mut lanes, &mut out);
                }
                Cached::F16(rows) => self.few_slots(rows, &token, &mut out),
            }
        }
    }
}

/// Whether slots attend a few at a time to keys and values of f32, as they do to those of f16: with more groups than
/// two, the lanes of more slots are as fast.
fn in_groups(isa: Isa, top_k: usize, head: usize) -> bool {
    top_k <= 2 * FewSlots::MOST && FewSlots::serves(isa, 1, head)
}

/// Whether the stage serves a call of these sizes, and reads caches as they are stored.
pub(crate) fn reads_stored(isa: Isa, tokens: usize, top_k: usize, head: usize) -> bool {
    serves(tokens, top_k, head) && FewSlots::serves(isa, 1, head)
}

/// Whether the stage serves a call of these sizes, and reads a past where it stood before it was copied.
pub(crate) fn reads_past(isa: Isa, tokens: usize, top_k: usize, head: usize) -> bool {
    serves(tokens, top_k, head) && in_groups(isa, top_k, head)
}

/// One token before one key/value head.
struct Token<'a> {
    /// Number `batch * G + head` of its keys and values.
    pair: usize,
    /// From its first slot's query on.
    queries: &'a [f32],
    /// Keys that it sees.
    places: &'a [usize],
    /// Row of its first slot in the tile that is written.
    first_row: usize,
}

/// What the tokens of a task that have many keys use in turn.
struct Lanes<'a> {
    /// `[D, LANES]`.
    queries: &'a mut [f32],
    scores: Option<Scores>,
    /// `[KEYS, D]`, where caches are widened.
    near: &'a mut [f32],
}

/// Scores of one tile: `[key][slot]`, and as weights `[slot][key]`.
#[repr(align(64))]
struct Scores {
    by_key: [[f32; LANES]; KEYS],
    by_slot: [[f32; KEYS]; LANES],
}

impl Scores {
    /// Writes the weights of `keys` keys by slot.
    fn turn(&mut self, keys: usize, slots: usize) {
        for (slot, weights) in self.by_slot[..slots].iter_mut().enumerate() {
            weights.iter_mut().zip(&self.by_key[..keys]).for_each(|(weight, by_key)| *weight = by_key[slot]);
        }
    }
}

impl Decode<'_> {
    /// Keys and values `[S, D]` that a token sees some of.
    fn of<'b, T>(&self, rows: CacheRows<'b, T>, token: &Token<'_>) -> CacheRows<'b, T> {
        let AttentionInputs { batch, kv_heads, head, .. } = self.inputs;
        rows.of(token.pair, batch * kv_heads, self.keys * head)
    }

    /// A token as the doors to other ways of attending take it.
    fn one_token<'b, T>(&self, CacheRows { key, value, .. }: CacheRows<'b, T>, token: &Token<'b>) -> OneToken<'b, T> {
        let Token { queries, places, .. } = *token;
        let (stride, slots) = (self.inputs.layout().stride, self.inputs.routing.top_k);
        OneToken { queries, stride, slots, head: self.inputs.head, key, value, places }
    }

    /// Attends for few slots at a time, which share what is read.
    fn few_slots<T: Element>(&self, rows: CacheRows<'_, T>, token: &Token<'_>, out: &mut Tile<'_, f32>) {
        let AttentionInputs { batch, kv_heads, head, .. } = self.inputs;
        let far = CacheRows::<T>::is_far(batch * kv_heads * self.keys * head);
        let rows = self.of(rows, token);
        let all = self.one_token(rows, token);
        for slots in even(0..all.slots, FewSlots::MOST) {
            let queries = &all.queries[slots.start * all.stride..];
            let token_rows = OneToken { queries, slots: slots.len(), ..all };
            let few = FewSlots { token: token_rows, past: rows.past, far: far && slots.start == 0 };
            few.attend(self.inputs.isa, out, token.first_row + slots.start);
        }
    }

    fn attend_to_wide(&self, rows: CacheRows<'_>, token: &Token<'_>, lanes: &mut Lanes<'_>, out: &mut Tile<'_, f32>) {
        let AttentionInputs { isa, routing, mode, as_stored, batch, head, .. } = self.inputs;
        if mode == AttentionMode::StickBreaking {
            self.attend_by_sticks(self.of(rows, token), token, lanes, out);
        } else if as_stored {
            self.few_slots(rows, token, out);
        } else if FewKeys::serves(isa, token.places.len(), head) {
            let token_rows = self.one_token(self.of(rows, token), token);
            let few = FewKeys { token: token_rows, next: rows.key.len() / batch };
            few.attend(isa, out, token.first_row);
        } else if in_groups(isa, routing.top_k, head) {
            self.few_slots(rows, token, out);
        } else {
            self.attend(self.of(rows, token), token, lanes, out);
        }
    }

    fn attend(&self, rows: CacheRows<'_>, token: &Token<'_>, lanes: &mut Lanes<'_>, out: &mut Tile<'_, f32>) {
        let Token { places, first_row, .. } = *token;
        let (isa, top_k) = (self.inputs.isa, self.inputs.routing.top_k);
        let CacheRows { key, value, .. } = rows;
        let (queries, scores, _) = self.side_by_side(token, lanes);
        let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        for (tile, places) in places.chunks(KEYS).enumerate() {
            let by_key = &mut scores.by_key[..places.len()];
            self.score(queries, [key, value], places, by_key);
            let (before, mut tile_sum) = (max, [0.0; LANES]);
            isa.softmax_lanes(by_key, &mut max, &mut tile_sum);
            let mut factors = [0.0; LANES];
            for slot in 0..top_k {
                factors[slot] = if tile == 0 { 0.0 } else { (before[slot] - max[slot]).exp() };
                sum[slot] = sum[slot] * factors[slot] + tile_sum[slot];
            }
            scores.turn(places.len(), top_k);
            let factors = (tile > 0).then_some(&factors);
            self.mix(value, places, &scores.by_slot, factors, (out, first_row));
        }
        (0..top_k).for_each(|slot| isa.scale(out.row(first_row + slot), 1.0 / sum[slot]));
    }

    /// As [`Self::attend`] by stick-breaking: from the last key to the first, as long as something is left for one.
    fn attend_by_sticks<T: Scalar>(
        &self,
        rows: CacheRows<'_, T>,
        token: &Token<'_>,
        lanes: &mut Lanes<'_>,
        out: &mut Tile<'_, f32>,
    ) {
        let Token { places, first_row, .. } = *token;
        let (isa, top_k) = (self.inputs.isa, self.inputs.routing.top_k);
        let (queries, scores, memory) = self.side_by_side(token, lanes);
        let (mut left, mut factors) = ([1.0; LANES], None);
        for places in places.chunks(KEYS).rev() {
            let by_key = &mut scores.by_key[..places.len()];
            let [key, value] = self.where_they_stood(rows, places);
            let (keys, near) = self.widened(key, places, memory);
            self.score(queries, [keys, T::direct(value).unwrap_or(keys)], near, by_key);
            isa.break_sticks(by_key, &[KEYS as u32; LANES], &mut left);
            scores.turn(places.len(), top_k);
            let (values, near) = self.widened(value, places, memory);
            self.mix(values, near, &scores.by_slot, factors, (out, first_row));
            if left[..top_k].iter().all(|left| *left == 0.0) {
                break;
            }
            factors = Some(&[1.0; LANES]);
        }
    }

    /// Keys and values with these places: where all of them belong to a past that stands elsewhere, those there.
    fn where_they_stood<'b, T>(&self, rows: CacheRows<'b, T>, places: &[usize]) -> [&'b [T]; 2] {
        let end = places.last().map_or(0, |last| (last + 1) * self.inputs.head);
        rows.past.filter(|[key, value]| end <= key.len().min(value.len())).unwrap_or([rows.key, rows.value])
    }

    /// The rows `places` as f32, where they stand or in `memory`, and their places there.
    fn widened<'b, T: Scalar>(
        &self,
        rows: &'b [T],
        places: &'b [usize],
        memory: &'b mut [f32],
    ) -> (&'b [f32], &'b [usize]) {
        if let Some(rows) = T::direct(rows) {
            return (rows, places);
        }
        let head = self.inputs.head;
        for (place, wide) in places.iter().zip(memory.chunks_exact_mut(head)) {
            T::widen(&rows[place * head..][..head], wide);
        }
        (memory, &IN_ORDER[..places.len()])
    }

    /// The queries of a token as lanes, and memory for the scores of a tile, and for its keys or values.
    fn side_by_side<'b>(
        &self,
        token: &Token<'_>,
        lanes: &'b mut Lanes<'_>,
    ) -> (&'b [f32], &'b mut Scores, &'b mut [f32]) {
        let Lanes { queries, scores, near } = lanes;
        let scores = scores.get_or_insert_with(|| {
            queries.fill(0.0);
            Scores { by_key: [[0.0; LANES]; KEYS], by_slot: [[0.0; KEYS]; LANES] }
        });
        self.inputs.isa.interleave(token.queries, self.inputs.layout().stride, self.inputs.routing.top_k, queries);
        (queries, scores, near)
    }

    /// Products of keys and queries; values of the same places are fetched meanwhile.
    fn score(&self, queries: &[f32], [key, value]: [&[f32]; 2], places: &[usize], by_key: &mut [[f32; LANES]]) {
        let head = self.inputs.head;
        let mut starts = [0; KEYS];
        starts.iter_mut().zip(places).for_each(|(start, place)| *start = place * head);
        let rows: [usize; KEYS] = std::array::from_fn(|row| row);
        let mut out = Tile::dense(by_key.as_flattened_mut(), LANES);
        for block in blocks(places.len()) {
            let count = block.len();
            Product {
                left: Left::new(key, &starts[block.clone()], head),
                right: Right { data: queries, stride: LANES, panel_stride: 0 },
                rows: &rows[block.clone()],
                first_column: 0,
                columns: LANES,
                write: Write::Replace,
                scales: None,
                ahead: starts[block].first().map(|start| Ahead::Later(Memory::of(&value[*start..][..count * head]))),
            }
            .compute(self.inputs.isa, &mut out);
        }
    }

    /// Adds the values of a tile of keys, one run of neighbours at a time; `None` where there is no earlier tile.
    fn mix(
        &self,
        value: &[f32],
        places: &[usize],
        by_slot: &[[f32; KEYS]; LANES],
        factors: Option<&[f32; LANES]>,
        (out, first_row): (&mut Tile<'_, f32>, usize),
    ) {
        const ONES: [f32; LANES] = [1.0; LANES];
        let (head, top_k) = (self.inputs.head, self.inputs.routing.top_k);
        let rows: [usize; LANES] = std::array::from_fn(|slot| first_row + slot);
        let mut first = 0;
        for run in places.chunk_by(|a, b| a + 1 == *b) {
            let starts: [usize; LANES] = std::array::from_fn(|slot| slot * KEYS + first);
            for block in blocks(top_k) {
                Product {
                    left: Left::new(by_slot.as_flattened(), &starts[block.clone()], run.len()),
                    right: Right { data: &value[run[0] * head..], stride: head, panel_stride: PANEL },
                    rows: &rows[block.clone()],
                    first_column: 0,
                    columns: head,
                    write: match (first, factors) {
                        (0, None) => Write::Replace,
                        (0, Some(factors)) => Write::Resume(&factors[block]),
                        _ => Write::Resume(&ONES[..ROWS]),
                    },
                    scales: None,
                    ahead: None,
                }
                .compute(self.inputs.isa, out);
            }
            first += run.len();
        }
    }
}
