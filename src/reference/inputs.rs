//! Reads inputs, proving type and shape.

use super::{
    ReferenceError,
    sequence::{Heads, Mask, Precision, Sequence},
};
use crate::tensor::{NamedTensors, Tensor};

/// What one dimension of an input must be.
#[derive(Debug, Clone, Copy)]
pub(super) enum Dim {
    /// Anything; the text is its name.
    Any(&'static str),
    /// At least this.
    AtLeast(usize),
    /// Exactly this.
    Is(usize),
}

impl Dim {
    fn accepts(self, found: usize) -> bool {
        match self {
            Self::Any(_) => true,
            Self::AtLeast(least) => found >= least,
            Self::Is(size) => found == size,
        }
    }

    fn text(self) -> String {
        match self {
            Self::Any(name) => name.into(),
            Self::AtLeast(least) => format!("at least {least}"),
            Self::Is(size) => size.to_string(),
        }
    }
}

/// Token ids, `[B, T]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct TokenIds<'a> {
    pub(super) precision: Precision,
    pub(super) input: &'static str,
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) ids: &'a [i64],
}

/// The inputs of one evaluation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs<'a> {
    pub(super) tensors: &'a NamedTensors,
    /// Of everything computed from them.
    pub(super) precision: Precision,
}

impl<'a> Inputs<'a> {
    /// Token ids, `[batch, sequence]`.
    pub(super) fn token_ids(self, input: &'static str) -> Result<TokenIds<'a>, ReferenceError> {
        let (shape, ids) = self.integers(input, &[Dim::Any("batch"), Dim::Any("sequence")])?;
        Ok(TokenIds { precision: self.precision, input, batch: shape[0], tokens: shape[1], ids })
    }

    /// A mask, `[batch, tokens]`, 1 at real tokens.
    pub(super) fn mask(self, input: &str, batch: usize, tokens: Dim) -> Result<Mask, ReferenceError> {
        let (shape, values) = self.integers(input, &[Dim::Is(batch), tokens])?;
        if let Some(index) = values.iter().position(|value| !matches!(value, 0 | 1)) {
            return Err(ReferenceError::MaskValue { input: input.into(), index, value: values[index] });
        }
        Ok(Mask { batch, tokens: shape[1], real: values.iter().map(|value| *value == 1).collect() })
    }

    /// Integers, exactly `[batch, tokens]`.
    pub(super) fn integer_matrix(self, input: &str, shape: [usize; 2]) -> Result<&'a [i64], ReferenceError> {
        Ok(self.integers(input, &shape.map(Dim::Is))?.1)
    }

    /// Vectors, `[batch, tokens, width]`.
    pub(super) fn sequence(self, input: &str, batch: Dim, width: usize) -> Result<Sequence, ReferenceError> {
        let (shape, values) = self.floats(input, &[batch, Dim::Any("tokens"), Dim::Is(width)])?;
        Ok(Sequence { precision: self.precision, batch: shape[0], tokens: shape[1], width, values })
    }

    /// Keys or values, exactly `[batch, heads, tokens, width]`.
    pub(super) fn heads(self, input: &str, shape: [usize; 4]) -> Result<Heads, ReferenceError> {
        let (_, values) = self.floats(input, &shape.map(Dim::Is))?;
        let [batch, heads, tokens, width] = shape;
        Ok(Heads { batch, heads, tokens, width, values })
    }

    fn tensor(self, input: &str) -> Result<&'a Tensor, ReferenceError> {
        self.tensors.get(input).ok_or_else(|| ReferenceError::MissingInput { input: input.into() })
    }

    fn integers(self, input: &str, dims: &[Dim]) -> Result<(&'a [usize], &'a [i64]), ReferenceError> {
        let tensor = self.tensor(input)?;
        match tensor.as_i64() {
            Some(values) if fits(tensor, dims) => Ok((tensor.shape(), values)),
            _ => Err(wrong(input, "int64", dims, tensor)),
        }
    }

    fn floats(self, input: &str, dims: &[Dim]) -> Result<(&'a [usize], Vec<f64>), ReferenceError> {
        let tensor = self.tensor(input)?;
        if tensor.is_float() && fits(tensor, dims) {
            return Ok((tensor.shape(), tensor.to_f64()));
        }
        Err(wrong(input, "float16, float32 or float64", dims, tensor))
    }
}

fn fits(tensor: &Tensor, dims: &[Dim]) -> bool {
    let shape = tensor.shape();
    shape.len() == dims.len() && shape.iter().zip(dims).all(|(found, dim)| dim.accepts(*found))
}

fn wrong(input: &str, types: &str, dims: &[Dim], found: &Tensor) -> ReferenceError {
    let dims: Vec<String> = dims.iter().map(|dim| dim.text()).collect();
    ReferenceError::WrongInput {
        input: input.into(),
        expected: format!("{types} [{}]", dims.join(", ")),
        found: format!("{} {:?}", found.data().type_name(), found.shape()),
    }
}
