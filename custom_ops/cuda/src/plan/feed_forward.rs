//! `MoEFeedForward`.

use moa_schema::{Activation, FeedForwardAttributes, FeedForwardDims, feed_forward as ffn};

use super::choice::{Choice, gate_mode};
use super::layer::{Layer, RouterInput, Sizes};
use super::{Plan, PlanError};
use crate::{Buffer, Device, Element, Options, Parameters};

/// Activations of the kernels, by their numbers in these and in the C interface.
pub const ACTIVATIONS: [Activation; 4] = [Activation::Relu, Activation::Gelu, Activation::Silu, Activation::GeluTanh];

const fn number(activation: Activation) -> i32 {
    match activation {
        Activation::Relu => 0,
        Activation::Gelu => 1,
        Activation::Silu => 2,
        Activation::GeluTanh => 3,
    }
}

/// Plans `MoEFeedForward`; `router_width` is the number of columns `R` of `router_input`, where the node has it.
///
/// # Errors
///
/// [`PlanError`] where a size exceeds what the kernels or the device support.
pub fn feed_forward(
    dims: &FeedForwardDims,
    attributes: &FeedForwardAttributes,
    router_width: Option<usize>,
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
        router_input: RouterInput::new(ffn::ROUTER_INPUT, router_width),
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
        activation: number(attributes.activation),
        ..Parameters::default()
    };
    let mut layer = Layer::new(sizes, Choice::new(element, device, options)?, parameters)?;
    layer.place_rows();
    layer.place_tickets(0)?;
    layer.push_input_router()?;
    layer.push_first(0, true, |_, _, _| {})?;
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
    fn activations_have_the_numbers_of_their_places() {
        assert_eq!(ACTIVATIONS.map(number), [0, 1, 2, 3]);
        assert!(Activation::ALL.iter().all(|activation| ACTIVATIONS.contains(activation)));
    }
}
