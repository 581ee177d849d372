//! `MoEFeedForward`, and the activations it shares with dense blocks.

use moa_schema::{Activation, FeedForwardAttributes};

use super::Matrix;
use super::routing::{Routed, route};
use crate::graph::{Attribute, Builder, Value};

/// Sizes that the body takes from the shapes of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FeedForwardSizes {
    /// Model width `C`.
    pub(crate) width: usize,
    /// Experts `E`.
    pub(crate) experts: usize,
    /// Hidden width `F`.
    pub(crate) hidden: usize,
}

/// Inputs of `MoEFeedForward`; shapes as in the schema.
pub(crate) struct FeedForwardValues {
    pub(crate) hidden_states: Value,
    pub(crate) router_weight: Value,
    pub(crate) input_weight: Matrix,
    pub(crate) output_weight: Matrix,
    pub(crate) output_bias: Option<Value>,
}

/// Nodes of `MoEFeedForward`: the output.
#[allow(clippy::cast_possible_wrap)]
pub(crate) fn feed_forward(
    b: &mut Builder,
    values: &FeedForwardValues,
    attributes: &FeedForwardAttributes,
    sizes: FeedForwardSizes,
    names: &Routed,
) -> Value {
    let FeedForwardSizes { width, experts, hidden } = sizes;
    let FeedForwardAttributes { top_k, gate_mode, activation: kind, gated } = *attributes;
    let routing = route(b, &values.hidden_states, &values.router_weight, gate_mode, top_k, None, names);
    let columns = if gated { 2 * hidden } else { hidden };
    let weight = values.input_weight.floats(b);
    let rows = routing.map(b, &values.hidden_states, &weight, [experts, width, columns]);
    let rows = if gated {
        let sizes = b.ints(&[hidden as i64, hidden as i64]);
        let [gate, linear] = b.op2("Split", &[&rows, &sizes], [("axis", Attribute::Int(-1))]);
        let gate = activation(b, &gate, kind);
        b.op("Mul", &[&gate, &linear], [])
    } else {
        activation(b, &rows, kind)
    };
    let weight = values.output_weight.floats(b);
    let output = routing.reduce(b, &rows, &weight, [experts, hidden, width]);
    match &values.output_bias {
        Some(bias) => b.op("Add", &[&output, bias], []),
        None => output,
    }
}

/// Nodes of an element-wise activation.
pub(crate) fn activation(b: &mut Builder, input: &Value, kind: Activation) -> Value {
    match kind {
        Activation::Relu => b.op("Relu", &[input], []),
        Activation::Silu => {
            let sigmoid = b.op("Sigmoid", &[input], []);
            b.op("Mul", &[input, &sigmoid], [])
        }
        Activation::Gelu => {
            let (root, half, one) = (b.float(std::f32::consts::SQRT_2), b.float(0.5), b.float(1.0));
            let scaled = b.op("Div", &[input, &root], []);
            let erf = b.op("Erf", &[&scaled], []);
            let shifted = b.op("Add", &[&erf, &one], []);
            let product = b.op("Mul", &[input, &shifted], []);
            b.op("Mul", &[&product, &half], [])
        }
    }
}
