//! Weights as callers have them.

use half::{bf16, f16};
use moa_schema::BLOCK;

use crate::simd::Form;

/// The values of a weight as they are stored, row-major.
///
/// The results of a call whose factors nobody rounds, see [`Prepared::rounds_rows`](crate::Prepared::rounds_rows), are
/// those of the same call with the weights widened to f32, bit for bit, except with int8, whose scales multiply sums,
/// and in products of few rows or columns times f16 or int4, which stay off AMX tiles where f32 goes to them.
#[derive(Debug, Clone, Copy)]
pub enum WeightData<'a> {
    /// 32-bit floats.
    F32(&'a [f32]),
    /// The upper halves of 32-bit floats.
    Bf16(&'a [bf16]),
    /// IEEE half-precision floats.
    F16(&'a [f16]),
    /// 8-bit integers, each of which is a weight once it is multiplied with the scale of its column; the product of a
    /// row with the integers of a column is summed before it is scaled.
    I8 {
        /// The integers.
        values: &'a [i8],
        /// A scale for each column of each matrix.
        scales: &'a [f32],
    },
    /// 4-bit integers, each of which is a weight once it is multiplied with its scale, which is exact in f32.
    I4(Int4<'a>),
}

/// Matrices `[matrices, inner, columns]` in 4-bit integers.
#[derive(Debug, Clone, Copy)]
pub struct Int4<'a> {
    /// Integers in two's complement, row-major, two in a byte, of which the earlier is in the lower half.
    pub values: &'a [u8],
    /// A scale for each [`BLOCK`] rows of a column, `[matrices, ceil(inner / BLOCK), columns]`.
    pub scales: &'a [bf16],
}

impl WeightData<'_> {
    /// Number of elements, where their last byte is full.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::I8 { values, .. } => values.len(),
            Self::I4(Int4 { values, .. }) => 2 * values.len(),
        }
    }

    /// The form that rows have which are multiplied with such values, where nodes allow more than theirs.
    pub(crate) fn form(&self) -> Form {
        match self {
            Self::F32(_) | Self::F16(_) => Form::Values,
            Self::Bf16(_) => Form::Pairs,
            Self::I8 { .. } => Form::OF_INT8,
            Self::I4(_) => Form::OF_INT4,
        }
    }

    /// Whether there are `count` elements.
    pub(crate) fn has(&self, count: usize) -> bool {
        match self {
            Self::I4(Int4 { values, .. }) => values.len() == count.div_ceil(2),
            _ => self.len() == count,
        }
    }

    /// A scale for each column, where there are any.
    pub(crate) fn column_scales(&self) -> Option<&[f32]> {
        if let Self::I8 { scales, .. } = self { Some(scales) } else { None }
    }

    /// Number of scales, where there are any, and how many matrices `[matrices, inner, columns]` need.
    pub(crate) fn scales(&self, [matrices, inner, columns]: [usize; 3]) -> Option<(usize, [usize; 3])> {
        match self {
            Self::F32(_) | Self::Bf16(_) | Self::F16(_) => None,
            Self::I8 { scales, .. } => Some((scales.len(), [matrices, 1, columns])),
            Self::I4(Int4 { scales, .. }) => Some((scales.len(), [matrices, inner.div_ceil(BLOCK), columns])),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'a, T: AsRef<[f32]> + ?Sized> From<&'a T> for WeightData<'a> {
    fn from(values: &'a T) -> Self {
        Self::F32(values.as_ref())
    }
}
