//! Keys and values of the new tokens, behind those of the past.

use std::ops::Range;

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::packed::Packed;
use crate::pool::{Awaited, Stage};
use crate::rope::Rotary;
use crate::rows::{RowProduct, TILE_ROWS};
use crate::scalar::Scalar;
use crate::simd::{Epoch, Isa, Left, copy_past_caches};

/// Most new tokens that one task projects.
const TOKENS_PER_TASK: usize = TILE_ROWS;

/// As [`TOKENS_PER_TASK`] where there would be fewer than [`TASKS`] tasks.
const FEWER_TOKENS: usize = TOKENS_PER_TASK / 2;

/// Tasks that are enough for one cache, beside which the other one is filled.
const TASKS: usize = 8;

/// Sizes of a cache `[B, G, rows, D]`: each head has the `past` rows, the new `tokens`, and room that may be left.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CacheSizes {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    pub(crate) past: usize,
    pub(crate) tokens: usize,
    /// At least `past + tokens`.
    pub(crate) rows: usize,
    pub(crate) head: usize,
}

/// Where the rows of the past are.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Past<'a, T> {
    /// They are copied from `[B, G, rows, D]`, and what no token fills is set to 0.
    Given {
        /// The elements.
        values: &'a [T],
        /// Rows of each head, of which the past is the first.
        rows: usize,
        /// Whether the caches keep what is copied; f16 is widened and always kept.
        kept: bool,
    },
    /// In the cache itself, which keeps them and what no token fills.
    InPlace,
}

/// What the stage reads.
#[derive(Clone, Copy)]
pub(crate) struct CacheInputs<'a, T> {
    pub(crate) isa: Isa,
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    /// `[C, 2 * G * D]`, a block for each head, keys first.
    pub(crate) kv_weight: &'a Packed,
    pub(crate) past: Past<'a, T>,
    /// `None` for values.
    pub(crate) rotary: Option<Rotary<'a>>,
    /// First block of the weights: 0 for keys, `G` for values.
    pub(crate) first_block: usize,
    pub(crate) width: usize,
    pub(crate) sizes: CacheSizes,
}

/// The stage that fills a cache: the past, then the new tokens, whose keys are rotated; all of it as `T` keeps it.
pub(crate) struct Append<'a, T> {
    inputs: CacheInputs<'a, T>,
    grid: Grid<'a, f32>,
    epoch: Epoch,
    stored: Option<Grid<'a, T>>,
}

impl CacheSizes {
    /// Elements of the cache.
    pub(crate) fn len(&self) -> usize {
        self.batch * self.kv_heads * self.rows * self.head
    }

    /// Rows of the batch, with their past, that one task fills: several where each has few new tokens, so that their
    /// product has rows enough. The rows of one head lie side by side only where there is one.
    fn pairs_per_task(&self) -> usize {
        if self.kv_heads == 1 && self.batch > 1 { FEWER_TOKENS / self.tokens } else { 1 }
    }

    /// New tokens of one head that one task projects: weights are read once for all of them.
    fn tokens_per_task(&self) -> usize {
        let tasks = self.batch * self.kv_heads * self.tokens.div_ceil(TOKENS_PER_TASK);
        if tasks < TASKS { FEWER_TOKENS } else { TOKENS_PER_TASK }
    }

    /// Cuts the rows of the cache: into groups of whole (batch, head) pairs, or for each pair the past, groups of new
    /// tokens, and what is left.
    pub(crate) fn cut(&self, bounds: &mut Vec<usize>) {
        let &Self { past, tokens, rows, .. } = self;
        let (pairs, group) = (self.batch * self.kv_heads, self.pairs_per_task());
        bounds.clear();
        if group > 1 {
            bounds.extend((0..pairs).step_by(group).map(|pair| pair * rows));
        } else {
            for first in (0..pairs).map(|pair| pair * rows) {
                bounds.extend((past > 0).then_some(first));
                bounds.extend((0..tokens).step_by(self.tokens_per_task()).map(|token| first + past + token));
                bounds.extend((rows > past + tokens).then_some(first + past + tokens));
            }
        }
        bounds.push(pairs * rows);
    }

