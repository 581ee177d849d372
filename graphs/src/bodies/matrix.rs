//! Trained matrices as operators take them.

use crate::graph::{Builder, DType, Value};

/// A trained matrix `[.., inner, columns]`.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    /// Floats, or int8 where there are scales.
    pub(crate) weight: Value,
    /// f32 `[.., columns]`.
    pub(crate) scale: Option<Value>,
}

impl Matrix {
    /// The matrix in floats.
    pub(super) fn floats(&self, b: &mut Builder) -> Value {
        let Some(scale) = &self.scale else { return self.weight.clone() };
        let integers = b.cast(&self.weight, DType::Float32);
        let scale = b.unsqueeze(scale, &[-2]);
        b.op("Mul", &[&integers, &scale], [])
    }
}
