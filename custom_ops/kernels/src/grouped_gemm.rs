//! One product per expert, over the rows of that expert only.

use crate::ThreadPool;
use crate::gemm::{Matrix, Write, multiply};
use crate::pool;
use crate::routing::Routing;

/// Weights `[E, rows, columns]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ExpertWeights<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl<'a> ExpertWeights<'a> {
    /// The matrix of one expert.
    pub(crate) fn expert(&self, expert: usize) -> Matrix<'a> {
        let len = self.rows * self.columns;
        Matrix::dense(&self.data[expert * len..][..len], self.rows, self.columns)
    }
}

/// Gathers the rows of each expert and multiplies them by its matrix.
///
/// `gather(row, x)` fills `x [weights.rows]`. `out` is `[columns / block, rows of the routing, block]`: each block of
/// columns is stored on its own, so that the columns of one head form dense rows.
pub(crate) fn grouped_gemm(
    pool: &dyn ThreadPool,
    routing: &Routing,
    weights: ExpertWeights<'_>,
    block: usize,
    gather: &(dyn Fn(usize, &mut [f32]) + Sync),
    out: &mut [f32],
) {
    let mut items = Vec::new();
    let mut rest = out;
    for first in (0..weights.columns).step_by(block) {
        let (rows, tail) = rest.split_at_mut(routing.rows() * block);
        rest = tail;
        items.extend(routing.split(rows, block).into_iter().map(|tile| (first, tile)));
    }
    pool::for_each(pool, items, |(first, (tile, out))| {
        let x = gather_rows(tile.rows.clone(), weights.rows, gather);
        let left = Matrix::dense(&x, tile.rows.len(), weights.rows);
        multiply(out, left, weights.expert(tile.expert).columns(first..first + block), Write::Replace);
    });
}

/// The gathered rows as one dense matrix `[rows, width]`.
pub(crate) fn gather_rows(
    rows: std::ops::Range<usize>,
    width: usize,
    gather: &(dyn Fn(usize, &mut [f32]) + Sync),
) -> Vec<f32> {
    let mut x = vec![0.0; rows.len() * width];
    for (row, x) in rows.zip(x.chunks_mut(width)) {
        gather(row, x);
    }
    x
}
