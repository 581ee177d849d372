//! How far an output is from its reference in all, where kernels may round factors of products.
//!
//! There the largest effect of rounding, of which each value is granted a multiple, may be as large as the values. The
//! root mean square over all cases is what no chance value moves.

use crate::tensor::Tensor;

use super::compare::distance;

/// How often the root mean square of the effect of rounding is granted to that of the differences.
const SPREADS: f64 = 2.0;

/// Units in the last place of f32, at the root mean square of an output, that are granted in any case.
const ULPS: f64 = 32.0;

/// Sums of squares over the values of an output in all cases.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Spread {
    differences: f64,
    rounding: f64,
    values: f64,
}

impl Spread {
    /// Adds a case; all three are of one shape.
    pub(super) fn add(&mut self, found: &Tensor, rounded: &Tensor, expected: &Tensor) {
        let expected = expected.to_f64();
        let squares = |other: &Tensor| -> f64 {
            other.to_f64().iter().zip(&expected).map(|(value, expected)| distance(*value, *expected).powi(2)).sum()
        };
        self.differences += squares(found);
        self.rounding += squares(rounded);
        self.values += expected.iter().map(|value| value * value).sum::<f64>();
    }

    /// What is too much, if something is. Rounding that makes a value infinite or NaN explains anything.
    pub(super) fn excess(self) -> Option<String> {
        let granted = (SPREADS * self.rounding.sqrt()).max(ULPS * f64::from(f32::EPSILON) * self.values.sqrt());
        let found = self.differences.sqrt();
        (found > granted).then(|| {
            let of_all = |part: f64| part / self.values.sqrt();
            format!(
                "differs by {:.1e} of its root mean square over all runs, and rounding explains {:.1e}",
                of_all(found),
                of_all(granted)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorData;

    fn spread(found: &[f64], rounded: &[f64], expected: &[f64]) -> Spread {
        let mut spread = Spread::default();
        for ((found, rounded), expected) in found.iter().zip(rounded).zip(expected) {
            let tensor = |value: f64| Tensor::new([1], TensorData::F64(vec![value])).unwrap();
            spread.add(&tensor(*found), &tensor(*rounded), &tensor(*expected));
        }
        spread
    }

    #[test]
    fn differences_are_held_to_the_effect_of_rounding_over_all_cases() {
        let expected = [3.0, -4.0, 5.0, 1.0];
        let moved = |by: [f64; 4]| [0, 1, 2, 3].map(|index: usize| expected[index] + by[index]);
        let rounded = moved([0.1, -0.1, 0.1, -0.1]);
        for (by, passes) in [
            ([0.0; 4], true),
            ([-0.1, 0.1, 0.1, 0.1], true),
            ([0.19, 0.19, 0.19, 0.19], true),
            ([0.21, 0.21, 0.21, 0.21], false),
            ([0.3, 0.0, 0.0, 0.0], true),
            ([0.5, 0.0, 0.0, 0.0], false),
            ([f64::NAN, 0.0, 0.0, 0.0], false),
        ] {
            assert_eq!(spread(&moved(by), &rounded, &expected).excess().is_none(), passes, "{by:?}");
        }
        assert_eq!(spread(&expected, &expected, &expected).excess(), None);
        let [last_place, more] = [1e-6, 1e-4].map(|by| spread(&moved([by; 4]), &expected, &expected).excess());
        assert_eq!((last_place, more.is_some()), (None, true));
    }
}
