//! Why a text ended.

/// Why a translation or a continuation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// With an end token, which is the last of its tokens.
    Eos,
    /// At the most tokens that it might have, or at the model's last position.
    Length,
    /// Before the first token: the prompt is blank or has no tokens.
    Blank,
}

impl Finish {
    /// How JSON calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::Length => "length",
            Self::Blank => "blank",
        }
    }
}
