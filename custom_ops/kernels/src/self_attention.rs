//! `MoASelfAttention`.

use moa_schema::{SelfAttentionAttributes, SelfAttentionDims};

use crate::attention::Attention;
use crate::check::{at_least_one, length, optional_length};
use crate::kv_cache::{self, KeyValueInputs};
use crate::projection::AttentionExperts;
use crate::rope::{Rotary, RotaryInputs};
use crate::routing::{RouterInputs, Routing};
use crate::{KernelError, ThreadPool};

/// Inputs of [`self_attention`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct SelfAttentionInputs<'a> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [f32],
    /// `[B, P + T]`, 0 where the token is padding.
    pub attention_mask: &'a [i32],
    /// `[C, E]`.
    pub router_weight: &'a [f32],
    /// `[E, C, G * D]`.
    pub query_weight: &'a [f32],
    /// `[C, 2 * G * D]`, keys first.
    pub kv_weight: &'a [f32],
    /// `[E, G * D, C]`.
    pub output_weight: &'a [f32],
    /// `[C]`.
    pub output_bias: Option<&'a [f32]>,
    /// `[B, G, P, D]`.
    pub past_key: Option<&'a [f32]>,
    /// `[B, G, P, D]`.
    pub past_value: Option<&'a [f32]>,
    /// `[positions, D / 2]`.
    pub cos_cache: Option<&'a [f32]>,
    /// `[positions, D / 2]`.
    pub sin_cache: Option<&'a [f32]>,
    /// `[B, T]`; not read where there is no cache.
    pub position_ids: Option<&'a [i64]>,
}

/// Outputs of [`self_attention`], row-major; `None` where nobody asks for the value.
#[derive(Debug)]
pub struct SelfAttentionOutputs<'a> {
    /// `[B, T, C]`.
    pub output: &'a mut [f32],
    /// `[B, G, P + T, D]`: the past, then the new keys after rotation.
    pub present_key: Option<&'a mut [f32]>,
    /// `[B, G, P + T, D]`: the past, then the new values.
    pub present_value: Option<&'a mut [f32]>,
    /// `[B, T, k]`, falling score, ties by lower expert; `0 .. k` for a skipped query.
    pub topk_indices: Option<&'a mut [i64]>,
    /// `[B, T, k]`, in the order of `topk_indices`; 0 for a skipped query.
    pub topk_weights: Option<&'a mut [f32]>,
}

/// Self-attention layer: route, project queries, keys and values, attend, project back, weight and sum.
///
/// # Errors
///
/// * [`KernelError::Length`], [`KernelError::Empty`] or [`KernelError::TopK`] where a slice or `top_k` does not fit
///   `dims`;
/// * [`KernelError::Missing`] or [`KernelError::OddHead`] where the rotary inputs do not belong together;
/// * [`KernelError::Position`] where a position id lies outside the caches, for a padded token too;
/// * [`KernelError::RouterLogits`] where a logit of a routed token is NaN or infinite.
pub fn self_attention(
    dims: &SelfAttentionDims,
    attributes: &SelfAttentionAttributes,
    inputs: &SelfAttentionInputs<'_>,
    outputs: &mut SelfAttentionOutputs<'_>,
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    check(dims, inputs, outputs)?;
    let rotary =
        RotaryInputs { cos_cache: inputs.cos_cache, sin_cache: inputs.sin_cache, position_ids: inputs.position_ids };
    let rotary = Rotary::new(rotary, dims.batch, dims.tokens, dims.head)?;
    let router = RouterInputs {
        hidden_states: inputs.hidden_states,
        router_weight: inputs.router_weight,
        tokens_per_row: dims.tokens,
        width: dims.width,
        experts: dims.experts,
        top_k: dims.top_k,
        gate_mode: attributes.gate_mode,
    };
    let routing = Routing::new(pool, &router, routed(dims, attributes, inputs.attention_mask))?;

    let keys = dims.past + dims.tokens;
    let cache_len = dims.batch * dims.kv_heads * keys * dims.head;
    let (mut own_key, mut own_value) = (Vec::new(), Vec::new());
    let key = slice_or_own(&mut outputs.present_key, &mut own_key, cache_len);
    let value = slice_or_own(&mut outputs.present_value, &mut own_value, cache_len);
    kv_cache::append(pool, &key_value_inputs(dims, inputs, rotary), key, value);

    let experts = AttentionExperts {
        query_weight: inputs.query_weight,
        output_weight: inputs.output_weight,
        output_bias: inputs.output_bias,
        tokens: dims.tokens,
        width: dims.width,
        kv_heads: dims.kv_heads,
        head: dims.head,
    };
    let queries = experts.project_queries(pool, &routing, inputs.hidden_states);
    let attended = Attention {
        routing: &routing,
        queries: &queries,
        key,
        value,
        key_mask: inputs.attention_mask,
        rotary,
        causal_past: attributes.causal.then_some(dims.past),
        scale: attributes.scale,
        batch: dims.batch,
        tokens: dims.tokens,
        keys,
        kv_heads: dims.kv_heads,
        head: dims.head,
    }
    .compute(pool);
    experts.project_back(pool, &routing, &attended, outputs.output);
    routing.export(outputs.topk_indices.as_deref_mut(), outputs.topk_weights.as_deref_mut());
    Ok(())
}

