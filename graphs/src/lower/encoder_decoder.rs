//! Encoder–decoder: two files.
//!
//! `encoder_model`: `input_ids`, `attention_mask` → `last_hidden_state`, and the keys and values of every
//! decoder layer's cross-attention. `decoder_model`: prefill and single steps in one graph, `P >= 0`.

use moa_schema::interface::{ATTENTION_MASK, Cache, ENCODER_ATTENTION_MASK, INPUT_IDS, LAST_HIDDEN_STATE};

use super::{
    BATCH, LowerAttention, LowerError, Lowering, NamedGraph, Options, PAST, SEQUENCE, SOURCE, block::Tokens,
    cache_shape, operator::SelfAttentionOutput,
};
use crate::{
    graph::{Attribute, DType, Dim, Value},
    model::{Attention, Decoder, DecoderLayer, EncoderDecoder, KeyValueWeights},
    part::Part,
};

pub(super) fn lower<A: LowerAttention>(
    model: &EncoderDecoder<A>,
    options: Options,
) -> Result<Vec<NamedGraph>, LowerError> {
    Ok(vec![lower_encoder(model, options)?, lower_decoder(&model.decoder, options)?])
}

fn lower_encoder<A: LowerAttention>(model: &EncoderDecoder<A>, options: Options) -> Result<NamedGraph, LowerError> {
    let mut l = Lowering::new(options, SOURCE);
    let hidden = l.encoder(&model.encoder)?;
    let shape = [Dim::from(BATCH), Dim::from(SOURCE), Dim::from(model.encoder.embedding.width())];
    let floats = l.b.activations();
    l.b.output(&hidden, LAST_HIDDEN_STATE, floats, &shape);
    let hidden = l.b.named(LAST_HIDDEN_STATE);
    for (index, layer) in model.decoder.layers.iter().enumerate() {
        let attention = &layer.cross_attention;
        l.b.set_prefix(attention.prefix());
        let shape = cache_shape(attention, SOURCE.into());
        let keys_and_values = attention.keys_and_values(&mut l, &hidden);
        for (name, value) in Cache::of_encoder(index).present().iter().zip(&keys_and_values) {
            l.b.output(value, name, floats, &shape);
        }
    }
    Ok(l.finish(Part::Encoder))
}

fn lower_decoder<A: LowerAttention>(decoder: &Decoder<A>, options: Options) -> Result<NamedGraph, LowerError> {
    let mut l = Lowering::new(options, SEQUENCE);
    let [batch, sequence, source, past] = [BATCH, SEQUENCE, SOURCE, PAST].map(Dim::from);
    let total = Dim::Symbolic(format!("{PAST} + {SEQUENCE}"));
    let ids = l.b.input(INPUT_IDS, DType::Int64, &[batch.clone(), sequence.clone()]);
    let [mask, mask_int32] = l.mask_input(ATTENTION_MASK, &[batch.clone(), total.clone()]);
    let [_, source_mask] = l.mask_input(ENCODER_ATTENTION_MASK, &[batch.clone(), source.clone()]);
    let caches: Vec<_> = decoder
        .layers
        .iter()
        .enumerate()
        .map(|(index, layer)| Caches {
            own: l.cache_inputs(&layer.self_attention, &Cache::of_decoder(index), &past),
            cross: l.cache_inputs(&layer.cross_attention, &Cache::of_encoder(index), &source),
        })
        .collect();
    let [total_size, size] = [&mask, &ids].map(|value| l.b.size(value, 1));
    let past_size = l.b.op("Sub", &[&total_size, &size], []);
    let mut x = l.embed(&decoder.embedding, &Tokens { ids: &ids, mask: &mask, past: Some(&past_size) });
    let end = l.b.ints(&[i64::MAX]);
    let query_mask = l.b.slice(&mask_int32, &past_size, &end, 1);
    let masks = Masks { own: &mask_int32, query: &query_mask, source: &source_mask };
    let mut present = Vec::new();
    for (layer, caches) in decoder.layers.iter().zip(caches) {
        let output = l.decoder_layer(layer, &x, &masks, caches)?;
        x = output.output;
        present.push(output.present);
    }
    l.b.set_prefix(&decoder.embedding.prefix);
    if let Some(norm) = &decoder.norm {
        x = l.norm(norm, &x);
    }
    let logits = l.output::<A>(&decoder.output, &x)?;
    let vocabulary = Dim::from(decoder.output.shape()[0]);
    l.logits(&logits, &[batch, sequence, vocabulary]);
    let floats = l.b.activations();
    for (index, (layer, present)) in decoder.layers.iter().zip(&present).enumerate() {
        let shape = cache_shape(&layer.self_attention, total.clone());
        for (name, value) in Cache::of_decoder(index).present().iter().zip(present) {
            l.b.output(value, name, floats, &shape);
        }
    }
    Ok(l.finish(Part::Decoder))
}

