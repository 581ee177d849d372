//! Keys and values of the new tokens, appended to those of the past.

use std::ops::Range;

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout};
use crate::packed::Packed;
use crate::pool::Stage;
use crate::rope::Rotary;
use crate::rows::RowProduct;
use crate::scalar::Scalar;
use crate::simd::{Isa, Left};

/// New tokens that one task projects.
const TOKENS_PER_TASK: usize = 64;

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct CacheInputs<'a, T> {
    pub(crate) isa: Isa,
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    /// `[C, 2 * G * D]`, a block for each head, keys first.
    pub(crate) kv_weight: &'a Packed,
    /// `[B, G, P, D]`.
    pub(crate) past_rows: &'a [T],
    /// `None` for values.
    pub(crate) rotary: Option<Rotary<'a>>,
    /// First block of the weights: 0 for keys, `G` for values.
    pub(crate) first_block: usize,
    pub(crate) tokens: usize,
    pub(crate) past: usize,
    pub(crate) width: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

/// The stage that fills a cache `[B, G, P + T, D]`: the past, then the new tokens, whose keys are rotated; all of it as
/// `T` keeps it.
pub(crate) struct Append<'a, T> {
    inputs: CacheInputs<'a, T>,
    grid: Grid<'a, f32>,
    stored: Option<Grid<'a, T>>,
}

/// Rows of the batch, with their past, that one task fills: several where each has few new tokens, so that their product
/// has rows enough. The rows of one head lie side by side only where there is one.
fn rows_per_task(kv_heads: usize, tokens: usize) -> usize {
    if kv_heads == 1 { TOKENS_PER_TASK / tokens } else { 1 }
}

/// Cuts the rows of a cache: into groups of whole (batch, head) pairs, or for each pair the past, then groups of new
/// tokens.
pub(crate) fn cut_cache(bounds: &mut Vec<usize>, batch: usize, kv_heads: usize, past: usize, tokens: usize) {
    bounds.clear();
    let (pairs, group) = (batch * kv_heads, rows_per_task(kv_heads, tokens));
    if group > 1 {
        bounds.extend((0..pairs).step_by(group).map(|pair| pair * (past + tokens)));
        bounds.push(pairs * (past + tokens));
        return;
    }
    for pair in 0..pairs {
        let first = pair * (past + tokens);
        bounds.push(first);
        bounds.extend((0..tokens).step_by(TOKENS_PER_TASK).map(|token| first + past + token));
    }
    bounds.push(pairs * (past + tokens));
}

impl<'a, T: Scalar> Append<'a, T> {
    /// Prepares the stage; `bounds` comes from [`cut_cache`], the destinations from [`destinations`].
    pub(crate) fn new(
        inputs: CacheInputs<'a, T>,
        cache: &'a mut [f32],
        stored: Option<&'a mut [T]>,
        bounds: &'a [usize],
        [claims, stored_claims]: &'a mut [Claims; 2],
    ) -> Self {
        let layout = Layout::whole(inputs.head);
        let stored = stored.map(|stored| Grid::new(stored, layout, bounds, stored_claims));
        Self { inputs, grid: Grid::new(cache, layout, bounds, claims), stored }
    }
}

/// Where a cache of `len` elements goes as f32, and beside it as `T`: `present` takes it where that is f32, else `own`.
pub(crate) fn destinations<'a, T: Scalar>(
    present: Option<&'a mut [T]>,
    own: &'a mut Buffer,
    len: usize,
) -> (&'a mut [f32], Option<&'a mut [T]>) {
    match present.map(T::direct_mut) {
        Some(Ok(present)) => (present, None),
        Some(Err(present)) => (own.take(len), Some(present)),
        None => (own.take(len), None),
    }
}

impl<T: Scalar> Stage for Append<'_, T> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let mut stored = self.stored.as_ref().and_then(|stored| stored.tile(index));
        let CacheInputs { isa, tokens, past, width, kv_heads, head, .. } = self.inputs;
        let share = self.share(index, out.rows());
        for pair in share.pairs.clone() {
            let source = self.inputs.past_rows[pair * past * head..][..past * head].chunks(head);
            for (row, source) in source.enumerate() {
                let row = (pair - share.pairs.start) * (past + tokens) + row;
                T::widen(source, out.row(row));
                if let Some(stored) = &mut stored {
                    stored.row(row).copy_from_slice(source);
                }
            }
        }
        let count = share.tokens.len();
        if count == 0 {
            return;
        }
        let token = |place: usize| share.tokens.start + place;
        let row = |place: usize| match share.pairs.is_empty() {
            true => place,
            false => (token(place) / tokens - share.pairs.start) * (past + tokens) + past + token(place) % tokens,
        };
        let starts: [usize; TOKENS_PER_TASK] = std::array::from_fn(|place| token(place) * width);
        let rows: [usize; TOKENS_PER_TASK] = std::array::from_fn(row);
        RowProduct {
            left: Left { data: self.inputs.hidden_states, starts: &starts[..count], inner: width },
            weights: self.inputs.kv_weight,
            matrix: 0,
            block: self.inputs.first_block + share.pair % kv_heads,
            first_column: 0,
            columns: head,
            rows: &rows[..count],
            factors: None,
        }
        .compute(isa, &mut out);
        for (place, row) in rows.into_iter().enumerate().take(count) {
            let values = out.row(row);
            if let Some(rotary) = self.inputs.rotary {
                rotary.rotate(token(place), values);
            }
            T::round_in_place(values);
            if let Some(stored) = &mut stored {
                T::round(values, stored.row(row));
            }
        }
    }
}

/// What one task fills.
struct Share {
    /// (batch, head) pair of its head.
    pair: usize,
    /// Pairs whose past it copies.
    pairs: Range<usize>,
    /// Tokens that it projects, by number `b * T + t`.
    tokens: Range<usize>,
}

impl<T> Append<'_, T> {
    /// The share of a task that has `rows` rows of the cache.
    fn share(&self, index: usize, rows: usize) -> Share {
        let CacheInputs { tokens, past, kv_heads, .. } = self.inputs;
        let group = rows_per_task(kv_heads, tokens);
        if group > 1 {
            let (first, count) = (index * group, rows / (past + tokens));
            return Share {
                pair: first,
                pairs: first..first + count,
                tokens: first * tokens..(first + count) * tokens,
            };
        }
        let per_pair = 1 + tokens.div_ceil(TOKENS_PER_TASK);
        let (pair, part) = (index / per_pair, index % per_pair);
        if part == 0 {
            return Share { pair, pairs: pair..pair + 1, tokens: 0..0 };
        }
        let first = pair / kv_heads * tokens + (part - 1) * TOKENS_PER_TASK;
        Share { pair, pairs: 0..0, tokens: first..first + rows }
    }
}
