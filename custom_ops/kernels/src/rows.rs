//! Rows from anywhere, times one block of packed weights.

use std::ops::Range;

use crate::buffer::Buffer;
use crate::grid::Tile;
use crate::packed::{Packed, Panels};
use crate::simd::magnitudes::Magnitudes;
use crate::simd::tiles::{COLUMN_LIMIT, STRIP, SUM_STRIDE, Unit};
use crate::simd::widened::{self, with_widened};
use crate::simd::{
    Ahead, Element, Epoch, Isa, Left, Memory, PANEL, Product, ROWS, Right, Write, are_integers, panels_at_once,
    with_rounded,
};

/// Most rows that one call multiplies.
pub(crate) const TILE_ROWS: usize = 128;

/// Rows of a destination in their order.
pub(crate) static IN_ORDER: [usize; TILE_ROWS] = {
    let mut rows = [0; TILE_ROWS];
    let mut row = 0;
    while row < TILE_ROWS {
        rows[row] = row;
        row += 1;
    }
    rows
};

/// Fewest rows, inner steps and columns of a product on AMX tiles, and fewest elements of one strip of rows and of
/// more: below, splitting rows and the first panel costs more than tiles gain.
const ON_TILES: [usize; 3] = [16, 64, 64];
const AREA_ON_TILES: [usize; 2] = [28 * 128, 48 * 128];

/// As [`ON_TILES`], rounded rows beside int4: vectors multiply fewer that are quantized faster.
const FEWEST_OF_INT4: usize = 64;

/// Whether tiles serve a product of these sizes.
///
/// Two parts of a weight (f16, int4) take more work than tiles save, where rows are few. Rows that are rounded are not
/// split, so that tiles serve fewer of them, but for int4, where vectors multiply integers.
fn on_tiles<W: Element>(isa: Isa, rounds: bool, rows: usize, inner: usize, columns: usize) -> bool {
    let enough = [rows, inner, columns].iter().zip(ON_TILES).all(|(size, fewest)| *size >= fewest);
    let many = rows > STRIP || W::PARTS == 2;
    isa.has_tiles()
        && enough
        && match (rounds, W::PARTS) {
            (true, 2) => rows >= FEWEST_OF_INT4,
            (true, _) => true,
            (false, parts) => rows * columns >= AREA_ON_TILES[usize::from(many)] && (parts != 2 || rows >= STRIP),
        }
}

/// Fewest rows for which panels of f16 are widened once, with AVX2; taken for NEON too, where nothing was measured.
const F16_WIDENED_ONCE: usize = 24;

/// Fewest rows for which panels of int4 are widened once, with AVX2, which is taken for NEON too, and with AVX-512.
const INT4_WIDENED_ONCE: [usize; 2] = [8, 24];

/// Whether panels are widened once for all blocks of rows.
///
/// With AVX2 a block has so few rows that widening f16 for each takes a quarter of the time, and int4 more than half of
/// it; with AVX-512 int4 takes an eighth. Other types are widened beside products.
fn widens_once<W: Element>(isa: Isa, rows: usize, inner: usize) -> bool {
    let fewest = match (W::ROWS, W::PARTS) {
        (2.., _) => INT4_WIDENED_ONCE[usize::from(isa.has_wide_vectors())],
        (_, 2) if isa.has_narrow_vectors() => F16_WIDENED_ONCE,
        _ => return false,
    };
    (isa.has_narrow_vectors() || isa.has_wide_vectors()) && rows >= fewest && widened::fits(inner)
}

/// Whether products of so many rows may be made on tiles.
pub(crate) fn may_meet_tiles(isa: Isa, rows: usize) -> bool {
    isa.has_tiles() && rows >= ON_TILES[0]
}

/// Tasks of a stage that are enough to keep threads evenly loaded.
const TASKS: usize = 16;

/// Bytes of weights that stay in a core's own caches while blocks of rows pass, and the next ones come.
const NEAR: usize = 262_144;

/// As [`NEAR`] without AVX-512, where second caches of 512 KiB are common.
const NEAR_IN_SMALL_CACHES: usize = 131_072;

/// Bytes of a panel from which on a single row fetches a page ahead, and with AVX-512 reads one after the other: such
/// weights come from memory, which gives one stream faster than several there.
const LONG: usize = 65536;

