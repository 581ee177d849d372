//! Blocks of products beside sums that are exact, and beside each other.

use half::bf16;
use moa_schema::BLOCK;

use super::super::{Instructions, every_isa};
use super::*;
use crate::geometry::Geometry;
use crate::packed::{Packed, Panels};
use crate::weight_data::{Int4, WeightData};

fn ramp(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7 + seed) % 11) as f32 - 5.0).collect()
}

/// Small integers, so every order of adding is exact.
fn expected(left: &[f32], starts: &[usize], inner: usize, right: &[f32], columns: usize) -> Vec<f32> {
    let at = |l: usize, c: usize| right[(c / PANEL) * inner * PANEL + l * PANEL + c % PANEL];
    let row = |start: usize| (0..columns).map(move |c| (0..inner).map(|l| left[start + l] * at(l, c)).sum());
    starts.iter().flat_map(|&start| row(start)).collect()
}

#[test]
fn every_block_size_on_every_level_is_exact() {
    let (step, inners, widths): (usize, &[usize], &[usize]) = match cfg!(miri) {
        true => (ROWS - 1, &[3], &[17, 150]),
        false => (1, &[0, 1, 3, 70], &[1, 15, 16, 17, 31, 32, 33, 70, 128, 150]),
    };
    for isa in every_isa() {
        for count in (1..=ROWS).step_by(step) {
            for inner in inners {
                for columns in widths {
                    block(isa, count, *inner, *columns);
                }
            }
        }
    }
}

fn block(isa: Isa, count: usize, inner: usize, columns: usize) {
    let left = ramp(3 * ROWS + inner, 1);
    let starts: Vec<usize> = (0..count).map(|row| 3 * (count - 1 - row)).collect();
    let right = ramp(columns.div_ceil(PANEL) * inner * PANEL, 2);
    let (rows, factors): (Vec<_>, Vec<_>) = (0..count).map(|row| (row, 2.0 - row as f32)).unzip();
    let unscaled = expected(&left, &starts, inner, &right, columns);
    let scales: Vec<f32> = (0..columns.next_multiple_of(LANES)).map(|column| (column % 3) as f32).collect();
    let width = columns + 5;
    for (write, scales) in [
        (Write::Replace, None),
        (Write::Resume(&factors), None),
        (Write::AddScaled(&factors), None),
        (Write::Replace, Some(&scales[..])),
        (Write::AddScaled(&factors), Some(&scales[..])),
    ] {
        let scale = |index: usize| scales.map_or(1.0, |scales| scales[index % columns]);
        let product: Vec<f32> = unscaled.iter().enumerate().map(|(index, sum)| sum * scale(index)).collect();
        let start = ramp(count * width, 3);
        let mut out = start.clone();
        Product {
            left: Left::new(&left, &starts, inner),
            right: Right { data: &right, stride: PANEL, panel_stride: inner * PANEL },
            rows: &rows,
            first_column: 2,
            columns,
            write,
            scales,
            ahead: Some(if count.is_multiple_of(2) { Ahead::Own } else { Ahead::Later(Memory::of(&right)) }),
        }
        .compute(isa, &mut Tile::dense(&mut out, width));
        for (index, (&found, &before)) in out.iter().zip(&start).enumerate() {
            let (row, column) = (index / width, index % width);
            let inside = (2..2 + columns).contains(&column).then(|| product[row * columns + column - 2]);
            let wanted = match (inside, write) {
                (None, _) => before,
                (Some(value), Write::Replace) => value,
                (Some(value), Write::Resume(factors)) => factors[row] * before + value,
                (Some(value), Write::AddScaled(factors)) => before + factors[row] * value,
            };
            assert_eq!(found, wanted, "{isa:?} {count}x{inner}x{columns} at {row}, {column}");
        }
    }
}

/// The bits of an element do not depend on the block that it is computed in.
#[test]
fn blocks_do_not_change_a_bit() {
    let inner = if cfg!(miri) { 5 } else { 100 };
    let left: Vec<f32> = (0..ROWS * inner).map(|i| (i as f32 * 0.37).sin()).collect();
    let right: Vec<f32> = (0..4 * inner * PANEL).map(|i| (i as f32 * 0.11).cos()).collect();
    let starts: Vec<usize> = (0..ROWS).map(|row| row * inner).collect();
    let rows: Vec<usize> = (0..ROWS).collect();
    for isa in every_isa() {
        let compute = |count: usize, columns: usize, first: usize| {
            let mut out = vec![0.0; count * columns];
            Product {
                left: Left::new(&left, &starts[first..first + count], inner),
                right: Right { data: &right, stride: PANEL, panel_stride: inner * PANEL },
                rows: &rows,
                first_column: 0,
                columns,
                write: Write::Replace,
                scales: None,
                ahead: None,
            }
            .compute(isa, &mut Tile::dense(&mut out, columns));
            out
        };
        let whole = compute(ROWS, PANEL, 0);
        for row in 0..ROWS {
            let alone = compute(1, 4 * PANEL, row);
            assert_eq!(&alone[..PANEL], &whole[row * PANEL..][..PANEL], "{isa:?}");
            assert_eq!(compute(1, 9, row), alone[..9], "{isa:?}");
        }
        assert_eq!(compute(3, PANEL, 2), whole[2 * PANEL..5 * PANEL], "{isa:?}");
        for count in 2..=4 {
            let several: Vec<f32> = (0..count).flat_map(|row| compute(1, 4 * PANEL, row)).collect();
            assert_eq!(compute(count, 4 * PANEL, 0), several, "{isa:?} {count}");
        }
    }
}

