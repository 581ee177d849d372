//! From the tensors of one call to a kernel.

use moa_kernels::{
    CrossAttentionInputs, CrossAttentionOutputs, FeedForwardInputs, FeedForwardOutputs, KernelError, LmHeadInputs,
    Prepared, SelfAttentionInputs, SelfAttentionOutputs, ThreadPool,
};
use moa_schema::{
    Attributes, CrossAttentionAttributes, CrossAttentionDims, FeedForwardAttributes, FeedForwardDims, LmHeadDims,
    SelfAttentionAttributes, SelfAttentionDims, ShapeError, cross_attention as cross, feed_forward as ffn,
    lm_head as head, self_attention as own,
};

use crate::failure::{Failure, catch};
use crate::ffi::{Activation, Call, Inputs};

impl From<ShapeError> for Failure {
    fn from(error: ShapeError) -> Self {
        Self::argument(error.to_string())
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        Self::argument(error.to_string())
    }
}

/// Computes one node once.
pub(crate) fn run<T: Activation>(attributes: &Attributes, prepared: &Prepared, call: Call<'_>) -> Result<(), Failure> {
    match attributes {
        Attributes::SelfAttention(attributes) => self_attention::<T>(attributes, prepared, call),
        Attributes::CrossAttention(attributes) => cross_attention::<T>(attributes, prepared, call),
        Attributes::FeedForward(attributes) => feed_forward::<T>(attributes, prepared, call),
        Attributes::LmHead => lm_head::<T>(prepared, call),
    }
}

fn self_attention<T: Activation>(
    attributes: &SelfAttentionAttributes,
    prepared: &Prepared,
    call: Call<'_>,
) -> Result<(), Failure> {
    let (dims, capacity) = SelfAttentionDims::with_capacity(&call.shapes(), attributes)?;
    let in_place = if capacity.is_some() { &own::SHARED_CACHES[..] } else { &[] };
    let (inputs, mut outputs, pool) = call.allocate(&dims.output_shapes(capacity), in_place)?;
    let given = SelfAttentionInputs {
        hidden_states: inputs.activations::<T>(own::HIDDEN_STATES)?,
        attention_mask: inputs.ints(own::ATTENTION_MASK)?,
        router_weight: inputs.floats(own::ROUTER_WEIGHT)?,
        query_weight: inputs.weights(own::QUERY_WEIGHT, own::QUERY_SCALE)?,
        kv_weight: inputs.optional(own::KV_WEIGHT, |inputs, weight| inputs.weights(weight, own::KV_SCALE))?,
        output_weight: inputs.weights(own::OUTPUT_WEIGHT, own::OUTPUT_SCALE)?,
        output_bias: inputs.optional(own::OUTPUT_BIAS, Inputs::activations::<T>)?,
        capacity,
        past_key: inputs.optional(own::PAST_KEY, Inputs::activations::<T>)?,
        past_value: inputs.optional(own::PAST_VALUE, Inputs::activations::<T>)?,
        cos_cache: inputs.optional(own::COS_CACHE, Inputs::floats)?,
        sin_cache: inputs.optional(own::SIN_CACHE, Inputs::floats)?,
        position_ids: inputs.optional(own::POSITION_IDS, Inputs::longs)?,
        router_input: inputs.optional(own::ROUTER_INPUT, Inputs::floats)?,
    };
    if let (Some(rows), true) = (capacity, given.past_key.is_some() || given.past_value.is_some()) {
        return Err(dims.separate_caches(rows).into());
    }
    let mut wanted = SelfAttentionOutputs {
        output: outputs.required::<T>(own::OUTPUT)?,
        present_key: outputs.activations::<T>(own::PRESENT_KEY)?,
        present_value: outputs.activations::<T>(own::PRESENT_VALUE)?,
        topk_indices: outputs.longs(own::TOPK_INDICES)?,
        topk_weights: outputs.floats(own::TOPK_WEIGHTS)?,
    };
    pool.finish(catch(|| {
        Ok(prepared.self_attention(&dims, attributes, &given, &mut wanted, &pool as &dyn ThreadPool)?)
    }))
}

