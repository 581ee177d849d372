//! The encoder–decoder, as two parts.

use moa_graphs::{WeightError, model};
use moa_schema::interface::{ATTENTION_MASK, Cache, ENCODER_ATTENTION_MASK, INPUT_IDS, LAST_HIDDEN_STATE, LOGITS};

use super::{
    ReferenceError,
    attention::{Attention, KeyValues},
    blocks::{Embedding, FeedForward, LayerNorm, residual},
    inputs::{Dim, Inputs, TokenIds},
    matrix::Matrices,
    router::Tape,
    sequence::{Mask, Sequence},
    stored::Stored,
};
use crate::tensor::NamedTensors;

/// A stack of encoder layers over an embedding.
#[derive(Debug)]
pub(super) struct Encoder {
    embedding: Embedding,
    layers: Vec<EncoderLayer>,
    norm: Option<LayerNorm>,
}

#[derive(Debug)]
struct EncoderLayer {
    self_attention: Attention,
    self_attention_norm: LayerNorm,
    feed_forward: FeedForward,
    final_norm: LayerNorm,
    normalize_before: bool,
}

impl Encoder {
    pub(super) fn new(model: &model::Encoder, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            embedding: Embedding::new(&model.embedding, stored)?,
            layers: model.layers.iter().map(|layer| EncoderLayer::new(layer, stored)).collect::<Result<_, _>>()?,
            norm: LayerNorm::optional(model.norm.as_ref())?,
        })
    }

    /// `ids`, `[B, S]`, with their `mask`, `[B, S]`, to `[B, S, C]`.
    pub(super) fn run(&self, ids: TokenIds<'_>, mask: &Mask, tape: &mut Tape<'_>) -> Result<Sequence, ReferenceError> {
        let mut x = self.embedding.run(ids, mask)?;
        for layer in &self.layers {
            x = layer.run(x, mask, tape)?;
        }
        match &self.norm {
            Some(norm) => Ok(norm.run(&x)),
            None => Ok(x),
        }
    }
}

impl EncoderLayer {
    fn new(model: &model::EncoderLayer, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            self_attention: Attention::new(&model.self_attention, stored)?,
            self_attention_norm: LayerNorm::new(&model.self_attention_norm)?,
            feed_forward: FeedForward::new(&model.feed_forward, stored)?,
            final_norm: LayerNorm::new(&model.final_norm)?,
            normalize_before: model.normalize_before,
        })
    }

    fn run(&self, x: Sequence, mask: &Mask, tape: &mut Tape<'_>) -> Result<Sequence, ReferenceError> {
        let before = self.normalize_before;
        let x = residual(x, &self.self_attention_norm, before, |x| {
            let source = self.self_attention.keys_values(x);
            self.self_attention.run(x, mask, &source, mask, tape)
        })?;
        residual(x, &self.final_norm, before, |x| self.feed_forward.run(x, tape))
    }
}

/// Weights of a [`model::EncoderDecoder`].
#[derive(Debug)]
pub(super) struct EncoderDecoder {
    encoder: Encoder,
    decoder: Decoder,
}

#[derive(Debug)]
struct Decoder {
    embedding: Embedding,
    layers: Vec<DecoderLayer>,
    norm: Option<LayerNorm>,
    /// `[C, V]`.
    output: Matrices,
}

#[derive(Debug)]
struct DecoderLayer {
    self_attention: Attention,
    self_attention_norm: LayerNorm,
    cross_attention: Attention,
    cross_attention_norm: LayerNorm,
    feed_forward: FeedForward,
    final_norm: LayerNorm,
    normalize_before: bool,
}

/// What is real among the tokens that a decoder step deals with.
struct DecoderMasks {
    /// New tokens, `[B, T]`.
    new: Mask,
    /// Past and new tokens, `[B, P + T]`.
    all: Mask,
    /// Tokens of the source, `[B, S]`.
    source: Mask,
}

