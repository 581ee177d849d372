//! Weights of bf16 in 12 bits: every one of them, and products with them.

use super::*;
use crate::geometry::Geometry;
use crate::packed::{Packed, Panels};
use crate::rows::{Next, RowProduct};
use crate::simd::{Epoch, every_isa};
use crate::weight_data::WeightData;

/// Groups and panels end early, and heads are blocks.
const GEOMETRY: Geometry = match cfg!(miri) {
    true => Geometry { matrices: 1, blocks: 2, inner: 11, columns: 35 },
    false => Geometry { matrices: 2, blocks: 3, inner: 203, columns: 101 },
};

/// Weights with an exponent that is rare, and values that are seen in a sum.
const RARE: [u16; 4] = [0x4321, 0xc3a5, 0x4490, 0xc512];

/// Steps and columns of the patches of each panel, as far as it has these: every vector, both steps of pairs, several
/// in a group and in a step, and groups that end early.
fn places(inner: usize) -> Vec<[usize; 2]> {
    let mut places = vec![[0, 0], [0, 15], [inner - 1, 2], [2, 31], [1, 16], [3, 7], [5, 20], [7, 31], [8, 0]];
    places.push([inner - 1, 3]);
    places.truncate(most_patches(inner).min(places.len()));
    places
}

/// Weights of 15 exponents, zeros and subnormal numbers, of both signs, with `rare` ones in their places.
fn weights(geometry: Geometry, rare: &[u16], places: &[[usize; 2]]) -> Vec<bf16> {
    let weight = |index: usize| match index % 41 {
        0 => 0x8000,
        1 => 0x0007,
        _ => (index % 2) << 15 | (110 + (index * 7919) % 15) << 7 | ((index * 31) % 128),
    };
    let mut all: Vec<bf16> = (0..geometry.len()).map(|index| bf16::from_bits(weight(index) as u16)).collect();
    for panel in 0..panels_of(geometry) {
        let place = geometry.place(panel, 0, geometry.inner);
        for (number, [step, column]) in places.iter().enumerate().filter(|(_, [_, column])| *column < place.columns) {
            all[place.first + step * place.stride + column] = bf16::from_bits(rare[(panel + number) % rare.len()]);
        }
    }
    all
}

fn panels_of(geometry: Geometry) -> usize {
    geometry.matrices * geometry.blocks * geometry.panels()
}

fn compact(packed: &Packed) -> &Compact {
    let Panels::Compact(compact) = packed.panels() else { panic!("not packed in 12 bits") };
    compact
}

/// Patches of the first of these panels.
fn patches(panels: CompactPanels<'_>) -> usize {
    panels.parts().1.iter().step_by(2).take_while(|place| **place != END).count()
}

#[test]
fn no_weight_is_changed() {
    let places = places(GEOMETRY.inner);
    let source = weights(GEOMETRY, &[0x7f80, 0xffc1, 0x7f7f, 0x0081, 0x8100, 0x4321], &places);
    let packed = Packed::compact(GEOMETRY, &source).unwrap();
    let compact = compact(&packed);
    for panel in 0..panels_of(GEOMETRY) {
        let place = GEOMETRY.place(panel, 0, GEOMETRY.inner);
        let panels = compact.panels_from(panel);
        if place.columns == PANEL {
            assert_eq!(patches(panels), places.len(), "{panel}");
        }
        for isa in every_isa() {
            panels.with_unpacked(isa, 1, |right| {
                for (index, pair) in right.data.iter().enumerate() {
                    let (step, column) = (index / PANEL * 2, index % PANEL);
                    let expected = |step| match step < place.rows && column < place.columns {
                        true => source[place.first + step * place.stride + column],
                        false => bf16::ZERO,
                    };
                    let expected = [step, step + 1].map(|step| expected(step).to_bits());
                    assert_eq!(pair.map(bf16::to_bits), expected, "{isa:?} {panel} {step} {column}");
                }
            });
        }
    }
    assert!(compact.holds(|panel| GEOMETRY.place(panel, 0, GEOMETRY.inner), &source));
    for index in [0, GEOMETRY.len() / 2, GEOMETRY.len() - 1] {
        let mut other = source.clone();
        other[index] = bf16::from_bits(other[index].to_bits() ^ 1);
        assert!(!compact.holds(|panel| GEOMETRY.place(panel, 0, GEOMETRY.inner), &other), "{index}");
    }
}

