//! Speed of the block products on packed weights beside the `gemm` crate; `cargo bench` prints it.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
pub mod limits;

use std::time::Instant;

use moa_schema::BLOCK;

use crate::{
    Instructions,
    geometry::Geometry,
    grid::Tile,
    packed::Packed,
    rows::{RowProduct, TILE_ROWS},
    simd::{Isa, Left},
    weight_data::{Int4, WeightData},
};

/// One product, and the best of 200 runs of each contender on one thread.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// Rows, inner size and columns.
    pub sizes: [usize; 3],
    /// Packed weights on vectors alone, in GFLOP/s.
    pub packed: f64,
    /// Packed weights with every instruction that the processor has, in GFLOP/s: stored as f32, and as bf16.
    pub best: [f64; 2],
    /// Stored as bf16, of rows that are rounded where the processor multiplies these faster, in GFLOP/s.
    pub rounded: f64,
    /// Stored as int8 and as int4, of rows that are rounded where the processor multiplies these faster, in GFLOP/s.
    pub quantized: [f64; 2],
    /// The crate `gemm`, in GFLOP/s.
    pub gemm: f64,
}

/// Products as the layers make them.
pub const SIZES: [[usize; 3]; 14] = [
    [1, 512, 128],
    [2, 512, 128],
    [5, 512, 128],
    [8, 512, 128],
    [10, 512, 128],
    [32, 512, 128],
    [48, 512, 128],
    [64, 512, 128],
    [128, 512, 128],
    [128, 512, 256],
    [128, 128, 512],
    [64, 128, 128],
    [64, 256, 512],
    [64, 2048, 2048],
];

/// Measures one product by instructions up to `limit`; nothing where its weights cannot be packed.
pub fn product(limit: Instructions, [m, k, n]: [usize; 3]) -> Option<Figure> {
    let (a, b) = (vec![0.5f32; m * k], vec![0.25f32; k * n]);
    let geometry = Geometry { matrices: 1, blocks: 1, inner: k, columns: n };
    let brain = vec![half::bf16::from_f32(0.25); k * n];
    let [wide, narrow] = [WeightData::F32(&b), WeightData::Bf16(&brain)].map(|data| Packed::new(geometry, data));
    let (wide, narrow) = (wide?, narrow?);
    let (values, scales, nibbles) = (vec![1i8; k * n], vec![0.25; n], vec![0x11u8; (k * n).div_ceil(2)]);
    let blocks = vec![half::bf16::from_f32(0.25); k.div_ceil(BLOCK) * n];
    let int8 = Packed::new(geometry, WeightData::I8 { values: &values, scales: &scales })?;
    let int4 = Packed::new(geometry, WeightData::I4(Int4 { values: &nibbles, scales: &blocks }))?;
    let mut out = vec![0.0f32; m * n];
    let mut ours = |isa, weights| best_gflops(m * k * n, || multiply(isa, [m, k, n], &a, weights, &mut out));
    let [vectors, widest] = levels(limit);
    let (packed, rounded) = (ours(vectors, &wide), ours(widest.rounding(), &narrow));
    let best = [ours(widest, &wide), ours(widest, &narrow)];
    let quantized = [&int8, &int4].map(|weights| ours(widest.quantizing(), weights));
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
    Some(Figure { sizes: [m, k, n], packed, best, rounded, quantized, gemm })
}

/// All rows times packed weights.
fn multiply(isa: Isa, [m, k, n]: [usize; 3], rows: &[f32], weights: &Packed, out: &mut [f32]) {
    let (mut starts, mut places) = ([0; TILE_ROWS], [0; TILE_ROWS]);
    for first in (0..m).step_by(TILE_ROWS) {
        let count = TILE_ROWS.min(m - first);
        for row in 0..count {
            (starts[row], places[row]) = ((first + row) * k, first + row);
        }
        RowProduct::new(Left::new(rows, &starts[..count], k), weights, &places[..count], n)
            .compute(isa, &mut Tile::dense(out, n));
    }
}

/// Rows times weights that come from memory.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    /// Rows that each matrix is multiplied with.
    pub rows: usize,
    /// How the weights are stored.
    pub stored: &'static str,
    /// Billions of weights a second on vectors alone, with every instruction that the processor has, and of rows that
    /// are rounded where that is faster beside such weights.
    pub weights: [f64; 3],
    /// Bytes of a weight, its scale included where that is packed beside it.
    pub bytes: f64,
}

