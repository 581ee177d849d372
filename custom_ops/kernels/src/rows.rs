//! Rows from anywhere, times one block of packed weights.

use crate::buffer::Buffer;
use crate::grid::Tile;
use crate::packed::{Packed, Panels};
#[cfg(target_arch = "x86_64")]
use crate::simd::tiles::{COLUMN_LIMIT, Products, Unit};
use crate::simd::{Element, Isa, Left, PANEL, Product, ROWS, Right, Write};

/// Most rows that one call multiplies.
pub(crate) const TILE_ROWS: usize = 128;

/// Fewest rows and inner steps of a product on AMX tiles: below, splitting the weights costs more than tiles gain.
#[cfg(target_arch = "x86_64")]
const ON_TILES: [usize; 2] = [48, 64];

/// Bytes of weights that stay in the nearest caches while blocks of rows pass.
const NEAR: usize = 65536;

/// Bytes between what the first block reads and what it fetches.
const DISTANCE: usize = 4096;

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
}

impl RowProduct<'_> {
    /// Computes the product into the columns `0 .. columns` of `out`.
    pub(crate) fn compute(&self, isa: Isa, out: &mut Tile<'_, f32>) {
        match self.weights.panels() {
            Panels::F32(panels) => self.compute_with(panels, isa, out),
            Panels::Bf16(panels) => self.compute_with(panels, isa, out),
            Panels::F16(panels) => self.compute_with(panels, isa, out),
        }
    }

    fn compute_with<W: Element>(&self, panels: &Buffer<W>, isa: Isa, out: &mut Tile<'_, f32>) {
        let count = self.left.starts.len();
        #[cfg(target_arch = "x86_64")]
        if isa.has_tiles() && count >= ON_TILES[0] && self.left.inner >= ON_TILES[1] {
            return self.compute_on_tiles(panels, isa, out);
        }
        let near = self.left.inner * self.columns * size_of::<W>() <= NEAR;
        let together = if count <= ROWS || near { self.columns } else { PANEL };
        for column in (0..self.columns).step_by(together.max(1)) {
            let panel = (self.first_column + column) / PANEL;
            let right = self.weights.geometry().right(panels, self.matrix, self.block, panel);
            let next = right.data.get(self.left.inner * PANEL..2 * self.left.inner * PANEL);
            let (total, panel_len) = (count.div_ceil(ROWS), self.left.inner * PANEL);
            for (index, block) in blocks(count).enumerate() {
                Product {
                    left: Left { starts: &self.left.starts[block.clone()], ..self.left },
                    right,
                    rows: &self.rows[block.clone()],
                    first_column: column,
                    columns: together.min(self.columns - column),
                    write: match self.factors {
                        Some(factors) => Write::AddScaled(&factors[block]),
                        None => Write::Replace,
                    },
                    ahead: match (index, column) {
                        (0, 0) => right
                            .data
                            .get(DISTANCE / size_of::<W>()..)
                            .map(|ahead| &ahead[..ahead.len().min(panel_len)]),
                        _ => next.and_then(|next| part(next, index, total)),
                    },
                }
                .compute(isa, out);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl RowProduct<'_> {
    fn compute_on_tiles<W: Element>(&self, panels: &Buffer<W>, isa: Isa, out: &mut Tile<'_, f32>) {
        let mut unit = Unit::new(isa);
        for column in (0..self.columns).step_by(COLUMN_LIMIT) {
            let panel = (self.first_column + column) / PANEL;
            let right = self.weights.geometry().right(panels, self.matrix, self.block, panel);
            let columns = COLUMN_LIMIT.min(self.columns - column);
            let products = unit.multiply(self.left, right, columns);
            for row in 0..self.left.starts.len() {
                if (0..columns.div_ceil(PANEL)).all(|panel| products.suits(row, panel)) {
                    let (place, product) = (&mut out.row(self.rows[row])[column..column + columns], products.row(row));
                    match self.factors {
                        Some(factors) => isa.add_scaled(place, factors[row], product),
                        None => isa.replace(place, product),
                    }
                } else {
                    self.compute_row(row, column, right, &products, isa, out);
                }
            }
        }
    }

    /// One row, of which some products came from tiles; the others are multiplied here.
    fn compute_row<W: Element>(
        &self,
        row: usize,
        first_column: usize,
        right: Right<'_, W>,
        products: &Products<'_>,
        isa: Isa,
        out: &mut Tile<'_, f32>,
    ) {
        for column in (first_column..self.columns.min(first_column + COLUMN_LIMIT)).step_by(PANEL) {
            let (columns, panel) = (PANEL.min(self.columns - column), (column - first_column) / PANEL);
            if products.suits(row, panel) {
                let product = &products.row(row)[panel * PANEL..];
                let place = &mut out.row(self.rows[row])[column..column + columns];
                match self.factors {
                    Some(factors) => isa.add_scaled(place, factors[row], product),
                    None => isa.replace(place, product),
                }
                continue;
            }
            Product {
                left: Left { starts: &self.left.starts[row..=row], ..self.left },
                right: Right { data: &right.data[panel * right.panel_stride..], ..right },
                rows: &self.rows[row..=row],
                first_column: column,
                columns,
                write: match self.factors {
                    Some(factors) => Write::AddScaled(&factors[row..=row]),
                    None => Write::Replace,
                },
                ahead: None,
            }
            .compute(isa, out);
        }
    }
}

/// Share `index` of `total` of the panel at the start of `panels`.
fn part<W>(panels: &[W], index: usize, total: usize) -> Option<&[W]> {
    let len = panels.len();
    panels.get(len * index / total..len * (index + 1) / total)
}

/// Cuts `count` rows into the fewest blocks of at most [`ROWS`], as even as can be.
pub(crate) fn blocks(count: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let total = count.div_ceil(ROWS);
    (0..total).map(move |block| block * count / total..(block + 1) * count / total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_even_and_complete() {
        for count in 0..100 {
            let all: Vec<_> = blocks(count).collect();
            assert_eq!(all.iter().cloned().flatten().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
            assert!(all.iter().all(|block| block.len() <= ROWS));
            let sizes = all.iter().map(|block| block.len());
            assert!(sizes.clone().max().unwrap_or(0) - sizes.min().unwrap_or(0) <= 1);
        }
    }
}
