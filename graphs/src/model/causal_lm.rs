//! Decoder-only language model: JetMoE.

use super::{Attention, AttentionLayer, ExpertFeedForward, RmsNorm};
use crate::Weight;

/// Pre-norm layers of routed attention and routed feed-forward over a token embedding.
#[derive(Debug, Clone)]
pub struct CausalLm {
    /// Token embedding, `[V, C]`.
    pub tokens: Weight,
    /// Id of the padding token.
    pub pad_token_id: usize,
    /// Layers in order.
    pub layers: Vec<CausalLayer>,
    /// Normalisation after the stack.
    pub norm: RmsNorm,
    /// Output matrix, `[V, C]`: `logits = x · outputᵀ`.
    pub output: Weight,
}

/// `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
#[derive(Debug, Clone)]
pub struct CausalLayer {
    /// Prefix of the layer's tensors, such as `model.layers.0`.
    pub prefix: String,
    /// Before attention.
    pub attention_norm: RmsNorm,
    /// Causal self-attention.
    pub attention: Attention,
    /// Before the feed-forward block.
    pub feed_forward_norm: RmsNorm,
    /// Routed feed-forward block.
    pub feed_forward: ExpertFeedForward,
}

impl CausalLm {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.push(&self.tokens);
        for layer in &self.layers {
            weights.push(&layer.attention_norm.weight);
            layer.attention.collect(weights);
            weights.push(&layer.feed_forward_norm.weight);
            layer.feed_forward.collect(weights);
        }
        weights.extend([&self.norm.weight, &self.output]);
    }

    /// Positions of the rotary tables, if there are any.
    pub fn max_positions(&self) -> Option<usize> {
        self.layers.first().and_then(|layer| layer.attention.rotary).map(|rotary| rotary.positions)
    }
}
