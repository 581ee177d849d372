//! The contract of the `ai.moa` operators, written once.
//!
//! The exporter, the CPU kernels, the ONNX Runtime library and the TensorRT plugin all read names,
//! attributes, parameter order and shape rules from here. [`parameter`] and [`attribute`] are names for code that
//! looks for one in a node, [`interface`] has those of whole models.
//!
//! # Symbols
//!
//! | symbol | meaning |
//! |---|---|
//! | `B` | batch size |
//! | `T` | query (new) tokens |
//! | `P` | past tokens already in the key/value cache |
//! | `M` | tokens that a shared key/value cache has room for |
//! | `S` | key tokens; `P + T` in self-attention |
//! | `C` | model width |
//! | `E` | experts |
//! | `k` | experts chosen per token (`top_k`) |
//! | `G` | key/value heads (`kv_num_heads`) |
//! | `D` | head width |
//! | `F` | hidden width of one feed-forward expert |
//! | `R` | width of what the router reads; `C` but where that is given |
//! | `V` | vocabulary |
//!
//! `LMHead` is `hidden_states · output_weight` with a matrix of integers or bf16, and nothing else: what is said of
//! routers and attention is about the other three.
//!
//! # Semantics shared by the operators
//!
//! * Activations are f32 or f16, weights f32, f16, bf16, int8 or int4, each one type per node ([`NodeTypes`]); on GPUs
//!   both are f32, f16 or bf16, of one type. The router's weights, the rotary tables and `topk_weights` are f32.
//! * Weights in integers, beside activations in f32, are the integers times their scales, which each matrix of such a
//!   node must have ([`IntegerType`]): one for each column of int8, one for each [`BLOCK`] rows of a column of int4.
//!   Matrices of floats have none.
//! * The router works in f32: `logits = x · router_weight`, where `x` is `router_input`, or `hidden_states` where that
//!   is absent; then [`GateMode`].
//! * Among equal scores the expert with the lower index is chosen.
//! * `topk_indices` and `topk_weights` hold the chosen experts and their weights by falling score. Where a token is
//!   routed nowhere, its weights are 0 and its indices mean nothing: kernels and bodies give different ones.
//! * Experts that are not chosen do not influence the result.
//! * A token whose query mask is 0 is routed nowhere (`skip_padded_queries = 1`): its output is exactly 0.
//! * What a query attends to that sees no key is 0, never NaN: its output is `output_bias`.
//! * Activations, keys and values must be finite at masked positions too for the bodies of standard operators, which
//!   multiply them by 0: 0 times NaN is NaN. No result of the library depends on a masked position that is not routed.
//! * The CPU library refuses the whole call where the router logits of a routed token are NaN or infinite (with
//!   `skip_padded_queries = 0` masked tokens are routed too), or a position, even that of a masked token, lies outside
//!   the rotary tables. The CUDA kernels cannot refuse by value: there the rows that these concern are NaN.
//! * The query head of slot `s` and key/value head `g` reads key/value head `g`.
//! * Where there are rotary tables, each head of the queries is rotated by them, and each head of the new keys before
//!   these are appended to the past: of the halves `a`, `b` of a row come `a · cos - b · sin` and `b · cos + a · sin`.
//!   A past that is given was rotated already, and values are not.
//! * Where `kv_weight` is absent, keys and values are the hidden states themselves: `G * D` is `C`.
//! * [`AttentionMode`] says how scores become weights of values. Masked keys, and later ones, take no part in either
//!   mode.
//!
//! # Shared caches
//!
//! `MoASelfAttention` may be given one buffer `[B, G, M, D]` for past and present, so that nothing is copied from one
//! step to the next. The mask tells: where it covers `M + T` tokens, the cache holds a past of `P = M`, and present is
//! `[B, G, P + T, D]`. Where it covers `T <= L <= M` tokens, the first `P = L - T` rows of each head are the past, and
//! present is `[B, G, M, D]` with rows `P .. L` for the new tokens, nothing else of which is written. The kernels
//! of ONNX Runtime, on the CPU and on CUDA, serve this ([`SelfAttentionDims::with_capacity`]), and only where present
//! is the memory of past: elsewhere such a mask is one that its user forgot to extend. The TensorRT plugin refuses it
//! ([`SelfAttentionDims::new`]), and the bodies of standard operators end with an error.

