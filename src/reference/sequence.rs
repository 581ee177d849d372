//! Batches of vectors, masks, and heads of keys or values.

use std::borrow::Cow;

use super::{
    math::Sums,
    stored::{to_bf16, to_f16},
};
use crate::tensor::{Tensor, TensorData, TensorShapeError};

/// Tokens whose vectors between two products are in memory together.
pub(super) const TOGETHER: usize = 256;

/// What vectors are rounded to whenever they are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// Nothing: they are f64.
    Double,
    /// f32.
    Single,
    /// f32, and bf16 what our operators multiply.
    Products,
    /// f32, and of what our operators multiply int8 what is multiplied with matrices of integers, see
    /// [`super::scaled::factor`], and bf16 the factors of attention.
    Integers,
    /// f16.
    Half,
    /// bf16.
    Brain,
}

impl Precision {
    /// What sums are rounded to on the way to a vector: runtimes add products of f16 and bf16 in f32.
    pub(super) const fn sums(self) -> Sums {
        match self {
            Self::Double => Sums::Double,
            Self::Single | Self::Products | Self::Integers | Self::Half | Self::Brain => Sums::Single,
        }
    }

    /// Rounds values to nearest, ties to even.
    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn round(self, values: &mut [f64]) {
        match self {
            Self::Double => {}
            Self::Single | Self::Products | Self::Integers => {
                values.iter_mut().for_each(|value| *value = f64::from(*value as f32));
            }
            Self::Half => values.iter_mut().for_each(|value| *value = to_f16(*value)),
            Self::Brain => values.iter_mut().for_each(|value| *value = to_bf16(*value)),
        }
    }

    /// Values as attention multiplies them; see [`super::matrix::Matrices::each`] for what matrices are multiplied
    /// with.
    pub(super) fn factor(self, vector: &[f64]) -> Cow<'_, [f64]> {
        match self {
            Self::Products | Self::Integers => vector.iter().map(|value| to_bf16(*value)).collect(),
            Self::Double | Self::Single | Self::Half | Self::Brain => Cow::Borrowed(vector),
        }
    }
}

/// One vector per token, `[B, T, C]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sequence {
    pub(super) precision: Precision,
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) values: Vec<f64>,
}

impl Sequence {
    /// What sums are rounded to.
    pub(super) const fn sums(&self) -> Sums {
        self.precision.sums()
    }

    /// The same vectors, rounded as their precision asks.
    pub(super) fn rounded(mut self) -> Self {
        self.precision.round(&mut self.values);
        self
    }

    /// The vector of token `t` in row `b`.
    pub(super) fn row(&self, b: usize, t: usize) -> &[f64] {
        self.token(b * self.tokens + t)
    }

    /// The vector of a token, counted over all rows.
    pub(super) fn token(&self, index: usize) -> &[f64] {
        &self.values[index * self.width..(index + 1) * self.width]
    }

    /// All vectors.
    pub(super) fn rows(&self) -> Vec<&[f64]> {
        (0..self.batch * self.tokens).map(|index| self.token(index)).collect()
    }

    /// Other vectors, of `width` values, in the place of these.
    pub(super) fn with(&self, width: usize, vectors: Vec<Vec<f64>>) -> Self {
        Self { width, values: vectors.concat(), ..*self }.rounded()
    }

    /// `f` of every vector; its results have `width` values.
    pub(super) fn map(&self, width: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Self {
        let mut values = Vec::with_capacity(self.batch * self.tokens * width);
        for index in 0..self.batch * self.tokens {
            values.extend(f(&self.values[index * self.width..(index + 1) * self.width]));
        }
        Self { width, values, ..*self }.rounded()
    }

    /// Element-wise sum.
    pub(super) fn plus(mut self, other: &Self) -> Self {
        self.values.iter_mut().zip(&other.values).for_each(|(a, b)| *a += b);
        self.rounded()
    }

    /// The same as a tensor.
    pub(super) fn into_tensor(self) -> Result<Tensor, TensorShapeError> {
        Tensor::new([self.batch, self.tokens, self.width], TensorData::F64(self.values))
    }
}

/// Which tokens are real, `[B, S]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mask {
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) real: Vec<bool>,
}

impl Mask {
    /// Whether token `s` of row `b` is real.
    pub(super) fn is_real(&self, b: usize, s: usize) -> bool {
        self.real[b * self.tokens + s]
    }

