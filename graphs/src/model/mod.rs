//! Typed models: what the tensors of a checkpoint mean, every shape proven.
//!
//! Symbols in shapes: `C` model width, `E` experts, `G` key/value heads, `D` head width, `F` hidden width of
//! the feed-forward block, `V` vocabulary. Matrices are kept in the checkpoint's own layout, stated per field.

mod block;
mod causal_lm;
mod encoder_decoder;
mod layer;
mod masked_lm;

pub use block::{
    Attention, DenseFeedForward, Embedding, ExpertFeedForward, ExpertLayout, FeedForward, KeyValueWeights, LayerNorm,
    Linear, Positions, RmsNorm, Rotary, SINUSOID_BASE,
};
pub use causal_lm::{CausalLayer, CausalLm};
pub use encoder_decoder::{Decoder, DecoderLayer, Encoder, EncoderDecoder, EncoderLayer};
pub use layer::MoaLayer;
pub use masked_lm::{LanguageModelHead, MaskedLm};

use crate::Weight;

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
        }
        weights
    }
}
