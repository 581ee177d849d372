//! Keys and values of the new tokens, behind those of the past.

use std::ops::Range;

use crate::buffer::{Buffer, emptied};
use crate::cached::{CacheRows, Cached, KeysAndValues};
use crate::grid::{Claims, Grid, Layout, Tile};
use crate::hidden_states::HiddenStates;
use crate::packed::Packed;
use crate::pool::{Awaited, Stage};
use crate::rope::Rotary;
use crate::rows::{RowProduct, TILE_ROWS};
use crate::scalar::Scalar;
use crate::simd::{Epoch, Isa};

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
        /// Whether the processor's caches keep what is copied; what is widened is always kept.
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
    pub(crate) hidden_states: HiddenStates<'a>,
    /// `[C, 2 * G * D]`, a block for each head, keys first; without it the hidden states are taken as they are.
    pub(crate) kv_weight: Option<&'a Packed>,
    pub(crate) past: Past<'a, T>,
    /// `None` for values.
    pub(crate) rotary: Option<Rotary<'a>>,
    /// First block of the weights: 0 for keys, `G` for values.
    pub(crate) first_block: usize,
    pub(crate) sizes: CacheSizes,
}

/// Where a cache goes.
pub(crate) struct Destination<'a, T> {
    /// The cache as f32, or its new rows alone.
    wide: &'a mut [f32],
    new_alone: bool,
    /// The cache as `T`, where that is not f32.
    stored: Option<&'a mut [T]>,
}

/// Rows at which tasks begin and end.
#[derive(Debug, Default)]
pub(crate) struct CacheBounds {
    /// Of the cache.
    all: Vec<usize>,
    /// Of the new rows alone.
    new: Vec<usize>,
}

/// The stage that fills a cache: the past, then the new tokens, whose keys are rotated; all of it as `T` keeps it.
pub(crate) struct Append<'a, T> {
    inputs: CacheInputs<'a, T>,
    bounds: &'a [usize],
    wide: Grid<'a, f32>,
    new_alone: bool,
    epoch: Epoch,
    stored: Option<Grid<'a, T>>,
}

/// A new row that a task projects.
#[derive(Clone, Copy, Default)]
struct NewRow {
    /// By number `b * T + t`.
    token: usize,
    /// Its place in the task's tile of f32, and in that of the stored cache.
    wide: usize,
    stored: usize,
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

    /// Elements of its new rows.
    fn new_len(&self) -> usize {
        self.batch * self.kv_heads * self.tokens * self.head
    }

    /// Cuts the rows of the cache: into groups of whole (batch, head) pairs, or for each pair the past, groups of new
    /// tokens, and what is left.
    pub(crate) fn cut(&self, CacheBounds { all: bounds, new }: &mut CacheBounds) {
        let &Self { past, tokens, rows, .. } = self;
        let (pairs, group) = (self.batch * self.kv_heads, self.pairs_per_task());
        emptied(bounds, pairs * (tokens.div_ceil(self.tokens_per_task()) + 2) + 1);
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
        let new_before = |row: usize| row / rows * tokens + (row % rows).saturating_sub(past).min(tokens);
        emptied(new, bounds.len()).extend(bounds.iter().map(|row| new_before(*row)));
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

impl CacheBounds {
    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        (self.all.capacity() + self.new.capacity()) * size_of::<usize>()
    }
}

/// The stages of both caches, which are cut alike.
pub(crate) struct Caches<'a, T> {
    pub(crate) keys: Append<'a, T>,
    pub(crate) values: Append<'a, T>,
}