impl EncoderDecoder {
    pub(super) fn new(model: &model::EncoderDecoder, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self { encoder: Encoder::new(&model.encoder, stored)?, decoder: Decoder::new(&model.decoder, stored)? })
    }

    /// `last_hidden_state`, `[B, S, C]`, and the keys and values of every decoder layer's cross-attention.
    pub(super) fn encode(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        let ids = inputs.token_ids(INPUT_IDS)?;
        let mask = inputs.mask(ATTENTION_MASK, ids.batch, Dim::Is(ids.tokens))?;
        let x = self.encoder.run(ids, &mask, tape)?;
        let mut outputs = NamedTensors::new();
        for (index, layer) in self.decoder.layers.iter().enumerate() {
            let present = layer.cross_attention.keys_values(&x);
            insert_key_values(&mut outputs, &Cache::of_encoder(index), present)?;
        }
        outputs.insert(LAST_HIDDEN_STATE.into(), x.into_tensor()?);
        Ok(outputs)
    }

    /// `logits`, `[B, T, V]`, and the keys and values of every decoder layer's self-attention, past included.
    pub(super) fn decode(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        self.decoder.run(inputs, tape)
    }
}

impl Decoder {
    fn new(model: &model::Decoder, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            embedding: Embedding::new(&model.embedding, stored)?,
            layers: model.layers.iter().map(|layer| DecoderLayer::new(layer, stored)).collect::<Result<_, _>>()?,
            norm: LayerNorm::optional(model.norm.as_ref())?,
            output: Matrices::of_head(stored, &model.output)?,
        })
    }

    fn run(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        let ids = inputs.token_ids(INPUT_IDS)?;
        let all = inputs.mask(ATTENTION_MASK, ids.batch, Dim::AtLeast(ids.tokens))?;
        let source = inputs.mask(ENCODER_ATTENTION_MASK, ids.batch, Dim::Any("source"))?;
        let mut x = self.embedding.run(ids, &all)?;
        let masks = DecoderMasks { new: all.last(ids.tokens), all, source };
        let mut outputs = NamedTensors::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let past_tokens = masks.all.tokens - ids.tokens;
            let shape = layer.self_attention.cache_shape(ids.batch, past_tokens);
            let past = key_values(inputs, &Cache::of_decoder(index), shape)?;
            let shape = layer.cross_attention.cache_shape(ids.batch, masks.source.tokens);
            let source = key_values(inputs, &Cache::of_encoder(index), shape)?;
            let present;
            (x, present) = layer.run(x, &masks, &past, &source, tape)?;
            insert_key_values(&mut outputs, &Cache::of_decoder(index), present)?;
        }
        if let Some(norm) = &self.norm {
            x = norm.run(&x);
        }
        let logits = self.output.map_head(&x);
        outputs.insert(LOGITS.into(), logits.into_tensor()?);
        Ok(outputs)
    }
}

impl DecoderLayer {
    fn new(model: &model::DecoderLayer, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            self_attention: Attention::new(&model.self_attention, stored)?,
            self_attention_norm: LayerNorm::new(&model.self_attention_norm)?,
            cross_attention: Attention::to_memory(&model.cross_attention, stored)?,
            cross_attention_norm: LayerNorm::new(&model.cross_attention_norm)?,
            feed_forward: FeedForward::new(&model.feed_forward, stored)?,
            final_norm: LayerNorm::new(&model.final_norm)?,
            normalize_before: model.normalize_before,
        })
    }

    /// `x`, `[B, T, C]`, to the same shape; with it the keys and values of past and new tokens.
    fn run(
        &self,
        x: Sequence,
        masks: &DecoderMasks,
        past: &KeyValues,
        source: &KeyValues,
        tape: &mut Tape<'_>,
    ) -> Result<(Sequence, KeyValues), ReferenceError> {
        let before = self.normalize_before;
        let mut present = past.clone();
        let x = residual(x, &self.self_attention_norm, before, |x| {
            present = past.followed_by(&self.self_attention.keys_values(x));
            self.self_attention.run(x, &masks.new, &present, &masks.all, tape)
        })?;
        let x = residual(x, &self.cross_attention_norm, before, |x| {
            self.cross_attention.run(x, &masks.new, source, &masks.source, tape)
        })?;
        let x = residual(x, &self.final_norm, before, |x| self.feed_forward.run(x, tape))?;
        Ok((x, present))
    }
}

pub(super) fn key_values(inputs: Inputs<'_>, cache: &Cache, shape: [usize; 4]) -> Result<KeyValues, ReferenceError> {
    let [key, value] = cache.past();
    Ok(KeyValues { key: inputs.heads(&key, shape)?, value: inputs.heads(&value, shape)? })
}

pub(super) fn insert_key_values(
    outputs: &mut NamedTensors,
    cache: &Cache,
    present: KeyValues,
) -> Result<(), ReferenceError> {
    let [key, value] = cache.present();
    outputs.insert(key, present.key.into_tensor()?);
    outputs.insert(value, present.value.into_tensor()?);
    Ok(())
}
