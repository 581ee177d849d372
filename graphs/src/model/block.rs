//! Building blocks shared by the families.

use moa_schema::{Activation, GateMode};

use crate::Weight;

/// Base of the wavelengths of sinusoidal positions.
pub const SINUSOID_BASE: f64 = 10_000.0;

/// One MoA attention layer: routed query and output projections over shared keys and values.
///
/// Source of the maths: Zhang et al., "Mixture of Attention Heads", EMNLP 2022, and its released code.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Name of the routed module in the checkpoint, such as `encoder.layers.0.self_attn.q_proj`; may be empty.
    pub module: String,
    /// Prefix of the layer's tensors, such as `encoder.layers.0.self_attn`; may be empty.
    pub prefix: String,
    /// Router, `[C, E]`: `x · router`.
    pub router: Weight,
    /// Query projections, `[E, C, G·D]`: `x · query[e]`.
    pub query: Weight,
    /// Key projection, `[G·D, source width]`: `z · keyᵀ`.
    pub key: Weight,
    /// Value projection, `[G·D, source width]`: `z · valueᵀ`.
    pub value: Weight,
    /// Output projections, `[E, G·D, C]`: `o · output[e]`.
    pub output: Weight,
    /// Experts per token.
    pub top_k: usize,
    /// Experts in all.
    pub num_experts: usize,
    /// Key/value heads `G`.
    pub kv_num_heads: usize,
    /// Head width `D`; queries are scaled by `D^-1/2`.
    pub head_size: usize,
    /// How router logits become weights.
    pub gate_mode: GateMode,
    /// Whether a query sees no later key.
    pub causal: bool,
    /// Whether a padded query is routed nowhere, so that the layer's output for it is exactly 0.
    pub skip_padded_queries: bool,
}

/// `x · weightᵀ + bias`.
#[derive(Debug, Clone)]
pub struct Linear {
    /// `[out, in]`.
    pub weight: Weight,
    /// `[out]`.
    pub bias: Weight,
}

/// Layer normalisation with biased variance over the last axis.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    /// `[C]`.
    pub weight: Weight,
    /// `[C]`.
    pub bias: Weight,
    /// Added to the variance.
    pub epsilon: f32,
}

/// The block after attention.
#[derive(Debug, Clone)]
pub enum FeedForward {
    /// Two dense matrices.
    Dense(DenseFeedForward),
    /// A routed mixture of experts.
    Experts(ExpertFeedForward),
}

/// `output(activation(input(x)))`.
#[derive(Debug, Clone)]
pub struct DenseFeedForward {
    /// `C → F`.
    pub input: Linear,
    /// Between the two.
    pub activation: Activation,
    /// `F → C`.
    pub output: Linear,
}

/// Weighted sum over the chosen experts of `activation(x · input[e]) · output[e]`; every token is routed.
#[derive(Debug, Clone)]
pub struct ExpertFeedForward {
    /// Name of the routed module in the checkpoint.
    pub module: String,
    /// Router, `[C, E]`.
    pub router: Weight,
    /// `[E, C, F]`.
    pub input: Weight,
    /// `[E, F, C]`.
    pub output: Weight,
    /// Experts per token.
    pub top_k: usize,
    /// Experts in all.
    pub num_experts: usize,
    /// How router logits become weights.
    pub gate_mode: GateMode,
    /// Between the two matrices.
    pub activation: Activation,
}

/// Token and position embedding.
///
/// The position of a real token is `pad_token_id` plus its number among the real tokens of its row, from 1;
/// padding has position `pad_token_id`.
#[derive(Debug, Clone)]
pub struct Embedding {
    /// Prefix of the side's tensors, such as `encoder`.
    pub prefix: String,
    /// `[V, C]`.
    pub tokens: Weight,
    /// Factor on the token embedding.
    pub scale: f32,
    /// What is added for the position.
    pub positions: Positions,
    /// Normalisation of the sum.
    pub norm: Option<LayerNorm>,
    /// Id of the padding token.
    pub pad_token_id: usize,
    /// Whether the result is set to 0 at padding.
    pub zero_at_padding: bool,
}

/// Position embedding.
#[derive(Debug, Clone)]
pub enum Positions {
    /// None.
    None,
    /// Row `p` is `[sin(p·f), cos(p·f)]`, halves concatenated, with `f[i] = base^(-i / (C/2 - 1))`, computed
    /// in f32, a zero column last where `C` is odd; row `pad_token_id` is zero.
    Sinusoidal {
        /// Rows of the table.
        rows: usize,
    },
    /// A trained table, `[rows, C]`.
    Learned(Weight),
}

impl Embedding {
    /// Model width `C`.
    pub fn width(&self) -> usize {
        self.tokens.shape()[1]
    }

    /// Longest row of real tokens that has positions, if there is a limit.
    pub fn max_tokens(&self) -> Option<usize> {
        let rows = match &self.positions {
            Positions::None => return None,
            Positions::Sinusoidal { rows } => *rows,
            Positions::Learned(table) => table.shape()[0],
        };
        Some(rows.saturating_sub(self.pad_token_id + 1))
    }
}

impl Attention {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.extend([&self.router, &self.query, &self.key, &self.value, &self.output]);
    }
}

impl Linear {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.extend([&self.weight, &self.bias]);
    }
}

impl LayerNorm {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.extend([&self.weight, &self.bias]);
    }
}

impl FeedForward {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        match self {
            Self::Dense(block) => {
                block.input.collect(weights);
                block.output.collect(weights);
            }
            Self::Experts(block) => weights.extend([&block.router, &block.input, &block.output]),
        }
    }
}

impl Embedding {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        weights.push(&self.tokens);
        if let Positions::Learned(table) = &self.positions {
            weights.push(table);
        }
        if let Some(norm) = &self.norm {
            norm.collect(weights);
        }
    }
}
