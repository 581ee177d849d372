//! Weights in the order in which the microkernels read them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::buffer::Buffer;
use crate::simd::{PANEL, Right};

/// Shape of weights `[matrices, inner, blocks * columns]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    /// Matrices one after the other: experts.
    pub(crate) matrices: usize,
    /// Parts of a row that are multiplied on their own: heads.
    pub(crate) blocks: usize,
    /// Rows: the inner dimension.
    pub(crate) inner: usize,
    /// Columns of one block.
    pub(crate) columns: usize,
}

impl Geometry {
    /// `router_weight [C, E]`.
    pub(crate) fn router(width: usize, experts: usize) -> Self {
        Self { matrices: 1, blocks: 1, inner: width, columns: experts }
    }

    /// `query_weight [E, C, G * D]`, a block for each head.
    pub(crate) fn queries(experts: usize, width: usize, kv_heads: usize, head: usize) -> Self {
        Self { matrices: experts, blocks: kv_heads, inner: width, columns: head }
    }

    /// `kv_weight [C, 2 * G * D]`, a block for each head, keys first.
    pub(crate) fn keys_values(width: usize, kv_heads: usize, head: usize) -> Self {
        Self { matrices: 1, blocks: 2 * kv_heads, inner: width, columns: head }
    }

    /// `input_weight [E, C, blocks * F]`.
    pub(crate) fn inputs(experts: usize, width: usize, blocks: usize, hidden: usize) -> Self {
        Self { matrices: experts, blocks, inner: width, columns: hidden }
    }

    /// `output_weight [E, inner, C]`.
    pub(crate) fn outputs(experts: usize, inner: usize, width: usize) -> Self {
        Self { matrices: experts, blocks: 1, inner, columns: width }
    }

    /// Elements before packing.
    pub(crate) fn len(&self) -> usize {
        [self.matrices, self.blocks, self.inner, self.columns].iter().fold(1, |len: usize, n| len.saturating_mul(*n))
    }

    fn panels(&self) -> usize {
        self.columns.div_ceil(PANEL)
    }

    fn panel_len(&self) -> usize {
        self.inner * PANEL
    }

    /// Every panel with the place in the source where its first row begins and the number of its columns.
    fn sources(self) -> impl Iterator<Item = (usize, usize)> {
        let row = self.blocks * self.columns;
        (0..self.matrices).flat_map(move |matrix| {
            (0..self.blocks).flat_map(move |block| {
                (0..self.columns).step_by(PANEL).map(move |column| {
                    let start = matrix * self.inner * row + block * self.columns + column;
                    (start, PANEL.min(self.columns - column))
                })
            })
        })
    }
}

/// Weights in panels `[matrices, blocks, ceil(columns / PANEL), inner, PANEL]`, the last panel of a block padded with
/// zeros.
#[derive(Debug)]
pub(crate) struct Packed {
    geometry: Geometry,
    data: Buffer,
}

/// Packed weights that are in use somewhere in the process.
static SHARED: Mutex<Vec<Weak<Packed>>> = Mutex::new(Vec::new());

impl Packed {
    /// Packs `source`; `None` where its length does not fit.
    pub(crate) fn new(geometry: Geometry, source: &[f32]) -> Option<Self> {
        let mut packed = Self { geometry, data: Buffer::default() };
        packed.fill(source).then_some(packed)
    }

