//! Values of initializers: literals, and expressions over trained weights that are evaluated when written.

use std::sync::Arc;

use super::{Blocks, Buffers, Constant, ConstantValues, DType, Quantization, RotaryTable, Sinusoids};
use crate::{FloatType, Weight, WeightError};

/// Where the values of an initializer come from.
#[derive(Debug, Clone)]
pub enum Data {
    /// They are here.
    Literal(Constant),
    /// They are computed from trained weights, and rounded to this type, when the graph is written.
    Weight(WeightExpr, FloatType),
    /// They are the integers that stand for trained weights, and computed when the graph is written.
    Integers(Arc<Quantization>),
    /// They are the scales of such integers.
    Scales(Arc<Quantization>),
}

impl Data {
    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Literal(constant) => constant.dtype(),
            Self::Weight(_, float) => (*float).into(),
            Self::Integers(matrices) => matrices.integers().into(),
            Self::Scales(matrices) => matrices.integers().scales().into(),
        }
    }

    /// Dimensions.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Literal(constant) => constant.shape.clone(),
            Self::Weight(expr, _) => expr.shape(),
            Self::Integers(matrices) => matrices.expr().shape(),
            Self::Scales(matrices) => matrices.scale_shape(),
        }
    }

    /// The values as little-endian bytes, row-major, block by block.
    pub fn blocks<'a>(&'a self, buffers: &'a mut Buffers) -> Blocks<'a> {
        Blocks::new(self, buffers)
    }

    /// The values as little-endian bytes, row-major.
    ///
    /// # Errors
    ///
    /// Where a trained weight cannot be read, or does not fit the type that it is written in.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WeightError> {
        let mut bytes = Vec::new();
        let mut buffers = Buffers::default();
        let mut blocks = self.blocks(&mut buffers);
        while let Some(block) = blocks.next_block()? {
            bytes.extend_from_slice(block);
        }
        Ok(bytes)
    }
}

impl Constant {
    /// Element type.
    pub const fn dtype(&self) -> DType {
        match self.values {
            ConstantValues::Float32(_) => DType::Float32,
            ConstantValues::Float16(_) => DType::Float16,
            ConstantValues::Int64(_) => DType::Int64,
        }
    }

    /// The values as little-endian bytes, row-major.
    pub fn to_bytes(&self) -> Vec<u8> {
        match &self.values {
            ConstantValues::Float32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ConstantValues::Float16(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            ConstantValues::Int64(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }
}

/// A tensor made of trained weights: only reordering, or a table of positions.
#[derive(Debug, Clone)]
pub enum WeightExpr {
    /// The stored tensor.
    Stored(Weight),
    /// Axes reordered: axis `i` of the result is axis `permutation[i]` of the input.
    Transposed {
        /// What is reordered.
        input: Box<WeightExpr>,
        /// One entry per axis.
        permutation: Vec<usize>,
    },
    /// The same values under another shape.
    Reshaped {
        /// What is reshaped.
        input: Box<WeightExpr>,
        /// New shape of equal size.
        shape: Vec<usize>,
    },
    /// Matrices of equal height side by side.
    Columns(Vec<WeightExpr>),
    /// The table of sinusoidal positions.
    Sinusoids(Sinusoids),
    /// Cosines or sines of rotary angles.
    Rotary(RotaryTable),
}

impl WeightExpr {
    /// Dimensions of the result.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Stored(weight) => weight.shape().to_vec(),
            Self::Transposed { input, permutation } => {
                let shape = input.shape();
                permutation.iter().map(|axis| shape[*axis]).collect()
            }
            Self::Reshaped { shape, .. } => shape.clone(),
            Self::Columns(parts) => {
                let rows = parts.first().map_or(0, |part| part.shape()[0]);
                vec![rows, parts.iter().map(|part| part.shape()[1]).sum()]
            }
            Self::Sinusoids(table) => vec![table.rows, table.width],
            Self::Rotary(table) => vec![table.rows, table.head / 2],
        }
    }

    /// This tensor with its axes reordered.
    #[must_use]
    pub fn transposed(self, permutation: &[usize]) -> Self {
        Self::Transposed { input: Box::new(self), permutation: permutation.to_vec() }
    }

    /// This tensor under another shape of equal size.
    #[must_use]
    pub fn reshaped(self, shape: &[usize]) -> Self {
        Self::Reshaped { input: Box::new(self), shape: shape.to_vec() }
    }
}

impl From<&Weight> for WeightExpr {
    fn from(weight: &Weight) -> Self {
        Self::Stored(weight.clone())
    }
}
