//! The visible keys and values of one call, in the order in which the microkernels read them.
//!
//! Keys are scaled as they are packed: there are `k` queries for each of them in self-attention, and a pass over these
//! is saved. Where products of rounded rows are faster, keys and values are rounded to bf16 too, and two elements of a
//! key, or the same element of two values, stand side by side.

use std::ops::Range;

use half::bf16;

use crate::buffer::{Buffer, emptied};
use crate::grid::{Claims, Grid, Layout, Tile, cut};
use crate::pool::Stage;
use crate::simd::magnitudes::Magnitudes;
use crate::simd::tiles::{Unit, parts_len};
use crate::simd::{Isa, PANEL, Right};

/// Keys of one tile of attention.
pub(crate) const KEYS_PER_TILE: usize = 256;

/// Key panels that one task packs.
const PANELS_PER_TASK: usize = 4;

/// Keys and values, their sizes and which of them are visible.
#[derive(Clone, Copy)]
pub(crate) struct Cache<'a> {
    pub(crate) isa: Isa,
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
        let rows = mask.chunks(keys.max(1));
        emptied(&mut self.places, mask.len());
        emptied(&mut self.offsets, rows.len() + 1).push(0);
        for row in rows {
            // Without an early exit, so that the compiler makes vectors of it.
            match row.iter().fold(true, |all, mask| all & (*mask != 0)) {
                true => self.places.extend(0..row.len()),
                false => self.places.extend(row.iter().enumerate().filter(|(_, mask)| **mask != 0).map(|(key, _)| key)),
            }
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

    /// As [`Self::of`], of those the keys up to `last`; all of them where that is `None`.
    pub(crate) fn up_to(&self, last: Option<usize>, batch: usize) -> &[usize] {
        let places = self.of(batch);
        let seen = last.map_or(places.len(), |last| places.partition_point(|&key| key <= last));
        &places[..seen]
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        (self.places.capacity() + self.offsets.capacity()) * size_of::<usize>()
    }
}

impl Cache<'_> {
    /// Rows of a panel for `inner` elements.
    fn rows(&self, inner: usize) -> usize {
        if self.isa.rounds_attention() { inner.div_ceil(2) } else { inner }
    }
}

/// Memory that the stages keep between calls.
#[derive(Debug, Default)]
pub(crate) struct PanelScratch {
    keys: Buffer,
    values: Buffer,
    rounded: bool,
    key_bounds: Vec<usize>,
    value_bounds: Vec<usize>,
    claims: [Claims; 2],
    key_parts: PartScratch,
    value_parts: PartScratch,
    part_count: usize,
}

/// Parts of panels for AMX tiles, and the magnitudes of what was split.
#[derive(Debug, Default)]
struct PartScratch {
    parts: Buffer<bf16>,
    magnitudes: Buffer<Magnitudes>,
    claims: [Claims; 2],
}

/// Parts of panels while they are filled.
struct PartGrids<'a> {
    isa: Isa,
    /// Rows of a group.
    group: usize,
    parts: Grid<'a, bf16>,
    magnitudes: Grid<'a, Magnitudes>,
}

impl PartScratch {
    /// `panels` panels, cut as the panels are, each of `groups` groups of `inner` rows.
    fn grids<'a>(
        &'a mut self,
        isa: Isa,
        panels: usize,
        groups: usize,
        inner: usize,
        bounds: &'a [usize],
    ) -> PartGrids<'a> {
        let len = groups * parts_len(isa.parts_of_attention(), inner);
        let (parts, magnitudes) = (self.parts.take(panels * len), self.magnitudes.take(panels * groups));
        let [parts_claims, claims] = &mut self.claims;
        PartGrids {
            isa,
            group: inner,
            parts: Grid::new(parts, Layout::whole(len), bounds, parts_claims),
            magnitudes: Grid::new(magnitudes, Layout::whole(groups), bounds, claims),
        }
    }

    fn bytes(&self) -> usize {
        self.parts.bytes() + self.magnitudes.bytes() + Claims::bytes(&self.claims)
    }
}