/// As [`LONG`], of all weights, where the last cache gives one stream faster too. Nearer caches give several, since a
/// panel alone has too few sums under way. With AVX2 blocks fetch the next panels of such weights alone: where the last
/// cache holds them, fetching costs more than it saves.
pub(crate) const FAR: usize = 1 << 22;

/// Whether the last cache may not hold weights until they are read again.
pub(crate) fn are_far(weights: &Packed) -> bool {
    weights.bytes() > FAR
}

/// Most rows whose panels, up to [`LONG`], a processor that reads one stream fastest is left to fetch itself: a fetch
/// takes a load, and so few rows need all of these. Far integers are waited for from [`LONG_OF_INTEGERS`] on.
const ALONE: usize = 4;

/// As [`LONG`], of far integers, of which as many bytes are more weights.
const LONG_OF_INTEGERS: usize = LONG / 4;

/// Most bytes of weights that a first block fetches before it reads them.
const EARLY: usize = 65536;

/// Where weights begin that are multiplied next.
#[derive(Clone, Copy)]
pub(crate) struct Next<'a> {
    pub(crate) weights: &'a Packed,
    pub(crate) matrix: usize,
    pub(crate) block: usize,
    /// A multiple of [`PANEL`].
    pub(crate) first_column: usize,
}

impl Next<'_> {
    /// Where its panels stand.
    pub(crate) fn memory(self) -> Memory {
        let geometry = self.weights.geometry();
        match self.weights.panels() {
            Panels::Compact(compact) => {
                let first = geometry.number(self.matrix, self.block, self.first_column / PANEL);
                Memory::of(compact.panels_from(first).words())
            }
            Panels::F32(panels) => self.of(panels),
            Panels::Bf16(panels) => self.of(panels),
            Panels::F16(panels) => self.of(panels),
            Panels::I8(panels) => self.of(panels),
            Panels::I4(panels) => self.of(panels),
        }
    }

    fn of<W: Element>(self, panels: &Buffer<W>) -> Memory {
        let Self { weights, matrix, block, first_column } = self;
        Memory::of(weights.geometry().right(panels, matrix, block, first_column / PANEL).data)
    }
}

/// A product of gathered rows with a block of packed weights.
pub(crate) struct RowProduct<'a> {
    /// At most [`TILE_ROWS`] rows.
    pub(crate) left: Left<'a>,
    pub(crate) weights: &'a Packed,
    pub(crate) matrix: usize,
    pub(crate) block: usize,
    /// First column of the block; a multiple of [`PANEL`].
    pub(crate) first_column: usize,
    pub(crate) columns: usize,
    /// Row of the destination for each row.
    pub(crate) rows: &'a [usize],
    /// `Some`: added to the destination with one factor for each row.
    pub(crate) factors: Option<&'a [f32]>,
    /// What is multiplied next, which is fetched meanwhile; where that is not known, what stands next.
    pub(crate) next: Option<Next<'a>>,
    /// While what `left` holds does not change, where that is known: rows that come again are not split again.
    pub(crate) epoch: Option<Epoch>,
}

impl<'a> RowProduct<'a> {
    /// A product with the first columns of the first block of the first matrix.
    pub(crate) fn new(left: Left<'a>, weights: &'a Packed, rows: &'a [usize], columns: usize) -> Self {
        let (matrix, block, first_column) = (0, 0, 0);
        Self { left, weights, matrix, block, first_column, columns, rows, factors: None, next: None, epoch: None }
    }

    /// Computes the product into the columns `0 .. columns` of `out`.
    pub(crate) fn compute(&self, isa: Isa, out: &mut Tile<'_, f32>) {
        let on_tiles = match self.weights.panels() {
            Panels::F32(panels) => self.compute_on_tiles(panels, isa, out),
            Panels::Bf16(panels) => self.compute_on_tiles(panels, isa, out),
            Panels::F16(panels) => self.compute_on_tiles(panels, isa, out),
            Panels::I8(panels) => self.compute_on_tiles(panels, isa, out),
            Panels::I4(panels) => self.compute_on_tiles(panels, isa, out),
            Panels::Compact(_) => false,
        };
        if !on_tiles {
            self.compute_on_any_vectors(isa.without_tiles(), out);
        }
    }

