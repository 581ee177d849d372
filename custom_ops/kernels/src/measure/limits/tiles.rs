//! What bounds products on AMX tiles.

use half::bf16;

use super::{End, TIMES, TURNS, slowest};
use crate::attention::{Attending, Rows};
use crate::attention_tiles::most_rows;
use crate::geometry::Geometry;
use crate::grid::Tile;
use crate::key_panels::{Cache, KEYS_PER_TILE, PanelScratch, Visible};
use crate::packed::Packed;
use crate::rows::{IN_ORDER, RowProduct, TILE_ROWS};
use crate::simd::tiles::{STEP, STRIP, TILE, Unit};
use crate::simd::{Epoch, Isa, LANES, Left};
use crate::{Instructions, Sequential, pool};

/// Products of parts that one of f32 takes.
const PRODUCTS: usize = 6;

/// Steps of four products of tiles of one run on registers.
const STEPS: usize = 5000;

/// Inner steps, columns and ends of blocks, as the layers of `benches/README.md` have them: queries, then outputs.
const BLOCKS: [(usize, usize, End); 3] =
    [(512, 128, End::Replace), (256, 512, End::AddScaled), (128, 512, End::AddScaled)];

/// Elements of heads, and keys, of which one tile and four are attended to.
const HEADS: [usize; 2] = [128, 256];
const KEYS: [usize; 2] = [KEYS_PER_TILE, 4 * KEYS_PER_TILE];

/// As [`super::Limits`].
#[derive(Debug, Clone)]
pub struct TileLimits {
    /// GFLOP/s of f32 products on registers alone.
    pub products: f64,
    /// GFLOP/s of blocks of 128 rows whose operands are near, by inner steps and end: those of queries are split
    /// already, those of outputs once for all columns.
    pub blocks: Vec<(usize, End, f64)>,
    /// Nanoseconds in which 32 rows attend to 256 keys that are near, by elements of a head.
    pub attention: Vec<(usize, f64)>,
}

/// The limits of each of `threads` threads; nothing without tiles.
pub(super) fn limits(threads: usize) -> Option<TileLimits> {
    let isa = Isa::at_most(Instructions::Amx);
    if !isa.has_tiles() {
        return None;
    }
    let macs = STEPS * 4 * TILE * TILE * STEP;
    let rate = |macs: usize, seconds: f64| 2e-9 * macs as f64 / seconds;
    let block = |(inner, columns, end)| {
        let seconds = block_seconds(isa, threads, [inner, columns], end);
        (inner, end, rate(TILE_ROWS * inner * columns, seconds))
    };
    let attention = |head| {
        let seconds = KEYS.map(|keys| attention_seconds(isa, threads, head, keys));
        (head, 1e9 * seconds.into_iter().fold(f64::INFINITY, f64::min))
    };
    Some(TileLimits {
        products: rate(macs, product_seconds(isa, threads)) / PRODUCTS as f64,
        blocks: BLOCKS.map(block).into(),
        attention: HEADS.map(attention).into(),
    })
}

/// Seconds of all products on registers.
fn product_seconds(isa: Isa, threads: usize) -> f64 {
    let make = || {
        let values = vec![bf16::from_f32(0.5); Unit::ON_REGISTERS];
        let unit = Unit::new(isa);
        move || {
            if let Some(unit) = &unit {
                unit.multiply_on_registers(&values, STEPS);
            }
        }
    };
    slowest(threads, TURNS, make)
}

/// Seconds of one block.
fn block_seconds(isa: Isa, threads: usize, [inner, columns]: [usize; 2], end: End) -> f64 {
    let stride = inner + LANES;
    let starts: [usize; TILE_ROWS] = std::array::from_fn(|row| row * stride);
    let make = || {
        let (rows, mut out) = (vec![0.5; TILE_ROWS * stride], vec![0.0; TILE_ROWS * columns]);
        let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
        let weights = Packed::new(geometry, &vec![0.25; geometry.len()]);
        let epoch = (end == End::Replace).then(Epoch::new);
        move || {
            let Some(weights) = &weights else { return };
            for _ in 0..TIMES {
                RowProduct {
                    factors: (end == End::AddScaled).then_some(&[0.5; TILE_ROWS]),
                    epoch,
                    ..RowProduct::new(Left::new(&rows, &starts, inner), weights, &IN_ORDER, columns)
                }
                .compute(isa, &mut Tile::dense(&mut out, columns));
            }
        }
    };
    slowest(threads, TURNS, make) / TIMES as f64
}

/// Seconds in which a strip of rows attends to a tile of keys.
fn attention_seconds(isa: Isa, threads: usize, head: usize, keys: usize) -> f64 {
    let count = most_rows(head);
    let make = || {
        let (queries, cached, mut out) = (vec![0.5; count * head], vec![0.25; keys * head], vec![0.0; count * head]);
        let (mut visible, mut scratch) = (Visible::default(), PanelScratch::default());
        visible.read(&vec![1; keys], keys);
        let (key, value, visible) = (&cached[..], &cached[..], &visible);
        let cache = Cache { isa, key, value, visible, batch: 1, keys, rows: keys, kv_heads: 1, head };
        let (pack_keys, pack_values) = scratch.stages(cache, (head as f32).sqrt().recip(), Some(isa));
        pool::run(&Sequential, &[&pack_keys, &pack_values]);
        move || {
            let with = Attending { isa, queries: &queries, panels: scratch.panels(keys, head), head };
            let mut rows = Rows::new(0);
            (0..count).for_each(|row| rows.push(row * head, row, keys));
            rows.attend_on_tiles(&with, &mut Tile::dense(&mut out, head));
        }
    };
    slowest(threads, TURNS, make) / (count.div_ceil(STRIP) * keys.div_ceil(KEYS_PER_TILE)) as f64
}