/// Which of the `B * T` new tokens are routed.
fn routed(dims: &SelfAttentionDims, attributes: &SelfAttentionAttributes, attention_mask: &[i32]) -> Vec<bool> {
    let rows = attention_mask.chunks(dims.past + dims.tokens);
    rows.flat_map(|row| &row[dims.past..]).map(|&mask| mask != 0 || !attributes.skip_padded_queries).collect()
}

fn key_value_inputs<'a>(
    dims: &SelfAttentionDims,
    inputs: &SelfAttentionInputs<'a>,
    rotary: Option<Rotary<'a>>,
) -> KeyValueInputs<'a> {
    KeyValueInputs {
        hidden_states: inputs.hidden_states,
        kv_weight: inputs.kv_weight,
        past_key: inputs.past_key.unwrap_or_default(),
        past_value: inputs.past_value.unwrap_or_default(),
        rotary,
        tokens: dims.tokens,
        past: dims.past,
        width: dims.width,
        kv_heads: dims.kv_heads,
        head: dims.head,
    }
}

/// The caller's output, or memory of our own where the caller does not want it.
fn slice_or_own<'a>(output: &'a mut Option<&mut [f32]>, own: &'a mut Vec<f32>, len: usize) -> &'a mut [f32] {
    match output {
        Some(output) => output,
        None => {
            own.resize(len, 0.0);
            own
        }
    }
}

fn check(
    dims: &SelfAttentionDims,
    inputs: &SelfAttentionInputs<'_>,
    outputs: &SelfAttentionOutputs<'_>,
) -> Result<(), KernelError> {
    let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = *dims;
    at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("G", kv_heads), ("D", head)])?;
    let cache = [batch, kv_heads, past.saturating_add(tokens), head];
    let past_len = |past: Option<&[f32]>| past.unwrap_or_default().len();
    length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
    length("attention_mask", inputs.attention_mask.len(), &[batch, cache[2]])?;
    length("router_weight", inputs.router_weight.len(), &[width, experts])?;
    length("query_weight", inputs.query_weight.len(), &[experts, width, kv_heads, head])?;
    length("kv_weight", inputs.kv_weight.len(), &[width, 2, kv_heads, head])?;
    length("output_weight", inputs.output_weight.len(), &[experts, kv_heads, head, width])?;
    optional_length("output_bias", inputs.output_bias.map(<[_]>::len), &[width])?;
    length("past_key", past_len(inputs.past_key), &[batch, kv_heads, past, head])?;
    length("past_value", past_len(inputs.past_value), &[batch, kv_heads, past, head])?;
    length("output", outputs.output.len(), &[batch, tokens, width])?;
    optional_length("present_key", outputs.present_key.as_ref().map(|o| o.len()), &cache)?;
    optional_length("present_value", outputs.present_value.as_ref().map(|o| o.len()), &cache)?;
    optional_length("topk_indices", outputs.topk_indices.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    optional_length("topk_weights", outputs.topk_weights.as_ref().map(|o| o.len()), &[batch, tokens, top_k])
}
