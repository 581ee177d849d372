//! What the parameters of a node are stored in.

use std::fmt;

/// Types of floats that operators take and graphs store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum FloatType {
    /// 32-bit float.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// The upper half of a 32-bit float.
    Bf16,
}

impl FloatType {
    /// Width of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for FloatType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        })
    }
}

/// Types of integers that matrices are stored in; each is a weight once it is multiplied with its scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IntegerType {
    /// 8 bits, with one scale for each column.
    Int8,
    /// 4 bits, two integers in a byte, the earlier one in its lower half; with one scale for each [`BLOCK`] rows of a
    /// column, or fewer at its end.
    Int4,
}

/// Rows of a column that share a scale in [`IntegerType::Int4`].
pub const BLOCK: usize = 32;

impl IntegerType {
    /// Every type, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Int8, Self::Int4];

    /// Type of the scales.
    pub const fn scales(self) -> FloatType {
        match self {
            Self::Int8 => FloatType::F32,
            Self::Int4 => FloatType::Bf16,
        }
    }

    /// Dimensions of the scales of matrices `shape`, `[.., inner, columns]`: `[.., columns]`, or
    /// `[.., ceil(inner / BLOCK), columns]` in [`IntegerType::Int4`].
    pub fn scale_shape(self, shape: &[usize]) -> Vec<usize> {
        let mut shape = shape.to_vec();
        if let Some(inner) = shape.len().checked_sub(2) {
            match self {
                Self::Int8 => drop(shape.remove(inner)),
                Self::Int4 => shape[inner] = shape[inner].div_ceil(BLOCK),
            }
        }
        shape
    }

    /// Whether `scales` is the [`IntegerType::scale_shape`] of `matrix`; allocates nothing.
    pub fn fits(self, scales: &[usize], matrix: &[usize]) -> bool {
        let [matrices @ .., inner, columns] = matrix else { return scales == matrix };
        match (self, scales) {
            (Self::Int8, [of_matrices @ .., of_columns]) => of_matrices == matrices && of_columns == columns,
            (Self::Int4, [of_matrices @ .., blocks, of_columns]) => {
                of_matrices == matrices && *blocks == inner.div_ceil(BLOCK) && of_columns == columns
            }
            _ => false,
        }
    }
}

impl fmt::Display for IntegerType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        })
    }
}

/// What a trained matrix of a node is stored in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixType {
    /// Floats, which are the weights.
    Float(FloatType),
    /// Integers with scales.
    Integer(IntegerType),
}

/// What the parameters [`Activation`](crate::ElementType::Activation) and [`Weight`](crate::ElementType::Weight) of one
/// node hold.
///
/// Whatever the types are, the CPU kernels add in f32. A float counts as the f32 of the same value, and so does an
/// int4 times its scale, which an f32 holds; the scale of int8 is multiplied with the sum of its column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeTypes {
    /// f32 or f16; on GPUs bf16 too.
    pub activations: FloatType,
    /// Any; on GPUs the type of the activations.
    pub weights: MatrixType,
}

impl NodeTypes {
    /// Every choice that the operators take on processors.
    pub const ALL: [Self; 8] = [
        Self::floats(FloatType::F32, FloatType::F32),
        Self::floats(FloatType::F32, FloatType::Bf16),
        Self::floats(FloatType::F32, FloatType::F16),
        Self::floats(FloatType::F16, FloatType::F16),
        Self::floats(FloatType::F16, FloatType::Bf16),
        Self::floats(FloatType::F16, FloatType::F32),
        Self::integers(IntegerType::Int8),
        Self::integers(IntegerType::Int4),
    ];

    /// A node whose matrices are floats.
    pub const fn floats(activations: FloatType, weights: FloatType) -> Self {
        Self { activations, weights: MatrixType::Float(weights) }
    }

    /// Whether ONNX Runtime multiplies them on no processor as they are: it widens bf16 beside f32 as it loads, and has
    /// no product of integers with f32 in ONNX's own operators.
    pub const fn have_no_matmul(self) -> bool {
        matches!(self.weights, MatrixType::Integer(_) | MatrixType::Float(FloatType::Bf16))
            && matches!(self.activations, FloatType::F32)
    }

    /// A node whose matrices are integers: its activations are f32.
    pub const fn integers(weights: IntegerType) -> Self {
        Self { activations: FloatType::F32, weights: MatrixType::Integer(weights) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_belong_to_columns_or_to_blocks_of_them() {
        assert_eq!(IntegerType::Int8.scale_shape(&[3, 70, 5]), [3, 5]);
        assert_eq!(IntegerType::Int4.scale_shape(&[3, 70, 5]), [3, 3, 5]);
        assert_eq!(IntegerType::Int4.scale_shape(&[64, 5]), [2, 5]);
        assert_eq!(IntegerType::ALL.map(|integers| integers.scale_shape(&[5])), [[5], [5]]);
        let shapes: [&[usize]; 7] = [&[3, 70, 5], &[3, 5], &[3, 3, 5], &[3, 70], &[64, 5], &[5], &[]];
        for (integers, matrix) in IntegerType::ALL.into_iter().flat_map(|integers| shapes.map(|m| (integers, m))) {
            let expected = integers.scale_shape(matrix);
            assert!(integers.fits(&expected, matrix), "{integers} {matrix:?}");
            for other in shapes.into_iter().filter(|other| **other != expected) {
                assert!(!integers.fits(other, matrix), "{integers} {matrix:?} {other:?}");
            }
        }
    }
}
