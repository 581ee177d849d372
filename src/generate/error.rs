//! Why there is no text.

use std::path::PathBuf;

use crate::{backend::BackendError, onnx::ReadError, text::TextError};

/// A folder could not be opened, or a line not be translated or continued.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A file of the folder is not there.
    #[error("{} is not there", .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A vocabulary file or `generation.json` cannot be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A graph cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A graph is not one that this program knows how to decode with.
    #[error("{}: {what}", .path.display())]
    Graph {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// Two graphs of one folder do not belong together.
    #[error("{} and {} are of two exports: \"{key}\" is not the same in both", .first.display(), .second.display())]
    TwoExports {
        /// A file.
        first: PathBuf,
        /// The other one.
        second: PathBuf,
        /// The key of their metadata.
        key: &'static str,
    },
    /// A dictionary beside the graphs is not that of the model.
    #[error("{}: {symbols} symbols with the four special ones; the model chooses from {outputs}", .path.display())]
    Vocabulary {
        /// The dictionary.
        path: PathBuf,
        /// Its symbols.
        symbols: usize,
        /// Symbols of the model.
        outputs: usize,
    },
    /// The runtime is missing or failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// An option is out of its range.
    #[error("{0}")]
    Option(String),
    /// A line has more tokens than the model has positions.
    #[error("line {line}: {tokens} tokens with the end; the model has positions for {limit}")]
    TooLong {
        /// Number of the line, from 1.
        line: usize,
        /// Tokens of the line.
        tokens: usize,
        /// Positions of the model.
        limit: usize,
    },
    /// A prompt has a token that the model does not know.
    #[error("prompt {prompt}: token {id} {}", strange(*.vocabulary))]
    TokenId {
        /// Number of the prompt, from 1.
        prompt: usize,
        /// The token.
        id: i64,
        /// Tokens of the model, where its graph fixes their number.
        vocabulary: Option<usize>,
    },
    /// A prompt leaves no position for a new token.
    #[error("prompt {prompt}: {tokens} tokens; the model has positions for {limit}, the new tokens included")]
    LongPrompt {
        /// Number of the prompt, from 1.
        prompt: usize,
        /// Its tokens.
        tokens: usize,
        /// Positions of the model.
        limit: usize,
    },
    /// The model computed NaN or infinity for a line.
    #[error("line {line}: the model computes NaN or infinite scores")]
    NotFinite {
        /// Number of the line, from 1.
        line: usize,
    },
    /// The model computed NaN or infinity behind a prompt.
    #[error("prompt {prompt}: the model computes NaN or infinite scores")]
    NotFiniteBehind {
        /// Number of the prompt, from 1.
        prompt: usize,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
}

/// Why a token is none of a model's.
fn strange(vocabulary: Option<usize>) -> String {
    match vocabulary {
        Some(vocabulary) => format!("is none of the model's {vocabulary}"),
        None => "is below 0, where ids begin".to_owned(),
    }
}