    /// As [`Packed::new`]; equal weights that are in use somewhere in the process are shared.
    pub(crate) fn shared(geometry: Geometry, source: &[f32]) -> Option<Arc<Self>> {
        let mut all = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|weak| weak.strong_count() > 0);
        if let Some(found) = all.iter().filter_map(Weak::upgrade).find(|packed| packed.holds(geometry, source)) {
            return Some(found);
        }
        let packed = Arc::new(Self::new(geometry, source)?);
        all.push(Arc::downgrade(&packed));
        Some(packed)
    }

    /// Weights that are there for one call only, in memory that is kept.
    pub(crate) fn refill(&mut self, geometry: Geometry, source: &[f32]) -> bool {
        self.geometry = geometry;
        self.fill(source)
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Bytes of the panels.
    pub(crate) fn bytes(&self) -> usize {
        self.data.bytes()
    }

    fn fill(&mut self, source: &[f32]) -> bool {
        let geometry = self.geometry;
        if source.len() != geometry.len() || geometry.len() == 0 {
            return false;
        }
        let panels = geometry.matrices * geometry.blocks * geometry.panels();
        let data = self.data.take(panels * geometry.panel_len());
        let row = geometry.blocks * geometry.columns;
        for (panel, (start, count)) in data.chunks_mut(geometry.panel_len()).zip(geometry.sources()) {
            for (packed, row) in panel.chunks_mut(PANEL).zip(source[start..].chunks(row)) {
                packed[..count].copy_from_slice(&row[..count]);
                packed[count..].fill(0.0);
            }
        }
        true
    }

    /// Whether these are the weights `source`, bit by bit.
    fn holds(&self, geometry: Geometry, source: &[f32]) -> bool {
        if geometry != self.geometry || source.len() != geometry.len() {
            return false;
        }
        let (data, row) = (self.data.filled(), geometry.blocks * geometry.columns);
        data.chunks(geometry.panel_len()).zip(geometry.sources()).all(|(panel, (start, count))| {
            let rows = panel.chunks(PANEL).zip(source[start..].chunks(row));
            rows.into_iter()
                .all(|(packed, row)| packed[..count].iter().zip(&row[..count]).all(|(a, b)| a.to_bits() == b.to_bits()))
        })
    }

    /// The panels of one block from panel `panel` on.
    pub(crate) fn right(&self, matrix: usize, block: usize, panel: usize) -> Right<'_> {
        let Geometry { blocks, .. } = self.geometry;
        let (panels, len) = (self.geometry.panels(), self.geometry.panel_len());
        let block = matrix * blocks + block;
        let data = &self.data.filled()[(block * panels + panel) * len..(block + 1) * panels * len];
        Right { data, stride: PANEL, panel_stride: len }
    }
}

impl Default for Packed {
    fn default() -> Self {
        Self { geometry: Geometry { matrices: 0, blocks: 0, inner: 0, columns: 0 }, data: Buffer::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry { matrices: 2, blocks: 3, inner: 5, columns: 37 };

    #[test]
    fn panels_hold_the_columns_of_their_block() {
        let source: Vec<f32> = (0..GEOMETRY.len()).map(|i| i as f32).collect();
        let packed = Packed::new(GEOMETRY, &source).unwrap();
        for (matrix, block) in [(0, 0), (1, 2)] {
            for inner in 0..5 {
                let row = &source[(matrix * 5 + inner) * 3 * 37 + block * 37..][..37];
                let first = &packed.right(matrix, block, 0).data[inner * PANEL..][..PANEL];
                let second = &packed.right(matrix, block, 1).data[inner * PANEL..][..PANEL];
                assert_eq!(first, &row[..PANEL]);
                assert_eq!(second[..5], row[PANEL..]);
                assert_eq!(second[5..], [0.0; PANEL - 5]);
            }
        }
        assert!(Packed::new(GEOMETRY, &source[1..]).is_none());
    }

    #[test]
    fn equal_weights_are_shared_while_in_use() {
        let source: Vec<f32> = (0..GEOMETRY.len()).map(|i| i as f32 + 0.5).collect();
        let first = Packed::shared(GEOMETRY, &source).unwrap();
        assert!(Arc::ptr_eq(&first, &Packed::shared(GEOMETRY, &source).unwrap()));
        let mut other = source.clone();
        other[100] = -1.0;
        assert!(!Arc::ptr_eq(&first, &Packed::shared(GEOMETRY, &other).unwrap()));
        let flat = Geometry { matrices: 6, blocks: 1, ..GEOMETRY };
        assert!(!Arc::ptr_eq(&first, &Packed::shared(flat, &source).unwrap()));
    }
}
