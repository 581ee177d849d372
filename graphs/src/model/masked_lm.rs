//! Masked language model.

use moa_schema::Activation;

use super::{Attention, AttentionLayer, Encoder, LayerNorm, Linear};
use crate::Weight;

/// An encoder with a language-model head.
#[derive(Debug, Clone)]
pub struct MaskedLm<A = Attention> {
    /// The stack.
    pub encoder: Encoder<A>,
    /// Vectors to logits.
    pub head: LanguageModelHead,
}

/// `norm(activation(dense(x))) · weightᵀ + bias`.
#[derive(Debug, Clone)]
pub struct LanguageModelHead {
    /// `C → C`.
    pub dense: Linear,
    /// After `dense`.
    pub activation: Activation,
    /// After the activation.
    pub norm: LayerNorm,
    /// `[V, C]`.
    pub weight: Weight,
    /// `[V]`.
    pub bias: Weight,
}

impl<A: AttentionLayer> MaskedLm<A> {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        self.encoder.collect(weights);
        self.head.dense.collect(weights);
        self.head.norm.collect(weights);
        weights.extend([&self.head.weight, &self.head.bias]);
    }
}
