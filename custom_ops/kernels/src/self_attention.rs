//! `MoASelfAttention`.

use moa_schema::{AttentionMode, SelfAttentionAttributes, SelfAttentionDims};

use crate::attention_layer::{AttentionLayer, FirstStages};
use crate::check::{at_least_one, length, optional_length, router, weight};
use crate::geometry::Geometry;
use crate::hidden_states::HiddenStates;
use crate::kernel_scratch::{BorderScratch, CacheScratch, Scratch};
use crate::kv_cache::{CacheInputs, CacheSizes, Caches, Past, destination};
use crate::pool::{Awaited, Counted};
use crate::prepared::{CallWeights, FewestOnTiles, Prepared, Weight};
use crate::rope::{Rotary, RotaryInputs};
use crate::routing::{ByExpert, Router, RouterInputs, RoutingScratch};
use crate::scalar::Scalar;
use crate::simd::Isa;
use crate::weight_data::WeightData;
use crate::{KernelError, ThreadPool};

/// Bytes of weights that one call reads and the caches do not keep.
const DRIVES_CACHES_OUT: usize = 1 << 25;

/// Inputs of [`self_attention`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct SelfAttentionInputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [T],
    /// `[B, P + T]`, 0 where the token is padding.
    pub attention_mask: &'a [i32],
    /// `[C, E]`; `[R, E]` where there is a `router_input`.
    pub router_weight: &'a [f32],
    /// `[E, C, G * D]`.
    pub query_weight: WeightData<'a>,
    /// `[C, 2 * G * D]`, keys first; without it keys and values are the hidden states, and `G * D` is `C`.
    pub kv_weight: Option<WeightData<'a>>,
    /// `[E, G * D, C]`.
    pub output_weight: WeightData<'a>,
    /// `[C]`.
    pub output_bias: Option<&'a [T]>,
    /// `Some(M)` where the caches are shared buffers of `M` rows a head, `P + T` of them filled after the call.
    pub capacity: Option<usize>,
    /// `[B, G, P, D]`; `[B, G, M, D]` where there is a capacity, and `None` where the past stands in `present_key`.
    pub past_key: Option<&'a [T]>,
    /// As `past_key`.
    pub past_value: Option<&'a [T]>,
    /// `[positions, D / 2]`.
    pub cos_cache: Option<&'a [f32]>,
    /// `[positions, D / 2]`.
    pub sin_cache: Option<&'a [f32]>,
    /// `[B, T]`, where there are `cos_cache` and `sin_cache`.
    pub position_ids: Option<&'a [i64]>,
    /// `[B, T, R]`: what the router reads instead of the hidden states, always in f32.
    pub router_input: Option<&'a [f32]>,
}

/// Outputs of [`self_attention`], row-major; `None` where nobody asks for the value.
#[derive(Debug)]
pub struct SelfAttentionOutputs<'a, T = f32> {
    /// `[B, T, C]`.
    pub output: &'a mut [T],
    /// `[B, G, P + T, D]`: the past, then the new keys after rotation. Where there is a capacity, `[B, G, M, D]`: only
    /// the new rows are written where the past stands here already; else the past is copied and the rest set to 0.
    pub present_key: Option<&'a mut [T]>,
    /// As `present_key`, the new values without rotation.
    pub present_value: Option<&'a mut [T]>,
    /// `[B, T, k]`, falling score, ties by lower expert; `0 .. k` for a skipped query.
    pub topk_indices: Option<&'a mut [i64]>,
    /// `[B, T, k]`, in the order of `topk_indices`; 0 for a skipped query.
    pub topk_weights: Option<&'a mut [f32]>,
}

