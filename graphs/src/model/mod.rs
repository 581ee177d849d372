//! Typed models: what the tensors of a checkpoint mean, every shape proven.
//!
//! Symbols in shapes: `C` model width, `E` experts, `G` key/value heads, `D` head width, `F` hidden width of
//! the feed-forward block, `V` vocabulary. Matrices are kept in the checkpoint's own layout, stated per field.

mod block;
mod causal_lm;
mod dense;
mod encoder_decoder;
mod layer;
mod masked_lm;

pub use block::{
    Attention, DenseFeedForward, Embedding, ExpertBiases, ExpertFeedForward, ExpertLayout, FeedForward,
    KeyValueWeights, LayerNorm, Linear, Norm, Positions, RmsNorm, Rotary, Router, RouterInput, SINUSOID_BASE,
};
pub use causal_lm::{CausalLayer, CausalLm, Dialect};
pub use dense::DenseAttention;
pub use encoder_decoder::{Decoder, DecoderLayer, Encoder, EncoderDecoder, EncoderLayer};
pub use layer::MoaLayer;
pub use masked_lm::{LanguageModelHead, MaskedLm};

use crate::Weight;

/// What every kind of attention layer says about itself.
pub trait AttentionLayer {
    /// Appends the weights, in the order of the structure.
    fn collect<'a>(&'a self, weights: &mut Vec<&'a Weight>);

    /// Heads and head width of the keys and values that are kept.
    fn cache_heads(&self) -> [usize; 2];
}

/// A trained model of one of the supported families.
#[derive(Debug, Clone)]
pub enum Model {
    /// fairseq MoA encoder–decoder.
    EncoderDecoder(EncoderDecoder),
    /// MoA masked language model.
    MaskedLm(MaskedLm),
    /// Decoder-only language model.
    CausalLm(CausalLm),
    /// One MoA layer by itself.
    Layer(MoaLayer),
    /// Standard Transformer encoder–decoder, a baseline.
    Transformer(EncoderDecoder<DenseAttention>),
    /// Masked language model of standard attention, a baseline.
    TransformerMaskedLm(MaskedLm<DenseAttention>),
}

impl Model {
    /// Every weight, in the order of the structure; a shared one as often as it is used.
    pub fn weights(&self) -> Vec<&Weight> {
        let mut weights = Vec::new();
        match self {
            Self::EncoderDecoder(model) => model.collect(&mut weights),
            Self::MaskedLm(model) => model.collect(&mut weights),
            Self::CausalLm(model) => model.collect(&mut weights),
            Self::Layer(layer) => layer.attention.collect(&mut weights),
            Self::Transformer(model) => model.collect(&mut weights),
            Self::TransformerMaskedLm(model) => model.collect(&mut weights),
        }
        weights
    }
}