/// Every bf16 that there is, those of fifteen exponents and of zeros and subnormal numbers at a time.
#[test]
#[cfg_attr(miri, ignore = "too many weights")]
fn every_bit_pattern_is_kept() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 16 * 8, columns: PANEL };
    for first in (1..=255).step_by(15) {
        let pattern = |index: usize| {
            let (number, fraction, sign) = (index / 256, index % 128, index / 128 % 2);
            let exponent = number.checked_sub(1).map_or(0, |number| (first + number).min(255));
            bf16::from_bits((sign << 15 | exponent << 7 | fraction) as u16)
        };
        let source: Vec<bf16> = (0..geometry.len()).map(pattern).collect();
        let packed = Packed::compact(geometry, &source).unwrap();
        assert_eq!(patches(compact(&packed).panels_from(0)), 0, "{first}");
        assert!(compact(&packed).holds(|panel| geometry.place(panel, 0, geometry.inner), &source), "{first}");
    }
}

#[test]
fn weights_of_too_many_exponents_are_left_alone() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 64, columns: 40 };
    let all: Vec<[usize; 2]> = (0..=most_patches(64)).map(|number| [number * 5, number * 3]).collect();
    let with = |count: usize| Packed::compact(geometry, &weights(geometry, &RARE, &all[..count]));
    assert_eq!(patches(compact(&with(6).unwrap()).panels_from(0)), 6);
    assert!(with(7).is_none());
    let source = vec![bf16::ONE; geometry.len()];
    assert!(Packed::compact(geometry, &source).is_some());
    assert!(Packed::compact(geometry, &source[1..]).is_none(), "a length that does not fit");
    assert!(Packed::compact(Geometry { columns: 0, ..geometry }, &[]).is_none(), "no weight");
}

#[test]
fn no_place_is_taken_for_the_end() {
    assert!(has_places((1 << 27) - 8) && !has_places((1 << 27) - 7) && !has_places(usize::MAX));
}

/// Some rows in rising or falling order, with NaN between them.
struct Rows {
    data: Vec<f32>,
    starts: Vec<usize>,
}

impl Rows {
    fn new(count: usize, inner: usize) -> Self {
        let value =
            |index: usize| if index.is_multiple_of(inner + 1) { f32::NAN } else { (index as f32 * 0.731).cos() };
        let data = (0..=count * (inner + 1)).map(value).collect();
        Self { data, starts: (0..count).rev().map(|row| row * (inner + 1) + 1).collect() }
    }