    /// The product on vectors, of rows that are rounded where these weights and `isa` want that.
    fn compute_on_any_vectors(&self, isa: Isa, out: &mut Tile<'_, f32>) {
        let rows = (isa, self.weights.panels().form());
        let quantizes = isa.quantizes_to(rows.1);
        match self.weights.panels() {
            Panels::F32(panels) => self.compute_on_vectors(self.left, |column| self.right(panels, column), isa, out),
            Panels::Bf16(panels) if isa.rounds() => with_rounded(rows, self.left, self.epoch, |left| {
                self.compute_on_vectors(left, |column| self.right(panels, column).pairs(), isa, out);
            }),
            Panels::I8(panels) if quantizes => with_rounded(rows, self.left, self.epoch, |left| {
                self.compute_on_vectors(left, |column| self.right(panels, column), isa, out);
            }),
            Panels::I4(panels) if quantizes => with_rounded(rows, self.left, self.epoch, |left| {
                self.compute_on_vectors(left, |column| self.right(panels, column), isa, out);
            }),
            Panels::Bf16(panels) => self.compute_on_vectors(self.left, |column| self.right(panels, column), isa, out),
            Panels::F16(panels) => self.compute_on_vectors(self.left, |column| self.right(panels, column), isa, out),
            Panels::Compact(compact) => self.compute_compact(compact, isa, out),
            Panels::I8(panels) => self.compute_on_vectors(self.left, |column| self.right(panels, column), isa, out),
            Panels::I4(panels) => self.compute_on_vectors(self.left, |column| self.right(panels, column), isa, out),
        }
    }

    /// The rows `left` times the panels that `right` gives from a column on.
    fn compute_on_vectors<'w, W: Element>(
        &self,
        left: Left<'_>,
        right: impl Fn(usize) -> Right<'w, W>,
        isa: Isa,
        out: &mut Tile<'_, f32>,
    ) {
        let (count, inner) = (left.starts.len(), left.inner);
        let widens = left.blocks.is_none() && widens_once::<W>(isa, count, inner);
        let panel_len = W::rows(inner) * PANEL;
        let panel_bytes = if widens { widened::bytes(inner) } else { panel_len * size_of::<W>() };
        let near = if isa.has_wide_vectors() { NEAR } else { NEAR_IN_SMALL_CACHES };
        let together = match count <= left.most() && !widens {
            true => self.columns.max(1),
            false => (near / panel_bytes.max(1)).max(1) * PANEL,
        };
        let (far, total) = (are_far(self.weights), count.div_ceil(left.most()));
        for column in (0..self.columns).step_by(together) {
            let right = right(column);
            let columns = column..self.columns.min(column + together);
            let met = columns.len().div_ceil(PANEL);
            // Beside each panel that is multiplied its share of a panel is fetched.
            let later = match self.next.filter(|_| columns.end == self.columns) {
                Some(next) => next.memory(),
                None => Memory::of(right.data.get(met * panel_len..).unwrap_or_default()),
            };
            let later = later.panels(panel_len * size_of::<W>());
            let share = |index, total| Ahead::Later(later.share(index, total));
            let fetches = isa.has_wide_vectors() || far;
            if widens {
                with_widened(isa, right, inner, met, |right| {
                    self.compute_blocks((left, right), columns, |index| fetches.then(|| share(index, total)), isa, out);
                });
                continue;
            }
            let cold = usize::from(column == 0);
            let rows = even(0..count, left.most()).next().map_or(0, |block| block.len());
            let ahead = |index: usize| match index.checked_sub(cold) {
                None => first_ahead(isa, right, (rows, left.blocks.is_some()), (panel_len, far), met),
                Some(index) => fetches.then(|| share(index, total - cold)),
            };
            self.compute_blocks((left, right), columns, ahead, isa, out);
        }
    }

    /// Every block of rows times the columns `columns`; block `index` fetches `ahead(index)`.
    pub(crate) fn compute_blocks<W: Element>(
        &self,
        (left, right): (Left<'_>, Right<'_, W>),
        columns: Range<usize>,
        ahead: impl Fn(usize) -> Option<Ahead>,
        isa: Isa,
        out: &mut Tile<'_, f32>,
    ) {
        for (index, block) in even(0..left.starts.len(), left.most()).enumerate() {
            Product {
                left: Left { starts: &left.starts[block.clone()], ..left },
                right,
                rows: &self.rows[block.clone()],
                first_column: columns.start,
                columns: columns.len(),
                write: match self.factors {
                    Some(factors) => Write::AddScaled(&factors[block.clone()]),
                    None => Write::Replace,
                },
                scales: self.scales(columns.start),
                ahead: ahead(index),
            }
            .compute(isa, out);
        }
    }

    /// The scales of a matrix from column `column` of the product on, where it has any.
    fn scales(&self, column: usize) -> Option<&[f32]> {
        self.weights.scales(self.matrix, self.block, self.first_column + column)
    }

    /// The panels of a matrix from column `column` of the product on, and what follows them.
    fn right<'w, W: Element>(&self, panels: &'w Buffer<W>, column: usize) -> Right<'w, W> {
        self.weights.geometry().right(panels, self.matrix, self.block, (self.first_column + column) / PANEL)
    }
}

