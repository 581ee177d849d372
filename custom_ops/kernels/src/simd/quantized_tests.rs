//! Quantized rows, and their products.

use half::bf16;

use super::super::{Form, Habits, Instructions, Left, RoundedRows, with_rounded};
use super::*;
use crate::geometry::Geometry;
use crate::grid::Tile;
use crate::packed::Packed;
use crate::rows::RowProduct;
use crate::skip::leave_out;
use crate::weight_data::{Int4, WeightData};

/// In plain arithmetic, and with the instructions of each level that the processor has.
fn every_way() -> Vec<Isa> {
    let mut ways = vec![plain_isa()];
    let levels = match cfg!(target_arch = "aarch64") {
        true => &[Instructions::Neon][..],
        false => &[Instructions::Avx2, Instructions::AvxVnni, Instructions::Avx512],
    };
    for level in levels.iter().copied() {
        let isa = Isa::at_most(level).quantizing();
        if isa.0 != level || !isa.form().is_quantized() {
            leave_out(&format!("no rounded rows at the level {level:?}"));
            continue;
        }
        ways.push(isa);
        if isa.has_wide_vectors() && isa.1.permutes_bytes {
            ways.push(Isa(isa.0, Habits { permutes_bytes: false, ..isa.1 }, isa.2));
        }
    }
    ways
}

/// Those of [`every_way`] that round rows for such weights.
fn ways_for(weights: &Packed) -> impl Iterator<Item = Isa> {
    let form = weights.panels().form();
    every_way().into_iter().filter(move |isa| isa.quantizes_to(form))
}

/// Rounds rows, and multiplies them in plain arithmetic.
fn plain_isa() -> Isa {
    Isa::at_most(Instructions::Portable).quantizing_in_plain_arithmetic()
}

fn quantized(isa: Isa, row: &[f32]) -> Vec<[f32; WORDS]> {
    in_order(isa, StepOrder::Rising, row)
}

fn in_order(isa: Isa, order: StepOrder, row: &[f32]) -> Vec<[f32; WORDS]> {
    let mut out = vec![9.0; len(row.len())];
    isa.quantize(order, row, &mut out);
    out.as_chunks().0.to_vec()
}

/// The integers of a block.
fn integers(block: &[f32; WORDS]) -> Vec<i32> {
    block[HEAD..].iter().flat_map(|quad| quad.to_ne_bytes()).map(|byte| i32::from(byte.cast_signed())).collect()
}

/// The values that a row stands for.
fn values(row: &[f32]) -> Vec<f32> {
    let blocks = quantized(plain_isa(), row);
    blocks.iter().flat_map(|block| integers(block).into_iter().map(|integer| integer as f32 * block[0])).collect()
}

#[test]
fn every_block_is_rounded_to_its_own_scale() {
    let row: Vec<f32> = (0..70).map(|i| (i as f32 * 0.37).sin() * [1.0, 1e-30, 1e30][i / BLOCK]).collect();
    for isa in every_way() {
        let blocks = quantized(isa, &row);
        assert_eq!(blocks.len(), 3);
        for (values, block) in row.chunks(BLOCK).zip(&blocks) {
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            assert_eq!(block[0], largest / 127.0, "{isa:?}");
            let found = integers(block);
            assert_eq!(found.iter().sum::<i32>(), block[1].to_bits().cast_signed());
            assert!(found[values.len()..].iter().all(|integer| *integer == 0), "{isa:?} {found:?}");
            assert_eq!(found.iter().map(|integer| integer.abs()).max(), Some(127));
            for (value, integer) in values.iter().zip(&found) {
                assert!((value / block[0] - *integer as f32).abs() <= 0.5001, "{isa:?} {value} {integer}");
            }
        }
    }
}

