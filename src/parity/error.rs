//! Why a verification could not be made.

use std::path::PathBuf;

use moa_graphs::{ImportError, LowerError, Part, WeightError};

use super::AuditError;
use crate::{backend::BackendError, file_names::NoGraph, onnx::ReadError};

/// Why nothing could be compared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The checkpoint is no model that can be exported.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The model has no graph in the form of the files.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// An exported file cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A weight of the checkpoint cannot be read.
    #[error(transparent)]
    Weight(#[from] WeightError),
    /// A constant of a file cannot be compared.
    #[error(transparent)]
    Audit(#[from] AuditError),
    /// The folder holds no graph at all.
    #[error(transparent)]
    NoGraph(#[from] NoGraph),
    /// The folder lacks a graph of the family.
    #[error("{} is missing", .path.display())]
    MissingGraph {
        /// The file.
        path: PathBuf,
    },
    /// One file of several was given.
    #[error("{} is one file of a {family} export", .path.display())]
    NeedsFolder {
        /// The file.
        path: PathBuf,
        /// What the checkpoint says.
        family: String,
    },
    /// The file was exported from another checkpoint's family.
    #[error("{} holds a {found} graph, the checkpoint is a {expected} model", .path.display())]
    WrongFamily {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: String,
        /// What the checkpoint says.
        expected: String,
    },
    /// What a file says of its export is none of the words for it.
    #[error("{graph}: metadata \"{key}\" says {found:?}, a value that moa-export does not write")]
    Metadata {
        /// File name.
        graph: String,
        /// The key.
        key: &'static str,
        /// What it says.
        found: String,
    },
    /// A file says that it is another part of an export than its name says.
    #[error("{graph} is the {} of an export, and has the place of the {}", found.as_str(), expected.as_str())]
    OtherPart {
        /// File name.
        graph: String,
        /// What it says.
        found: Part,
        /// What belongs there.
        expected: Part,
    },
    /// Two files of one export say different things of it.
    #[error("metadata \"{key}\" of {first} and {second} are different, and an export has the same in all its files")]
    Contradiction {
        /// The key.
        key: &'static str,
        /// File name.
        first: String,
        /// File name.
        second: String,
    },
    /// A graph has neither the operator of a module nor values under the names of its routing.
    #[error(
        "{graph} does not show which experts {} chooses{}",
        if .module.is_empty() { "the layer".to_owned() } else { format!("the module \"{}\"", .module) },
        if *.is_of_other_weights { "; it was made from another checkpoint" } else { "" }
    )]
    RoutingUnseen {
        /// The file.
        graph: String,
        /// The module.
        module: String,
        /// Whether the files say that they come from other weights than those of the checkpoint.
        is_of_other_weights: bool,
    },
    /// A backend is required that none of those given is.
    #[error("the backend {name} is required, and is not among those that were given")]
    NotGiven {
        /// Its name.
        name: &'static str,
    },
    /// What the user gave a backend, such as a plan, does not serve: nothing was verified.
    #[error(transparent)]
    Given(BackendError),
    /// A backend that is required is not there, or cannot take this kind of model: nothing was verified.
    #[error("backend {backend} was not used: {source}")]
    Missing {
        /// Its name.
        backend: &'static str,
        /// Why.
        source: BackendError,
    },
}
