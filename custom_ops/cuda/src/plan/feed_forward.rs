//! `MoEFeedForward`.

use moa_schema::{FeedForwardAttributes, FeedForwardDims, feed_forward as ffn};

use super::choice::Choice;
use super::layer::{Layer, RouterInput, Sizes};
use super::{Plan, PlanError};
use crate::constants::{activation_number, gate_number};
use crate::{Buffer, Device, Element, Options, Parameters};

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
        gate_mode: gate_number(attributes.gate_mode),
        activation: activation_number(attributes.activation),
        ..Parameters::default()
    };
    let mut layer = Layer::new(sizes, Choice::new(element, device, options)?, parameters)?;
    layer.place_rows();
    layer.place_tickets(0)?;
    layer.push_input_router()?;
    layer.push_first(0, false, |_, _, _| {})?;
    if layer.is_grouped() {
        layer.push_lists()?;
    }
    layer.push_experts()?;
    layer.push_output()?;
    Ok(layer.finish())
}