#[test]
fn all_ways_round_alike() {
    let mut row: Vec<f32> = (0..40 * BLOCK).map(|i| (i as f32 * 0.7).cos() * 10f32.powi(i as i32 / 17 - 38)).collect();
    row.extend((0..BLOCK).map(|i| i as f32 + 0.5 - 16.0));
    row.extend([127.0, 0.5, -0.5, 1.5, 2.5, -1.5, 126.5, f32::MIN_POSITIVE, -0.0]);
    for isa in every_way() {
        for end in [0, 1, 31, 32, 33, row.len()] {
            let bits = |isa| quantized(isa, &row[..end]).as_flattened().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(isa), bits(plain_isa()), "{isa:?} {end}");
        }
    }
}

#[test]
fn blocks_of_nothing_are_zero_and_others_are_not_numbers() {
    for isa in every_way() {
        for nothing in [0.0, -0.0, 1e-40, 9e-37] {
            let [block] = quantized(isa, &[nothing; 7])[..] else { panic!("one block") };
            assert_eq!(block, [0.0; WORDS], "{isa:?} {nothing}");
        }
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0; 2 * BLOCK];
            row[BLOCK + 3] = odd;
            let [first, second] = quantized(isa, &row)[..] else { panic!("two blocks") };
            assert_eq!(first[0], 1.0 / 127.0);
            assert!(second[0].is_nan() && second[1..] == [0.0; WORDS - 1], "{isa:?} {odd} {second:?}");
        }
    }
}

/// Weights in each type of integers, the largest and the smallest of them too, and what they stand for.
fn weights(inner: usize, columns: usize) -> [(Packed, Vec<f32>); 2] {
    let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
    let count = inner * columns;
    let values: Vec<i8> = (0..count).map(|i| (i * 151 % 256) as u8 as i8).collect();
    let scales: Vec<f32> = (0..columns).map(|i| 0.25 + i as f32 / 64.0).collect();
    let int8 = Packed::new(geometry, WeightData::I8 { values: &values, scales: &scales }).unwrap();
    let of_int8 = values.iter().enumerate().map(|(i, value)| f32::from(*value) * scales[i % columns]).collect();
    let bytes: Vec<u8> = (0..count.div_ceil(2)).map(|i| (i * 151 % 256) as u8).collect();
    let block_scales: Vec<bf16> =
        (0..inner.div_ceil(BLOCK) * columns).map(|i| bf16::from_f32(0.5 - i as f32 / 256.0)).collect();
    let int4 = Packed::new(geometry, WeightData::I4(Int4 { values: &bytes, scales: &block_scales })).unwrap();
    let of_int4 = |i: usize| {
        let integer = (bytes[i / 2] << (4 - i % 2 * 4)).cast_signed() >> 4;
        f32::from(integer) * block_scales[i / columns / BLOCK * columns + i % columns].to_f32()
    };
    [(int8, of_int8), (int4, (0..count).map(of_int4).collect())]
}

/// Rows times the columns `[first, count]`, added with factors where there are any.
fn product(isa: Isa, left: Left<'_>, weights: &Packed, columns: [usize; 2], factors: Option<&[f32]>) -> Vec<f32> {
    let [first_column, columns] = columns;
    let mut out = vec![2.0; left.starts.len() * columns];
    let rows: Vec<usize> = (0..left.starts.len()).collect();
    let (matrix, block, next, epoch) = (0, 0, None, None);
    RowProduct { matrix, block, first_column, factors, next, epoch, ..RowProduct::new(left, weights, &rows, columns) }
        .compute(isa, &mut Tile::dense(&mut out, columns));
    out
}

