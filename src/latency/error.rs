//! Why nothing was timed.

use std::path::PathBuf;

use super::{regression::Incomparable, subjects::LeftOut};
use crate::{backend::BackendError, file_names::NoGraph, onnx::ReadError, tensor::TensorShapeError};

/// A benchmark could not be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LatencyError {
    /// A file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A runtime is missing, or failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A tensor does not fit its shape.
    #[error(transparent)]
    Shape(#[from] TensorShapeError),
    /// The older result measured something else.
    #[error(transparent)]
    Incomparable(#[from] Incomparable),
    /// A folder holds no graph.
    #[error(transparent)]
    NoGraph(#[from] NoGraph),
    /// Several models have no graph in common.
    #[error("the models have no part in common: {parts}")]
    NothingInCommon {
        /// The parts of each.
        parts: String,
    },
    /// An axis of a graph has no size.
    #[error("the size of the axis \"{axis}\" is not known")]
    UnknownAxis {
        /// Its name.
        axis: String,
    },
    /// No graph has the axis that was given a size.
    #[error("no graph here has the axis \"{axis}\"")]
    UnusedAxis {
        /// Its name.
        axis: String,
    },
    /// Nothing can be given to an input.
    #[error("input \"{input}\": {what}")]
    UnknownInput {
        /// Its name.
        input: String,
        /// What is not known.
        what: &'static str,
    },
    /// A graph fixes a size of 0.
    #[error("{}: input \"{input}\" is {dims}: it holds no value", .model.display())]
    FixedSize {
        /// The graph.
        model: PathBuf,
        /// Name of the input.
        input: String,
        /// Its dimensions.
        dims: String,
    },
    /// Inputs would fill the memory.
    #[error("input \"{input}\" of shape {shape:?}: {what}")]
    TooLarge {
        /// Name of the first that does not fit.
        input: String,
        /// Its shape.
        shape: Vec<usize>,
        /// What it does not fit.
        what: String,
    },
    /// A file of inputs lacks one of every graph.
    #[error("the file of inputs has no {}", .graphs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", no "))]
    MissingInput {
        /// Every graph, and an input that it lacks.
        graphs: Vec<LeftOut>,
    },
    /// A row is longer than a table of positions.
    #[error("{}: {length} positions, and the table \"{table}\" has {positions}", .model.display())]
    TooLong {
        /// The graph.
        model: PathBuf,
        /// Positions asked for.
        length: usize,
        /// Weight that holds the table.
        table: String,
        /// Positions that there are.
        positions: usize,
    },
    /// Caches were to be updated in place, and nothing here can.
    #[error(
        "--in-place: no graph here has caches that a backend of this run updates in place{}",
        .skipped.as_ref().map_or_else(String::new, |why| format!("; ort was skipped: {why}"))
    )]
    NotInPlace {
        /// Why `ort` was skipped, where it was.
        skipped: Option<String>,
    },
    /// A graph has no operator of ours that could be cut out.
    #[error("{} has no MoA operator as a node", .model.display())]
    NoOperators {
        /// The graph.
        model: PathBuf,
    },
    /// An operator cannot be timed by itself.
    #[error("the operator of module {module} cannot be cut out: {why}")]
    Cut {
        /// Its module.
        module: String,
        /// What is in the way.
        why: String,
    },
    /// A router does not make the asked choice.
    #[error("the router of module {module} cannot be steered: {why}")]
    Steering {
        /// Its module.
        module: String,
        /// What is in the way.
        why: String,
    },
    /// A trace does not fit the model.
    #[error("the trace of {module}: {why}")]
    Trace {
        /// Its module.
        module: String,
        /// What does not fit.
        why: String,
    },
    /// Backends of one model disagree.
    #[error("{place}: {fault}")]
    Disagreement {
        /// Model, backend, part and shape.
        place: String,
        /// What is wrong.
        fault: String,
    },
}
