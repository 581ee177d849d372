//! Float comparison: the one formula of the project.

use crate::tensor::{Tensor, coordinates};

/// How far a value may be from its reference: `|a - b| <= atol + rtol * |b|`.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Tolerance {
    /// Absolute part.
    pub atol: f64,
    /// Part relative to the reference.
    pub rtol: f64,
}

/// What the user fixed; the rest follows from the reference.
#[derive(Debug, Clone, Copy, Default)]
pub struct ToleranceOptions {
    /// Absolute part.
    pub atol: Option<f64>,
    /// Relative part.
    pub rtol: Option<f64>,
}

/// Units in the last place of f32, at the largest reference value, that are granted to every model.
const ULPS_OF_LARGEST: f64 = 32.0;

/// How often the effect of rounding on the reference itself is granted: a runtime rounds inside the equations
/// too, and sums in another order.
pub(super) const ROUNDINGS: f64 = 8.0;

impl Tolerance {
    /// Budget of an f32 computation whose largest reference value is `largest` and whose reference moves by
    /// `rounding` when its vectors are rounded to f32: the larger of 32 units in the last place of `largest`
    /// and eight times `rounding`, and nothing relative; at least the smallest normal f32, since runtimes may take
    /// what is smaller for 0. What the user fixed replaces one part and leaves the other.
    pub fn derive(options: ToleranceOptions, largest: f64, rounding: f64) -> Self {
        let ulps = ULPS_OF_LARGEST * f64::from(f32::EPSILON) * largest;
        let derived = ulps.max(ROUNDINGS * rounding).max(f64::from(f32::MIN_POSITIVE));
        Self { atol: options.atol.unwrap_or(derived), rtol: options.rtol.unwrap_or(0.0) }
    }

    /// How far a value may be from `expected`.
    fn of(self, expected: f64) -> f64 {
        let relative = if self.rtol > 0.0 { self.rtol * expected.abs() } else { 0.0 };
        self.atol + relative
    }
}

/// Outcome of comparing one or several tensors with their references.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Comparison {
    /// Values compared.
    pub values: usize,
    /// Values out of tolerance; NaN always is.
    pub mismatches: usize,
    /// Largest absolute difference; infinite where a value is NaN.
    pub max_abs: f64,
    /// Largest difference in f32 units in the last place of the reference.
    pub max_ulp: f64,
    /// Largest absolute part of a tolerance that was applied.
    pub atol: f64,
    /// Largest relative part of one.
    pub rtol: f64,
    /// Largest difference as a share of the tolerance of its value: 1 is just within, infinite where none was granted.
    pub largest_share: f64,
    /// First value out of tolerance.
    pub first: Option<Difference>,
    /// Value whose difference is the largest share of its tolerance.
    pub worst: Option<Difference>,
}

/// One value beside its reference.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Difference {
    /// Case and output.
    pub place: String,
    /// Index along each axis.
    pub index: Vec<usize>,
    /// What the backend computed.
    pub found: f64,
    /// What the reference computed.
    pub expected: f64,
    /// How far apart they may be.
    pub tolerance: f64,
}

impl Difference {
    /// How far apart they are; infinite where one is NaN.
    pub fn distance(&self) -> f64 {
        distance(self.found, self.expected)
    }
}

impl Default for Comparison {
    fn default() -> Self {
        Self {
            values: 0,
            mismatches: 0,
            max_abs: 0.0,
            max_ulp: 0.0,
            atol: 0.0,
            rtol: 0.0,
            largest_share: 0.0,
            first: None,
            worst: None,
        }
    }
}

impl Comparison {
    /// Whether every value was within tolerance.
    pub const fn passed(&self) -> bool {
        self.mismatches == 0
    }

    /// Adds the values of `found` beside `expected`, which must have the same shape.
    pub fn add(&mut self, place: &str, found: &Tensor, expected: &Tensor, tolerance: Tolerance) {
        let shape = expected.shape();
        let difference = |index: usize, [found, expected, tolerance]: [f64; 3]| Difference {
            place: place.into(),
            index: coordinates(index, shape),
            found,
            expected,
            tolerance,
        };
        self.atol = self.atol.max(tolerance.atol);
        self.rtol = self.rtol.max(tolerance.rtol);
        for (index, (found, expected)) in found.to_f64().into_iter().zip(expected.to_f64()).enumerate() {
            self.values += 1;
            let distance = distance(found, expected);
            self.max_ulp = self.max_ulp.max(distance / ulp(expected));
            let granted = tolerance.of(expected);
            let within = distance.is_finite() && distance <= granted;
            if !within {
                self.mismatches += 1;
                self.first.get_or_insert_with(|| difference(index, [found, expected, granted]));
            }
            self.max_abs = self.max_abs.max(distance);
            let share = Some(distance / granted).filter(|share| !share.is_nan()).unwrap_or(f64::INFINITY);
            let before = self.worst.as_ref().map_or(0.0, Difference::distance);
            if distance > 0.0 && (share, distance) > (self.largest_share, before) {
                self.largest_share = share;
                self.worst = Some(difference(index, [found, expected, granted]));
            }
        }
    }
}

/// Distance of neighbouring f32 values at `value`.
#[allow(clippy::cast_possible_truncation)]
fn ulp(value: f64) -> f64 {
    let value = (value.abs() as f32).max(f32::MIN_POSITIVE);
    f64::from(f32::from_bits(value.to_bits() + 1) - value)
}

/// Absolute difference, infinite at NaN.
pub(super) fn distance(a: f64, b: f64) -> f64 {
    let distance = (a - b).abs();
    if distance.is_nan() { f64::INFINITY } else { distance }
}

