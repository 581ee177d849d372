//! The visible keys and values of one call, in the order in which the microkernels read them.

use crate::buffer::Buffer;
use crate::grid::{Claims, Grid, Layout, cut};
use crate::pool::Stage;
use crate::simd::{PANEL, Right};

/// Key panels that one task packs.
const PANELS_PER_TASK: usize = 4;

/// Keys and values, their sizes and which of them are visible.
#[derive(Clone, Copy)]
pub(crate) struct Cache<'a> {
    /// `[B, G, rows, D]`, of which the first `S` rows are keys.
    pub(crate) key: &'a [f32],
    /// As `key`.
    pub(crate) value: &'a [f32],
    pub(crate) visible: &'a Visible,
    pub(crate) batch: usize,
    pub(crate) keys: usize,
    pub(crate) rows: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

/// Places of the keys that are not masked, rising, for each row of the batch.
#[derive(Debug, Default)]
pub(crate) struct Visible {
    places: Vec<usize>,
    offsets: Vec<usize>,
}

impl Visible {
    /// Reads a mask `[B, S]`, 0 where the key is masked.
    pub(crate) fn read(&mut self, mask: &[i32], keys: usize) {
        self.places.clear();
        self.offsets.clear();
        self.offsets.push(0);
        for row in mask.chunks(keys.max(1)) {
            self.places.extend(row.iter().enumerate().filter(|(_, mask)| **mask != 0).map(|(key, _)| key));
            self.offsets.push(self.places.len());
        }
    }

    /// Places of the visible keys of one row of the batch.
    pub(crate) fn of(&self, batch: usize) -> &[usize] {
        match self.offsets.get(batch..batch + 2) {
            Some(&[start, end]) => &self.places[start..end],
            _ => &[],
        }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        (self.places.capacity() + self.offsets.capacity()) * size_of::<usize>()
    }
}

/// Memory that the stages keep between calls.
#[derive(Debug, Default)]
pub(crate) struct PanelScratch {
    keys: Buffer,
    values: Buffer,
    key_bounds: Vec<usize>,
    value_bounds: Vec<usize>,
    claims: [Claims; 2],
}

/// The stage that transposes keys into panels `[B * G, ceil(S / PANEL), D, PANEL]`.
pub(crate) struct PackKeys<'a> {
    cache: Cache<'a>,
    grid: Grid<'a, f32>,
}

/// The stage that cuts values into panels `[B * G, ceil(D / PANEL), S, PANEL]`.
pub(crate) struct PackValues<'a> {
    cache: Cache<'a>,
    grid: Grid<'a, f32>,
}

/// What both stages have filled.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    /// Keys `S`, visible or not.
    count: usize,
    head: usize,
}

impl PanelScratch {
    /// Prepares the two stages.
    pub(crate) fn stages<'a>(&'a mut self, cache: Cache<'a>) -> (PackKeys<'a>, PackValues<'a>) {
        let pairs = cache.batch * cache.kv_heads;
        let (key_panels, value_panels) = (cache.keys.div_ceil(PANEL), cache.head.div_ceil(PANEL));
        self.key_bounds.clear();
        for pair in 0..pairs {
            self.key_bounds.extend((0..key_panels).step_by(PANELS_PER_TASK).map(|panel| pair * key_panels + panel));
        }
        self.key_bounds.push(pairs * key_panels);
        cut(&mut self.value_bounds, if cache.keys == 0 { 0 } else { pairs * value_panels }, 1);
        let keys = self.keys.take(pairs * key_panels * cache.head * PANEL);
        let values = self.values.take(pairs * value_panels * cache.keys * PANEL);
        let (key_len, value_len) = (cache.head * PANEL, cache.keys.max(1) * PANEL);
        let [key_claims, value_claims] = &mut self.claims;
        (
            PackKeys { cache, grid: Grid::new(keys, Layout::whole(key_len), &self.key_bounds, key_claims) },
            PackValues { cache, grid: Grid::new(values, Layout::whole(value_len), &self.value_bounds, value_claims) },
        )
    }

    /// What the stages have filled.
    pub(crate) fn panels(&self, keys: usize, head: usize) -> Panels<'_> {
        Panels { keys: self.keys.filled(), values: self.values.filled(), count: keys, head }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let bounds = self.key_bounds.capacity() + self.value_bounds.capacity();
        self.keys.bytes() + self.values.bytes() + bounds * size_of::<usize>()
    }
}

impl Stage for PackKeys<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let Cache { keys, rows, kv_heads, head, .. } = self.cache;
        let panels = keys.div_ceil(PANEL);
        for row in 0..out.rows() {
            let (pair, panel) = ((out.first_row() + row) / panels, (out.first_row() + row) % panels);
            let places = self.cache.visible.of(pair / kv_heads);
            let places = &places[places.len().min(panel * PANEL)..places.len().min((panel + 1) * PANEL)];
            let source = &self.cache.key[pair * rows * head..][..keys * head];
            transpose(source, head, places, out.row(row));
        }
    }
}

/// Fills `out [D, PANEL]` with the rows `places` as columns, and zeros after them.
fn transpose(source: &[f32], head: usize, places: &[usize], out: &mut [f32]) {
    const BLOCK: usize = 8;
    for (first, places) in (0..PANEL).step_by(BLOCK).zip(places.chunks(BLOCK).map(Some).chain(std::iter::repeat(None)))
    {
        let places = places.unwrap_or_default();
        let rows: [&[f32]; BLOCK] = std::array::from_fn(|column| match places.get(column) {
            Some(place) => &source[place * head..][..head],
            None => &[],
        });
        for (inner, out) in out.chunks_exact_mut(PANEL).enumerate() {
            let out = &mut out[first..first + BLOCK];
            for (value, row) in out.iter_mut().zip(rows) {
                *value = row.get(inner).copied().unwrap_or(0.0);
            }
        }
    }
}

impl Stage for PackValues<'_> {
    fn tasks(&self) -> usize {
        self.grid.len()
    }

    fn run(&self, index: usize) {
        let Some(mut out) = self.grid.tile(index) else { return };
        let Cache { keys, rows, kv_heads, head, .. } = self.cache;
        let panels = head.div_ceil(PANEL);
        let (pair, column) = (index / panels, index % panels * PANEL);
        let count = PANEL.min(head - column);
        let places = self.cache.visible.of(pair / kv_heads);
        let source = &self.cache.value[pair * rows * head..][..keys * head];
        for (out, place) in out.row(0).chunks_exact_mut(PANEL).zip(places) {
            out[..count].copy_from_slice(&source[place * head + column..][..count]);
            out[count..].fill(0.0);
        }
    }
}

impl<'a> Panels<'a> {
    /// Transposed keys from panel `panel` on: `D` rows.
    pub(crate) fn key(&self, pair: usize, panel: usize) -> Right<'a> {
        let panels = self.count.div_ceil(PANEL);
        let len = self.head * PANEL;
        let data = &self.keys[(pair * panels + panel) * len..(pair + 1) * panels * len];
        Right { data, stride: PANEL, panel_stride: len }
    }

    /// Values from visible key `first` on.
    pub(crate) fn value(&self, pair: usize, first: usize) -> Right<'a> {
        let panels = self.head.div_ceil(PANEL);
        let len = self.count * PANEL;
        let data = &self.values[pair * panels * len + first * PANEL..(pair + 1) * panels * len];
        Right { data, stride: PANEL, panel_stride: len }
    }
}
