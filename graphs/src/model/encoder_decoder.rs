//! fairseq encoder–decoder, with MoA or with the attention of the standard Transformer.

use super::{Attention, AttentionLayer, Embedding, FeedForward, LayerNorm};
use crate::Weight;

/// Encoder and decoder with cross-attention.
#[derive(Debug, Clone)]
pub struct EncoderDecoder<A = Attention> {
    /// Source side.
    pub encoder: Encoder<A>,
    /// Target side.
    pub decoder: Decoder<A>,
}

/// A stack of encoder layers over an embedding.
#[derive(Debug, Clone)]
pub struct Encoder<A = Attention> {
    /// Tokens to vectors.
    pub embedding: Embedding,
    /// Layers in order.
    pub layers: Vec<EncoderLayer<A>>,
    /// Normalisation after the stack, in pre-norm models.
    pub norm: Option<LayerNorm>,
}

/// Self-attention and feed-forward, each with residual and normalisation.
#[derive(Debug, Clone)]
pub struct EncoderLayer<A = Attention> {
    /// Prefix of the layer's tensors, such as `encoder.layers.0`.
    pub prefix: String,
    /// Self-attention.
    pub self_attention: A,
    /// Its normalisation.
    pub self_attention_norm: LayerNorm,
    /// Feed-forward block.
    pub feed_forward: FeedForward,
    /// Its normalisation.
    pub final_norm: LayerNorm,
    /// `x + f(norm(x))` if true, `norm(x + f(x))` if false.
    pub normalize_before: bool,
}

/// A stack of decoder layers over an embedding, and the output matrix.
#[derive(Debug, Clone)]
pub struct Decoder<A = Attention> {
    /// Tokens to vectors.
    pub embedding: Embedding,
    /// Layers in order.
    pub layers: Vec<DecoderLayer<A>>,
    /// Normalisation after the stack, in pre-norm models.
    pub norm: Option<LayerNorm>,
    /// Output matrix, `[V, C]`: `logits = x · outputᵀ`.
    pub output: Weight,
}

/// Self-attention, cross-attention and feed-forward, each with residual and normalisation.
#[derive(Debug, Clone)]
pub struct DecoderLayer<A = Attention> {
    /// Prefix of the layer's tensors, such as `decoder.layers.0`.
    pub prefix: String,
    /// Causal self-attention.
    pub self_attention: A,
    /// Its normalisation.
    pub self_attention_norm: LayerNorm,
    /// Attention over the encoder's output.
    pub cross_attention: A,
    /// Its normalisation.
    pub cross_attention_norm: LayerNorm,
    /// Feed-forward block.
    pub feed_forward: FeedForward,
    /// Its normalisation.
    pub final_norm: LayerNorm,
    /// `x + f(norm(x))` if true, `norm(x + f(x))` if false.
    pub normalize_before: bool,
}

impl<A: AttentionLayer> EncoderDecoder<A> {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        self.encoder.collect(weights);
        let decoder = &self.decoder;
        decoder.embedding.collect(weights);
        for layer in &decoder.layers {
            layer.self_attention.collect(weights);
            layer.self_attention_norm.collect(weights);
            layer.cross_attention.collect(weights);
            layer.cross_attention_norm.collect(weights);
            layer.feed_forward.collect(weights);
            layer.final_norm.collect(weights);
        }
        if let Some(norm) = &decoder.norm {
            norm.collect(weights);
        }
        weights.push(&decoder.output);
    }
}

impl<A: AttentionLayer> Encoder<A> {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        self.embedding.collect(weights);
        for layer in &self.layers {
            layer.self_attention.collect(weights);
            layer.self_attention_norm.collect(weights);
            layer.feed_forward.collect(weights);
            layer.final_norm.collect(weights);
        }
        if let Some(norm) = &self.norm {
            norm.collect(weights);
        }
    }
}
