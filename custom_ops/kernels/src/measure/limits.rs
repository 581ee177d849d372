//! What bounds a call on this machine: rates of loops that do one kind of work, and of blocks whose operands are near.

mod tiles;

use std::sync::Barrier;
use std::time::Instant;

pub use tiles::TileLimits;

use crate::buffer::Buffer;
use crate::grid::Tile;
use crate::simd::limits::Loop;
use crate::simd::{Isa, LANES, Left, PANEL, Product, ROWS, Right, Write};

/// Times that each loop runs; the fastest counts.
const TURNS: usize = 2000;

/// Times that short work is done in a turn, since a clock has a grain.
const TIMES: usize = 32;

/// Multiply-adds of a vector, exponentials and scores of one run.
const MULTIPLY_ADDS: usize = 240_000;
const EXPONENTIALS: usize = 4096;
const KEYS: usize = 256;

/// What a thread reads in turn: matrices of so many elements, which lie apart from each other as those of chosen
/// experts do, within the last cache; and one that is larger than most of these.
const READ: [(usize, usize); 2] = [(9, 1 << 16), (1, 1 << 26)];

/// From one of these matrices to the next, of every [`MATRICES`].
const APART: usize = 7;
const MATRICES: usize = 32;

/// Inner steps of blocks, and how they end, as the layers of `benches/README.md` have them.
const BLOCKS: [(usize, End); 6] = [
    (512, End::Replace),
    (256, End::Replace),
    (128, End::Replace),
    (256, End::Resume),
    (256, End::AddScaled),
    (128, End::AddScaled),
];

/// Columns of a block.
const COLUMNS: usize = 4 * PANEL;

/// How a block ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The product is written.
    Replace,
    /// The destination is scaled and is the first term.
    Resume,
    /// The product is scaled and added.
    AddScaled,
}

/// The best of many turns of one thread, while all threads do the same.
#[derive(Debug, Clone)]
pub struct Limits {
    /// GFLOP/s of multiply-adds on registers alone.
    pub multiply_adds: f64,
    /// GFLOP/s of blocks of twelve rows, by inner steps and end, with operands in the nearest two caches.
    pub blocks: Vec<(usize, End, f64)>,
    /// Nanoseconds of 16 exponentials of what lies in the nearest cache.
    pub exponentials: f64,
    /// Nanoseconds of 16 scores of twelve rows in the online softmax.
    pub softmax: f64,
    /// GB/s of a thread that reads so many matrices of so many elements again and again.
    pub reads: Vec<(usize, usize, f64)>,
    /// Of AMX tiles, where there are any.
    pub tiles: Option<TileLimits>,
}

/// The limits of each of `threads` threads; nothing without AVX2.
#[must_use]
pub fn limits(threads: usize) -> Option<Limits> {
    let isa = Isa::at_most(crate::Instructions::Avx512);
    if !Loop::serves(isa) {
        return None;
    }
    let near = vec![-0.5f32; EXPONENTIALS];
    let seconds = |run: &(dyn Fn() + Sync)| slowest(threads, TURNS, || run);
    let multiply_adds = seconds(&|| Loop::MultiplyAdds(MULTIPLY_ADDS).run(isa));
    let exponentials = seconds(&|| (0..TIMES).for_each(|_| Loop::Exponentials(&near).run(isa)));
    let block =
        |(inner, end)| (inner, end, 2e-9 * (ROWS * inner * COLUMNS) as f64 / block_seconds(isa, threads, inner, end));
    let read = |(count, len): (usize, usize)| {
        let bytes = count * len * size_of::<f32>();
        (count, len, 1e-9 * bytes as f64 / read_seconds(isa, threads, count, len))
    };
    Some(Limits {
        multiply_adds: 2e-9 * (MULTIPLY_ADDS * LANES) as f64 / multiply_adds,
        blocks: BLOCKS.map(block).into(),
        exponentials: 1e9 * exponentials / (TIMES * EXPONENTIALS / LANES) as f64,
        softmax: 1e9 * softmax_seconds(isa, threads) / (ROWS * KEYS / LANES) as f64,
        reads: READ.map(read).into(),
        tiles: tiles::limits(threads),
    })
}

/// Seconds of the best turn of the slowest of some threads that begin their turns together.
fn slowest<R: FnMut()>(threads: usize, turns: usize, make: impl Fn() -> R + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let one = || {
        let mut run = make();
        let mut turn = || {
            barrier.wait();
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        };
        turn();
        (0..turns).map(|_| turn()).fold(f64::INFINITY, f64::min)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        let own = one();
        others.into_iter().filter_map(|other| other.join().ok()).fold(own, f64::max)
    })
}

/// Seconds of one block.
fn block_seconds(isa: Isa, threads: usize, inner: usize, end: End) -> f64 {
    let rows: [usize; ROWS] = std::array::from_fn(|row| row);
    let stride = inner + LANES;
    let starts = rows.map(|row| row * stride);
    let make = || {
        let [left, right, mut out] =
            [(0.5, ROWS * stride), (0.25, COLUMNS * inner), (0.0, ROWS * COLUMNS)].map(|(value, len)| {
                let mut values = Buffer::default();
                values.take(len).fill(value);
                values
            });
        move || {
            for _ in 0..TIMES {
                Product {
                    left: Left::new(left.filled(), &starts, inner),
                    right: Right { data: right.filled(), stride: PANEL, panel_stride: inner * PANEL },
                    rows: &rows,
                    first_column: 0,
                    columns: COLUMNS,
                    write: match end {
                        End::Replace => Write::Replace,
                        End::Resume => Write::Resume(&[0.5; ROWS]),
                        End::AddScaled => Write::AddScaled(&[0.5; ROWS]),
                    },
                    scales: None,
                    ahead: None,
                }
                .compute(isa, &mut Tile::dense(out.filled_mut(), COLUMNS));
            }
        }
    };
    slowest(threads, TURNS, make) / TIMES as f64
}

/// Seconds of the softmax of a block of rows.
fn softmax_seconds(isa: Isa, threads: usize) -> f64 {
    let make = || {
        let mut scores = vec![-0.5; ROWS * KEYS];
        move || {
            for _ in 0..TIMES {
                let (mut max, mut sum) = ([0.0; ROWS], [0.0; ROWS]);
                isa.softmax_rows(&mut scores, KEYS, &[KEYS; ROWS], &mut max, &mut sum);
            }
        }
    };
    slowest(threads, TURNS, make) / TIMES as f64
}

/// Seconds in which a thread reads `count` matrices of its own, which it has read before.
fn read_seconds(isa: Isa, threads: usize, count: usize, len: usize) -> f64 {
    let all = if count > 1 { MATRICES } else { 1 };
    let make = || {
        let values = vec![1.0; all * len];
        move || {
            for matrix in (0..count).map(|matrix| matrix * APART % all) {
                Loop::Read(&values[matrix * len..][..len]).run(isa);
            }
        }
    };
    slowest(threads, TURNS.min((1 << 33) / (count * len)), make)
}
