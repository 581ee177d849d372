//! Decoder-only language models, in one file: prefill and single steps in one graph, `P >= 0`.
//!
//! `input_ids`, `attention_mask`, `position_ids` where a layer rotates by it, `past_key_values.{i}.key|value` →
//! `logits`, `present.{i}.key|value`. On request `logits` holds the last position only, `[B, 1, V]`.

use moa_schema::interface::{ATTENTION_MASK, Cache, INPUT_IDS, POSITION_IDS};

use super::{
    BATCH, LowerError, Lowering, NamedGraph, Options, PAST, SEQUENCE, cache_shape, operator::SelfAttentionOutput,
};
use crate::{
    graph::{DType, Dim, Value},
    model::{CausalLayer, CausalLm},
    part::Part,
};

pub(super) fn lower(model: &CausalLm, options: Options) -> Result<Vec<NamedGraph>, LowerError> {
    let mut l = Lowering::new(options, SEQUENCE);
    let [batch, sequence, past] = [BATCH, SEQUENCE, PAST].map(Dim::from);
    let total = Dim::Symbolic(format!("{PAST} + {SEQUENCE}"));
    let token_shape = [batch.clone(), sequence.clone()];
    let ids = l.b.input(INPUT_IDS, DType::Int64, &token_shape);
    let [_, mask] = l.mask_input(ATTENTION_MASK, &[batch.clone(), total.clone()]);
    let has_positions = model.max_positions().is_some();
    let positions = has_positions.then(|| l.b.input(POSITION_IDS, DType::Int64, &token_shape));
    let floats = l.b.activations();
    let caches: Vec<_> = model
        .layers
        .iter()
        .enumerate()
        .map(|(index, layer)| {
            let shape = cache_shape(&layer.attention, past.clone());
            Cache::of_layer(index).past().map(|name| l.b.input(&name, floats, &shape))
        })
        .collect();
    let mut x = l.token_rows(&model.tokens, &ids);
    let mut present = Vec::new();
    for (layer, past) in model.layers.iter().zip(caches) {
        let output = l.causal_layer(layer, &x, (&mask, positions.as_ref()), past)?;
        x = output.output;
        present.push(output.present);
    }
    l.b.set_prefix("");
    let mut predicted = sequence;
    if options.last_logits {
        let (last, end) = (l.b.ints(&[-1]), l.b.ints(&[i64::MAX]));
        x = l.b.slice(&x, &last, &end, 1);
        predicted = Dim::from(1);
    }
    let x = l.either_norm(&model.norm, &x);
    let logits = l.lm_head(&model.output, &x)?;
    l.logits(&logits, &[batch, predicted, Dim::from(model.output.shape()[0])]);
    for (index, (layer, present)) in model.layers.iter().zip(&present).enumerate() {
        let shape = cache_shape(&layer.attention, total.clone());
        for (name, value) in Cache::of_layer(index).present().iter().zip(present) {
            l.b.output(value, name, floats, &shape);
        }
    }
    Ok(vec![l.finish(Part::Model)])
}

impl Lowering {
    fn causal_layer(
        &mut self,
        layer: &CausalLayer,
        x: &Value,
        (mask, positions): (&Value, Option<&Value>),
        past: [Value; 2],
    ) -> Result<SelfAttentionOutput, LowerError> {
        self.b.set_prefix(&layer.prefix);
        let normed = self.either_norm(&layer.attention_norm, x);
        let attended = self.self_attention(&layer.attention, &normed, mask, Some(past), positions)?;
        let x = self.b.op("Add", &[x, &attended.output], []);
        let normed = self.either_norm(&layer.feed_forward_norm, &x);
        let added = self.expert_feed_forward(&layer.feed_forward, &normed)?;
        Ok(SelfAttentionOutput { output: self.b.op("Add", &[&x, &added], []), present: attended.present })
    }
}