    /// The bits of the product of the first `count` rows with columns of a block.
    fn times(
        &self,
        (isa, count): (Isa, usize),
        weights: &Packed,
        [matrix, block, first_column, columns]: [usize; 4],
        (factors, next, epoch): (Option<&[f32]>, Option<Next<'_>>, Option<Epoch>),
    ) -> Vec<u32> {
        let (most, inner) = (self.starts.len(), weights.geometry().inner);
        let rows: Vec<usize> = (0..count).map(|row| row * 5 % most).collect();
        let mut out = vec![0.25f32; most * (columns + 1)];
        let (left, rows) = (Left::new(&self.data, &self.starts[..count], inner), &rows[..]);
        let mut tile = Tile::columns_of(&mut out, columns + 1, 1, columns);
        RowProduct { left, weights, matrix, block, first_column, columns, rows, factors, next, epoch }
            .compute(isa, &mut tile);
        drop(tile);
        assert!(out.iter().any(|value| *value != 0.25) && out.iter().all(|value| value.is_finite()));
        out.into_iter().map(f32::to_bits).collect()
    }
}

/// Every level, with rows rounded and without; tiles have other bits than vectors.
fn levels() -> impl Iterator<Item = Isa> {
    every_isa().into_iter().flat_map(|isa| [isa.without_tiles(), isa.without_tiles().rounding()])
}

/// Rows of all counts about those that are multiplied as weights are packed, in every way to write, and as many patches
/// as end a row of words.
#[test]
fn products_have_the_bits_of_plain_weights() {
    let long = Geometry { matrices: 1, blocks: 2, inner: 387, columns: 40 };
    let many: Vec<[usize; 2]> = (0..16).map(|number| [number * 25 + 9, number * 2 % 7]).collect();
    let all = [(GEOMETRY, places(GEOMETRY.inner)), (long, many)];
    for (geometry, places) in &all[..if cfg!(miri) { 1 } else { 2 }] {
        let source = weights(*geometry, &RARE, places);
        let plain = Packed::new(*geometry, WeightData::Bf16(&source)).unwrap();
        let packed = Packed::compact(*geometry, &source).unwrap();
        let (matrix, columns) = (geometry.matrices - 1, geometry.columns);
        let first = geometry.number(matrix, 1, 0);
        let behind = compact(&packed).panels_from(first).parts().1;
        assert_eq!((patches(compact(&packed).panels_from(first)), behind[2 * places.len()]), (places.len(), END));
        let most = if cfg!(miri) { 2 } else { 14 };
        let rows = Rows::new(most, geometry.inner);
        let factors: Vec<f32> = (0..most).map(|row| 0.5 - row as f32).collect();
        let blocks = [[matrix, 1, 0, columns], [matrix, 1, PANEL, columns - PANEL], [matrix, 0, 0, 3]];
        for (isa, count) in levels().flat_map(|isa| (1..=most).map(move |count| (isa, count))) {
            for block in &blocks[..if cfg!(miri) { 1 } else { 3 }] {
                for factors in [None, Some(&factors[..count])] {
                    let [expected, found] = [&plain, &packed]
                        .map(|weights| rows.times((isa, count), weights, *block, (factors, None, None)));
                    assert!(found == expected, "{isa:?} {count} {block:?} {factors:?}");
                }
            }
        }
    }
}

/// More panels than a thread unpacks at a time, of two matrices, whose rows are rounded once.
#[test]
#[cfg_attr(miri, ignore = "too many weights")]
fn panels_are_unpacked_in_turns() {
    let geometry = Geometry { matrices: 2, blocks: 1, inner: 2047, columns: 4 * PANEL + 9 };
    let source = weights(geometry, &RARE, &places(geometry.inner));
    let plain = Packed::new(geometry, WeightData::Bf16(&source)).unwrap();
    let packed = Packed::compact(geometry, &source).unwrap();
    assert_eq!(compact(&packed).panels_from(0).at_a_time(), 2);
    let rows = Rows::new(14, geometry.inner);
    for (isa, count) in levels().flat_map(|isa| [1, 5, 13].map(|count| (isa, count))) {
        let both = [&plain, &packed].map(|weights| {
            let epoch = Some(Epoch::new());
            let next = Some(Next { weights, matrix: 1, block: 0, first_column: 4 * PANEL });
            let blocks = [[0, 0, 0, geometry.columns], [1, 0, PANEL, geometry.columns - PANEL]];
            blocks.map(|block| rows.times((isa, count), weights, block, (None, next, epoch)))
        });
        assert!(both[0] == both[1], "{isa:?} {count}");
    }
}

#[test]
fn few_rows_are_multiplied_without_unpacking() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 9, columns: 7 };
    let packed = Packed::compact(geometry, &vec![bf16::ONE; geometry.len()]).unwrap();
    let (rows, places) = (Rows::new(10, geometry.inner), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    for (isa, count) in every_isa().into_iter().flat_map(|isa| (1..=10).map(move |count| (isa, count))) {
        let (mut out, left) = (vec![0.0; 10 * 7], Left::new(&rows.data, &rows.starts[..count], geometry.inner));
        let panels = compact(&packed).panels_from(0);
        let multiplied = panels.multiply(isa, left, (&places, 7), None, &mut Tile::dense(&mut out, 7));
        assert_eq!(multiplied, serves(isa) && count <= MOST_ROWS, "{isa:?} {count}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn a_thread_keeps_what_is_stated() {
    for inner in [3, 9001] {
        let geometry = Geometry { matrices: 1, blocks: 1, inner, columns: 3 };
        let packed = Packed::compact(geometry, &vec![bf16::ONE; geometry.len()]).unwrap();
        PANELS.take();
        compact(&packed).panels_from(0).with_unpacked(Isa::at_most(Instructions::default()), 1, |_| {});
        assert_eq!(PANELS.take().bytes(), thread_bytes(inner), "{inner}");
    }
}

#[test]
#[should_panic(expected = "panels at a time")]
fn more_panels_than_a_thread_keeps_are_refused() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 8, columns: 8 };
    let packed = Packed::compact(geometry, &[bf16::ONE; 64]).unwrap();
    let panels = compact(&packed).panels_from(0);
    panels.with_unpacked(Isa::at_most(Instructions::Portable), panels.at_a_time() + 1, |_| {});
}
