//! Errors of giving a checkpoint its meaning.

use crate::WeightError;

/// What a checkpoint has where a tensor is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instead {
    /// The stored name of a tensor that is called as the missing one, with more before or within it.
    Longer(String),
    /// A tensor that belongs to no part of the model.
    Unread {
        /// Its stored name.
        tensor: String,
        /// Its shape.
        shape: String,
        /// Whether it has the shape of the missing one with the last two dimensions exchanged.
        is_transposed: bool,
    },
}

/// Why tensors and configuration do not make a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// A tensor that the configuration asks for is not there.
    #[error("{origin}: tensor \"{tensor}\" of shape {expected} is missing")]
    MissingTensor {
        /// Checkpoint.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// Shape that it should have.
        expected: String,
        /// What may be meant by it.
        instead: Option<Box<Instead>>,
    },
    /// A tensor has another shape than the configuration says.
    #[error("{origin}: tensor \"{tensor}\" has shape {found}, expected {expected}")]
    WrongShape {
        /// File of the tensor.
        origin: String,
        /// Name of the tensor.
        tensor: String,
        /// Shape that it should have.
        expected: String,
        /// Shape that it has.
        found: String,
    },
    /// The checkpoint holds tensors that no part of the model reads.
    #[error(
        "{origin}: tensor \"{}\" of shape {found} belongs to no part of a {family} model of this configuration ({} such in all)",
        .extra.first().map_or("", String::as_str),
        .extra.len()
    )]
    ExtraTensors {
        /// Checkpoint.
        origin: String,
        /// Family that was asked for.
        family: String,
        /// Stored names of all such tensors, sorted.
        extra: Vec<String>,
        /// Shape of the first.
        found: String,
    },
    /// Two names of one shared parameter hold different values.
    #[error(
        "{origin}: \"{first}\" and \"{second}\" must be one shared parameter, but their values differ from index {index} on"
    )]
    AliasConflict {
        /// Checkpoint.
        origin: String,
        /// One name.
        first: String,
        /// The other name.
        second: String,
        /// Row-major index of the first difference.
        index: usize,
    },
    /// A key of the configuration is absent and has no default.
    #[error("{origin}: key \"{key}\" is missing ({meaning})")]
    MissingKey {
        /// Configuration file.
        origin: String,
        /// The key.
        key: String,
        /// What it says.
        meaning: String,
    },
    /// A key of the configuration means nothing to a family whose keys are all known.
    #[error("{origin}: key \"{key}\" is not known (known: {known})")]
    UnknownKey {
        /// Configuration file.
        origin: String,
        /// The key.
        key: String,
        /// The family's keys.
        known: String,
    },
    /// A key of the configuration has an impossible value.
    #[error("{origin}: key \"{key}\" must be {expected}, found {found}")]
    InvalidKey {
        /// Configuration file.
        origin: String,
        /// The key.
        key: String,
        /// What it may be.
        expected: String,
        /// What it is, as JSON.
        found: String,
    },
    /// No family has the `model_type` of the configuration.
    #[error("{origin}: not supported: model_type \"{found}\" (supported: {supported})")]
    Family {
        /// Configuration file.
        origin: String,
        /// Its `model_type`.
        found: String,
        /// Those of the families.
        supported: String,
    },
    /// The model is well formed, but this program cannot export it.
    #[error("{origin}: not supported: {what}")]
    Unsupported {
        /// Configuration file or checkpoint.
        origin: String,
        /// The feature and the key or tensor that asks for it.
        what: String,
    },
    /// The values of a tensor could not be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
}
