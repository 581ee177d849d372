//! 8-bit integers for trained matrices: symmetric, one scale for each column of each matrix.
//!
//! A matrix `[inner, columns]` of f32 becomes integers `q` and scales `s` with `weight[i][j] ≈ q[i][j] · s[j]`, where
//! `s[j]` is the largest magnitude of column `j` divided by [`LARGEST`] in f32, and `q` the quotient `weight / s` in
//! f32, rounded to the nearest integer, ties to even. There is no zero point. A column whose scale is 0 has integers 0.

/// The largest magnitude of an integer; -128 is not used, so that the range is symmetric.
pub const LARGEST: i8 = 127;

/// The scale of a column whose largest magnitude is `largest`, finite and not negative.
pub fn scale(largest: f32) -> f32 {
    largest / f32::from(LARGEST)
}

/// 1.5 · 2^23: a small number plus this one is rounded to an integer, ties to even, whose lowest bits are the lowest of
/// the f32. Without SSE4.1, `round_ties_even` is a call of a function for each weight.
const ROUNDER: f32 = 12_582_912.0;

/// The integer that stands for `weight`, finite, in a column of scale `scale`.
#[allow(clippy::cast_possible_truncation)]
pub fn quantized(weight: f32, scale: f32) -> i8 {
    let most = f32::from(LARGEST);
    let quotient = if scale == 0.0 { 0.0 } else { weight / scale };
    (quotient.clamp(-most, most) + ROUNDER).to_bits() as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_weight_is_the_largest_integer() {
        for largest in [1e-30f32, 0.1, 1.0, 3.7, 1e30] {
            assert_eq!([largest, -largest].map(|weight| quantized(weight, scale(largest))), [LARGEST, -LARGEST]);
        }
    }

    #[test]
    fn ties_go_to_the_even_integer() {
        assert_eq!([0.5, 1.5, 2.5, -0.5, -1.5].map(|weight| quantized(weight, 1.0)), [0, 2, 2, 0, -2]);
    }

    #[test]
    fn every_quotient_is_rounded_as_the_standard_library_does() {
        for bits in (0..=u32::MAX).step_by(997) {
            let quotient = f32::from_bits(bits);
            if quotient.is_finite() {
                let expected = quotient.round_ties_even().clamp(-127.0, 127.0) as i8;
                assert_eq!(quantized(quotient, 1.0), expected, "{quotient}");
            }
        }
    }

    #[test]
    fn columns_without_a_scale_are_zero() {
        let smallest = f32::from_bits(1);
        assert_eq!(scale(smallest), 0.0);
        assert_eq!([0.0, smallest].map(|weight| quantized(weight, 0.0)), [0, 0]);
    }
}
