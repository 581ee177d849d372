//! Building blocks shared by the families.

use moa_schema::{Activation, AttentionMode, GateMode};

use super::AttentionLayer;
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
    /// Layout of the matrices of experts.
    pub layout: ExpertLayout,
    /// Router of the experts.
    pub router: Router,
    /// Query projections, `[E, C, G·D]` or `[E, G·D, C]`.
    pub query: Weight,
    /// Key and value projections.
    pub keys_values: KeyValueWeights,
    /// Output projections, `[E, G·D, C]` or `[E, C, G·D]`.
    pub output: Weight,
    /// Added once to the weighted sum, `[C]`.
    pub output_bias: Option<Weight>,
    /// Biases of the projections; counted, and refused when a graph is written.
    pub expert_biases: Option<ExpertBiases>,
    /// Rotary position embedding of queries and keys.
    pub rotary: Option<Rotary>,
    /// Model width `C`.
    pub width: usize,
    /// Width of the source of keys and values.
    pub source_width: usize,
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
    /// How scores become weights of values.
    pub attention_mode: AttentionMode,
    /// Whether a query sees no later key.
    pub causal: bool,
    /// Whether a padded query is routed nowhere, so that the layer's output for it is exactly 0.
    pub skip_padded_queries: bool,
}

/// Biases of all projections of one attention layer.
#[derive(Debug, Clone)]
pub struct ExpertBiases {
    /// `[E, G·D]`.
    pub query: Weight,
    /// `[G·D]`.
    pub key: Weight,
    /// `[G·D]`.
    pub value: Weight,
    /// `[E, C]`.
    pub output: Weight,
}

/// How matrices of experts, or a router, are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertLayout {
    /// Inputs before outputs: `x · w[e]`.
    InOut,
    /// Outputs before inputs: `x · w[e]ᵀ`.
    OutIn,
}

/// Key and value projections, shared by all experts.
#[derive(Debug, Clone)]
pub enum KeyValueWeights {
    /// Two matrices.
    Separate {
        /// `[G·D, source width]`: `z · keyᵀ`.
        key: Weight,
        /// `[G·D, source width]`: `z · valueᵀ`.
        value: Weight,
    },
    /// One matrix, `[2·G·D, source width]`, keys first.
    Joint(Weight),
    /// None: keys and values are the hidden states, `G·D` is `C`.
    HiddenStates,
}

/// Scores the experts for a token, always in f32.
#[derive(Debug, Clone)]
pub struct Router {
    /// What it reads, `R` wide, where that is not the token; `R` is `C` there.
    pub input: Option<Box<RouterInput>>,
    /// `[R, E]` or `[E, R]`.
    pub weight: Weight,
    /// Which of the two.
    pub layout: ExpertLayout,
}

/// `gelu(x · weightᵀ + bias)`, which a router reads in place of `x`; always in f32.
#[derive(Debug, Clone)]
pub struct RouterInput(pub Linear);

/// Rotary position embedding, rotate-half, over the whole head: frequency `i` is `base^(-2i/D)`, angles in f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rotary {
    /// Base of the wavelengths.
    pub base: f64,
    /// Positions in the table.
    pub positions: usize,
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
    /// Layout of the matrices of experts.
    pub layout: ExpertLayout,
    /// Router of the experts.
    pub router: Router,
    /// `[E, C, F]` or `[E, F, C]`; with `2·F` for `F` where gated.
    pub input: Weight,
    /// `[E, F, C]` or `[E, C, F]`.
    pub output: Weight,
    /// Added once to the weighted sum, `[C]`.
    pub output_bias: Option<Weight>,
    /// Whether the hidden row is `activation(first F) · last F`.
    pub gated: bool,
    /// Model width `C`.
    pub width: usize,
    /// Hidden width `F`.
    pub hidden: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Experts in all.
    pub num_experts: usize,
    /// How router logits become weights.
    pub gate_mode: GateMode,
    /// Between the two matrices.
    pub activation: Activation,
}

/// Division by the root of the mean square, over the last axis.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    /// `[C]`.
    pub weight: Weight,
    /// Added to the mean square.
    pub epsilon: f32,
}

/// Normalisation in a causal language model.
#[derive(Debug, Clone)]
pub enum Norm {
    /// Of mean and variance.
    Layer(LayerNorm),
    /// Of the mean square alone.
    Rms(RmsNorm),
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

impl AttentionLayer for Attention {
    fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        self.router.collect(weights);
        weights.push(&self.query);
        match &self.keys_values {
            KeyValueWeights::Separate { key, value } => weights.extend([key, value]),
            KeyValueWeights::Joint(both) => weights.push(both),
            KeyValueWeights::HiddenStates => {}
        }
        weights.push(&self.output);
        weights.extend(&self.output_bias);
        if let Some(biases) = &self.expert_biases {
            weights.extend([&biases.query, &biases.key, &biases.value, &biases.output]);
        }
    }

    fn cache_heads(&self) -> [usize; 2] {
        [self.kv_num_heads, self.head_size]
    }
}

impl Router {
    /// A router that reads the token.
    pub fn of_tokens(weight: Weight, layout: ExpertLayout) -> Self {
        Self { input: None, weight, layout }
    }

    fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        if let Some(RouterInput(linear)) = self.input.as_deref() {
            linear.collect(weights);
        }
        weights.push(&self.weight);
    }
}

impl Norm {
    /// What is added to the variance, or to the mean square.
    pub fn epsilon(&self) -> f32 {
        match self {
            Self::Layer(norm) => norm.epsilon,
            Self::Rms(norm) => norm.epsilon,
        }
    }

    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        match self {
            Self::Layer(norm) => norm.collect(weights),
            Self::Rms(norm) => weights.push(&norm.weight),
        }
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
            Self::Experts(block) => block.collect(weights),
        }
    }
}

impl ExpertFeedForward {
    pub(super) fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>) {
        self.router.collect(weights);
        weights.extend([&self.input, &self.output]);
        weights.extend(&self.output_bias);
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
