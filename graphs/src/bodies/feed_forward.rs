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
    pub(crate) router_input: Option<Value>,
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
    let read = values.router_input.as_ref().unwrap_or(&values.hidden_states);
    let routing = route(b, read, &values.router_weight, gate_mode, top_k, None, names);
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

/// `√(2 / π)`: `(1 + tanh(u)) / 2` is `sigmoid(2 · u)`.
const ROOT_OF_2_BY_PI: f32 = 0.797_884_6;

/// Nodes of an element-wise activation.
pub(crate) fn activation(b: &mut Builder, input: &Value, kind: Activation) -> Value {
    match kind {
        Activation::Relu => b.op("Relu", &[input], []),
        Activation::Silu => {
            let sigmoid = b.op("Sigmoid", &[input], []);
            b.op("Mul", &[input, &sigmoid], [])
        }
        Activation::Gelu => gelu(b, input, Builder::float),
        Activation::GeluTanh => {
            let (cubic, linear) = (b.float(2.0 * ROOT_OF_2_BY_PI * 0.044_715), b.float(2.0 * ROOT_OF_2_BY_PI));
            let square = b.op("Mul", &[input, input], []);
            let scaled = b.op("Mul", &[&square, &cubic], []);
            let factor = b.op("Add", &[&scaled, &linear], []);
            let argument = b.op("Mul", &[input, &factor], []);
            let sigmoid = b.op("Sigmoid", &[&argument], []);
            b.op("Mul", &[input, &sigmoid], [])
        }
    }
}

/// [`Activation::Gelu`] of f32, whatever activations are.
pub(crate) fn gelu_float32(b: &mut Builder, input: &Value) -> Value {
    gelu(b, input, Builder::float32)
}

fn gelu(b: &mut Builder, input: &Value, constant: fn(&mut Builder, f32) -> Value) -> Value {
    let [root, half, one] = [std::f32::consts::SQRT_2, 0.5, 1.0].map(|value| constant(b, value));
    let scaled = b.op("Div", &[input, &root], []);
    let erf = b.op("Erf", &[&scaled], []);
    let shifted = b.op("Add", &[&erf, &one], []);
    let product = b.op("Mul", &[input, &shifted], []);
    b.op("Mul", &[&product, &half], [])
}
