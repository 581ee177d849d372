//! `MoEFeedForward`.

use moa_schema::{Activation, FeedForwardAttributes, FeedForwardDims, feed_forward as ffn};

use super::choice::{Choice, gate_mode};
use super::layer::{Layer, Sizes};
use super::{Plan, PlanError};
use crate::{Buffer, Device, Element, Options, Parameters};

/// Activations of the kernels, by their numbers in these and in the C interface.
pub const ACTIVATIONS: [Activation; 3] = [Activation::Relu, Activation::Gelu, Activation::Silu];

fn activation(activation: Activation) -> Result<i32, PlanError> {
    let place = ACTIVATIONS.iter().position(|known| *known == activation);
    let unserved = PlanError::Unserved { name: "activation", value: activation.as_str() };
    place.and_then(|place| i32::try_from(place).ok()).ok_or(unserved)
}

/// Plans `MoEFeedForward`.
///
/// # Errors
///
/// [`PlanError`] where a size exceeds what the kernels or the device support, or the activation is none of
/// [`ACTIVATIONS`].
pub fn feed_forward(
    dims: &FeedForwardDims,
    attributes: &FeedForwardAttributes,
    element: Element,
    device: &Device,
    options: Options,
) -> Result<Plan, PlanError> {
    let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = *dims;
    let sizes = Sizes {
        batch,
        tokens,
        width,
        experts,
        top_k,
        kv_heads: 1,
        head: hidden,
        gated: attributes.gated,
        ..Sizes::default()
    };
    let parameters = Parameters {
        hidden_states: Buffer::Input(ffn::HIDDEN_STATES),
        router_weight: Buffer::Input(ffn::ROUTER_WEIGHT),
        input_weight: Buffer::Input(ffn::INPUT_WEIGHT),
        output_weight: Buffer::Input(ffn::OUTPUT_WEIGHT),
        output_bias: Buffer::Input(ffn::OUTPUT_BIAS),
        output: Buffer::Output(ffn::OUTPUT),
        topk_indices: Buffer::Output(ffn::TOPK_INDICES),
        topk_weights: Buffer::Output(ffn::TOPK_WEIGHTS),
        gate_mode: gate_mode(attributes.gate_mode),
        activation: activation(attributes.activation)?,
        ..Parameters::default()
    };
    let mut layer = Layer::new(sizes, Choice::new(element, device, options)?, parameters)?;
    layer.place_rows();
    layer.place_tickets(0)?;
    layer.push_first(0, |_, _, _| {})?;
    if layer.is_grouped() {
        layer.push_lists()?;
    }
    layer.push_experts()?;
    layer.push_output()?;
    Ok(layer.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_keep_their_numbers() {
        let known = [Activation::Relu, Activation::Gelu, Activation::Silu].map(activation);
        assert_eq!(known, [Ok(0), Ok(1), Ok(2)]);
        let error = activation(Activation::GeluTanh).unwrap_err().to_string();
        assert_eq!(error, "the CUDA kernels do not serve activation = gelu_tanh");
    }
}
