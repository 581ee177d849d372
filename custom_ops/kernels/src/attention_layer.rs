//! What both attention operators do once keys and values are known.

use crate::attention::{Attention, AttentionInputs, cut_pairs};
use crate::few_tokens::FewInputs;
use crate::kernel_scratch::LayerScratch;
use crate::key_panels::Cache;
use crate::output_projection::{Order, OutputInputs, OutputScratch};
use crate::packed::Packed;
use crate::query_projection::{QueryInputs, row_stride};
use crate::rope::Rotary;
use crate::routing::Routing;
use crate::simd::Isa;
use crate::single_token::SingleInputs;
use crate::{ThreadPool, attention_tiles, decode, few_tokens, pool, single_token};

/// Inputs of the steps after routing and the cache.
pub(crate) struct AttentionLayer<'a> {
    pub(crate) isa: Isa,
    pub(crate) routing: &'a Routing,
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    pub(crate) query_weight: &'a Packed,
    pub(crate) output_weight: &'a Packed,
    /// `[C]`.
    pub(crate) output_bias: Option<&'a [f32]>,
    /// `[B, G, rows, D]`, of which the first `S` rows are keys.
    pub(crate) key: &'a [f32],
    /// As `key`.
    pub(crate) value: &'a [f32],
    /// `[B, G, P, D]` of keys and values: what `key` and `value` begin with, where it stands elsewhere too.
    pub(crate) past: Option<[&'a [f32]; 2]>,
    /// `[B, S]`, 0 where the key is masked.
    pub(crate) key_mask: &'a [i32],
    pub(crate) rotary: Option<Rotary<'a>>,
    /// `Some(P)`: query `i` sees the keys `0 ..= P + i` only.
    pub(crate) causal_past: Option<usize>,
    pub(crate) scale: f32,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) keys: usize,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl AttentionLayer<'_> {
    /// Fills `output [B * T, C]`.
    pub(crate) fn compute(
        &self,
        pool: &dyn ThreadPool,
        layer: &mut LayerScratch,
        output_scratch: &mut OutputScratch,
        output: &mut [f32],
    ) {
        let LayerScratch { visible, queries, panels, decode, single: single_token, few, attended, bounds, claims } =
            layer;
        let Self { routing, batch, tokens, keys, rows, kv_heads, head, .. } = *self;
        visible.read(self.key_mask, keys);
        let cache =
            Cache { key: self.key, value: self.value, past: self.past, visible, batch, keys, rows, kv_heads, head };
        let (sizes, queries_of) = ([batch, tokens, kv_heads], self.query_inputs());
        let (causal_past, output_weights) = (self.causal_past, self.output_weight);
        if single_token::serves(self.isa, sizes, routing.top_k, output_weights.geometry()) {
            let inputs = SingleInputs { queries: queries_of, cache, causal_past, output_weights };
            pool::run(pool, &[&single_token.stage(inputs)]);
            return single_token.sum(self.isa, routing, self.output_bias, output);
        }
        if few_tokens::serves(self.isa, sizes, keys, routing.top_k, output_weights.geometry()) {
            pool::run(pool, &[&few.stage(FewInputs { queries: queries_of, cache, causal_past, output_weights })]);
            return pool::run(pool, &[&few.sum(self.isa, routing, self.output_bias, output)]);
        }
        let single = decode::serves(tokens, routing.top_k, head);
        let on_tiles = attention_tiles::serves(self.isa, tokens * routing.top_k, keys, head);
        if single {
            pool::run(pool, &[&queries.stage(queries_of)]);
        } else {
            let (pack_keys, pack_values) = panels.stages(cache, on_tiles.then_some(self.isa));
            pool::run(pool, &[&queries.stage(queries_of), &pack_keys, &pack_values]);
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
            routing: self.routing,
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