/// The tiles of one task.
struct PartTiles<'a> {
    /// Without it nothing is split, and vectors serve.
    unit: Option<Unit>,
    group: usize,
    parts: Tile<'a, bf16>,
    magnitudes: Tile<'a, Magnitudes>,
}

impl PartGrids<'_> {
    fn tile(&self, index: usize) -> Option<PartTiles<'_>> {
        let (parts, magnitudes) = (self.parts.tile(index)?, self.magnitudes.tile(index)?);
        Some(PartTiles { unit: Unit::of_attention(self.isa), group: self.group, parts, magnitudes })
    }
}

impl PartTiles<'_> {
    /// Splits `rows` rows of a panel, in groups, or rounds them.
    fn split(&mut self, row: usize, panel: &[f32], rows: usize) {
        let (parts, magnitudes) = (self.parts.row(row), self.magnitudes.row(row));
        magnitudes.fill(Magnitudes::default());
        let Some(unit) = &self.unit else { return magnitudes.fill(Magnitudes::UNKNOWN) };
        let group_len = parts.len() / magnitudes.len().max(1);
        let groups = parts.chunks_mut(group_len.max(1)).zip(magnitudes);
        for (first, (parts, magnitudes)) in (0..rows).step_by(self.group).zip(groups) {
            let right = Right { data: &panel[first * PANEL..], stride: PANEL, panel_stride: 0 };
            let rows = (rows - first).min(self.group);
            unit.split_panel(right, rows, parts);
            *magnitudes = unit.magnitudes(&right.data[..rows * PANEL]);
        }
    }
}

/// The stage that scales keys and transposes them into panels `[B * G, ceil(S / PANEL), D, PANEL]`; `ceil(D / 2)` pairs
/// where they are rounded.
pub(crate) struct PackKeys<'a> {
    cache: Cache<'a>,
    scale: f32,
    grid: Grid<'a, f32>,
    parts: Option<PartGrids<'a>>,
}

/// The stage that cuts values into panels `[B * G, ceil(D / PANEL), S, PANEL]`; `ceil(S / 2)` pairs where they are
/// rounded.
pub(crate) struct PackValues<'a> {
    cache: Cache<'a>,
    grid: Grid<'a, f32>,
    parts: Option<PartGrids<'a>>,
}

/// What both stages have filled.
#[derive(Clone, Copy)]
pub(crate) struct Panels<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    /// Whether both are pairs of bf16.
    rounded: bool,
    /// Parts of keys, and of values in groups of [`KEYS_PER_TILE`] keys.
    parts: [Parts<'a>; 2],
    /// Parts of an element.
    part_count: usize,
    /// Keys `S`, visible or not.
    count: usize,
    head: usize,
}

/// Parts of panels and the magnitudes of their values; empty without tiles.
type Parts<'a> = (&'a [bf16], &'a [Magnitudes]);