mod attributes;
pub mod interface;
mod names;
mod operator;
mod output_shape;
mod panic;
mod routing;
mod shape;
mod switches;
mod types;
mod weights;

pub use attributes::{
    AttributeError, AttributeSource, Attributes, FURTHER_ATTRIBUTES, accuracy_level, check_further_attributes,
    other_version,
};
pub use names::{attribute, parameter};
pub use operator::{
    Attribute, AttributeKind, CROSS_ATTENTION, ElementType, FEED_FORWARD, LM_HEAD, OPERATORS, Operator, Parameter,
    SELF_ATTENTION, cross_attention, feed_forward, lm_head, self_attention,
};
pub use output_shape::OutputShape;
pub use panic::panic_text;
pub use routing::RoutingPart;
pub use shape::{CrossAttentionDims, FeedForwardDims, LmHeadDims, SelfAttentionDims, ShapeError, refuse_integers};
pub use switches::{
    ARCHIVE_VARIABLE, CUDA_LIBRARY, CUDA_VARIABLE, INSTRUCTION_LEVELS, INSTRUCTIONS_VARIABLE, MULTIPROCESSORS_VARIABLE,
    ORT_LIBRARY, PACKING_VARIABLE, PACKINGS, TENSORRT_LIBRARY, WGMMA_VARIABLE, instructions, is_wgmma_off,
    library_file, multiprocessors, packing,
};
pub use types::{BLOCK, FloatType, IntegerType, MatrixType, NodeTypes};
pub use weights::{Given, check_constants};

/// ONNX domain of the operators.
pub const DOMAIN: &str = "ai.moa";

/// Domain of ONNX Runtime's own operators, version 1.
pub const RUNTIME_DOMAIN: &str = "com.microsoft";

/// Version of the domain [`DOMAIN`].
pub const OPSET_VERSION: i64 = 1;

/// Attribute of a node that is written for TensorRT, which knows no absent input before a present one: bit `i` says
/// that input `i` of the schema is there; 0 or absent: the first ones are, as many as the node has.
pub const PRESENT_INPUTS: &str = "present_inputs";

/// Attribute of a node that is written for TensorRT, which asks for the number of outputs before it sees the node:
/// 0 or absent: those before the routing.
pub const OUTPUT_COUNT: &str = "output_count";

/// How the operator library ends its word on router logits that are NaN or infinite, by which its users tell such a
/// model from a failure of the runtime.
pub const LOGITS_NOT_FINITE: &str = "are not finite";

/// Attribute by which a parser of TensorRT finds the plugin of a node, and a library the version of the operators that
/// the node is written for: [`OPSET_VERSION`] as a text.
pub const PLUGIN_VERSION: &str = "plugin_version";

/// Attribute by which a parser of TensorRT finds the plugin of a node: [`DOMAIN`].
pub const PLUGIN_NAMESPACE: &str = "plugin_namespace";

/// Attribute of a node, which any of the operators may have: an [`AccuracyLevel`] by its number.
pub const ACCURACY_LEVEL: &str = "accuracy_level";

/// What a kernel may round factors of its products to, but those of the router; it may also round nothing.
///
/// The numbers are those of the attribute of the same name of ONNX Runtime's `com.microsoft.MatMulNBits`. Sums, and
/// what is computed of them, stay f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AccuracyLevel {
    /// Nothing: the factors have the type of the activations or of the matrices, or f32.
    #[default]
    Activations,
    /// Both factors to bf16, to nearest: hidden states, queries, keys, weights of keys, values, what is attended to,
    /// hidden rows of experts and trained matrices.
    Bf16,
    /// Of products with trained matrices of integers the other factor, hidden states, what is attended to and hidden
    /// rows of experts, to int8: to the nearest of 255 multiples of 1/127 of the largest magnitude among each [`BLOCK`]
    /// inner steps of a row, counted from its first, or to 0 where that is below 1e-36; or to bf16, to nearest.
    /// Queries, keys, weights of keys and values to bf16.
    Int8,
}

impl AccuracyLevel {
    /// Every level, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Activations, Self::Bf16, Self::Int8];

    /// The value of [`ACCURACY_LEVEL`]; a node without that attribute is as one that has 0.
    pub const fn number(self) -> i64 {
        match self {
            Self::Activations => 0,
            Self::Bf16 => 3,
            Self::Int8 => 4,
        }
    }
}

