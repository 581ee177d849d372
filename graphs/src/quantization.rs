//! Integers for trained matrices: symmetric around zero, without a zero point.
//!
//! A matrix `[inner, columns]` of f32 becomes integers `q` and scales `s` with `weight ≈ q · s`, where `s` belongs to a
//! column in [`IntegerType::Int8`] and to [`moa_schema::BLOCK`] rows of one, or fewer at its end, in
//! [`IntegerType::Int4`]:
//!
//! * int8: `s` is the largest magnitude of the column divided by 127 in f32; `q` lies between -127 and 127.
//! * int4: `s` is the value of the largest magnitude divided by -8 and rounded to bf16, ties to even; its sign is not
//!   that of the value, which becomes -8 (the convention of llama.cpp's `Q4_0` and of `MatMulNBits`). Of two values of
//!   the same magnitude the positive one counts. No scale is so large that -8 times it is infinite. `q` lies between -8
//!   and 7.
//!
//! `q` is the quotient `weight / s` in f32, rounded to the nearest integer, ties to even. Where `s` is 0, `q` is.

use half::bf16;
use moa_schema::IntegerType;

/// The smallest and the largest integer of a type; -128 is not used.
const fn range(integers: IntegerType) -> [f32; 2] {
    match integers {
        IntegerType::Int8 => [-127.0, 127.0],
        IntegerType::Int4 => [-8.0, 7.0],
    }
}

/// The one of the larger magnitude, and the positive one of two that have the same.
pub fn farther(one: f32, other: f32) -> f32 {
    let is_other = other.abs() > one.abs() || other == -one && other > 0.0;
    if is_other { other } else { one }
}

/// The largest bf16 of which -8 times is finite in f32.
const LARGEST_SCALE: f32 = f32::from_bits(0x7dff_0000);

/// The scale of finite values of which `farthest` is the [`farther`] one.
pub fn scale(integers: IntegerType, farthest: f32) -> f32 {
    let [least, most] = range(integers);
    match integers {
        IntegerType::Int8 => farthest.abs() / most,
        // Never -0.
        IntegerType::Int4 => bf16::from_f32(farthest / least).to_f32().clamp(-LARGEST_SCALE, LARGEST_SCALE) + 0.0,
    }
}

/// 1.5 · 2^23: a small number plus this one is rounded to an integer, ties to even, whose lowest bits are the lowest of
/// the f32. Without SSE4.1, `round_ties_even` is a call of a function for each weight.
const ROUNDER: f32 = 12_582_912.0;

/// The integer that stands for `weight`, finite, where the scale is `scale`.
#[allow(clippy::cast_possible_truncation)]
pub fn quantized(integers: IntegerType, weight: f32, scale: f32) -> i8 {
    let [least, most] = range(integers);
    let quotient = if scale == 0.0 { 0.0 } else { weight / scale };
    (quotient.clamp(least, most) + ROUNDER).to_bits() as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    const INT8: IntegerType = IntegerType::Int8;
    const INT4: IntegerType = IntegerType::Int4;

    #[test]
    fn the_largest_weight_is_the_largest_integer() {
        for largest in [1e-30f32, 0.1, 1.0, 3.7, 1e30] {
            let scale = scale(INT8, largest);
            assert_eq!(scale, self::scale(INT8, -largest));
            assert_eq!([largest, -largest].map(|weight| quantized(INT8, weight, scale)), [127, -127]);
        }
    }

    #[test]
    fn the_farthest_weight_is_the_smallest_integer_of_four_bits() {
        for farthest in [1e-30f32, 0.1, 1.0, 3.7, 1e30, f32::MAX].into_iter().flat_map(|value| [value, -value]) {
            let scale = scale(INT4, farthest);
            assert_eq!(bf16::from_f32(scale).to_f32(), scale);
            assert!((scale / (farthest / -8.0) - 1.0).abs() <= 1.0 / 256.0, "{scale} {farthest}");
            assert!((scale * -8.0).is_finite(), "{scale} {farthest}");
            assert_eq!([farthest, -farthest, 0.0].map(|weight| quantized(INT4, weight, scale)), [-8, 7, 0]);
        }
    }

    #[test]
    fn of_equal_magnitudes_the_positive_one_is_farther() {
        assert_eq!(
            [[1.0, -1.0], [-1.0, 1.0], [0.5, -1.0], [-1.0, 0.5]].map(|[a, b]| farther(a, b)),
            [1.0, 1.0, -1.0, -1.0]
        );
        assert_eq!(farther(0.0, -0.0).to_bits(), 0);
    }

    #[test]
    fn ties_go_to_the_even_integer() {
        for integers in IntegerType::ALL {
            let rounded = [0.5, 1.5, 2.5, -0.5, -1.5].map(|weight| quantized(integers, weight, 1.0));
            assert_eq!(rounded, [0, 2, 2, 0, -2]);
        }
    }

    #[test]
    fn every_quotient_is_rounded_as_the_standard_library_does() {
        for bits in (0..=u32::MAX).step_by(997) {
            let quotient = f32::from_bits(bits);
            if quotient.is_finite() {
                let rounded = quotient.round_ties_even();
                assert_eq!(quantized(INT8, quotient, 1.0), rounded.clamp(-127.0, 127.0) as i8, "{quotient}");
                assert_eq!(quantized(INT4, quotient, 1.0), rounded.clamp(-8.0, 7.0) as i8, "{quotient}");
            }
        }
    }

    #[test]
    fn weights_without_a_scale_are_zero() {
        let smallest = f32::from_bits(1);
        for integers in IntegerType::ALL {
            assert_eq!([smallest, -smallest, 0.0, -0.0].map(|weight| scale(integers, weight).to_bits()), [0; 4]);
            assert_eq!([0.0, smallest].map(|weight| quantized(integers, weight, 0.0)), [0, 0]);
        }
    }
}
