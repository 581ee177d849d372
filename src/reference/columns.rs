//! Columns of products of a matrix with vectors, in plain loops that are compiled for several kinds of processors.
//!
//! A sum adds its terms in ascending order, each by the operations that [`Adding`] names and no others, so that the
//! instructions of a processor change no bit.

use std::{marker::PhantomData, ops::Range};

use pulp::{Arch, NullaryFnOnce};

use super::{
    kept::{Kept, Number},
    math::Sums,
};

/// Most columns that are computed together.
pub(super) const COLUMNS: usize = 128;
/// Terms that are added in one go.
const TERMS: usize = 16;
/// Vectors whose sums stay near while a part of the matrix is read.
const VECTORS: usize = 256;

/// How a term is added to a sum.
pub(super) trait Adding: Sync {
    /// What sums and both factors are.
    type Number: Number;

    /// `sum + x · weight`.
    fn add(sum: Self::Number, x: Self::Number, weight: Self::Number) -> Self::Number;
}

/// In f64.
pub(super) struct InDouble;

/// In f64, rounded to f32 after each term.
pub(super) struct InSingle;

/// In f32, by a fused multiply-add: of factors that f32 holds.
pub(super) struct Fused;

impl Adding for InDouble {
    type Number = f64;

    #[inline(always)]
    fn add(sum: f64, x: f64, weight: f64) -> f64 {
        sum + x * weight
    }
}

impl Adding for InSingle {
    type Number = f64;

    #[inline(always)]
    fn add(sum: f64, x: f64, weight: f64) -> f64 {
        Sums::Single.rounded(sum + x * weight)
    }
}

impl Adding for Fused {
    type Number = f32;

    #[inline(always)]
    fn add(sum: f32, x: f32, weight: f32) -> f32 {
        x.mul_add(weight, sum)
    }
}

/// Some columns of the products of one matrix; `LANES` of them, a divisor of [`COLUMNS`], stay in registers.
pub(super) struct Columns<'a, A: Adding, const LANES: usize> {
    values: &'a Kept,
    /// Where the first value of the first column stands.
    start: usize,
    /// Values from one row to the next.
    stride: usize,
    columns: usize,
    x: &'a [&'a [A::Number]],
    adding: PhantomData<A>,
}

impl<'a, A: Adding, const LANES: usize> Columns<'a, A, LANES> {
    /// The columns of `values` from `start` on, of which a row has `stride`, with every vector of `x`.
    pub(super) const fn new(
        values: &'a Kept,
        start: usize,
        [stride, columns]: [usize; 2],
        x: &'a [&'a [A::Number]],
    ) -> Self {
        Self { values, start, stride, columns, x, adding: PhantomData }
    }

    /// The products, a row for each vector; what is beyond the columns is 0.
    pub(super) fn sums(self) -> Vec<[A::Number; COLUMNS]> {
        Arch::new().dispatch(self)
    }

    /// Adds some terms, [`TERMS`] at most, to the `sums` of some vectors.
    #[inline(always)]
    fn add(&self, terms: Range<usize>, x: &[&[A::Number]], sums: &mut [[A::Number; COLUMNS]]) {
        let mut rows = [[A::Number::default(); COLUMNS]; TERMS];
        for (term, row) in terms.clone().zip(&mut rows) {
            self.values.widen(self.start + term * self.stride, &mut row[..self.columns]);
        }
        for (x, sums) in x.iter().zip(sums) {
            let (parts, _) = sums.as_chunks_mut::<LANES>();
            for (place, part) in parts.iter_mut().take(self.columns.div_ceil(LANES)).enumerate() {
                let mut near = *part;
                for (x, row) in x[terms.clone()].iter().zip(&rows) {
                    let weights = &row.as_chunks::<LANES>().0[place];
                    near.iter_mut().zip(weights).for_each(|(sum, weight)| *sum = A::add(*sum, *x, *weight));
                }
                *part = near;
            }
        }
    }
}

impl<A: Adding, const LANES: usize> NullaryFnOnce for Columns<'_, A, LANES> {
    type Output = Vec<[A::Number; COLUMNS]>;

    #[inline(always)]
    fn call(self) -> Self::Output {
        let mut all = vec![[A::Number::default(); COLUMNS]; self.x.len()];
        let terms = self.x.first().map_or(0, |x| x.len());
        for (x, sums) in self.x.chunks(VECTORS).zip(all.chunks_mut(VECTORS)) {
            for first in (0..terms).step_by(TERMS) {
                self.add(first..terms.min(first + TERMS), x, sums);
            }
        }
        all
    }
}
