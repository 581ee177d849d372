//! Routing, in f32, and moving rows between "one per expert" and "one per chosen expert".

use moa_schema::GateMode;

use crate::graph::{Attribute, Builder, Value};

/// Names that the routing of a module gets; empty ones are invented.
#[derive(Debug, Clone, Default)]
pub(crate) struct Routed {
    /// `[B, T, k]` int64, by falling weight.
    pub(crate) indices: String,
    /// `[B, T, k]` float32.
    pub(crate) weights: String,
}

/// The chosen experts of every token.
pub(super) struct Routing {
    /// `[B, T, k]`.
    indices: Value,
    /// `[B, T, k, 1]`.
    weights: Value,
    top_k: usize,
}

/// Routes `hidden` `[B, T, C]`; tokens where `mask` `[B, T, 1]` is false get weight 0.
pub(super) fn route(
    b: &mut Builder,
    hidden: &Value,
    router: &Value,
    gate_mode: GateMode,
    top_k: usize,
    mask: Option<&Value>,
    names: &Routed,
) -> Routing {
    let hidden = b.to_float32(hidden);
    let logits = b.op("MatMul", &[&hidden, router], []);
    let last = ("axis", Attribute::Int(-1));
    let scores = match gate_mode {
        GateMode::TopkSoftmax => logits,
        GateMode::SoftmaxTopk | GateMode::SoftmaxTopkRenorm => b.op("Softmax", &[&logits], [last.clone()]),
    };
    let [mut weights, indices] = top_k_of(b, &scores, top_k);
    match gate_mode {
        GateMode::SoftmaxTopk => {}
        GateMode::SoftmaxTopkRenorm => {
            let axis = b.ints(&[-1]);
            let sum = b.op("ReduceSum", &[&weights, &axis], [("keepdims", Attribute::Int(1))]);
            weights = b.op("Div", &[&weights, &sum], []);
        }
        GateMode::TopkSoftmax => weights = b.op("Softmax", &[&weights], [last]),
    }
    if let Some(mask) = mask {
        let zero = b.float32(0.0);
        weights = b.op("Where", &[mask, &weights, &zero], []);
    }
    let indices = rename(b, indices, &names.indices);
    let weights = rename(b, weights, &names.weights);
    let weights = b.from_float32(&weights);
    Routing { indices, weights: b.unsqueeze(&weights, &[-1]), top_k }
}

#[allow(clippy::cast_possible_wrap)]
fn top_k_of(b: &mut Builder, scores: &Value, top_k: usize) -> [Value; 2] {
    let count = b.ints(&[top_k as i64]);
    b.op2("TopK", &[scores, &count], [("axis", Attribute::Int(-1)), ("sorted", Attribute::Int(1))])
}

fn rename(b: &mut Builder, value: Value, name: &str) -> Value {
    if name.is_empty() { value } else { b.rename(&value, name) }
}

#[allow(clippy::cast_possible_wrap)]
impl Routing {
    /// Indices spread over `columns`, `[B, T, k, columns]`.
    fn spread(&self, b: &mut Builder, columns: usize) -> Value {
        let indices = b.unsqueeze(&self.indices, &[-1]);
        let shape = b.ints(&[1, 1, 1, columns as i64]);
        b.op("Expand", &[&indices, &shape], [])
    }

    /// `hidden` `[B, T, C]` through the chosen of `weight` `[E, C, columns]`: `[B, T, k, columns]`.
    pub(super) fn map(
        &self,
        b: &mut Builder,
        hidden: &Value,
        weight: &Value,
        [experts, width, columns]: [usize; 3],
    ) -> Value {
        let weight = b.transpose(weight, &[1, 0, 2]);
        let weight = b.reshape_static(&weight, &[width, experts * columns]);
        let weight = b.widen(&weight);
        let all = b.op("MatMul", &[hidden, &weight], []);
        let all = b.reshape(&all, &[0, 0, experts as i64, columns as i64]);
        let indices = self.spread(b, columns);
        b.op("GatherElements", &[&all, &indices], [("axis", Attribute::Int(2))])
    }

    /// `rows` `[B, T, k, columns]` weighted, through the chosen of `weight` `[E, columns, C]`, and summed:
    /// `[B, T, C]`.
    pub(super) fn reduce(
        &self,
        b: &mut Builder,
        rows: &Value,
        weight: &Value,
        [experts, columns, width]: [usize; 3],
    ) -> Value {
        let weighted = b.op("Mul", &[rows, &self.weights], []);
        let indices = self.spread(b, columns);
        let (batch, tokens) = (b.size(rows, 0), b.size(rows, 1));
        let slots = b.ints(&[experts as i64, columns as i64]);
        let shape = b.op("Concat", &[&batch, &tokens, &slots], [("axis", Attribute::Int(0))]);
        let zero = b.float(0.0);
        let zeros = b.op("Expand", &[&zero, &shape], []);
        let placed = b.op("ScatterElements", &[&zeros, &indices, &weighted], [("axis", Attribute::Int(2))]);
        let flat = b.reshape(&placed, &[0, 0, (experts * columns) as i64]);
        let weight = b.reshape_static(weight, &[experts * columns, width]);
        let weight = b.widen(&weight);
        b.op("MatMul", &[&flat, &weight], [])
    }

    /// Chosen experts per token.
    pub(super) const fn top_k(&self) -> usize {
        self.top_k
    }
}