    /// Rows `rows` of the cache by (batch, head) pair, counted in the pair.
    fn by_pair(&self, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
        let step = self.rows;
        let pairs = rows.start / step..rows.end.div_ceil(step);
        pairs.map(move |pair| {
            let first = pair * step;
            (pair, rows.start.max(first) - first..rows.end.min(first + step) - first)
        })
    }
}

/// The stages of both caches, which are cut alike.
pub(crate) struct Caches<'a, T> {
    pub(crate) keys: Append<'a, T>,
    pub(crate) values: Append<'a, T>,
}

impl<'a, T: Scalar> Caches<'a, T> {
    /// Prepares the stages; `inputs` and `claims` are those of keys and of values, `bounds` comes from
    /// [`CacheSizes::cut`], the destinations from [`destinations`].
    pub(crate) fn new(
        [keys, values]: [CacheInputs<'a, T>; 2],
        [(key, stored_key), (value, stored_value)]: [(&'a mut [f32], Option<&'a mut [T]>); 2],
        bounds: &'a [usize],
        [key_claims, value_claims]: &'a mut [[Claims; 2]; 2],
    ) -> Self {
        Self {
            keys: Append::new(keys, key, stored_key, bounds, key_claims),
            values: Append::new(values, value, stored_value, bounds, value_claims),
        }
    }

    /// Keys and values as f32, once all tasks have ended; `None` before.
    pub(crate) fn finished(&self) -> Option<[&'a [f32]; 2]> {
        Some([self.keys.grid.finished()?, self.values.grid.finished()?])
    }
}

/// Keys and values `[B, G, rows, D]` that other tasks may still be filling.
pub(crate) trait KeysAndValues: Stage {
    /// Both, once the tasks of the stage have ended; `None` where one was left out.
    fn wait(&self) -> Option<[&[f32]; 2]>;
}

impl<T: Scalar> KeysAndValues for Awaited<Caches<'_, T>> {
    fn wait(&self) -> Option<[&[f32]; 2]> {
        self.wait().finished()
    }
}

/// Keys and values that are there.
pub(crate) struct Given<'a>(pub(crate) [&'a [f32]; 2]);

impl Stage for Given<'_> {
    fn tasks(&self) -> usize {
        0
    }

    fn run(&self, _: usize) {}
}

impl KeysAndValues for Given<'_> {
    fn wait(&self) -> Option<[&[f32]; 2]> {
        Some(self.0)
    }
}

/// Both in turn, new tokens before the past: these take longest, and are waited for.
impl<T: Scalar> Stage for Caches<'_, T> {
    fn tasks(&self) -> usize {
        self.keys.tasks() + self.values.tasks()
    }

    fn run(&self, index: usize) {
        let stage = [&self.keys, &self.values][index % 2];
        stage.run(stage.tasks() - 1 - index / 2);
    }
}

impl<'a, T: Scalar> Append<'a, T> {
    fn new(
        inputs: CacheInputs<'a, T>,
        cache: &'a mut [f32],
        stored: Option<&'a mut [T]>,
        bounds: &'a [usize],
        [claims, stored_claims]: &'a mut [Claims; 2],
    ) -> Self {
        let layout = Layout::whole(inputs.sizes.head);
        let stored = stored.map(|stored| Grid::new(stored, layout, bounds, stored_claims));
        Self { inputs, grid: Grid::new(cache, layout, bounds, claims), epoch: Epoch::new(), stored }
    }