fn cross_attention<T: Activation>(
    attributes: &CrossAttentionAttributes,
    prepared: &Prepared,
    call: Call<'_>,
) -> Result<(), Failure> {
    let dims = CrossAttentionDims::new(&call.shapes(), attributes)?;
    let (inputs, mut outputs, pool) = call.allocate(&dims.output_shapes(), &[])?;
    let given = CrossAttentionInputs {
        hidden_states: inputs.activations::<T>(cross::HIDDEN_STATES)?,
        key: inputs.activations::<T>(cross::KEY)?,
        value: inputs.activations::<T>(cross::VALUE)?,
        key_mask: inputs.ints(cross::KEY_MASK)?,
        query_mask: inputs.ints(cross::QUERY_MASK)?,
        router_weight: inputs.floats(cross::ROUTER_WEIGHT)?,
        query_weight: inputs.weights(cross::QUERY_WEIGHT, cross::QUERY_SCALE)?,
        output_weight: inputs.weights(cross::OUTPUT_WEIGHT, cross::OUTPUT_SCALE)?,
        output_bias: inputs.optional(cross::OUTPUT_BIAS, Inputs::activations::<T>)?,
    };
    let mut wanted = CrossAttentionOutputs {
        output: outputs.required::<T>(cross::OUTPUT)?,
        topk_indices: outputs.longs(cross::TOPK_INDICES)?,
        topk_weights: outputs.floats(cross::TOPK_WEIGHTS)?,
    };
    pool.finish(catch(|| {
        Ok(prepared.cross_attention(&dims, attributes, &given, &mut wanted, &pool as &dyn ThreadPool)?)
    }))
}

fn feed_forward<T: Activation>(
    attributes: &FeedForwardAttributes,
    prepared: &Prepared,
    call: Call<'_>,
) -> Result<(), Failure> {
    let dims = FeedForwardDims::new(&call.shapes(), attributes)?;
    let (inputs, mut outputs, pool) = call.allocate(&dims.output_shapes(), &[])?;
    let given = FeedForwardInputs {
        hidden_states: inputs.activations::<T>(ffn::HIDDEN_STATES)?,
        router_weight: inputs.floats(ffn::ROUTER_WEIGHT)?,
        input_weight: inputs.weights(ffn::INPUT_WEIGHT, ffn::INPUT_SCALE)?,
        output_weight: inputs.weights(ffn::OUTPUT_WEIGHT, ffn::OUTPUT_SCALE)?,
        output_bias: inputs.optional(ffn::OUTPUT_BIAS, Inputs::activations::<T>)?,
        router_input: inputs.optional(ffn::ROUTER_INPUT, Inputs::floats)?,
    };
    let mut wanted = FeedForwardOutputs {
        output: outputs.required::<T>(ffn::OUTPUT)?,
        topk_indices: outputs.longs(ffn::TOPK_INDICES)?,
        topk_weights: outputs.floats(ffn::TOPK_WEIGHTS)?,
    };
    pool.finish(catch(|| {
        Ok(prepared.feed_forward(&dims, attributes, &given, &mut wanted, &pool as &dyn ThreadPool)?)
    }))
}

fn lm_head<T: Activation>(prepared: &Prepared, call: Call<'_>) -> Result<(), Failure> {
    let dims = LmHeadDims::new(&call.shapes())?;
    let (inputs, mut outputs, pool) = call.allocate(&dims.output_shapes(), &[])?;
    let given = LmHeadInputs {
        hidden_states: inputs.activations::<T>(head::HIDDEN_STATES)?,
        output_weight: inputs.weights(head::OUTPUT_WEIGHT, head::OUTPUT_SCALE)?,
    };
    let logits = outputs.required::<T>(head::LOGITS)?;
    pool.finish(catch(|| Ok(prepared.lm_head(&dims, &given, logits, &pool as &dyn ThreadPool)?)))
}
