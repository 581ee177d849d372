//! Where the elements of a weight stand, before packing and after.

use moa_schema::BLOCK;

use crate::buffer::Buffer;
use crate::simd::{Element, PANEL, Place, Right};
use crate::weight_data::WeightData;

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

    /// Whether `data` has such weights, and as many scales as they need.
    pub(crate) fn fits(&self, data: WeightData<'_>) -> bool {
        let shape = [self.matrices, self.inner, self.blocks * self.columns];
        let fit = |(found, needed): (usize, [usize; 3])| found == needed.iter().product();
        data.has(self.len()) && data.scales(shape).is_none_or(fit)
    }

    /// Panels of a block.
    pub(crate) fn panels(&self) -> usize {
        self.columns.div_ceil(PANEL)
    }

    /// Elements of a packed panel.
    pub(crate) fn panel_len<W: Element>(&self) -> usize {
        W::rows(self.inner) * PANEL
    }

    /// Where the values of a panel stand in the source from inner step `inner` on, at most `steps` of them.
    pub(crate) fn place(self, panel: usize, inner: usize, steps: usize) -> Place {
        let (block, column) = (panel / self.panels(), panel % self.panels() * PANEL);
        let (matrix, block) = (block / self.blocks, block % self.blocks);
        let (stride, first) = (self.blocks * self.columns, block * self.columns + column);
        Place {
            first: (matrix * self.inner + inner) * stride + first,
            scale: (matrix * self.inner.div_ceil(BLOCK) + inner / BLOCK) * stride + first,
            stride,
            rows: steps.min(self.inner - inner),
            columns: PANEL.min(self.columns - column),
        }
    }

    /// The panels of a matrix from panel `panel` of block `block` on, and what follows them.
    pub(crate) fn right<W: Element>(
        self,
        panels: &Buffer<W>,
        matrix: usize,
        block: usize,
        panel: usize,
    ) -> Right<'_, W> {
        let (first, len) = (self.number(matrix, block, panel), self.panel_len::<W>());
        Right { data: &panels.filled()[first * len..], stride: PANEL, panel_stride: len }
    }

    /// The number of a panel among those of all matrices.
    pub(crate) fn number(self, matrix: usize, block: usize, panel: usize) -> usize {
        (matrix * self.blocks + block) * self.panels() + panel
    }
}