    /// Takes rows of the past over; `to` are the same rows as `rows`, counted in the tile.
    fn keep(
        &self,
        out: &mut Tile<'_, f32>,
        stored: Option<&mut Tile<'_, T>>,
        pair: usize,
        rows: Range<usize>,
        to: usize,
    ) {
        let head = self.inputs.sizes.head;
        match (self.inputs.past, stored) {
            (Past::InPlace, None) => {}
            (Past::InPlace, Some(stored)) => {
                let to = to..to + rows.len();
                T::widen(stored.rows_in_line(to.clone()), out.rows_in_line(to));
            }
            (Past::Given { values, rows: step, kept }, stored) => {
                let source = &values[(pair * step + rows.start) * head..][..rows.len() * head];
                let to = to..to + rows.len();
                match (T::direct(source), kept) {
                    (Some(source), false) => copy_past_caches(source, out.rows_in_line(to.clone())),
                    _ => T::widen(source, out.rows_in_line(to.clone())),
                }
                if let Some(stored) = stored {
                    stored.rows_in_line(to).copy_from_slice(source);
                }
            }
        }
    }

    /// Sets rows of the tile to 0 where the cache is not the past's own.
    fn clear(&self, out: &mut Tile<'_, f32>, stored: Option<&mut Tile<'_, T>>, rows: Range<usize>) {
        match (self.inputs.past, stored) {
            (Past::InPlace, _) => {}
            (Past::Given { .. }, None) => rows.for_each(|row| out.row(row).fill(0.0)),
            (Past::Given { .. }, Some(stored)) => rows.for_each(|row| stored.row(row).fill(T::default())),
        }
    }

    /// Projects the new tokens `tokens`, by number `b * T + t`, into the rows `rows` of the tile.
    fn project(&self, out: &mut Tile<'_, f32>, stored: Option<&mut Tile<'_, T>>, pair: usize, new: &[(usize, usize)]) {
        let CacheInputs { isa, width, sizes, .. } = self.inputs;
        let (mut starts, mut rows) = ([0; TOKENS_PER_TASK], [0; TOKENS_PER_TASK]);
        for (place, (token, row)) in new.iter().enumerate() {
            (starts[place], rows[place]) = (token * width, *row);
        }
        RowProduct {
            left: Left { data: self.inputs.hidden_states, starts: &starts[..new.len()], inner: width },
            weights: self.inputs.kv_weight,
            matrix: 0,
            block: self.inputs.first_block + pair % sizes.kv_heads,
            first_column: 0,
            columns: sizes.head,
            rows: &rows[..new.len()],
            factors: None,
            next: None,
            epoch: Some(self.epoch),
        }
        .compute(isa, out);
        let mut stored = stored;
        for &(token, row) in new {
            let values = out.row(row);
            if let Some(rotary) = self.inputs.rotary {
                rotary.rotate(token, values);
            }
            T::round_in_place(values);
            if let Some(stored) = &mut stored {
                T::round(values, stored.row(row));
            }
        }
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
        let CacheSizes { kv_heads, past, tokens, .. } = self.inputs.sizes;
        let first = out.first_row();
        let (mut new, mut count) = ([(0, 0); TOKENS_PER_TASK], 0);
        for (pair, rows) in self.inputs.sizes.by_pair(first..first + out.rows()) {
            let in_tile = |row: usize| pair * self.inputs.sizes.rows + row - first;
            let kept = rows.start..rows.end.min(past);
            if !kept.is_empty() {
                self.keep(&mut out, stored.as_mut(), pair, kept.clone(), in_tile(kept.start));
            }
            let left = rows.start.max(past + tokens)..rows.end;
            if !left.is_empty() {
                self.clear(&mut out, stored.as_mut(), in_tile(left.start)..in_tile(left.end));
            }
            for row in rows.start.max(past)..rows.end.min(past + tokens) {
                new[count] = (pair / kv_heads * tokens + row - past, in_tile(row));
                count += 1;
            }
        }
        if count > 0 {
            let pair = first / self.inputs.sizes.rows;
            self.project(&mut out, stored.as_mut(), pair, &new[..count]);
        }
    }
}
