//! Weights of bf16 in 12 bits: every one of them, and products with them.

use super::*;
use crate::geometry::Geometry;
use crate::packed::{Packed, Panels};
use crate::rows::RowProduct;
use crate::simd::every_isa;
use crate::weight_data::WeightData;

/// Groups and panels end early, and heads are blocks.
const GEOMETRY: Geometry = match cfg!(miri) {
    true => Geometry { matrices: 1, blocks: 2, inner: 11, columns: 35 },
    false => Geometry { matrices: 2, blocks: 3, inner: 203, columns: 101 },
};

/// Weights as trained ones are, of both signs, with zeros and subnormal numbers, and rare ones that may be far larger
/// or far smaller, infinite or NaN.
fn weights(len: usize) -> Vec<bf16> {
    let weight = |index: usize| match index * 7919 % if cfg!(miri) { 127 } else { 5003 } {
        0..4 => bf16::from_bits(((index * 40503) >> 4) as u16),
        4..12 => bf16::from_bits(0x8000),
        12..20 => bf16::from_bits(0x0007),
        number => bf16::from_f32(((number as f32 * 0.37).sin() + 0.01) * 0.06),
    };
    (0..len).map(weight).collect()
}

fn compact(packed: &Packed) -> &Compact {
    let Panels::Compact(compact) = packed.panels() else { panic!("not packed in 12 bits") };
    compact
}

#[test]
fn no_weight_is_changed() {
    let source = weights(GEOMETRY.len());
    let packed = Packed::compact(GEOMETRY, &source).unwrap();
    let (compact, width) = (compact(&packed), GEOMETRY.blocks * GEOMETRY.columns);
    let mut patches = 0;
    for panel in 0..GEOMETRY.matrices * GEOMETRY.blocks * GEOMETRY.panels() {
        let place = GEOMETRY.place(panel, 0, GEOMETRY.inner);
        let panels = compact.panels_from(panel);
        patches += panels.parts().1.iter().step_by(2).take_while(|place| **place != END).count();
        for isa in every_isa() {
            panels.with_unpacked(isa, 1, |right| {
                for (index, pair) in right.data.iter().enumerate() {
                    let (step, column) = (index / PANEL * 2, index % PANEL);
                    let expected = |step| match step < place.rows && column < place.columns {
                        true => source[place.first + step * width + column],
                        false => bf16::ZERO,
                    };
                    let expected = [step, step + 1].map(|step| expected(step).to_bits());
                    assert_eq!(pair.map(bf16::to_bits), expected, "{isa:?} {panel} {step} {column}");
                }
            });
        }
    }
    assert!(patches > 0);
    assert!(compact.holds(|panel| GEOMETRY.place(panel, 0, GEOMETRY.inner), &source));
    for index in [0, GEOMETRY.len() / 2, GEOMETRY.len() - 1] {
        let mut other = source.clone();
        other[index] = bf16::from_bits(other[index].to_bits() ^ 1);
        assert!(!compact.holds(|panel| GEOMETRY.place(panel, 0, GEOMETRY.inner), &other), "{index}");
    }
}

/// Every bf16 that there is, sixteen exponents at a time.
#[test]
#[cfg_attr(miri, ignore = "too many weights")]
fn every_bit_pattern_is_kept() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 15 * 8, columns: PANEL };
    for first in (1..=255).step_by(15) {
        let pattern = |index: usize| {
            let (exponent, fraction, sign) = (first + index / 256, index % 128, index / 128 % 2);
            bf16::from_bits((sign << 15 | exponent.min(255) << 7 | fraction) as u16)
        };
        let source: Vec<bf16> = (0..geometry.len()).map(pattern).collect();
        let packed = Packed::compact(geometry, &source).unwrap();
        assert_eq!(compact(&packed).panels_from(0).parts().1[0], END, "{first}: a patch");
        assert!(compact(&packed).holds(|panel| geometry.place(panel, 0, geometry.inner), &source), "{first}");
    }
}

#[test]
fn weights_of_too_many_exponents_are_left_alone() {
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 64, columns: 40 };
    let mut source = vec![bf16::ONE; geometry.len()];
    let bits = |source: &mut [bf16], count: usize| {
        for number in 0..count {
            let exponent = if number < 14 * 20 { 1 + number / 20 } else { 100 + number - 14 * 20 };
            source[number / 32 * 40 + number % 32] = bf16::from_bits((exponent << 7) as u16);
        }
        Packed::compact(geometry, source)
    };
    let most = 14 * 20 + geometry.inner / STEPS / 4 + 4;
    assert!(bits(&mut source, most).is_some_and(|packed| compact(&packed).panels_from(0).parts().1[2 * 5] != END));
    assert!(bits(&mut source, most + 1).is_none());
    assert!(Packed::compact(geometry, &source[1..]).is_none(), "a length that does not fit");
    assert!(Packed::compact(Geometry { columns: 0, ..geometry }, &[]).is_none(), "no weight");
}

/// Rows of all counts about those that are multiplied as weights are packed, in every way to write.
#[test]
fn products_have_the_bits_of_plain_weights() {
    let source = weights(GEOMETRY.len());
    let plain = Packed::new(GEOMETRY, WeightData::Bf16(&source)).unwrap();
    let packed = Packed::compact(GEOMETRY, &source).unwrap();
    let most = if cfg!(miri) { 2 } else { 14 };
    let left: Vec<f32> = (0..most * GEOMETRY.inner + 3).map(|i| (i as f32 * 0.731).cos()).collect();
    let starts: Vec<usize> = (0..most).map(|row| (most - 1 - row) * GEOMETRY.inner + 3).collect();
    let rows: Vec<usize> = (0..most).map(|row| row * 5 % most).collect();
    let factors: Vec<f32> = (0..most).map(|row| 0.5 - row as f32).collect();
    let (matrix, block) = (GEOMETRY.matrices - 1, 1);
    let columns = &[(0, GEOMETRY.columns), (PANEL, GEOMETRY.columns - PANEL), (0, 3)][..if cfg!(miri) { 1 } else { 3 }];
    let levels = every_isa().into_iter().flat_map(|isa| [isa, isa.rounding()]).filter(|isa| !isa.has_tiles());
    for (isa, count) in levels.flat_map(|isa| (1..=most).map(move |count| (isa, count))) {
        for &(first_column, columns) in columns {
            for factors in [None, Some(&factors[..count])] {
                let compute = |weights: &Packed| {
                    let mut out = vec![0.25f32; most * (columns + 1)];
                    let (left, rows) = (Left::new(&left, &starts[..count], GEOMETRY.inner), &rows[..count]);
                    let mut tile = Tile::columns_of(&mut out, columns + 1, 1, columns);
                    let (next, epoch) = (None, None);
                    RowProduct { left, weights, matrix, block, first_column, columns, rows, factors, next, epoch }
                        .compute(isa, &mut tile);
                    drop(tile);
                    out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                };
                let expected = compute(&plain);
                assert!(expected.iter().any(|bits| *bits != 0.25f32.to_bits()));
                assert!(compute(&packed) == expected, "{isa:?} {count} {columns} {factors:?}");
            }
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn a_thread_keeps_what_is_stated() {
    for inner in [3, 9001] {
        let geometry = Geometry { matrices: 1, blocks: 1, inner, columns: 3 };
        let packed = Packed::compact(geometry, &vec![bf16::ONE; geometry.len()]).unwrap();
        PAIRS.take();
        compact(&packed).panels_from(0).with_unpacked(Isa::at_most(Instructions::default()), 1, |_| {});
        assert_eq!(PAIRS.take().bytes(), thread_bytes(inner), "{inner}");
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
