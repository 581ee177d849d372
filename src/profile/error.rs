//! What stops a profile.

use std::path::PathBuf;

use crate::{backend::BackendError, file_names::NoGraph, onnx::ReadError, tensor::TensorShapeError};

/// Why a model cannot be profiled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// The model cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The runtime is missing, or does not take model or inputs.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A shape that cannot be.
    #[error(transparent)]
    Shape(#[from] TensorShapeError),
    /// A folder holds no graph.
    #[error(transparent)]
    NoGraph(#[from] NoGraph),
    /// There is no file at the path, or half of a pair is missing.
    #[error("{} is missing", .path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The graph routes nothing that could be found.
    #[error("{}: no routed module is found: neither an operator of this project nor a `TopK` with named routing", .path.display())]
    NoRouting {
        /// The file.
        path: PathBuf,
    },
    /// Where a module's scores come from cannot be told.
    #[error("{}: module \"{module}\": {what}", .path.display())]
    Scores {
        /// The file.
        path: PathBuf,
        /// The module.
        module: String,
        /// What is not as expected.
        what: &'static str,
    },
    /// An input is missing or cannot be used.
    #[error("input \"{input}\": {what}")]
    Input {
        /// Its name.
        input: String,
        /// Expected and found.
        what: String,
    },
    /// The runtime returned what is no routing.
    #[error("output \"{output}\" of {graph} is no routing: {what}")]
    Output {
        /// The output.
        output: String,
        /// The graph.
        graph: String,
        /// Expected and found.
        what: String,
    },
}
