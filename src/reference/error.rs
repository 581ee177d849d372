//! Why an evaluation is refused.

use moa_graphs::Part;

use crate::tensor::TensorShapeError;

/// Inputs that do not fit the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// The model is not divided so.
    #[error("the {family} has no part \"{}\"", part.as_str())]
    NoSuchPart {
        /// What the model is.
        family: &'static str,
        /// The part asked for.
        part: Part,
    },
    /// An input is absent.
    #[error("input \"{input}\" is missing")]
    MissingInput {
        /// Name of the input.
        input: String,
    },
    /// An input has another type or shape.
    #[error("input \"{input}\" must be {expected}, found {found}")]
    WrongInput {
        /// Name of the input.
        input: String,
        /// Type and shape that fit.
        expected: String,
        /// Type and shape given.
        found: String,
    },
    /// A mask holds another value than 0 and 1.
    #[error("input \"{input}\" holds {value} at index {index}; a mask is 1 at real tokens and 0 at padding")]
    MaskValue {
        /// Name of the input.
        input: String,
        /// Row-major index.
        index: usize,
        /// The value found.
        value: i64,
    },
    /// A token id has no embedding.
    #[error("input \"{input}\" holds token id {id} at index {index}; the vocabulary has {vocabulary} ids from 0")]
    TokenId {
        /// Name of the input.
        input: String,
        /// Row-major index.
        index: usize,
        /// The id found.
        id: i64,
        /// Rows of the embedding.
        vocabulary: usize,
    },
    /// A row has more real tokens than there are positions.
    #[error("row {row} reaches position {position}; the table of positions has {rows} rows")]
    Position {
        /// Index in the batch.
        row: usize,
        /// The position needed.
        position: usize,
        /// Rows of the table.
        rows: usize,
    },
    /// The routing to be replayed does not fit a module.
    #[error("routing of module \"{module}\": {what}")]
    Replay {
        /// Name of the module.
        module: String,
        /// What does not fit.
        what: String,
    },
    /// The size of a result does not fit its shape.
    #[error(transparent)]
    Shape(#[from] TensorShapeError),
}
