//! `LMHead`.

use super::Matrix;
use crate::graph::{Builder, Value};

/// Nodes of `LMHead`: `[B, T, V]`.
pub(crate) fn lm_head(b: &mut Builder, hidden_states: &Value, weight: &Matrix) -> Value {
    let weight = weight.floats_of(b, b.precision().head_integers());
    let weight = b.widen(&weight);
    b.op("MatMul", &[hidden_states, &weight], [])
}