/// Every way, every number of rows and vectors, ends of blocks and groups in every place.
#[test]
fn products_are_those_of_what_rows_and_weights_stand_for() {
    let counts: Vec<usize> = (1..=QUANTIZED_ROWS).chain([9, 20]).collect();
    let [inners, counts, widths]: [&[usize]; 3] = match cfg!(miri) {
        true => [&[3, 34], &[1, 5], &[33]],
        false => [&[1, 2, 3, 4, 31, 33, 70, 101, 130], &counts, &[1, 16, 17, 33, 70]],
    };
    for (&inner, &count) in inners.iter().flat_map(|inner| counts.iter().map(move |count| (inner, count))) {
        let rows: Vec<f32> = (0..count * inner).map(|i| (i as f32 * 0.37).sin()).collect();
        let starts: Vec<usize> = (0..count).map(|row| row * inner).collect();
        let factors: Vec<f32> = (0..count).map(|row| 3.0 - row as f32).collect();
        let left = Left::new(&rows, &starts, inner);
        let rounded: Vec<Vec<f32>> = rows.chunks(inner).map(values).collect();
        for &columns in widths {
            for (packed, of_weights) in weights(inner, columns) {
                let plain = product(plain_isa(), left, &packed, [0, columns], None);
                for (place, found) in plain.iter().enumerate() {
                    let (row, column) = (place / columns, place % columns);
                    let terms =
                        (0..inner).map(|l| f64::from(rounded[row][l]) * f64::from(of_weights[l * columns + column]));
                    let (sum, size): (f64, f64) = terms.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()));
                    assert!((sum - f64::from(*found)).abs() <= size * 1e-6, "{count}x{inner}x{columns}: {sum} {found}");
                }
                for isa in ways_for(&packed) {
                    assert_eq!(
                        product(isa, left, &packed, [0, columns], None),
                        plain,
                        "{isa:?} {count}x{inner}x{columns}"
                    );
                    let [added, expected] =
                        [isa, plain_isa()].map(|isa| product(isa, left, &packed, [0, columns], Some(&factors)));
                    assert_eq!(added, expected, "{isa:?} {count}x{inner}x{columns}");
                }
            }
        }
    }
}

/// Neither the block, nor the columns beside, nor who has rounded the rows, changes a bit.
#[test]
#[cfg_attr(miri, ignore = "too many products")]
fn products_have_the_same_bits_in_every_block() {
    const COUNT: usize = 20;
    let (inner, columns) = (333, 5 * PANEL);
    let rows: Vec<f32> = (0..COUNT * inner).map(|i| (i as f32 * 0.37).sin()).collect();
    let starts: Vec<usize> = (0..COUNT).map(|row| row * inner).collect();
    let all = Left::new(&rows, &starts, inner);
    let stride = len(inner) + 3;
    for (packed, _) in weights(inner, columns) {
        let Form::Quantized(order) = packed.panels().form() else { panic!("integers") };
        let mut once = vec![0.0; COUNT * stride];
        for (row, out) in rows.chunks(inner).zip(once.chunks_mut(stride)) {
            plain_isa().quantize(order, row, &mut out[..len(inner)]);
        }
        let form = Form::Quantized(order);
        let rounded = Some(RoundedRows { form, data: &once, stride, of: inner, blocks: WORDS });
        let whole = product(plain_isa(), all, &packed, [0, columns], None);
        for (isa, left) in ways_for(&packed).flat_map(|isa| [(isa, all), (isa, Left { rounded, ..all })]) {
            for (first, count) in (0..COUNT).map(|row| (row, 1)).chain([(0, COUNT), (3, 2), (1, 3), (4, 7), (9, 9)]) {
                let left = Left { starts: &starts[first..first + count], ..left };
                for [column, width] in [[0, columns], [2 * PANEL, 9], [PANEL, PANEL + LANES]] {
                    let found = product(isa, left, &packed, [column, width], None);
                    for (row, found) in found.chunks(width).enumerate() {
                        let expected = &whole[(first + row) * columns + column..][..width];
                        assert_eq!(found, expected, "{isa:?} {first} {count} {column}");
                    }
                }
            }
        }
    }
}