/// Keys and values that a decoder layer is given.
struct Caches {
    own: [Value; 2],
    cross: [Value; 2],
}

/// Int32 masks of the decoder.
struct Masks<'a> {
    /// `[B, P + T]`.
    own: &'a Value,
    /// `[B, T]`.
    query: &'a Value,
    /// `[B, source]`.
    source: &'a Value,
}

impl Lowering {
    fn cache_inputs(&mut self, attention: &impl LowerAttention, cache: &Cache, length: &Dim) -> [Value; 2] {
        let (shape, floats) = (cache_shape(attention, length.clone()), self.b.activations());
        cache.past().map(|name| self.b.input(&name, floats, &shape))
    }

    /// Keys and values of `memory` `[B, S, source width]`, `[B, G, S, D]` each.
    #[allow(clippy::cast_possible_wrap)]
    pub(super) fn cross_keys_and_values(&mut self, attention: &Attention, memory: &Value) -> [Value; 2] {
        let (groups, head) = (attention.kv_num_heads, attention.head_size);
        let projected = match &attention.keys_values {
            KeyValueWeights::Separate { key, value } => {
                [key, value].map(|weight| self.matmul_transposed(memory, weight))
            }
            KeyValueWeights::Joint(both) => {
                let projected = self.matmul_transposed(memory, both);
                let columns = (groups * head) as i64;
                let sizes = self.b.ints(&[columns, columns]);
                self.b.op2("Split", &[&projected, &sizes], [("axis", Attribute::Int(-1))])
            }
            KeyValueWeights::HiddenStates => [memory.clone(), memory.clone()],
        };
        projected.map(|projected| {
            if groups == 1 {
                return self.b.unsqueeze(&projected, &[1]);
            }
            let split = self.b.reshape(&projected, &[0, 0, groups as i64, head as i64]);
            self.b.transpose(&split, &[0, 2, 1, 3])
        })
    }

    fn decoder_layer<A: LowerAttention>(
        &mut self,
        layer: &DecoderLayer<A>,
        x: &Value,
        masks: &Masks<'_>,
        caches: Caches,
    ) -> Result<SelfAttentionOutput, LowerError> {
        self.b.set_prefix(&layer.prefix);
        let before = layer.normalize_before;
        let (x, present) = self.residual_with(x, &layer.self_attention_norm, before, |l, x| {
            let attended = layer.self_attention.self_attention(l, x, masks.own, Some(caches.own))?;
            Ok((attended.output, attended.present))
        })?;
        let x = self.residual(&x, &layer.cross_attention_norm, before, |l, x| {
            let [key, value] = &caches.cross;
            layer.cross_attention.cross_attention(l, x, [key, value], [masks.source, masks.query])
        })?;
        let output = self.residual(&x, &layer.final_norm, before, |l, x| l.feed_forward(&layer.feed_forward, x))?;
        Ok(SelfAttentionOutput { output, present })
    }
}
