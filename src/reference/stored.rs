//! Weights as an export stores them.

use std::ops::Range;

use moa_graphs::{FloatType, Precision, Weight, WeightError};
use moa_schema::IntegerType;

/// How the values of trained weights are read.
///
/// Routers and norms are read as they are: they stay f32 in every export, and what f32 makes of an f64 is left to the
/// tolerance.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    matrices: FloatType,
    biases: FloatType,
    /// What matrices of our routed operators are integers of, if they are; see [`super::scaled`].
    integers: Option<IntegerType>,
    /// The same of the matrix of a head.
    head: Option<IntegerType>,
}

impl Stored {
    pub(super) const fn new(precision: Precision) -> Self {
        Self {
            matrices: precision.weights(),
            biases: precision.activations(),
            integers: precision.integers(),
            head: precision.head_integers(),
        }
    }

    /// The type of the integers that matrices of our routed operators are, if they are.
    pub(super) const fn integers(self) -> Option<IntegerType> {
        self.integers
    }

    /// The same of the matrix of a head.
    pub(super) const fn head_integers(self) -> Option<IntegerType> {
        self.head
    }

    /// A matrix: a projection, experts or an embedding.
    pub(super) fn matrix(self, weight: &Weight) -> Result<Vec<f64>, WeightError> {
        Ok(rounded(weight.to_f64()?, self.matrices))
    }

    /// A part of a matrix or of several.
    pub(super) fn matrix_part(self, weight: &Weight, part: Range<usize>) -> Result<Vec<f64>, WeightError> {
        Ok(rounded(weight.part_to_f64(part)?, self.matrices))
    }

    /// A bias of a matrix.
    pub(super) fn bias(self, weight: &Weight) -> Result<Vec<f64>, WeightError> {
        Ok(rounded(weight.to_f64()?, self.biases))
    }
}

fn rounded(mut values: Vec<f64>, to: FloatType) -> Vec<f64> {
    match to {
        FloatType::F32 => {}
        FloatType::F16 => values.iter_mut().for_each(|value| *value = to_f16(*value)),
        FloatType::Bf16 => {
            let rounded = values.iter_mut().filter(|value| !is_kept_by_bf16(**value));
            rounded.for_each(|value| *value = to_bf16(*value));
        }
    }
    values
}

/// The nearest f16, infinite beyond the largest one.
pub(super) fn to_f16(value: f64) -> f64 {
    const LARGEST: f64 = 65504.0;
    let nearest = nearest(value, 11, -14);
    if nearest.abs() > LARGEST { f64::INFINITY.copysign(nearest) } else { nearest }
}

/// The nearest bf16, whose range is that of f32.
pub(super) fn to_bf16(value: f64) -> f64 {
    nearest(value, 8, -126)
}

/// Whether `value` is a bf16: an f32 whose lower half is 0.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn is_kept_by_bf16(value: f64) -> bool {
    f64::from(f32::from_bits((value as f32).to_bits() & 0xffff_0000)).to_bits() == value.to_bits()
}

/// The nearest number of `digits` binary digits, ties to even, that is a multiple of `2^(lowest - digits + 1)`.
fn nearest(value: f64, digits: i32, lowest: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let unit = power_of_two(exponent.max(lowest) - digits + 1);
    to_integer(value / unit) * unit
}

/// `2^exponent`, where that is no subnormal f64.
const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// The nearest integer, ties to even, of a value below 2^51: the last digit that f64 has for the sum is that of ones.
/// What the standard library has calls a function of C where processors may lack an instruction.
pub(super) fn to_integer(value: f64) -> f64 {
    const ONES: f64 = 1.5 * (1_u64 << 52) as f64;
    (value + ONES - ONES).copysign(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16_is_kept_and_halfway_goes_to_the_even_one() {
        for bits in 0..0x7c00u16 {
            let value = half::f16::from_bits(bits).to_f64();
            assert_eq!(to_f16(value), value);
            let next = if bits == 0x7bff { 65536.0 } else { half::f16::from_bits(bits + 1).to_f64() };
            let even = if bits % 2 == 0 { value } else { next };
            let even = if even == 65536.0 { f64::INFINITY } else { even };
            assert_eq!(to_f16((value + next) / 2.0), even);
            assert_eq!(to_f16(-(value + next) / 2.0), -even);
        }
        assert!([0.1, 1.0 + 2f64.powi(-8), 2f64.powi(-140), 1e300].iter().all(|value| !is_kept_by_bf16(*value)));
        for bits in (0..0x7f7fu16).step_by(3) {
            let [value, next] = [bits, bits + 1].map(|bits| half::bf16::from_bits(bits).to_f64());
            assert!(to_bf16(value) == value && is_kept_by_bf16(value) && is_kept_by_bf16(-value));
            assert_eq!(to_bf16((value + next) / 2.0), if bits % 2 == 0 { value } else { next });
            assert_eq!(to_bf16(value + (next - value) * 0.500_000_001), next);
        }
    }

    #[test]
    fn values_are_rounded_once_to_nearest_even() {
        let thin = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(rounded(vec![thin], FloatType::F16), [1.0 + 2f64.powi(-10)]);
        assert_eq!(rounded(vec![1.0 + 2f64.powi(-11)], FloatType::F16), [1.0]);
        assert_eq!(rounded(vec![1.0 + 2f64.powi(-8) + 2f64.powi(-40)], FloatType::Bf16), [1.0 + 2f64.powi(-7)]);
        assert_eq!(rounded(vec![thin], FloatType::F32), [thin]);
    }
}