/// Self-attention layer: route, project queries, keys and values, attend, project back, weight and sum.
///
/// Stick-breaking has an order of keys: it is causal whatever the attributes say.
///
/// # Errors
///
/// * [`KernelError::Length`], [`KernelError::Empty`] or [`KernelError::TopK`] where a slice or `top_k` does not fit
///   `dims`, [`KernelError::Experts`] where `dims` has too many;
/// * [`KernelError::Capacity`] where the caches have no room for the new tokens;
/// * [`KernelError::Missing`] where a shared cache is neither given nor asked for;
/// * [`KernelError::Missing`] or [`KernelError::OddHead`] where the rotary inputs do not belong together;
/// * [`KernelError::Position`] where a position id lies outside the caches, for a padded token too;
/// * [`KernelError::RouterLogits`] where a logit of a routed token is NaN or infinite.
pub fn self_attention<T: Scalar>(
    dims: &SelfAttentionDims,
    attributes: &SelfAttentionAttributes,
    inputs: &SelfAttentionInputs<'_, T>,
    outputs: &mut SelfAttentionOutputs<'_, T>,
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    Prepared::default().self_attention(dims, attributes, inputs, outputs, pool)
}

/// One call, proved to fit.
struct Call<'a, T> {
    dims: &'a SelfAttentionDims,
    attributes: &'a SelfAttentionAttributes,
    inputs: &'a SelfAttentionInputs<'a, T>,
    /// `[B, T, C]`.
    hidden_states: HiddenStates<'a>,
    /// `[B, T, R]`, what the router reads.
    read: HiddenStates<'a>,
    rotary: Option<Rotary<'a>>,
    pool: &'a Counted<'a>,
    isa: Isa,
}

impl<T: Scalar> Call<'_, T> {
    fn cache_sizes(&self) -> CacheSizes {
        let SelfAttentionDims { batch, tokens, past, kv_heads, head, .. } = *self.dims;
        CacheSizes { batch, kv_heads, past, tokens, rows: self.inputs.capacity.unwrap_or(past + tokens), head }
    }

    /// Whether the copy of the past is left to memory: attention reads the past where it was, and the weights drive the
    /// copy out of the caches before the next call.
    fn copies_past_caches(&self, layer: &AttentionLayer<'_>, reads_stored: bool) -> bool {
        let SelfAttentionDims { batch, width, experts, top_k, kv_heads, head, .. } = *self.dims;
        let matrices = usize::from(self.inputs.kv_weight.is_some()) + batch.saturating_mul(top_k).min(experts);
        let weights = [2, width, kv_heads, head].iter().fold(matrices, |all, size| all.saturating_mul(*size));
        let reads_past = T::direct(&[]).is_some() && layer.reads_past();
        layer.query_weight.bytes_of(weights) > DRIVES_CACHES_OUT
            && (reads_past || reads_stored)
            && self.inputs.capacity.is_none()
    }

    fn past<'a>(&self, values: Option<&'a [T]>, kept: bool) -> Past<'a, T> {
        match (self.inputs.capacity, values) {
            (Some(_), None) => Past::InPlace,
            (Some(rows), Some(values)) => Past::Given { values, rows, kept },
            (None, values) => Past::Given { values: values.unwrap_or_default(), rows: self.dims.past, kept },
        }
    }
}

impl Prepared {
    /// As [`self_attention`], with what is packed already.
    ///
    /// # Errors
    ///
    /// As [`self_attention`].
    pub fn self_attention<T: Scalar>(
        &self,
        dims: &SelfAttentionDims,
        attributes: &SelfAttentionAttributes,
        inputs: &SelfAttentionInputs<'_, T>,
        outputs: &mut SelfAttentionOutputs<'_, T>,
        pool: &dyn ThreadPool,
    ) -> Result<(), KernelError> {
        let read_width = check(dims, inputs, outputs)?;
        let SelfAttentionInputs { cos_cache, sin_cache, position_ids, .. } = *inputs;
        let rotary = RotaryInputs { cos_cache, sin_cache, position_ids };
        let rotary = Rotary::new(rotary, dims.batch, dims.tokens, dims.head)?;
        let given = [(Weight::Query, inputs.query_weight), (Weight::Output, inputs.output_weight)];
        let isa = self.isa_of(FewestOnTiles::ATTENTION, dims.batch * dims.tokens, [dims.top_k, dims.experts], given);
        self.with_scratch(|scratch| {
            let BorderScratch { hidden_states, router_input, .. } = &mut scratch.border;
            let (mut hidden, mut read) = (std::mem::take(hidden_states), std::mem::take(router_input));
            let hidden_states = HiddenStates::new(isa, inputs.hidden_states, dims.width, &mut hidden);
            let own =
                inputs.router_input.map(|values| HiddenStates::new(isa.keeping_rows(), values, read_width, &mut read));
            let read_states = own.unwrap_or(hidden_states);
            let pool = &Counted::new(pool, &self.threads);
            let call = Call { dims, attributes, inputs, hidden_states, read: read_states, rotary, pool, isa };
            let result = self.compute_self(&call, outputs, scratch);
            (scratch.border.hidden_states, scratch.border.router_input) = (hidden, read);
            result
        })
    }