impl<'a, T: Scalar> Caches<'a, T> {
    /// Prepares the stages; `inputs` and `claims` are those of keys and of values, `bounds` comes from
    /// [`CacheSizes::cut`], the destinations from [`destination`].
    pub(crate) fn new(
        [keys, values]: [CacheInputs<'a, T>; 2],
        [key, value]: [Destination<'a, T>; 2],
        bounds: &'a CacheBounds,
        [key_claims, value_claims]: &'a mut [[Claims; 2]; 2],
    ) -> Self {
        Self {
            keys: Append::new(keys, key, bounds, key_claims),
            values: Append::new(values, value, bounds, value_claims),
        }
    }

    /// Keys and values, once all tasks have ended; `None` before.
    pub(crate) fn cached(&self) -> Option<Cached<'a>> {
        let Self { keys, values } = self;
        let past = keys.past_elsewhere().zip(values.past_elsewhere());
        if keys.new_alone {
            let [key, value] = [keys, values].map(|cache| cache.stored.as_ref()?.finished());
            let past = past.map(|(key, value)| [key, value]);
            return Some(Cached::of(CacheRows { key: key?, value: value?, past }));
        }
        let past = past.and_then(|(key, value)| Some([T::direct(key)?, T::direct(value)?]));
        Some(Cached::F32(CacheRows { key: keys.wide.finished()?, value: values.wide.finished()?, past }))
    }
}

impl<T: Scalar> KeysAndValues for Awaited<Caches<'_, T>> {
    fn wait(&self) -> Option<Cached<'_>> {
        self.wait().cached()
    }

    fn cached(&self) -> Option<Cached<'_>> {
        self.stage().cached()
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
        Destination { wide, new_alone, stored }: Destination<'a, T>,
        CacheBounds { all: bounds, new }: &'a CacheBounds,
        [claims, stored_claims]: &'a mut [Claims; 2],
    ) -> Self {
        let layout = Layout::whole(inputs.sizes.head);
        let wide = Grid::new(wide, layout, if new_alone { new } else { bounds }, claims);
        let stored = stored.map(|stored| Grid::new(stored, layout, bounds, stored_claims));
        Self { inputs, bounds, wide, new_alone, epoch: Epoch::new(), stored }
    }

    /// The past where it stands without gaps beside the cache.
    fn past_elsewhere(&self) -> Option<&'a [T]> {
        match self.inputs.past {
            Past::Given { values, rows, .. } if rows == self.inputs.sizes.past => Some(values),
            _ => None,
        }
    }

    /// Takes rows of the past over; `to` are the same rows as `rows`, counted in the tile.
    fn keep(
        &self,
        wide: &mut Tile<'_, f32>,
        stored: Option<&mut Tile<'_, T>>,
        pair: usize,
        rows: Range<usize>,
        to: usize,
    ) {
        let to = to..to + rows.len();
        match (self.inputs.past, stored) {
            (Past::InPlace, Some(stored)) if !self.new_alone => {
                T::widen(stored.rows_in_line(to.clone()), wide.rows_in_line(to));
            }
            (Past::InPlace, _) => {}
            (Past::Given { values, rows: step, kept }, stored) => {
                let head = self.inputs.sizes.head;
                let source = &values[(pair * step + rows.start) * head..][..rows.len() * head];
                match (T::direct(source), kept) {
                    _ if self.new_alone => {}
                    (Some(source), false) => f32::copy_past_caches(source, wide.rows_in_line(to.clone())),
                    _ => T::widen(source, wide.rows_in_line(to.clone())),
                }
                match stored.map(|stored| stored.rows_in_line(to)) {
                    Some(stored) if kept || !self.new_alone => stored.copy_from_slice(source),
                    Some(stored) => T::copy_past_caches(source, stored),
                    None => {}
                }
            }
        }
    }

    /// Sets rows of the tile to 0 where the cache is not the past's own.
    fn clear(&self, wide: &mut Tile<'_, f32>, stored: Option<&mut Tile<'_, T>>, rows: Range<usize>) {
        match (self.inputs.past, stored) {
            (Past::InPlace, _) => {}
            (Past::Given { .. }, None) => rows.for_each(|row| wide.row(row).fill(0.0)),
            (Past::Given { .. }, Some(stored)) => rows.for_each(|row| stored.row(row).fill(T::default())),
        }
    }

    /// Projects new tokens, or takes them as they are, into their rows.
    fn project(&self, wide: &mut Tile<'_, f32>, mut stored: Option<&mut Tile<'_, T>>, pair: usize, new: &[NewRow]) {
        let CacheInputs { isa, hidden_states, sizes, .. } = self.inputs;
        let (mut starts, mut rows) = ([0; TOKENS_PER_TASK], [0; TOKENS_PER_TASK]);
        for (place, new) in new.iter().enumerate() {
            (starts[place], rows[place]) = (hidden_states.start(new.token), new.wide);
        }
        let group = pair % sizes.kv_heads;
        match self.inputs.kv_weight {
            Some(weights) => RowProduct {
                block: self.inputs.first_block + group,
                epoch: Some(self.epoch),
                ..RowProduct::new(hidden_states.rows(&starts[..new.len()]), weights, &rows[..new.len()], sizes.head)
            }
            .compute(isa, wide),
            None => new.iter().for_each(|new| {
                let source = &hidden_states.row(new.token)[group * sizes.head..][..sizes.head];
                wide.row(new.wide).copy_from_slice(source);
            }),
        }
        for new in new {
            let values = wide.row(new.wide);
            if let Some(rotary) = self.inputs.rotary {
                rotary.rotate(new.token, values);
            }
            T::round_in_place(values);
            if let Some(stored) = &mut stored {
                T::round(values, stored.row(new.stored));
            }
        }
    }
}