impl PanelScratch {
    /// Prepares the two stages; `tiles` are the instructions where the panels are split for AMX tiles too.
    pub(crate) fn stages<'a>(
        &'a mut self,
        cache: Cache<'a>,
        scale: f32,
        tiles: Option<Isa>,
    ) -> (PackKeys<'a>, PackValues<'a>) {
        let pairs = cache.batch * cache.kv_heads;
        let (key_panels, value_panels) = (cache.keys.div_ceil(PANEL), cache.head.div_ceil(PANEL));
        emptied(&mut self.key_bounds, pairs * key_panels.div_ceil(PANELS_PER_TASK) + 1);
        for pair in 0..pairs {
            self.key_bounds.extend((0..key_panels).step_by(PANELS_PER_TASK).map(|panel| pair * key_panels + panel));
        }
        self.key_bounds.push(pairs * key_panels);
        cut(&mut self.value_bounds, if cache.keys == 0 { 0 } else { pairs * value_panels }, 1);
        self.rounded = cache.isa.rounds_attention();
        self.part_count = cache.isa.parts_of_attention();
        let (key_len, value_len) = (cache.rows(cache.head) * PANEL, cache.rows(cache.keys) * PANEL);
        let keys = self.keys.take(pairs * key_panels * key_len);
        let values = self.values.take(pairs * value_panels * value_len);
        let [key_claims, value_claims] = &mut self.claims;
        let (key_bounds, value_bounds) = (&self.key_bounds, &self.value_bounds);
        let (key_scratch, value_scratch) = (&mut self.key_parts, &mut self.value_parts);
        let (groups, inner) = (cache.keys.div_ceil(KEYS_PER_TILE), KEYS_PER_TILE);
        let key_parts = tiles.map(|isa| key_scratch.grids(isa, pairs * key_panels, 1, cache.head, key_bounds));
        let value_parts = tiles.map(|isa| value_scratch.grids(isa, pairs * value_panels, groups, inner, value_bounds));
        let keys = Grid::new(keys, Layout::whole(key_len), key_bounds, key_claims);
        let values = Grid::new(values, Layout::whole(value_len.max(PANEL)), value_bounds, value_claims);
        let values = PackValues { cache, grid: values, parts: value_parts };
        (PackKeys { cache, scale, grid: keys, parts: key_parts }, values)
    }

    /// What the stages have filled.
    pub(crate) fn panels(&self, keys: usize, head: usize) -> Panels<'_> {
        let parts = [&self.key_parts, &self.value_parts];
        let parts = parts.map(|scratch| (scratch.parts.filled(), scratch.magnitudes.filled()));
        let (rounded, part_count, values) = (self.rounded, self.part_count, self.values.filled());
        Panels { keys: self.keys.filled(), values, rounded, parts, part_count, count: keys, head }
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let bounds = (self.key_bounds.capacity() + self.value_bounds.capacity()) * size_of::<usize>();
        let parts = self.key_parts.bytes() + self.value_parts.bytes();
        self.keys.bytes() + self.values.bytes() + parts + bounds + Claims::bytes(&self.claims)
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
        let mut parts = self.parts.as_ref().and_then(|parts| parts.tile(index));
        for row in 0..out.rows() {
            let (pair, panel) = ((out.first_row() + row) / panels, (out.first_row() + row) % panels);
            let places = self.cache.visible.of(pair / kv_heads);
            let places = &places[places.len().min(panel * PANEL)..places.len().min((panel + 1) * PANEL)];
            let source = &self.cache.key[pair * rows * head..][..keys * head];
            match self.cache.isa.rounds_attention() {
                true => transpose_pairs(self.cache.isa, (source, head), places, self.scale, out.row(row)),
                false => transpose((source, head), 0..head, places, self.scale, out.row(row)),
            }
            if let Some(parts) = &mut parts {
                parts.split(row, out.row(row), head);
            }
        }
    }
}

/// Elements of keys that are transposed before they are made pairs: an even number.
const TRANSPOSED: usize = 32;

/// As [`transpose`], rounded: `out [ceil(D / 2), PANEL]`, with a 0 behind an odd element.
fn transpose_pairs(isa: Isa, keys: (&[f32], usize), places: &[usize], scale: f32, out: &mut [f32]) {
    let head = keys.1;
    let mut columns = [0.0; TRANSPOSED * PANEL];
    let firsts = (0..head).step_by(TRANSPOSED);
    for (first, out) in firsts.zip(out.chunks_mut(TRANSPOSED / 2 * PANEL)) {
        let count = TRANSPOSED.min(head - first);
        transpose(keys, first..first + count, places, scale, &mut columns[..count * PANEL]);
        columns[count * PANEL..].fill(0.0);
        for (both, out) in columns.as_chunks::<{ 2 * PANEL }>().0.iter().zip(out.as_chunks_mut::<PANEL>().0) {
            let (first, second) = both.split_at(PANEL);
            isa.pair_up(first, second, out);
        }
    }
}