/// How router logits become the `k` weights of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateMode {
    /// Softmax over all experts, then the `k` largest as they are: the released MoA code.
    SoftmaxTopk,
    /// Softmax over all experts, then the `k` largest divided by their sum: the MoA paper.
    SoftmaxTopkRenorm,
    /// The `k` largest logits, then softmax over those: JetMoE.
    TopkSoftmax,
}

impl GateMode {
    /// Every mode, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::SoftmaxTopk, Self::SoftmaxTopkRenorm, Self::TopkSoftmax];

    /// The attribute's text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SoftmaxTopk => "softmax_topk",
            Self::SoftmaxTopkRenorm => "softmax_topk_renorm",
            Self::TopkSoftmax => "topk_softmax",
        }
    }

    /// The mode that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text)
    }
}

/// How the scores of a query become weights of the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AttentionMode {
    /// Softmax over the keys that the query sees.
    #[default]
    Softmax,
    /// Stick-breaking (Shen et al., "ModuleFormer", 2023): `z = sigmoid(score)`, and key `j` weighs
    /// `z_j · prod (1 - z_m)` over the seen keys `m` after `j`. The weights add up to less than 1. Needs `causal`.
    StickBreaking,
}

impl AttentionMode {
    /// Every mode, in the order of the documentation.
    pub const ALL: [Self; 2] = [Self::Softmax, Self::StickBreaking];

    /// The attribute's text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Softmax => "softmax",
            Self::StickBreaking => "stick_breaking",
        }
    }

    /// The mode that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text)
    }
}

/// Element-wise function between the two matrices of a feed-forward expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x · Φ(x)`, the exact (erf) form.
    Gelu,
    /// `x / 2 · (1 + tanh(√(2 / π) · (x + 0.044715 · x³)))`.
    GeluTanh,
    /// `x · sigmoid(x)`.
    Silu,
}

impl Activation {
    /// Every activation, in the order of the documentation.
    pub const ALL: [Self; 4] = [Self::Relu, Self::Gelu, Self::GeluTanh, Self::Silu];

    /// The attribute's text.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Relu => "relu",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Silu => "silu",
        }
    }

    /// The activation that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|activation| activation.as_str() == text)
    }
}

/// Attributes of `MoASelfAttention`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SelfAttentionAttributes {
    /// Experts per token, `1 ..= E`.
    pub top_k: usize,
    /// Key/value heads `G`, at least 1.
    pub kv_num_heads: usize,
    /// Whether query `i` sees keys `0 ..= P + i` only.
    pub causal: bool,
    /// Factor on query · key.
    pub scale: f32,
    /// How logits become weights.
    pub gate_mode: GateMode,
    /// Whether a padded query is routed nowhere and yields exactly 0.
    pub skip_padded_queries: bool,
    /// How scores become weights of values.
    pub attention_mode: AttentionMode,
}

/// Attributes of `MoACrossAttention`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossAttentionAttributes {
    /// Experts per token, `1 ..= E`.
    pub top_k: usize,
    /// Key/value heads `G`, at least 1.
    pub kv_num_heads: usize,
    /// Factor on query · key.
    pub scale: f32,
    /// How logits become weights.
    pub gate_mode: GateMode,
    /// Whether a padded query is routed nowhere and yields exactly 0.
    pub skip_padded_queries: bool,
}

/// Attributes of `MoEFeedForward`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeedForwardAttributes {
    /// Experts per token, `1 ..= E`.
    pub top_k: usize,
    /// How logits become weights.
    pub gate_mode: GateMode,
    /// Function between the two matrices.
    pub activation: Activation,
    /// Whether `input_weight` is `[E, C, 2F]` and the hidden row is `activation(first F) * last F`.
    pub gated: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enum_texts_round_trip() {
        for mode in GateMode::ALL {
            assert_eq!(GateMode::parse(mode.as_str()), Some(mode));
        }
        for mode in AttentionMode::ALL {
            assert_eq!(AttentionMode::parse(mode.as_str()), Some(mode));
        }
        for activation in Activation::ALL {
            assert_eq!(Activation::parse(activation.as_str()), Some(activation));
        }
        assert_eq!(GateMode::parse("softmax"), None);
    }
}