/// Whatever the block is and whatever it fetches, int4 has the bits of the weights that it stands for.
///
/// Miri lacks a shift of 16 lanes.
#[test]
fn int4_has_the_bits_of_wide_weights() {
    let (inners, widths, counts): (&[usize], &[usize], &[usize]) = match cfg!(miri) {
        true => (&[9, 65], &[33], &[1, 3]),
        false => (
            &[1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 64, 65, 97, 200],
            &[1, 16, 17, 32, 33, 47, 70, 150, 300],
            &[1, 2, 3, 4, 5, 6, 7, 11, 12],
        ),
    };
    for inner in inners {
        for columns in widths {
            for isa in every_isa().into_iter().filter(|isa| !cfg!(miri) || !isa.has_wide_vectors()) {
                counts.iter().for_each(|count| int4_block(isa, *count, *inner, *columns));
            }
        }
    }
}

fn int4_block(isa: Isa, count: usize, inner: usize, columns: usize) {
    let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
    let values: Vec<u8> = (0..(inner * columns).div_ceil(2)).map(|i| (i * 151 % 256) as u8).collect();
    let scale = |i: usize| bf16::from_f32(((i * 7 % 19) as f32 - 9.5) * 0.013);
    let scales: Vec<bf16> = (0..inner.div_ceil(BLOCK) * columns).map(scale).collect();
    let weight = |index: usize| {
        let integer = (values[index / 2] << (4 - index % 2 * 4)).cast_signed() >> 4;
        f32::from(integer) * scales[index / columns / BLOCK * columns + index % columns].to_f32()
    };
    let wide: Vec<f32> = (0..inner * columns).map(weight).collect();
    let narrow = Packed::new(geometry, WeightData::I4(Int4 { values: &values, scales: &scales })).unwrap();
    let wide = Packed::new(geometry, &wide).unwrap();
    let left: Vec<f32> = (0..count * inner).map(|i| (i as f32 * 0.37).sin()).collect();
    let (Panels::I4(narrow), Panels::F32(wide)) = (narrow.panels(), wide.panels()) else {
        panic!("not packed as it is stored");
    };
    let size = [count, columns];
    for own in [None, Some(true), Some(false)] {
        let found = bits(isa, size, &left, geometry.right(narrow, 0, 0, 0), own);
        assert_eq!(found, bits(isa, size, &left, geometry.right(wide, 0, 0, 0), own), "{isa:?} {size:?} {inner}");
    }
}

/// A product that is added to something, with what is fetched.
fn bits<W: Element>(
    isa: Isa,
    [count, columns]: [usize; 2],
    left: &[f32],
    right: Right<'_, W>,
    own: Option<bool>,
) -> Vec<u32> {
    let inner = left.len() / count;
    let starts: Vec<usize> = (0..count).map(|row| row * inner).collect();
    let (rows, factors): (Vec<_>, Vec<_>) = (0..count).map(|row| (row, row as f32 - 1.5)).unzip();
    let mut out = vec![0.5; count * columns];
    Product {
        left: Left::new(left, &starts, inner),
        right,
        rows: &rows,
        first_column: 0,
        columns,
        write: Write::AddScaled(&factors),
        scales: None,
        ahead: own.map(|own| if own { Ahead::Own } else { Ahead::Later(Memory::of(right.data)) }),
    }
    .compute(isa, &mut Tile::dense(&mut out, columns));
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn shares_of_memory_are_all_of_it() {
    let values = [0.0f32; 1000];
    let panels = Memory::of(&values).panels(1001);
    assert_eq!((panels.bytes, panels.step), (1001, 1001));
    for total in [1, 3, 7, 64] {
        let shares: Vec<Memory> = (0..total).map(|index| panels.share(index, total)).collect();
        let mut next = panels.from;
        for share in &shares {
            assert_eq!((share.from, share.step), (next, panels.step));
            next = next.wrapping_add(share.bytes);
        }
        assert_eq!(next, panels.from.wrapping_add(1001), "{total}");
    }
    assert_eq!(Memory::of(&values[..10]).panels(1001).bytes, 40);
}

#[test]
#[should_panic(expected = "right out of bounds")]
fn a_short_panel_is_refused() {
    let (left, right, mut out) = ([0.0; 4], [0.0; 3 * PANEL], [0.0; PANEL]);
    Product {
        left: Left::new(&left, &[0], 4),
        right: Right { data: &right, stride: PANEL, panel_stride: 0 },
        rows: &[0],
        first_column: 0,
        columns: PANEL,
        write: Write::Replace,
        scales: None,
        ahead: None,
    }
    .compute(Isa::at_most(Instructions::Portable), &mut Tile::dense(&mut out, PANEL));
}

#[test]
#[should_panic(expected = "left row out of bounds")]
fn a_short_row_is_refused() {
    let (left, right, mut out) = ([0.0; 5], [0.0; 4 * PANEL], [0.0; PANEL]);
    Product {
        left: Left::new(&left, &[2], 4),
        right: Right { data: &right, stride: PANEL, panel_stride: 0 },
        rows: &[0],
        first_column: 0,
        columns: PANEL,
        write: Write::Replace,
        scales: None,
        ahead: None,
    }
    .compute(Isa::at_most(Instructions::Portable), &mut Tile::dense(&mut out, PANEL));
}
