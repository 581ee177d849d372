//! Decoder-only language models: JetMoE and MoLM.

use super::{Attention, AttentionLayer, ExpertFeedForward, Norm};
use crate::Weight;

/// Whose class reads the configuration, by which its keys are called and what it says where they are absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// That of JetMoE in transformers.
    JetMoe,
    /// That of MoLM's own code.
    ModuleFormer,
}

/// Pre-norm layers of routed attention and routed feed-forward over a token embedding.
#[derive(Debug, Clone)]
pub struct CausalLm {
    /// Dialect of its configuration.
    pub dialect: Dialect,
    /// Token embedding, `[V, C]`.
    pub tokens: Weight,
    /// Id of the padding token.
    pub pad_token_id: usize,
    /// Layers in order.
    pub layers: Vec<CausalLayer>,
    /// Normalisation after the stack.
    pub norm: Norm,
    /// Output matrix, `[V, C]`: `logits = x · outputᵀ`.
    pub output: Weight,
    /// Tokens of a row that there are positions for, or that the model was trained on; `None` where nothing says it.
    pub context: Option<usize>,
}

/// `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
#[derive(Debug, Clone)]
pub struct CausalLayer {
    /// Prefix of the layer's tensors, such as `model.layers.0`.
    pub prefix: String,
    /// Before attention.
    pub attention_norm: Norm,
    /// Causal self-attention.
    pub attention: Attention,
    /// Before the feed-forward block.
    pub feed_forward_norm: Norm,
    /// Routed feed-forward block.
    pub feed_forward: ExpertFeedForward,
}

impl CausalLm {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.push(&self.tokens);
        for layer in &self.layers {
            layer.attention_norm.collect(weights);
            layer.attention.collect(weights);
            layer.feed_forward_norm.collect(weights);
            layer.feed_forward.collect(weights);
        }
        self.norm.collect(weights);
        weights.push(&self.output);
    }

    /// Positions of the rotary tables, if there are any: without them the graph has no positions as an input.
    pub fn max_positions(&self) -> Option<usize> {
        self.layers.first().and_then(|layer| layer.attention.rotary).map(|rotary| rotary.positions)
    }
}
