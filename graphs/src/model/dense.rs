//! Attention of the standard Transformer: the block that MoA replaces.

use super::{AttentionLayer, Linear};
use crate::Weight;

/// Multi-head attention with biases.
///
/// Source of the maths: Vaswani et al., "Attention Is All You Need", 2017; tensors as fairseq names them.
#[derive(Debug, Clone)]
pub struct DenseAttention {
    /// Prefix of the layer's tensors, such as `encoder.layers.0.self_attn`.
    pub prefix: String,
    /// `C → C`; queries are scaled by `D^-1/2`.
    pub query: Linear,
    /// `source width → C`.
    pub key: Linear,
    /// `source width → C`.
    pub value: Linear,
    /// `C → C`.
    pub output: Linear,
    /// Heads `H`.
    pub heads: usize,
    /// Head width `D = C / H`.
    pub head_size: usize,
    /// Whether a query sees no later key.
    pub causal: bool,
}

impl AttentionLayer for DenseAttention {
    fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        for linear in [&self.query, &self.key, &self.value, &self.output] {
            linear.collect(weights);
        }
    }

    fn cache_heads(&self) -> [usize; 2] {
        [self.heads, self.head_size]
    }
}