    fn compute_self<T: Scalar>(
        &self,
        call: &Call<'_, T>,
        outputs: &mut SelfAttentionOutputs<'_, T>,
        scratch: &mut Scratch,
    ) -> Result<(), KernelError> {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = *call.dims;
        let Scratch { routing, weights, cache, layer, output, border, .. } = scratch;
        let BorderScratch { bias, output: result, .. } = border;
        let (inputs, attributes) = (call.inputs, call.attributes);
        let is_stick = attributes.attention_mode == AttentionMode::StickBreaking;
        let kv = inputs.kv_weight.map(|data| (Weight::KeyValue, Geometry::keys_values(width, kv_heads, head), data));
        let weights = self.weights(
            weights,
            [
                (Weight::Router, Geometry::router(call.read.width(), experts), inputs.router_weight.into()),
                (Weight::Query, Geometry::queries(experts, width, kv_heads, head), inputs.query_weight),
                (Weight::Output, Geometry::outputs(experts, kv_heads * head, width), inputs.output_weight),
            ]
            .into_iter()
            .chain(kv),
            call.pool,
        );
        let layer_inputs = AttentionLayer {
            isa: call.isa,
            widest_isa: self.isa,
            pool: call.pool,
            hidden_states: call.hidden_states,
            query_weight: weights.get(Weight::Query),
            output_weight: weights.get(Weight::Output),
            output_bias: inputs.output_bias.map(|values| bias.widened(values)),
            key_mask: inputs.attention_mask,
            rotary: call.rotary,
            mode: attributes.attention_mode,
            is_narrow: T::direct(&[]).is_none(),
            causal_past: (attributes.causal || is_stick).then_some(past),
            scale: attributes.scale,
            batch,
            tokens,
            top_k,
            keys: past + tokens,
            rows: call.cache_sizes().rows,
            kv_heads,
            head,
        };
        let present = [outputs.present_key.as_deref_mut(), outputs.present_value.as_deref_mut()];
        let (router, by_expert, caches) =
            self.first_stages(call, present, &layer_inputs, &weights, (routing, cache))?;
        let (router, caches) = (Awaited::new(router), Awaited::new(caches));
        let first = FirstStages { router: &router, by_expert, keys_and_values: &caches };
        result.rounded_into(outputs.output, |out| layer_inputs.run(first, layer, output, out))?;
        router.stage().export(outputs.topk_indices.as_deref_mut(), outputs.topk_weights.as_deref_mut());
        Ok(())
    }

