//! `MoACrossAttention`.

use moa_schema::{AttentionMode, CrossAttentionAttributes, CrossAttentionDims};

use crate::attention_layer::{AttentionLayer, FirstStages};
use crate::cached::{CacheRows, Cached, Given};
use crate::check::{at_least_one, length, optional_length, weight};
use crate::geometry::Geometry;
use crate::hidden_states::HiddenStates;
use crate::kernel_scratch::{BorderScratch, Scratch};
use crate::pool::{Awaited, Counted};
use crate::prepared::{FewestOnTiles, Prepared, Weight};
use crate::routing::RouterInputs;
use crate::scalar::Scalar;
use crate::weight_data::WeightData;
use crate::{KernelError, ThreadPool};

/// Inputs of [`cross_attention`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct CrossAttentionInputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [T],
    /// `[B, G, S, D]`.
    pub key: &'a [T],
    /// `[B, G, S, D]`.
    pub value: &'a [T],
    /// `[B, S]`, 0 where the key is masked.
    pub key_mask: &'a [i32],
    /// `[B, T]`, 0 where the query is padding.
    pub query_mask: &'a [i32],
    /// `[C, E]`.
    pub router_weight: &'a [f32],
    /// `[E, C, G * D]`.
    pub query_weight: WeightData<'a>,
    /// `[E, G * D, C]`.
    pub output_weight: WeightData<'a>,
    /// `[C]`.
    pub output_bias: Option<&'a [T]>,
}

/// Outputs of [`cross_attention`], row-major; `None` where nobody asks for the value.
#[derive(Debug)]
pub struct CrossAttentionOutputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub output: &'a mut [T],
    /// `[B, T, k]`, falling score, ties by lower expert; `0 .. k` for a skipped query.
    pub topk_indices: Option<&'a mut [i64]>,
    /// `[B, T, k]`, in the order of `topk_indices`; 0 for a skipped query.
    pub topk_weights: Option<&'a mut [f32]>,
}

/// Cross-attention layer over keys and values that were projected once per source.
///
/// # Errors
///
/// [`KernelError::Length`], [`KernelError::Empty`] or [`KernelError::TopK`] where a slice or `top_k` does not fit
/// `dims`; [`KernelError::Experts`] where `dims` has too many;
/// [`KernelError::RouterLogits`] where a logit of a routed token is NaN or infinite.
pub fn cross_attention<T: Scalar>(
    dims: &CrossAttentionDims,
    attributes: &CrossAttentionAttributes,
    inputs: &CrossAttentionInputs<'_, T>,
    outputs: &mut CrossAttentionOutputs<'_, T>,
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    Prepared::default().cross_attention(dims, attributes, inputs, outputs, pool)
}

impl Prepared {
    /// As [`cross_attention`], with what is packed already.
    ///
    /// # Errors
    ///
    /// As [`cross_attention`].
    pub fn cross_attention<T: Scalar>(
        &self,
        dims: &CrossAttentionDims,
        attributes: &CrossAttentionAttributes,
        inputs: &CrossAttentionInputs<'_, T>,
        outputs: &mut CrossAttentionOutputs<'_, T>,
        pool: &dyn ThreadPool,
    ) -> Result<(), KernelError> {
        check(dims, inputs, outputs)?;
        let pool = &Counted::new(pool, &self.threads);
        self.with_scratch(|scratch| self.compute_cross(dims, attributes, inputs, outputs, pool, scratch))
    }

    fn compute_cross<T: Scalar>(
        &self,
        dims: &CrossAttentionDims,
        attributes: &CrossAttentionAttributes,
        inputs: &CrossAttentionInputs<'_, T>,
        outputs: &mut CrossAttentionOutputs<'_, T>,
        pool: &Counted<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = *dims;
        let Scratch { routing, weights, layer, output, border, .. } = scratch;
        let BorderScratch { hidden_states: hidden, bias, output: result, .. } = border;
        let given = [(Weight::Query, inputs.query_weight), (Weight::Output, inputs.output_weight)];
        let isa = self.isa_of(FewestOnTiles::ATTENTION, batch * tokens, [top_k, experts], given);
        let hidden_states = HiddenStates::new(isa, inputs.hidden_states, width, hidden);
        let weights = self.weights(
            weights,
            [
                (Weight::Router, Geometry::router(width, experts), inputs.router_weight.into()),
                (Weight::Query, Geometry::queries(experts, width, kv_heads, head), inputs.query_weight),
                (Weight::Output, Geometry::outputs(experts, kv_heads * head, width), inputs.output_weight),
            ],
            pool,
        );
        let router = RouterInputs {
            read: hidden_states,
            router_weight: weights.get(Weight::Router),
            tokens_per_row: tokens,
            experts,
            top_k,
            gate_mode: attributes.gate_mode,
        };
        let routed = inputs.query_mask.iter().map(|&mask| mask != 0 || !attributes.skip_padded_queries);
        let (router, by_expert) = routing.router(isa, router, routed)?;
        let router = Awaited::new(router);
        let layer_inputs = AttentionLayer {
            isa,
            widest_isa: self.isa,
            pool,
            hidden_states,
            query_weight: weights.get(Weight::Query),
            output_weight: weights.get(Weight::Output),
            output_bias: inputs.output_bias.map(|values| bias.widened(values)),
            key_mask: inputs.key_mask,
            rotary: None,
            mode: AttentionMode::Softmax,
            is_narrow: T::direct(&[]).is_none(),
            causal_past: None,
            scale: attributes.scale,
            batch,
            tokens,
            top_k,
            keys,
            rows: keys,
            kv_heads,
            head,
        };
        let given = Given(Cached::of(CacheRows { key: inputs.key, value: inputs.value, past: None }));
        let first = FirstStages { router: &router, by_expert, keys_and_values: &given };
        result.rounded_into(outputs.output, |out| layer_inputs.run(first, layer, output, out))?;
        router.stage().export(outputs.topk_indices.as_deref_mut(), outputs.topk_weights.as_deref_mut());
        Ok(())
    }
}

fn check<T>(
    dims: &CrossAttentionDims,
    inputs: &CrossAttentionInputs<'_, T>,
    outputs: &CrossAttentionOutputs<'_, T>,
) -> Result<(), KernelError> {
    let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = *dims;
    at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("G", kv_heads), ("D", head)])?;
    length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
    length("key", inputs.key.len(), &[batch, kv_heads, keys, head])?;
    length("value", inputs.value.len(), &[batch, kv_heads, keys, head])?;
    length("key_mask", inputs.key_mask.len(), &[batch, keys])?;
    length("query_mask", inputs.query_mask.len(), &[batch, tokens])?;
    length("router_weight", inputs.router_weight.len(), &[width, experts])?;
    let columns = kv_heads.saturating_mul(head);
    weight(["query_weight", "query_scale"], inputs.query_weight, [experts, width, columns])?;
    weight(["output_weight", "output_scale"], inputs.output_weight, [experts, columns, width])?;
    optional_length("output_bias", inputs.output_bias.map(<[_]>::len), &[width])?;
    length("output", outputs.output.len(), &[batch, tokens, width])?;
    optional_length("topk_indices", outputs.topk_indices.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    optional_length("topk_weights", outputs.topk_weights.as_ref().map(|o| o.len()), &[batch, tokens, top_k])
}