impl RowProduct<'_> {
    /// Computes the product on tiles; `false` where they do not serve it, or this thread has none.
    fn compute_on_tiles<W: Element>(&self, panels: &Buffer<W>, isa: Isa, out: &mut Tile<'_, f32>) -> bool {
        let rounds = isa.rounds_on_tiles(self.weights.panels().form());
        let serves = on_tiles::<W>(isa, rounds, self.left.starts.len(), self.left.inner, self.columns);
        let Some(unit) = serves.then(|| Unit::new(isa)).flatten() else { return false };
        match rounds {
            true => self.compute_rounded(unit.rounding(), panels, isa, out),
            false => self.compute_exactly(unit, panels, isa, out),
        }
        true
    }

    /// The product of rows that are rounded to bf16.
    fn compute_rounded<W: Element>(&self, mut unit: Unit, panels: &Buffer<W>, isa: Isa, out: &mut Tile<'_, f32>) {
        for column in (0..self.columns).step_by(COLUMN_LIMIT) {
            let columns = column..self.columns.min(column + COLUMN_LIMIT);
            unit.multiply(self.left, self.right(panels, column), columns.len(), self.epoch);
            let sums = unit.sums().chunks(SUM_STRIDE).take(self.left.starts.len());
            sums.enumerate().for_each(|(row, product)| self.write(row, columns.clone(), product, isa, out));
        }
    }

    fn compute_exactly<W: Element>(&self, mut unit: Unit, panels: &Buffer<W>, isa: Isa, out: &mut Tile<'_, f32>) {
        for column in (0..self.columns).step_by(COLUMN_LIMIT) {
            let first_panel = (self.first_column + column) / PANEL;
            let right = self.right(panels, column);
            let columns = column..self.columns.min(column + COLUMN_LIMIT);
            let rows = unit.multiply(self.left, right, columns.len(), self.epoch);
            let mut known = [Magnitudes::default(); COLUMN_LIMIT / PANEL];
            for (panel, known) in known.iter_mut().enumerate().take(columns.len().div_ceil(PANEL)) {
                let values = &right.panels_from(panel).data[..right.panel_stride];
                let find = || unit.magnitudes(values);
                *known = self.weights.magnitudes(self.matrix, self.block, first_panel + panel, find);
            }
            let all = known.iter().fold(Magnitudes::default(), |all, found| all.join(*found));
            for (row, (found, product)) in
                rows.iter().zip(unit.sums().chunks(SUM_STRIDE)).enumerate().take(self.left.starts.len())
            {
                if found.suit(all, self.left.inner) {
                    self.write(row, columns.clone(), product, isa, out);
                    continue;
                }
                for ((panel, known), product) in known.iter().enumerate().zip(product.chunks(PANEL)) {
                    let columns = column + panel * PANEL..columns.end.min(column + (panel + 1) * PANEL);
                    if columns.is_empty() {
                        break;
                    }
                    match found.suit(*known, self.left.inner) {
                        true => self.write(row, columns, product, isa, out),
                        false => self.compute_row(row, columns, right.panels_from(panel), isa, out),
                    }
                }
            }
        }
    }

    /// Writes a product to the columns `columns` of a row.
    fn write(&self, row: usize, columns: Range<usize>, product: &[f32], isa: Isa, out: &mut Tile<'_, f32>) {
        let Some(scales) = self.scales(columns.start) else {
            return self.write_scaled(row, columns, product, isa, out);
        };
        let mut scaled = [0.0; COLUMN_LIMIT];
        let count = columns.len();
        let (sums, scales) = (&product[..count], &scales[..count]);
        scaled.iter_mut().zip(sums).zip(scales).for_each(|((out, sum), scale)| *out = sum * scale);
        self.write_scaled(row, columns, &scaled, isa, out);
    }

    fn write_scaled(&self, row: usize, columns: Range<usize>, product: &[f32], isa: Isa, out: &mut Tile<'_, f32>) {
        let place = &mut out.row(self.rows[row])[columns];
        match self.factors {
            Some(factors) => isa.add_terms(place, &[(factors[row], product)]),
            None => isa.replace(place, product),
        }
    }

    /// One row times one panel, on vectors.
    fn compute_row<W: Element>(
        &self,
        row: usize,
        columns: Range<usize>,
        right: Right<'_, W>,
        isa: Isa,
        out: &mut Tile<'_, f32>,
    ) {
        Product {
            left: Left { starts: &self.left.starts[row..=row], ..self.left },
            right,
            rows: &self.rows[row..=row],
            first_column: columns.start,
            columns: columns.len(),
            write: match self.factors {
                Some(factors) => Write::AddScaled(&factors[row..=row]),
                None => Write::Replace,
            },
            scales: self.scales(columns.start),
            ahead: None,
        }
        .compute(isa, out);
    }
}

