//! Rows times packed weights, on vectors.

use moa_schema::BLOCK;

use super::*;
use crate::geometry::Geometry;
use crate::simd::every_isa;
use crate::weight_data::{Int4, WeightData};

/// Weights that near caches do not hold, stored in every way, times one row and two.
#[test]
#[cfg_attr(miri, ignore = "too many weights")]
fn far_weights_are_read_alike_in_one_stream_and_in_several() {
    let (inner, columns) = (1101_usize, 1950);
    let weights: Vec<f32> = (0..inner * columns).map(|i| (i % 509) as f32 - 254.0).collect();
    let half: Vec<half::bf16> = weights.iter().copied().map(half::bf16::from_f32).collect();
    let row: Vec<f32> = (0..2 * inner).map(|i| (i as f32 * 0.37).sin()).collect();
    let integers: Vec<u8> = (0..(inner * columns).div_ceil(2)).map(|i| (i % 7 * 16 + i % 5 + 17) as u8).collect();
    let scales = vec![half::bf16::from_f32(-0.375); inner.div_ceil(BLOCK) * columns];
    let int4 = WeightData::I4(Int4 { values: &integers, scales: &scales });
    for data in [WeightData::F32(&weights), WeightData::Bf16(&half), int4] {
        let packed = Packed::new(Geometry { matrices: 1, blocks: 1, inner, columns }, data).unwrap();
        let compute = |isa: Isa, rows: usize, [first_column, columns]: [usize; 2]| {
            let mut out = vec![0.0; rows * columns];
            RowProduct {
                first_column,
                ..RowProduct::new(Left::new(&row, &[0, inner][..rows], inner), &packed, &[0, 1], columns)
            }
            .compute(isa, &mut Tile::dense(&mut out, columns));
            out
        };
        for isa in every_isa() {
            let both = compute(isa, 2, [0, columns]);
            assert!(both.iter().all(|value| *value != 0.0), "{isa:?}");
            assert!(compute(isa, 1, [0, columns]) == both[..columns], "{isa:?}");
            assert!(compute(isa, 1, [64, 1001]) == both[64..1065], "{isa:?}");
        }
    }
}

/// Weights in f16, near and far, widened once or by each block, with panels that the memory of a thread holds and
/// larger ones, added with factors from the second panel on.
#[test]
#[cfg_attr(miri, ignore = "too many weights")]
fn many_rows_times_halves_have_the_bits_of_wide_weights() {
    let rows: Vec<usize> = (0..40).collect();
    for (inner, columns) in [(3, 70), (100, 300), (2048, 70), (2049, 33), (1000, 2100)] {
        let half: Vec<half::f16> = (0..inner * columns).map(|i| half::f16::from_f32((i as f32 * 0.7).sin())).collect();
        let wide: Vec<f32> = half.iter().map(|value| value.to_f32()).collect();
        let left: Vec<f32> = (0..rows.len() * inner).map(|i| (i as f32 * 0.37).sin()).collect();
        let factors: Vec<f32> = rows.iter().map(|row| *row as f32 - 7.5).collect();
        let starts: Vec<usize> = rows.iter().map(|row| row * inner).collect();
        let compute = |isa: Isa, data: WeightData<'_>, count: usize| {
            let mut out = vec![1.0; count * (columns - 32)];
            RowProduct {
                first_column: 32,
                factors: Some(&factors),
                ..RowProduct::new(
                    Left::new(&left, &starts[..count], inner),
                    &Packed::new(Geometry { matrices: 1, blocks: 1, inner, columns }, data).unwrap(),
                    &rows,
                    columns - 32,
                )
            }
            .compute(isa, &mut Tile::dense(&mut out, columns - 32));
            out
        };
        for isa in every_isa().into_iter().filter(|isa| !isa.has_tiles()) {
            for count in [F16_WIDENED_ONCE - 1, F16_WIDENED_ONCE, 40] {
                let once = isa.has_narrow_vectors() && count >= F16_WIDENED_ONCE && inner <= 2048;
                assert_eq!(widens_once::<half::f16>(isa, count, inner), once, "{isa:?} {inner} {count}");
                let expected = compute(isa, (&wide).into(), count);
                assert!(compute(isa, WeightData::F16(&half), count) == expected, "{isa:?} {inner} {count}");
            }
        }
    }
}

#[test]
fn blocks_are_even_and_complete() {
    for count in 0..if cfg!(miri) { 26 } else { 100 } {
        let all: Vec<_> = blocks(count).collect();
        assert_eq!(all.iter().cloned().flatten().collect::<Vec<_>>(), (0..count).collect::<Vec<_>>());
        assert!(all.iter().all(|block| block.len() <= ROWS));
        let sizes = all.iter().map(|block| block.len());
        assert!(sizes.clone().max().unwrap_or(0) - sizes.min().unwrap_or(0) <= 1);
    }
}
