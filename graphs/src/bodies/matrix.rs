//! Trained matrices as operators take them.

use moa_schema::{BLOCK, IntegerType};

use crate::graph::{Attribute, Builder, DType, Value};

/// A trained matrix `[.., inner, columns]`.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    /// Floats, or integers where there are scales.
    pub(crate) weight: Value,
    /// Scales of the integers that the builder's [`crate::Precision`] has for it.
    pub(crate) scale: Option<Value>,
}

impl Matrix {
    /// The matrix in floats.
    pub(super) fn floats(&self, b: &mut Builder) -> Value {
        self.floats_of(b, b.precision().integers())
    }

    /// As [`Self::floats`], where integers are of the type `integers`.
    pub(super) fn floats_of(&self, b: &mut Builder, integers: Option<IntegerType>) -> Value {
        let Some(scale) = &self.scale else { return self.weight.clone() };
        if integers == Some(IntegerType::Int4) {
            return self.of_blocks(b, scale);
        }
        let integers = b.cast(&self.weight, DType::Float32);
        let scale = b.unsqueeze(scale, &[-2]);
        b.op("Mul", &[&integers, &scale], [])
    }

    /// `scale` belongs to blocks of rows.
    #[allow(clippy::cast_possible_wrap)]
    fn of_blocks(&self, b: &mut Builder, scale: &Value) -> Value {
        let scale = b.cast(scale, DType::Float32);
        let blocks = [("axis", Attribute::Int(-2)), ("block_size", Attribute::Int(BLOCK as i64))];
        b.op("DequantizeLinear", &[&self.weight, &scale], blocks)
    }
}