/// Largest absolute difference that rounding makes between two tensors of one shape, 0 where there is none; `None`
/// where it makes a value infinite or NaN, and so explains nothing.
pub(super) fn effect_of_rounding(rounded: &Tensor, exact: &Tensor) -> Option<f64> {
    let distances = rounded.to_f64().into_iter().zip(exact.to_f64()).map(|(a, b)| distance(a, b));
    Some(distances.fold(0.0, f64::max)).filter(|effect| effect.is_finite())
}

/// Largest absolute value of a tensor, 0 for an empty one.
pub(super) fn largest(tensor: &Tensor) -> f64 {
    tensor.to_f64().into_iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::TensorData;

    fn tensor(values: &[f64]) -> Tensor {
        Tensor::new([values.len()], TensorData::F64(values.to_vec())).unwrap()
    }

    fn compare(found: &[f64], expected: &[f64]) -> Comparison {
        let mut comparison = Comparison::default();
        comparison.add("x", &tensor(found), &tensor(expected), Tolerance { atol: 1e-6, rtol: 0.0 });
        comparison
    }

    #[test]
    fn nan_is_a_mismatch_on_either_side() {
        for (found, expected) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::NAN, f64::NAN), (f64::INFINITY, 1.0)] {
            let comparison = compare(&[found], &[expected]);
            assert!(!comparison.passed());
            assert_eq!(comparison.max_abs, f64::INFINITY);
        }
    }

    #[test]
    fn no_tolerance_grants_what_is_no_number() {
        let granted = Tolerance { atol: f64::INFINITY, rtol: 0.0 };
        for (found, passes) in [(f64::NAN, false), (f64::INFINITY, false), (1e300, true)] {
            let mut comparison = Comparison::default();
            comparison.add("x", &tensor(&[found]), &tensor(&[1.0]), granted);
            assert_eq!(comparison.passed(), passes, "{found}");
        }
    }

    #[test]
    fn first_and_worst_are_found() {
        let comparison = compare(&[1.0, 2.1, 3.0, 9.0], &[1.0, 2.0, 3.0, 4.0]);
        assert_eq!(comparison.mismatches, 2);
        assert_eq!(comparison.first.unwrap().index, [1]);
        assert_eq!(comparison.worst.unwrap().index, [3]);
        assert_eq!(comparison.max_abs, 5.0);
    }

    #[test]
    fn each_difference_is_a_share_of_its_own_tolerance() {
        let mut comparison = Comparison::default();
        let tolerance = Tolerance { atol: 1.0, rtol: 0.5 };
        comparison.add("x", &tensor(&[1.5, 13.0]), &tensor(&[1.0, 10.0]), tolerance);
        assert_eq!((comparison.atol, comparison.rtol, comparison.largest_share), (1.0, 0.5, 0.5));
        comparison.add("x", &tensor(&[2.0]), &tensor(&[2.0]), Tolerance { atol: 0.0, rtol: 0.0 });
        assert_eq!((comparison.largest_share, comparison.passed()), (0.5, true));
    }

    #[test]
    fn the_worst_value_is_the_largest_share_of_its_own_tolerance() {
        let mut comparison = Comparison::default();
        let mut add = |place, found, expected, atol| {
            comparison.add(place, &tensor(&[found]), &tensor(&[expected]), Tolerance { atol, rtol: 0.0 });
            let worst = comparison.worst.clone().unwrap();
            (worst.place.clone(), worst.distance(), worst.tolerance, comparison.largest_share)
        };
        assert_eq!(add("large", 10.75, 10.0, 1.0), ("large".into(), 0.75, 1.0, 0.75));
        assert_eq!(add("small", 1.5, 1.0, 0.25), ("small".into(), 0.5, 0.25, 2.0));
        assert_eq!(add("another", 10.75, 10.0, 1.0).0, "small");
        assert_eq!(add("exact", 1.25, 1.0, 0.0), ("exact".into(), 0.25, 0.0, f64::INFINITY));
        assert_eq!(add("further", 1.5, 1.0, 0.0).0, "further", "the larger difference of two that nothing grants");
        assert_eq!(add("no number", f64::NAN, f64::INFINITY, 1.0).0, "no number");
        assert_eq!((comparison.max_abs, comparison.atol), (f64::INFINITY, 1.0));
    }

    #[test]
    fn the_default_tolerance_follows_the_largest_value_or_the_effect_of_rounding() {
        let derive = |largest, rounding| Tolerance::derive(ToleranceOptions::default(), largest, rounding).atol;
        assert_eq!(derive(1.0, 0.0), 32.0 * f64::from(f32::EPSILON));
        assert_eq!(derive(30.0, 0.0), 30.0 * derive(1.0, 0.0));
        assert_eq!(derive(1e-6, 0.0), 1e-6 * derive(1.0, 0.0), "small outputs are held to their own size");
        assert_eq!(derive(1.0, 1e-5), 8e-5);
        assert_eq!(derive(1e-36, 1e-40), f64::from(f32::MIN_POSITIVE), "subnormal numbers may be taken for 0");
        let fixed = ToleranceOptions { atol: Some(1e-9), rtol: Some(1e-3) };
        assert_eq!(Tolerance::derive(fixed, 30.0, 1.0), Tolerance { atol: 1e-9, rtol: 1e-3 });
    }

    #[test]
    fn indices_follow_the_shape() {
        assert_eq!(coordinates(17, &[2, 3, 4]), [1, 1, 1]);
    }
}
