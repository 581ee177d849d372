//! Which graph of a model a file holds.

/// One of the graphs that a model is written as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The whole of a model that is one graph.
    Model,
    /// The encoder of an encoder and decoder.
    Encoder,
    /// The decoder of an encoder and decoder.
    Decoder,
}

impl Part {
    /// Every part, an encoder before its decoder.
    pub const ALL: [Self; 3] = [Self::Model, Self::Encoder, Self::Decoder];

    /// Stem of the name of its file, and its name in metadata and results.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Encoder => "encoder_model",
            Self::Decoder => "decoder_model",
        }
    }

    /// The part that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|part| part.as_str() == text)
    }
}
