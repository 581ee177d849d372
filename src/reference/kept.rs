//! Matrices in the fewest bytes that hold them.

use super::{scaled::Scaled, stored::is_kept_by_bf16};

/// What a matrix is widened to.
pub(super) trait Number: Copy + Default + Send + Sync + Into<f64> {
    /// One of the values that this type holds.
    fn of(value: f32) -> Self;

    /// A value, rounded to this type.
    fn nearest(value: f64) -> Self;
}

impl Number for f64 {
    #[inline(always)]
    fn of(value: f32) -> Self {
        value.into()
    }

    #[inline(always)]
    fn nearest(value: f64) -> Self {
        value
    }
}

impl Number for f32 {
    #[inline(always)]
    fn of(value: f32) -> Self {
        value
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)]
    fn nearest(value: f64) -> Self {
        value as Self
    }
}

/// The same numbers as f32, where that holds all of them.
pub(super) fn exact_singles(values: &[f64]) -> Option<Vec<f32>> {
    values.iter().all(is_single).then(|| values.iter().map(|value| f32::nearest(*value)).collect())
}

fn is_single(value: &f64) -> bool {
    f64::from(f32::nearest(*value)).to_bits() == value.to_bits()
}

/// Values of matrices, row by row.
#[derive(Debug)]
pub(super) enum Kept {
    Floats(Values),
    Scaled(Scaled),
}

impl Kept {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Floats(values) => values.len(),
            Self::Scaled(scaled) => scaled.len(),
        }
    }

    /// Whether f32 holds all values.
    pub(super) fn are_singles(&self) -> bool {
        match self {
            Self::Floats(Values::Half(_) | Values::Single(_)) => true,
            Self::Floats(Values::Double(_)) => false,
            Self::Scaled(scaled) => scaled.are_singles(),
        }
    }

    /// Fills `to` with the values from `start` on, which stand in one row, rounded to its type.
    #[inline(always)]
    pub(super) fn widen<N: Number>(&self, start: usize, to: &mut [N]) {
        match self {
            Self::Floats(values) => values.widen(start, to),
            Self::Scaled(scaled) => scaled.widen(start, to),
        }
    }
}

/// Numbers in the narrowest of these types that holds all of them.
#[derive(Debug)]
pub(super) enum Values {
    /// bf16: the upper halves of f32.
    Half(Vec<u16>),
    Single(Vec<f32>),
    Double(Vec<f64>),
}

#[inline(always)]
fn of_upper_half(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

impl Values {
    pub(super) fn zeros(count: usize) -> Self {
        Self::Half(vec![0; count])
    }

    fn len(&self) -> usize {
        match self {
            Self::Half(values) => values.len(),
            Self::Single(values) => values.len(),
            Self::Double(values) => values.len(),
        }
    }

    /// Becomes a wider type where this one does not hold `values`.
    pub(super) fn hold(&mut self, values: &[f64]) {
        if let Self::Half(narrow) = self
            && !values.iter().all(|value| is_kept_by_bf16(*value))
        {
            *self = Self::Single(narrow.iter().map(|bits| of_upper_half(*bits)).collect());
        }
        if let Self::Single(narrow) = self
            && !values.iter().all(is_single)
        {
            *self = Self::Double(narrow.iter().map(|value| f64::from(*value)).collect());
        }
    }

    /// Writes `values`, which it must [`Self::hold`], from `start` on.
    pub(super) fn fill(&mut self, start: usize, values: &[f64]) {
        let range = start..start + values.len();
        match self {
            Self::Half(all) => all[range].iter_mut().zip(values).for_each(|(to, value)| {
                *to = (f32::nearest(*value).to_bits() >> 16) as u16;
            }),
            Self::Single(all) => all[range].iter_mut().zip(values).for_each(|(to, value)| *to = f32::nearest(*value)),
            Self::Double(all) => all[range].copy_from_slice(values),
        }
    }

    /// Fills `to` with the values from `start` on, rounded to its type.
    #[inline(always)]
    fn widen<N: Number>(&self, start: usize, to: &mut [N]) {
        let range = start..start + to.len();
        match self {
            Self::Half(all) => to.iter_mut().zip(&all[range]).for_each(|(to, bits)| *to = N::of(of_upper_half(*bits))),
            Self::Single(all) => to.iter_mut().zip(&all[range]).for_each(|(to, value)| *to = N::of(*value)),
            Self::Double(all) => to.iter_mut().zip(&all[range]).for_each(|(to, value)| *to = N::nearest(*value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_kept_in_the_narrowest_type_that_has_them_all() {
        let kind = |parts: &[&[f64]]| {
            let mut values = Values::zeros(parts.concat().len());
            let mut start = 0;
            for part in parts {
                values.hold(part);
                values.fill(start, part);
                start += part.len();
            }
            let mut back = vec![1.0_f64; start];
            values.widen(0, &mut back);
            assert!(back.iter().zip(parts.concat()).all(|(a, b)| a.to_bits() == b.to_bits()), "{parts:?}");
            let mut short = vec![1.0_f32; start];
            values.widen(0, &mut short);
            let fits = back.iter().zip(&short).all(|(value, short)| value.to_bits() == f64::from(*short).to_bits());
            assert_eq!((fits, exact_singles(&back)), (short_fits(&values), short_fits(&values).then_some(short)));
            std::mem::discriminant(&values)
        };
        let [half, single, double] = [Values::Half(Vec::new()), Values::Single(Vec::new()), Values::Double(Vec::new())]
            .map(|values| std::mem::discriminant(&values));
        let short = [1.0, -0.0, 2f64.powi(-126), 1.0 + 2f64.powi(-7)];
        assert_eq!(kind(&[&short, &short]), half);
        assert_eq!(kind(&[&short, &[1.0 + 2f64.powi(-23), -0.0]]), single);
        assert_eq!(kind(&[&short, &[0.1], &short]), double);
        assert_eq!(kind(&[&[1.0 + 2f64.powi(-10)], &[1e300]]), double);
    }

    fn short_fits(values: &Values) -> bool {
        !matches!(values, Values::Double(_))
    }
}
