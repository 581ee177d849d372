//! Keys and values of the new tokens, appended to those of the past.

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout};
use crate::packed::Packed;
use crate::pool::Stage;
use crate::rope::Rotary;
use crate::rows::{RowProduct, TILE_ROWS};
use crate::scalar::Scalar;
use crate::simd::{Isa, Left};

/// New tokens that one task projects.
const TOKENS_PER_TASK: usize = 32;

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

/// Cuts the rows of a cache: for each (batch, head) pair the past, then groups of new tokens.
pub(crate) fn cut_cache(bounds: &mut Vec<usize>, pairs: usize, past: usize, tokens: usize) {
    bounds.clear();
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
        let per_pair = 1 + tokens.div_ceil(TOKENS_PER_TASK);
        let (pair, part) = (index / per_pair, index % per_pair);
        if part == 0 {
            let source = self.inputs.past_rows[pair * past * head..][..past * head].chunks(head);
            for (row, source) in source.enumerate() {
                T::widen(source, out.row(row));
                if let Some(stored) = &mut stored {
                    stored.row(row).copy_from_slice(source);
                }
            }
            return;
        }
        let first = pair / kv_heads * tokens + (part - 1) * TOKENS_PER_TASK;
        let starts: [usize; TILE_ROWS] = std::array::from_fn(|row| (first + row) * width);
        let rows: [usize; TILE_ROWS] = std::array::from_fn(|row| row);
        RowProduct {
            left: Left { data: self.inputs.hidden_states, starts: &starts[..out.rows()], inner: width },
            weights: self.inputs.kv_weight,
            matrix: 0,
            block: self.inputs.first_block + pair % kv_heads,
            first_column: 0,
            columns: head,
            rows: &rows,
            factors: None,
        }
        .compute(isa, &mut out);
        for row in 0..out.rows() {
            let values = out.row(row);
            if let Some(rotary) = self.inputs.rotary {
                rotary.rotate(first + row, values);
            }
            T::round_in_place(values);
            if let Some(stored) = &mut stored {
                T::round(values, stored.row(row));
            }
        }
    }
}