/// Where a cache goes: into `present` where that is f32, else beside it into `own`, of which the new rows are enough
/// where attention reads what is stored.
pub(crate) fn destination<'a, T: Scalar>(
    present: Option<&'a mut [T]>,
    own: &'a mut Buffer,
    sizes: CacheSizes,
    reads_stored: bool,
) -> Destination<'a, T> {
    match present.map(T::direct_mut) {
        Some(Ok(wide)) => Destination { wide, new_alone: false, stored: None },
        Some(Err(stored)) if reads_stored => {
            Destination { wide: own.take(sizes.new_len()), new_alone: true, stored: Some(stored) }
        }
        Some(Err(stored)) => Destination { wide: own.take(sizes.len()), new_alone: false, stored: Some(stored) },
        None => Destination { wide: own.take(sizes.len()), new_alone: false, stored: None },
    }
}

impl<T: Scalar> Stage for Append<'_, T> {
    fn tasks(&self) -> usize {
        self.wide.len()
    }

    fn run(&self, index: usize) {
        let Some(mut wide) = self.wide.tile(index) else { return };
        let mut stored = self.stored.as_ref().and_then(|stored| stored.tile(index));
        let CacheSizes { kv_heads, past, tokens, .. } = self.inputs.sizes;
        let (first, end) = (self.bounds[index], self.bounds[index + 1]);
        let (mut new, mut count) = ([NewRow::default(); TOKENS_PER_TASK], 0);
        for (pair, rows) in self.inputs.sizes.by_pair(first..end) {
            let in_tile = |row: usize| pair * self.inputs.sizes.rows + row - first;
            let kept = rows.start..rows.end.min(past);
            if !kept.is_empty() {
                self.keep(&mut wide, stored.as_mut(), pair, kept.clone(), in_tile(kept.start));
            }
            let left = rows.start.max(past + tokens)..rows.end;
            if !left.is_empty() {
                self.clear(&mut wide, stored.as_mut(), in_tile(left.start)..in_tile(left.end));
            }
            for row in rows.start.max(past)..rows.end.min(past + tokens) {
                let stored = in_tile(row);
                let wide = if self.new_alone { count } else { stored };
                new[count] = NewRow { token: pair / kv_heads * tokens + row - past, wide, stored };
                count += 1;
            }
        }
        if count > 0 {
            let pair = first / self.inputs.sizes.rows;
            self.project(&mut wide, stored.as_mut(), pair, &new[..count]);
        }
    }
}