/// Inner size, columns and number of the matrices that are read in turn: more than caches hold.
const STREAM: [usize; 3] = [2048, 2048, 16];

/// Rows of [`streams`].
const STREAM_ROWS: [usize; 10] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64];

/// Columns that a task multiplies: those of single rows, and those of more.
const STREAM_COLUMNS: [usize; 2] = [128, 512];

/// Multiplies rows with each of many matrices, on one thread, by instructions up to `limit`, for every type of weight
/// in turn.
pub fn streams(limit: Instructions) -> Vec<Stream> {
    let [inner, columns, matrices] = STREAM;
    let geometry = Geometry { matrices, blocks: 1, inner, columns };
    let wide: Vec<f32> = (0..geometry.len()).map(|i| (i % 251) as f32 - 125.0).collect();
    let brain: Vec<half::bf16> = wide.iter().copied().map(half::bf16::from_f32).collect();
    let rare = |i: usize| half::bf16::from_bits(((1 + i % 100) << 7) as u16);
    let with_rare = |(i, value): (usize, &half::bf16)| if i % 5003 == 0 { rare(i / 5003) } else { *value };
    let patched: Vec<half::bf16> = brain.iter().enumerate().map(with_rare).collect();
    let half: Vec<half::f16> = wide.iter().copied().map(half::f16::from_f32).collect();
    let integers: Vec<i8> = (0..geometry.len()).map(|i| (i % 251) as u8 as i8).collect();
    let scales = vec![0.5; matrices * columns];
    let nibbles: Vec<u8> = (0..geometry.len() / 2).map(|i| (i % 251) as u8).collect();
    let blocks = vec![half::bf16::from_f32(0.5); geometry.len().div_ceil(BLOCK)];
    let all = [
        ("f32", Packed::new(geometry, &wide)),
        ("bf16", Packed::new(geometry, WeightData::Bf16(&brain))),
        ("compact", Packed::compact(geometry, &patched)),
        ("f16", Packed::new(geometry, WeightData::F16(&half))),
        ("int8", Packed::new(geometry, WeightData::I8 { values: &integers, scales: &scales })),
        ("int4", Packed::new(geometry, WeightData::I4(Int4 { values: &nibbles, scales: &blocks }))),
    ];
    let [vectors, widest] = levels(limit);
    let mut found = Vec::new();
    for rows in STREAM_ROWS {
        for (stored, packed) in &all {
            let Some(packed) = packed else { continue };
            let mut best = [f64::INFINITY; 3];
            for _ in 0..8 {
                let rounding =
                    if ["bf16", "compact"].contains(stored) { widest.rounding() } else { widest.quantizing() };
                for (isa, best) in [vectors, widest, rounding].into_iter().zip(&mut best) {
                    let start = Instant::now();
                    stream(isa, rows, packed);
                    *best = best.min(start.elapsed().as_secs_f64());
                }
            }
            let weights = best.map(|seconds| geometry.len() as f64 / seconds / 1e9);
            let bytes = packed.bytes_of(geometry.len()) as f64 / geometry.len() as f64;
            found.push(Stream { rows, stored, weights, bytes });
        }
    }
    found
}

/// Rows times every matrix.
fn stream(isa: Isa, count: usize, weights: &Packed) {
    let [inner, columns, matrices] = STREAM;
    let (values, mut out) = (vec![0.5f32; count * inner], vec![0.0f32; count * columns]);
    let starts: Vec<usize> = (0..count).map(|row| row * inner).collect();
    let places: Vec<usize> = (0..count).collect();
    let step = STREAM_COLUMNS[usize::from(count > 1)];
    for matrix in 0..matrices {
        for first_column in (0..columns).step_by(step) {
            RowProduct {
                matrix,
                first_column,
                ..RowProduct::new(Left::new(&values, &starts, inner), weights, &places, step)
            }
            .compute(isa, &mut Tile::dense(&mut out, columns));
        }
    }
}

/// Vectors alone, and every instruction up to `limit`.
fn levels(limit: Instructions) -> [Isa; 2] {
    [limit.min(Instructions::Avx512), limit].map(Isa::at_most)
}

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