    /// The last `tokens` tokens of every row.
    pub(super) fn last(&self, tokens: usize) -> Self {
        let first = self.tokens - tokens;
        let real = (0..self.batch).flat_map(|b| (first..self.tokens).map(move |s| self.is_real(b, s))).collect();
        Self { batch: self.batch, tokens, real }
    }
}

/// Keys or values: one vector per head and token, `[B, G, S, D]`.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Heads {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) values: Vec<f64>,
}

impl Heads {
    /// `[B, S, G·D]` to `[B, G, S, D]`.
    pub(super) fn split(projected: &Sequence, heads: usize) -> Self {
        let (batch, tokens, width) = (projected.batch, projected.tokens, projected.width / heads);
        let mut values = Vec::with_capacity(projected.values.len());
        for b in 0..batch {
            for g in 0..heads {
                for s in 0..tokens {
                    values.extend_from_slice(&projected.row(b, s)[g * width..(g + 1) * width]);
                }
            }
        }
        Self { batch, heads, tokens, width, values }
    }

    /// The vector of head `g` and token `s` in row `b`.
    pub(super) fn row(&self, b: usize, g: usize, s: usize) -> &[f64] {
        let start = ((b * self.heads + g) * self.tokens + s) * self.width;
        &self.values[start..start + self.width]
    }

    /// These tokens followed by those of `new`, `[B, G, P + T, D]`.
    pub(super) fn followed_by(&self, new: &Self) -> Self {
        let mut values = Vec::with_capacity(self.values.len() + new.values.len());
        for group in 0..self.batch * self.heads {
            for part in [self, new] {
                let size = part.tokens * part.width;
                values.extend_from_slice(&part.values[group * size..(group + 1) * size]);
            }
        }
        Self { tokens: self.tokens + new.tokens, values, ..*self }
    }

    /// The same as a tensor.
    pub(super) fn into_tensor(self) -> Result<Tensor, TensorShapeError> {
        Tensor::new([self.batch, self.heads, self.tokens, self.width], TensorData::F64(self.values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_split_and_joined_along_tokens() {
        let values = (0..8).map(f64::from).collect();
        let heads = Heads::split(&Sequence { precision: Precision::Double, batch: 1, tokens: 2, width: 4, values }, 2);
        assert_eq!(heads.values, [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        assert_eq!(heads.row(0, 1, 0), [2.0, 3.0]);
        let joined = heads.followed_by(&Heads { tokens: 1, values: vec![-1.0, -2.0, -3.0, -4.0], ..heads.clone() });
        assert_eq!((joined.row(0, 0, 2), joined.row(0, 1, 1)), (&[-1.0, -2.0][..], &[6.0, 7.0][..]));
        assert_eq!(joined.into_tensor().unwrap().shape(), [1, 2, 3, 2]);
    }

    #[test]
    fn single_precision_rounds_every_result() {
        let third = 1.0 / 3.0;
        let x = Sequence { precision: Precision::Single, batch: 1, tokens: 1, width: 1, values: vec![1.0] };
        assert_eq!(x.map(1, |_| vec![third]).values, [f64::from(third as f32)]);
        assert_eq!(Sequence { precision: Precision::Double, ..x }.map(1, |_| vec![third]).values, [third]);
    }

    #[test]
    fn products_round_their_factors_to_bf16_and_their_results_to_f32() {
        let third = 1.0 / 3.0;
        let x = Sequence { precision: Precision::Products, batch: 1, tokens: 1, width: 1, values: vec![third] };
        assert_eq!(x.precision.factor(&x.values).as_ref(), [f64::from(half::bf16::from_f64(third))]);
        assert_eq!(x.map(1, |_| vec![third]).values, [f64::from(third as f32)]);
        assert_eq!((x.sums(), x.precision.factor(&[]).as_ref()), (Sums::Single, &[][..]));
        assert_eq!(Precision::Integers.factor(&x.values), x.precision.factor(&x.values));
        let others = [Precision::Double, Precision::Single, Precision::Half, Precision::Brain];
        assert!(others.iter().all(|precision| precision.factor(&x.values).as_ref() == [third]));
        let integers = Sequence { precision: Precision::Integers, ..x };
        assert_eq!(
            (integers.map(1, |_| vec![third]).values[0], integers.sums()),
            (f64::from(third as f32), Sums::Single)
        );
    }

    #[test]
    fn the_last_tokens_of_a_mask_are_taken_per_row() {
        let mask = Mask { batch: 2, tokens: 2, real: vec![true, false, false, true] };
        assert_eq!(mask.last(1).real, [false, true]);
        assert!(mask.last(0).real.is_empty());
    }
}