/// Fills `out [inner, PANEL]` with the elements `inner` of the rows `places`, which have `head` of them, scaled, as
/// columns, and zeros after them.
fn transpose((source, head): (&[f32], usize), inner: Range<usize>, places: &[usize], scale: f32, out: &mut [f32]) {
    const BLOCK: usize = 8;
    for (first, places) in (0..PANEL).step_by(BLOCK).zip(places.chunks(BLOCK).map(Some).chain(std::iter::repeat(None)))
    {
        let places = places.unwrap_or_default();
        let rows: [&[f32]; BLOCK] = std::array::from_fn(|column| match places.get(column) {
            Some(place) => &source[place * head..][inner.clone()],
            None => &[],
        });
        for (inner, out) in out.as_chunks_mut::<PANEL>().0.iter_mut().enumerate() {
            let out = &mut out[first..first + BLOCK];
            for (value, row) in out.iter_mut().zip(rows) {
                *value = row.get(inner).map_or(0.0, |element| element * scale);
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
        let value = |place: &usize| &source[place * head + column..][..count];
        if self.cache.isa.rounds_attention() {
            let (mut first, mut second) = ([0.0; PANEL], [0.0; PANEL]);
            for (out, places) in out.row(0).as_chunks_mut::<PANEL>().0.iter_mut().zip(places.chunks(2)) {
                first[..count].copy_from_slice(value(&places[0]));
                match places.get(1) {
                    Some(place) => second[..count].copy_from_slice(value(place)),
                    None => second.fill(0.0),
                }
                self.cache.isa.pair_up(&first, &second, out);
            }
            return;
        }
        for (out, place) in out.row(0).as_chunks_mut::<PANEL>().0.iter_mut().zip(places) {
            out[..count].copy_from_slice(value(place));
            out[count..].fill(0.0);
        }
        if let Some(mut parts) = self.parts.as_ref().and_then(|parts| parts.tile(index)) {
            parts.split(0, out.row(0), places.len());
        }
    }
}

impl<'a> Panels<'a> {
    /// Whether keys and values are pairs of bf16.
    pub(crate) fn rounded(&self) -> bool {
        self.rounded
    }

    /// Transposed keys from panel `panel` on: `D` rows, or as many pairs as these make.
    pub(crate) fn key(&self, pair: usize, panel: usize) -> Right<'a> {
        let panels = self.count.div_ceil(PANEL);
        let len = self.rows(self.head) * PANEL;
        let data = &self.keys[(pair * panels + panel) * len..(pair + 1) * panels * len];
        Right { data, stride: PANEL, panel_stride: len }
    }

    /// Values from visible key `first` on; an even one where they are pairs.
    pub(crate) fn value(&self, pair: usize, first: usize) -> Right<'a> {
        let panels = self.head.div_ceil(PANEL);
        let len = self.rows(self.count) * PANEL;
        let data = &self.values[pair * panels * len + self.rows(first) * PANEL..(pair + 1) * panels * len];
        Right { data, stride: PANEL, panel_stride: len }
    }

    fn rows(&self, inner: usize) -> usize {
        if self.rounded { inner.div_ceil(2) } else { inner }
    }

    /// Parts of key panel `panel`.
    pub(crate) fn key_parts(&self, pair: usize, panel: usize) -> &'a [bf16] {
        let (panels, len) = (self.count.div_ceil(PANEL), parts_len(self.part_count, self.head));
        &self.parts[0].0[(pair * panels + panel) * len..][..len]
    }

    /// Parts of value panel `panel`, of the [`KEYS_PER_TILE`] keys from visible key `first` on.
    pub(crate) fn value_parts(&self, pair: usize, panel: usize, first: usize) -> &'a [bf16] {
        let (panels, groups) = (self.head.div_ceil(PANEL), self.count.div_ceil(KEYS_PER_TILE));
        let len = parts_len(self.part_count, KEYS_PER_TILE);
        &self.parts[1].0[((pair * panels + panel) * groups + first / KEYS_PER_TILE) * len..][..len]
    }

    /// Magnitudes of the visible keys, and of their values.
    pub(crate) fn magnitudes(&self, pair: usize) -> [Magnitudes; 2] {
        let groups = self.count.div_ceil(KEYS_PER_TILE) * self.head.div_ceil(PANEL);
        [(0, self.count.div_ceil(PANEL)), (1, groups)].map(|(of, count)| {
            let all = &self.parts[of].1[pair * count..][..count];
            all.iter().fold(Magnitudes::default(), |all, found| all.join(*found))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Instructions;
    use crate::skip::skip;
    use crate::{Sequential, pool};

    #[test]
    fn nothing_suits_tiles_where_a_thread_has_none_to_split_with() {
        let isa = Isa::at_most(Instructions::Amx);
        let Some(taken) = Unit::new(isa) else { return skip("no AMX tiles") };
        let (ones, mut visible, mut scratch) = ([1.0; 3 * 4], Visible::default(), PanelScratch::default());
        visible.read(&[1; 3], 3);
        let (key, value, visible) = (&ones[..], &ones[..], &visible);
        let cache = Cache { isa, key, value, visible, batch: 1, keys: 3, rows: 3, kv_heads: 1, head: 4 };
        let (keys, values) = scratch.stages(cache, 1.0, Some(isa));
        pool::run(&Sequential, &[&keys, &values]);
        assert_eq!(scratch.panels(3, 4).magnitudes(0), [Magnitudes::UNKNOWN; 2]);
        drop(taken);
    }

    #[test]
    fn visible_keys_are_scaled_columns_and_their_values_rows() {
        let (rows, mut visible, mut scratch) =
            ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], Visible::default(), PanelScratch::default());
        visible.read(&[1, 0, 1], 3);
        let isa = Isa::at_most(Instructions::Portable);
        let cache = Cache {
            isa,
            key: &rows,
            value: &rows,
            visible: &visible,
            batch: 1,
            keys: 3,
            rows: 3,
            kv_heads: 1,
            head: 2,
        };
        let (keys, values) = scratch.stages(cache, -0.5, None);
        pool::run(&Sequential, &[&keys, &values]);
        let panels = scratch.panels(3, 2);
        let row = |first: f32, second: f32| [&[first, second][..], &[0.0; PANEL - 2]].concat();
        assert_eq!(panels.key(0, 0).data, [row(-0.5, -2.5), row(-1.0, -3.0)].concat());
        assert_eq!(panels.value(0, 0).data[..2 * PANEL], [row(1.0, 2.0), row(5.0, 6.0)].concat());
    }

    /// A key of an odd number of elements, and an odd number of visible keys, end with half a pair.
    #[test]
    fn rounded_keys_and_values_stand_in_pairs() {
        let isa = Isa::at_most(Instructions::Avx512).rounding();
        if !isa.rounds() {
            return skip("no AVX512_BF16, or none that is faster than AVX-512");
        }
        let (head, mut visible, mut scratch) = (35, Visible::default(), PanelScratch::default());
        let rows: Vec<f32> = (0..4 * head).map(|i| (i as f32 * 0.37).sin()).collect();
        visible.read(&[1, 0, 1, 1], 4);
        let (key, value, visible) = (&rows[..], &rows[..], &visible);
        let cache = Cache { isa, key, value, visible, batch: 1, keys: 4, rows: 4, kv_heads: 1, head };
        let (keys, values) = scratch.stages(cache, -0.5, None);
        pool::run(&Sequential, &[&keys, &values]);
        let panels = scratch.panels(4, head);
        let pair = |first: f32, second: f32| {
            let mut out = [0.0];
            isa.round_to_pairs(&[first, second], &mut out);
            out[0].to_bits()
        };
        let at = |place: usize, element: usize, scale: f32| match element < head && place < 4 {
            true => rows[place * head + element] * scale,
            false => 0.0,
        };
        for (index, found) in panels.key(0, 0).data.iter().enumerate() {
            let (element, place) = (index / PANEL * 2, [0, 2, 3].get(index % PANEL).copied().unwrap_or(4));
            let expected = pair(at(place, element, -0.5), at(place, element + 1, -0.5));
            assert_eq!(found.to_bits(), expected, "{element} {place}");
        }
        for first in [0, 2] {
            let (panels, places) = (panels.value(0, first), [0, 2, 3, 4]);
            for index in 0..2 * PANEL {
                let found = panels.data[index / PANEL * panels.panel_stride + index % PANEL].to_bits();
                let expected = pair(at(places[first], index, 1.0), at(places[first + 1], index, 1.0));
                assert_eq!(found, expected, "{first} {index}");
            }
        }
    }
}
