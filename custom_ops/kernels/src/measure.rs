//! Speed of the block products on packed weights beside the `gemm` crate; `cargo bench` prints it.
#![allow(unsafe_code)]

use std::time::Instant;

use crate::{
    Instructions,
    grid::Tile,
    packed::{Geometry, Packed},
    rows::{RowProduct, TILE_ROWS},
    simd::{Isa, Left},
};

/// One product, and the best of 200 runs of each contender on one thread.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Rows, inner size and columns.
    pub sizes: [usize; 3],
    /// Packed weights, in GFLOP/s.
    pub packed: f64,
    /// The crate `gemm`, in GFLOP/s.
    pub gemm: f64,
}

/// Products as the layers make them.
pub const SIZES: [[usize; 3]; 9] = [
    [1, 512, 128],
    [2, 512, 128],
    [5, 512, 128],
    [8, 512, 128],
    [10, 512, 128],
    [64, 512, 128],
    [64, 128, 128],
    [64, 256, 512],
    [64, 2048, 2048],
];

/// Measures one product; nothing where its weights cannot be packed.
pub fn product([m, k, n]: [usize; 3]) -> Option<Figure> {
    let isa = Isa::at_most(Instructions::default());
    let (a, b) = (vec![0.5f32; m * k], vec![0.25f32; k * n]);
    let packed = Packed::new(Geometry { matrices: 1, blocks: 1, inner: k, columns: n }, &b)?;
    let mut out = vec![0.0f32; m * n];
    let starts: Vec<usize> = (0..m).map(|row| row * k).collect();
    let rows: Vec<usize> = (0..m).collect();
    let ours = best_gflops(m * k * n, || {
        for first in (0..m).step_by(TILE_ROWS) {
            let tile = first..m.min(first + TILE_ROWS);
            RowProduct {
                left: Left { data: &a, starts: &starts[tile.clone()], inner: k },
                weights: &packed,
                matrix: 0,
                block: 0,
                first_column: 0,
                columns: n,
                rows: &rows[tile],
                factors: None,
            }
            .compute(isa, &mut Tile::dense(&mut out, n));
        }
    });
    let gemm = best_gflops(m * k * n, || {
        let (k_stride, n_stride) = (k.cast_signed(), n.cast_signed());
        let (c, a, b) = (out.as_mut_ptr(), a.as_ptr(), b.as_ptr());
        let none = gemm::Parallelism::None;
        // SAFETY: three dense matrices of the sizes given.
        unsafe {
            gemm::gemm(
                m, n, k, c, 1, n_stride, false, a, 1, k_stride, b, 1, n_stride, 0.0, 1.0, false, false, false, none,
            );
        }
    });
    Some(Figure { sizes: [m, k, n], packed: ours, gemm })
}

#[allow(clippy::cast_precision_loss)]
fn best_gflops(macs: usize, mut run: impl FnMut()) -> f64 {
    run();
    let mut once = || {
        let start = Instant::now();
        run();
        start.elapsed().as_secs_f64()
    };
    let best = (0..200).map(|_| once()).fold(f64::INFINITY, f64::min);
    2e-9 * macs as f64 / best
}
