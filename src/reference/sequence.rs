//! Batches of vectors, masks, and heads of keys or values.

use std::borrow::Cow;

use super::{
    math::Sums,
    stored::{to_bf16, to_f16},
};
use crate::tensor::{Tensor, TensorData, TensorShapeError};

/// Tokens whose vectors between two products are in memory together.
pub(super) const TOGETHER: usize = 256;

/// How vectors are rounded whenever they are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Precision {
    pub(super) to: Rounding,
    pub(super) draw: Draw,
}

/// What vectors are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rounding {
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
    pub(super) const DOUBLE: Self = Self::nearest(Rounding::Double);

    /// To nearest, ties to even.
    pub(super) const fn nearest(to: Rounding) -> Self {
        Self { to, draw: Draw::NEAREST }
    }

    /// What sums are rounded to on the way to a vector: runtimes add products of f16 and bf16 in f32.
    pub(super) const fn sums(self) -> Sums {
        match self.to {
            Rounding::Double => Sums::Double,
            Rounding::Single | Rounding::Products | Rounding::Integers | Rounding::Half | Rounding::Brain => {
                Sums::Single
            }
        }
    }

    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn round(self, values: &mut [f64]) {
        let (round, unit): (fn(f64) -> f64, f64) = match self.to {
            Rounding::Double => return,
            Rounding::Single | Rounding::Products | Rounding::Integers => {
                (|value| f64::from(value as f32), UNIT_OF_SINGLE)
            }
            Rounding::Half => (to_f16, UNIT_OF_HALF),
            Rounding::Brain => (to_bf16, UNIT_OF_BRAIN),
        };
        values.iter_mut().for_each(|value| *value = round(self.draw.moved(*value, unit)));
    }

    /// Values as attention multiplies them; see [`super::matrix::Matrices::each`] for what matrices are multiplied
    /// with.
    pub(super) fn factor(self, vector: &[f64]) -> Cow<'_, [f64]> {
        match self.to {
            Rounding::Products | Rounding::Integers => {
                vector.iter().map(|value| to_bf16(self.draw.moved(*value, UNIT_OF_BRAIN))).collect()
            }
            Rounding::Double | Rounding::Single | Rounding::Half | Rounding::Brain => Cow::Borrowed(vector),
        }
    }
}

#[cfg(test)]
impl Precision {
    pub(super) const SINGLE: Self = Self::nearest(Rounding::Single);
    pub(super) const PRODUCTS: Self = Self::nearest(Rounding::Products);
    pub(super) const INTEGERS: Self = Self::nearest(Rounding::Integers);
    pub(super) const HALF: Self = Self::nearest(Rounding::Half);
    pub(super) const BRAIN: Self = Self::nearest(Rounding::Brain);
}

const UNIT_OF_SINGLE: f64 = f32::EPSILON as f64 / 2.0;
const UNIT_OF_HALF: f64 = 1.0 / 2048.0;
pub(super) const UNIT_OF_BRAIN: f64 = 1.0 / 256.0;

/// Which of several evaluations that round alike. But for the first, values are moved by less than half a unit in the
/// last place before they are rounded to nearest, so that those that the type holds stay, and others go up or down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Draw(pub(super) u8);

impl Draw {
    /// Nothing is moved.
    pub(super) const NEAREST: Self = Self(0);

    /// `value` before it is rounded to a type whose least relative distance of neighbours is `unit`.
    pub(super) fn moved(self, value: f64, unit: f64) -> f64 {
        value * (1.0 + self.share(value) * unit)
    }

    /// A number above -1/2 and below 1/2 that draw and `value` decide as SplitMix64 mixes bits.
    pub(super) fn share(self, value: f64) -> f64 {
        if self == Self::NEAREST {
            return 0.0;
        }
        let seed = value.to_bits().wrapping_add(u64::from(self.0).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let most = (1u64 << 53) as f64;
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / most - 0.5
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
        let heads = Heads::split(&Sequence { precision: Precision::DOUBLE, batch: 1, tokens: 2, width: 4, values }, 2);
        assert_eq!(heads.values, [0.0, 1.0, 4.0, 5.0, 2.0, 3.0, 6.0, 7.0]);
        assert_eq!(heads.row(0, 1, 0), [2.0, 3.0]);
        let joined = heads.followed_by(&Heads { tokens: 1, values: vec![-1.0, -2.0, -3.0, -4.0], ..heads.clone() });
        assert_eq!((joined.row(0, 0, 2), joined.row(0, 1, 1)), (&[-1.0, -2.0][..], &[6.0, 7.0][..]));
        assert_eq!(joined.into_tensor().unwrap().shape(), [1, 2, 3, 2]);
    }

    #[test]
    fn single_precision_rounds_every_result() {
        let third = 1.0 / 3.0;
        let x = Sequence { precision: Precision::SINGLE, batch: 1, tokens: 1, width: 1, values: vec![1.0] };
        assert_eq!(x.map(1, |_| vec![third]).values, [f64::from(third as f32)]);
        assert_eq!(Sequence { precision: Precision::DOUBLE, ..x }.map(1, |_| vec![third]).values, [third]);
    }

    #[test]
    fn products_round_their_factors_to_bf16_and_their_results_to_f32() {
        let third = 1.0 / 3.0;
        let x = Sequence { precision: Precision::PRODUCTS, batch: 1, tokens: 1, width: 1, values: vec![third] };
        assert_eq!(x.precision.factor(&x.values).as_ref(), [f64::from(half::bf16::from_f64(third))]);
        assert_eq!(x.map(1, |_| vec![third]).values, [f64::from(third as f32)]);
        assert_eq!((x.sums(), x.precision.factor(&[]).as_ref()), (Sums::Single, &[][..]));
        assert_eq!(Precision::INTEGERS.factor(&x.values), x.precision.factor(&x.values));
        let others = [Precision::DOUBLE, Precision::SINGLE, Precision::HALF, Precision::BRAIN];
        assert!(others.iter().all(|precision| precision.factor(&x.values).as_ref() == [third]));
        let integers = Sequence { precision: Precision::INTEGERS, ..x };
        assert_eq!(
            (integers.map(1, |_| vec![third]).values[0], integers.sums()),
            (f64::from(third as f32), Sums::Single)
        );
    }

    #[test]
    fn draws_round_what_their_type_does_not_hold_up_or_down() {
        let values: Vec<f64> = (0..64).map(|index| 1.0 + f64::from(index) / 48.0).chain([f64::INFINITY]).collect();
        for to in [Rounding::Single, Rounding::Half, Rounding::Brain] {
            let rounded = |values: &[f64], draw| {
                let mut values = values.to_vec();
                Precision { to, draw: Draw(draw) }.round(&mut values);
                values
            };
            let [nearest, first, second] = [0, 1, 2].map(|draw| rounded(&values, draw));
            assert!(nearest != first && first != second && second != nearest, "{to:?}");
            assert_eq!(rounded(&values, 1), first);
            assert_eq!([1, 2].map(|draw| rounded(&nearest, draw)), [nearest.clone(), nearest.clone()], "{to:?}");
        }
        let products = |draw| Precision { to: Rounding::Products, draw: Draw(draw) }.factor(&values).into_owned();
        assert!(products(0) != products(1) && products(1) != products(2));
    }

    #[test]
    fn the_last_tokens_of_a_mask_are_taken_per_row() {
        let mask = Mask { batch: 2, tokens: 2, real: vec![true, false, false, true] };
        assert_eq!(mask.last(1).real, [false, true]);
        assert!(mask.last(0).real.is_empty());
    }
}