/// Columns of a task, a multiple of `unit`, of a stage that multiplies `rows` rows, cut into `tiles` tiles, with
/// `columns` columns.
///
/// On AMX tiles a wide task splits its rows once for many columns, as long as [`TASKS`] are left.
pub(crate) fn task_columns(isa: Isa, rows: usize, tiles: usize, columns: usize, unit: usize) -> usize {
    if !isa.has_tiles() || rows < tiles * ON_TILES[0] {
        return unit;
    }
    let widest = COLUMN_LIMIT / unit.max(1);
    let enough = |count: &usize| tiles * columns.div_ceil(count * unit) >= TASKS;
    (1..=widest).rev().find(enough).unwrap_or(1) * unit
}

/// What the first block of `rows` rows fetches of `right`, whose panels have `panel_len` elements, where it meets
/// `met` of them; the weights may be `far`.
fn first_ahead<W: Element>(
    isa: Isa,
    right: Right<'_, W>,
    (rows, quantized): (usize, bool),
    (panel_len, far): (usize, bool),
    met: usize,
) -> Option<Ahead> {
    let bytes = panel_len * size_of::<W>();
    if rows == 1 {
        return (bytes > LONG || isa.reads_one_stream() && far).then_some(Ahead::Own);
    }
    let alone = if far && are_integers::<W>() { LONG_OF_INTEGERS } else { LONG };
    if rows <= ALONE && bytes <= alone && isa.reads_one_stream() {
        return None;
    }
    match panels_at_once::<W>(isa, (rows, quantized), bytes).min(met) {
        1 => Some(Ahead::Own),
        panels if panels * bytes <= EARLY => {
            let ahead = right.data.get(panels * panel_len..)?;
            Some(Ahead::Later(Memory::of(ahead).panels(panels * bytes)))
        }
        _ => None,
    }
}

/// Cuts `count` rows into the fewest blocks of at most [`ROWS`], as even as can be.
pub(crate) fn blocks(count: usize) -> impl Iterator<Item = Range<usize>> {
    even(0..count, ROWS)
}

/// Cuts `rows` into the fewest ranges of at most `most`, as even as can be.
pub(crate) fn even(rows: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let (start, count) = (rows.start, rows.len());
    let total = count.div_ceil(most);
    (0..total).map(move |index| start + index * count / total..start + (index + 1) * count / total)
}

#[cfg(test)]
#[path = "rows_on_tiles_tests.rs"]
mod on_tiles;

#[cfg(test)]
#[path = "rows_tests.rs"]
mod tests;