/// The largest sums that a block can have are exact.
#[test]
fn sums_of_the_largest_integers_are_exact() {
    let (inner, columns) = (64, 33);
    let geometry = Geometry { matrices: 1, blocks: 1, inner, columns };
    let (smallest, scales) = (vec![i8::MIN; inner * columns], vec![1.0; columns]);
    let int8 = Packed::new(geometry, WeightData::I8 { values: &smallest, scales: &scales }).unwrap();
    let (bytes, ones) = (vec![0x88; inner * columns / 2], vec![bf16::ONE; inner.div_ceil(BLOCK) * columns]);
    let int4 = Packed::new(geometry, WeightData::I4(Int4 { values: &bytes, scales: &ones })).unwrap();
    for (packed, weight) in [(&int8, -128.0), (&int4, -8.0)] {
        for isa in ways_for(packed) {
            for value in [127.0, -127.0] {
                let row = [value; 64];
                let found = product(isa, Left::new(&row, &[0], inner), packed, [0, columns], None);
                assert_eq!(found, vec![64.0 * value * weight; columns], "{isa:?}");
            }
        }
    }
}

/// Rows of floats keep their values.
#[test]
fn weights_in_floats_have_rows_as_they_are() {
    let row = [1.0, 3.0, 1000.0, 0.001];
    let geometry = Geometry { matrices: 1, blocks: 1, inner: 4, columns: 1 };
    let packed = Packed::new(geometry, &[1.0f32, 1.0, 0.0, 0.0]).unwrap();
    for isa in every_way() {
        assert_eq!(product(isa, Left::new(&row, &[0], 4), &packed, [0, 1], None), [4.0]);
        let mut blocks = None;
        with_rounded((isa, Form::OF_INT8), Left::new(&row, &[0], 4), None, |left| blocks = left.blocks);
        assert_eq!(blocks, Some(WORDS));
    }
}

/// Rows of another order, or in another form, are none that a product takes.
#[test]
fn rows_in_another_order_are_rounded_again() {
    let row: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
    for (packed, _) in weights(64, 33) {
        let expected = product(plain_isa(), Left::new(&row, &[0], 64), &packed, [0, 33], None);
        let nothing = vec![f32::NAN; 64];
        for form in [Form::Values, Form::Pairs, Form::OF_INT8, Form::OF_INT4] {
            let rounded = RoundedRows { form, data: &nothing, stride: 64, of: 64, blocks: WORDS };
            let left = Left { rounded: Some(rounded), ..Left::new(&row, &[0], 64) };
            for isa in ways_for(&packed) {
                let found = product(isa, left, &packed, [0, 33], None);
                assert_eq!(found == expected, form != packed.panels().form(), "{isa:?} {form:?}");
            }
        }
    }
}

#[test]
fn rows_are_quantized_where_they_stand() {
    let row: Vec<f32> = (0..96).map(|i| (i as f32 * 0.37).sin()).collect();
    for (isa, order) in
        every_way().into_iter().flat_map(|isa| [StepOrder::Rising, StepOrder::EvenFirst].map(|o| (isa, o)))
    {
        let expected = in_order(plain_isa(), order, &row);
        let mut found = row.clone();
        isa.quantize_in_place(order, &mut found);
        for (found, expected) in found.chunks(BLOCK).zip(&expected) {
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found[..WORDS]), bits(expected), "{isa:?} {order:?}");
        }
    }
    for (packed, _) in weights(96, 33) {
        let expected = product(plain_isa(), Left::new(&row, &[0], 96), &packed, [0, 33], None);
        for isa in ways_for(&packed) {
            let order = isa.quantized_in_place(packed.panels().form(), 96).unwrap();
            let mut rows = row.clone();
            isa.quantize_in_place(order, &mut rows);
            let rounded = Some(RoundedRows::in_place(order, &rows, 96));
            let left = Left { rounded, ..Left::new(&rows, &[0], 96) };
            assert_eq!(product(isa, left, &packed, [0, 33], None), expected, "{isa:?}");
            assert_eq!(isa.quantized_in_place(packed.panels().form(), 97), None);
        }
        assert_eq!(Isa::at_most(Instructions::Avx512).quantized_in_place(packed.panels().form(), 96), None);
    }
}

#[test]
fn even_steps_stand_before_odd_ones() {
    assert_eq!(StepOrder::Rising.steps::<9>(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(StepOrder::EvenFirst.steps::<10>(), [0, 2, 4, 6, 1, 3, 5, 7, 8, 10]);
}
