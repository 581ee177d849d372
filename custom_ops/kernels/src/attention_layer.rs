//! What both attention operators do once keys and values are known.

use crate::attention::{Attention, AttentionInputs, cut_pairs};
use crate::few_tokens::FewInputs;
use crate::kernel_scratch::LayerScratch;
use crate::key_panels::Cache;
use crate::kv_cache::KeysAndValues;
use crate::output_projection::{Order, OutputInputs, OutputScratch};
use crate::packed::Packed;
use crate::pool::Awaited;
use crate::query_projection::{QueryInputs, row_stride};
use crate::rope::Rotary;
use crate::routing::{Router, Routing};
use crate::simd::Isa;
use crate::single_token::SingleInputs;
use crate::{KernelError, ThreadPool, attention_tiles, decode, few_tokens, pool, single_token};

/// Inputs of the steps after routing and the cache.
pub(crate) struct AttentionLayer<'a> {
    pub(crate) isa: Isa,
    pub(crate) pool: &'a dyn ThreadPool,
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    pub(crate) query_weight: &'a Packed,
    pub(crate) output_weight: &'a Packed,
    /// `[C]`.
    pub(crate) output_bias: Option<&'a [f32]>,
    /// `[B, G, P, D]` of keys and values: what these begin with, where it stands elsewhere too.
    pub(crate) past: Option<[&'a [f32]; 2]>,
    /// `[B, S]`, 0 where the key is masked.
    pub(crate) key_mask: &'a [i32],
    pub(crate) rotary: Option<Rotary<'a>>,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) scale: f32,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) top_k: usize,
    pub(crate) keys: usize,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl AttentionLayer<'_> {
    /// Whether one token is computed alone, by [`Self::compute_one`] and [`Self::sum_one`] in place of
    /// [`Self::compute`].
    pub(crate) fn is_one(&self) -> bool {
        let sizes = [self.batch, self.tokens, self.kv_heads];
        single_token::serves(self.isa, sizes, self.top_k, self.output_weight.geometry())
    }

    /// Routes the only token, fills keys and values and computes the products of its slots.
    ///
    /// # Errors
    ///
    /// As [`Router::finish`].
    pub(crate) fn compute_one(
        &self,
        routes: Router<'_>,
        keys_and_values: &dyn KeysAndValues,
        LayerScratch { visible, single, .. }: &mut LayerScratch,
    ) -> Result<(), KernelError> {
        visible.read(self.key_mask, self.keys);
        let routes = Awaited::new(routes);
        let inputs = SingleInputs {
            queries: self.query_inputs(),
            routes: &routes,
            top_k: self.top_k,
            keys_and_values,
            keys: self.keys,
            visible,
            past: self.past,
            causal_past: self.causal_past,
            output_weights: self.output_weight,
        };
        pool::run_in_order(self.pool, &[&routes, keys_and_values, &single.stage(inputs)]);
        routes.into_inner().finish()
    }

    /// Fills `output [C]` after [`Self::compute_one`].
    pub(crate) fn sum_one(&self, routing: &Routing, layer: &LayerScratch, output: &mut [f32]) {
        layer.single.sum(self.isa, routing, self.output_bias, output);
    }

    /// Fills `output [B * T, C]`; keys and values are `[B, G, rows, D]`, of which the first `S` rows are keys.
    pub(crate) fn compute(
        &self,
        routing: &Routing,
        [key, value]: [&[f32]; 2],
        layer: &mut LayerScratch,
        output_scratch: &mut OutputScratch,
        output: &mut [f32],
    ) {
        let LayerScratch { visible, queries, panels, decode, few, attended, bounds, claims, .. } = layer;
        let Self { pool, past, batch, tokens, keys, rows, kv_heads, head, .. } = *self;
        visible.read(self.key_mask, keys);
        let cache = Cache { key, value, past, visible, batch, keys, rows, kv_heads, head };
        let (sizes, queries_of) = ([batch, tokens, kv_heads], self.query_inputs());
        let (causal_past, output_weights) = (self.causal_past, self.output_weight);
        if few_tokens::serves(self.isa, sizes, keys, routing.top_k, output_weights.geometry()) {
            let inputs = FewInputs { queries: queries_of, routing, cache, causal_past, output_weights };
            pool::run(pool, &[&few.stage(inputs)]);
            return pool::run(pool, &[&few.sum(self.isa, routing, self.output_bias, output)]);
        }
        let single = decode::serves(tokens, routing.top_k, head);
        let on_tiles = attention_tiles::serves(self.isa, tokens * routing.top_k, keys, head);
        if single {
            pool::run(pool, &[&queries.stage(queries_of, routing)]);
        } else {
            let (pack_keys, pack_values) = panels.stages(cache, on_tiles.then_some(self.isa));
            pool::run(pool, &[&queries.stage(queries_of, routing), &pack_keys, &pack_values]);
        }

        let inputs = AttentionInputs {
            isa: self.isa,
            routing,
            queries: queries.queries(),
            visible,
            causal_past,
            batch,
            tokens,
            kv_heads,
            head,
        };
        let out = attended.take(batch * tokens * routing.top_k * inputs.layout().stride);
        if single {
            pool::run(pool, &[&decode.stage(inputs, cache, out)]);
        } else {
            cut_pairs(bounds, &inputs, on_tiles);
            let panels = panels.panels(keys, head);
            pool::run(pool, &[&Attention::new(inputs, panels, out, bounds, claims, on_tiles)]);
        }

        let outputs = OutputInputs {
            isa: self.isa,
            routing,
            expert_rows: attended.filled(),
            stride: row_stride(kv_heads * head),
            order: Order::Pairs,
            weights: output_weights,
            bias: self.output_bias,
            width: self.width,
        };
        pool::run(pool, &[&output_scratch.stage(outputs, output)]);
    }

    fn query_inputs(&self) -> QueryInputs<'_> {
        QueryInputs {
            isa: self.isa,
            hidden_states: self.hidden_states,
            weights: self.query_weight,
            rotary: self.rotary,
            scale: self.scale,
            width: self.width,
            kv_heads: self.kv_heads,
            head: self.head,
        }
    }
}