    /// Prepares routing of the tokens, and the caches, which are filled beside it.
    fn first_stages<'r, 'a: 'r, T: Scalar>(
        &self,
        call: &'a Call<'_, T>,
        present: [Option<&'a mut [T]>; 2],
        layer: &AttentionLayer<'_>,
        weights: &'a CallWeights<'_>,
        (routing, cache): (&'r mut RoutingScratch, &'a mut CacheScratch),
    ) -> Result<(Router<'r>, &'r mut ByExpert, Caches<'a, T>), KernelError> {
        let SelfAttentionDims { tokens, past, experts, top_k, .. } = *call.dims;
        let inputs = call.inputs;
        let router = RouterInputs {
            read: call.read,
            router_weight: weights.get(Weight::Router),
            tokens_per_row: tokens,
            experts,
            top_k,
            gate_mode: call.attributes.gate_mode,
        };
        let rows = inputs.attention_mask.chunks(past + tokens);
        let routed = rows.flat_map(|row| &row[past..]).map(|&mask| mask != 0 || !call.attributes.skip_padded_queries);
        let (router, by_expert) = routing.router(call.isa, router, routed)?;

        let CacheScratch { key, value, bounds, claims } = cache;
        let sizes = call.cache_sizes();
        let reads_stored = layer.reads_stored() && present.iter().all(Option::is_some);
        let kept = !call.copies_past_caches(layer, reads_stored);
        sizes.cut(bounds);
        let keys = CacheInputs {
            isa: call.isa,
            hidden_states: call.hidden_states,
            kv_weight: inputs.kv_weight.map(|_| weights.get(Weight::KeyValue)),
            past: call.past(inputs.past_key, kept),
            rotary: call.rotary,
            first_block: 0,
            sizes,
        };
        let values =
            CacheInputs { past: call.past(inputs.past_value, kept), rotary: None, first_block: sizes.kv_heads, ..keys };
        let [present_key, present_value] = present;
        let key = destination(present_key, key, sizes, reads_stored);
        let value = destination(present_value, value, sizes, reads_stored);
        Ok((router, by_expert, Caches::new([keys, values], [key, value], bounds, claims)))
    }
}

/// Proves all lengths; returns the width of what the router reads.
fn check<T>(
    dims: &SelfAttentionDims,
    inputs: &SelfAttentionInputs<'_, T>,
    outputs: &SelfAttentionOutputs<'_, T>,
) -> Result<usize, KernelError> {
    let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = *dims;
    at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("G", kv_heads), ("D", head)])?;
    let keys = past.saturating_add(tokens);
    let [past_rows, present_rows] = inputs.capacity.map_or([past, keys], |capacity| [capacity; 2]);
    if present_rows < keys {
        return Err(KernelError::Capacity { capacity: present_rows, needed: keys });
    }
    let cache = [batch, kv_heads, present_rows, head];
    let check_past = |name, past: Option<&[T]>, present_name, present: &Option<&mut [T]>| match past {
        Some(past) => length(name, past.len(), &[batch, kv_heads, past_rows, head]),
        None if inputs.capacity.is_none() => length(name, 0, &[batch, kv_heads, past_rows, head]),
        None if present.is_none() => Err(KernelError::Missing { name: present_name, because: "capacity" }),
        None => Ok(()),
    };
    length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
    length("attention_mask", inputs.attention_mask.len(), &[batch, keys])?;
    let read = router(inputs.router_weight, inputs.router_input, [batch, tokens], [width, experts])?;
    let columns = kv_heads.saturating_mul(head);
    weight(["query_weight", "query_scale"], inputs.query_weight, [experts, width, columns])?;
    match inputs.kv_weight {
        Some(kv_weight) => weight(["kv_weight", "kv_scale"], kv_weight, [1, width, columns.saturating_mul(2)])?,
        None => {
            length("query_weight", experts.saturating_mul(width).saturating_mul(columns), &[experts, width, width])?
        }
    }
    weight(["output_weight", "output_scale"], inputs.output_weight, [experts, columns, width])?;
    optional_length("output_bias", inputs.output_bias.map(<[_]>::len), &[width])?;
    check_past("past_key", inputs.past_key, "present_key", &outputs.present_key)?;
    check_past("past_value", inputs.past_value, "present_value", &outputs.present_value)?;
    length("output", outputs.output.len(), &[batch, tokens, width])?;
    optional_length("present_key", outputs.present_key.as_ref().map(|o| o.len()), &cache)?;
    optional_length("present_value", outputs.present_value.as_ref().map(|o| o.len()), &cache)?;
    optional_length("topk_indices", outputs.topk_indices.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    optional_length("topk_weights", outputs.topk_weights.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    Ok(read)
}
