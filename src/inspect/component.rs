//! What a model consists of, as its costs are told.

/// One component; they have the order of the journey of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Component {
    Embeddings,
    /// Of a model with one side.
    Attention,
    EncoderAttention,
    EncoderFeedForward,
    DecoderAttention,
    CrossAttention,
    /// Of a model with one side.
    FeedForward,
    DecoderFeedForward,
    Norms,
    Output,
    /// What no name tells.
    Other,
}

impl Component {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Embeddings => "embeddings",
            Self::Attention => "attention",
            Self::EncoderAttention => "encoder self-attention",
            Self::EncoderFeedForward => "encoder feed-forward",
            Self::DecoderAttention => "decoder self-attention",
            Self::CrossAttention => "cross-attention",
            Self::FeedForward => "feed-forward",
            Self::DecoderFeedForward => "decoder feed-forward",
            Self::Norms => "norms",
            Self::Output => "output",
            Self::Other => "other",
        }
    }

    /// What sizes of its attention are called.
    pub(super) const fn of_sizes(self) -> &'static str {
        match self {
            Self::EncoderAttention => "encoder attention",
            Self::DecoderAttention => "decoder attention",
            other => other.name(),
        }
    }
}
