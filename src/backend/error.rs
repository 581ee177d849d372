//! Why a backend could not load or run a model.

use std::io::ErrorKind;
use std::path::PathBuf;

use super::{EngineError, LibraryUse, RuntimeLibrary};
use crate::onnx::inline::InlineError;
use crate::onnx::read::ReadError;

/// Class of a [`BackendError`]; decides the exit code of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BackendErrorKind {
    /// A runtime or library is missing or too old.
    Runtime,
    /// The runtime does not take this kind of model.
    Unsupported,
    /// The inputs do not fit the model.
    Input,
    /// The model file could not be read.
    Model,
    /// The model computes NaN or infinity.
    NotFinite,
    /// The runtime failed.
    Failed,
}

/// A backend could not load or run a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A library was not found.
    #[error("{library} not found; looked in {}", looked_in.join(", "))]
    RuntimeMissing {
        /// What is missing.
        library: RuntimeLibrary,
        /// Every place that was looked at.
        looked_in: Vec<String>,
        /// What named the only place, where it was named.
        named_by: Option<NamedBy>,
    },
    /// A library was found, and could not be loaded.
    #[error("{library} at {} cannot be loaded: {why}", path.display())]
    RuntimeUnusable {
        /// What it should be.
        library: RuntimeLibrary,
        /// The file.
        path: PathBuf,
        /// What the loader said.
        why: String,
    },
    /// ONNX Runtime was found, but it is too old for this program or for the model.
    #[error("ONNX Runtime {found} is too old: {needed} is needed")]
    RuntimeTooOld {
        /// Version found.
        found: String,
        /// What is needed.
        needed: String,
    },
    /// A library was loaded that does not have the entries of the runtime.
    #[error("the library at {} is no ONNX Runtime, or is too old: {needed} is needed", path.display())]
    RuntimeUnknown {
        /// The file.
        path: PathBuf,
        /// What is needed.
        needed: String,
    },
    /// The runtime does not take this kind of model.
    #[error("{why}")]
    Unsupported {
        /// What is not supported.
        why: String,
        /// What to do instead.
        help: Option<&'static str>,
    },
    /// An input does not fit the model.
    #[error("input `{name}`: expected {expected}, found {found}")]
    Input {
        /// Name of the input.
        name: String,
        /// What the model takes.
        expected: String,
        /// What was given.
        found: String,
    },
    /// The model file could not be read.
    #[error(transparent)]
    Model(#[from] ReadError),
    /// A model that was changed to be run cannot be written where the names of its data files resolve.
    #[error("{}: a changed copy of the graph cannot be written beside its data file: {source}", folder.display())]
    Beside {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The functions of the model could not be replaced by their nodes.
    #[error(transparent)]
    Inline(#[from] InlineError),
    /// An engine could not be built, loaded or run.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An operator met NaN or infinity where it cannot go on.
    #[error("{backend} failed to {stage}: {text}")]
    NotFinite {
        /// Name of the backend.
        backend: &'static str,
        /// What it was doing.
        stage: &'static str,
        /// What it said.
        text: String,
    },
    /// The runtime failed.
    #[error("{backend} failed to {stage}: {text}")]
    Failed {
        /// Name of the backend.
        backend: &'static str,
        /// What it was doing.
        stage: &'static str,
        /// What it said.
        text: String,
    },
}

/// What says where a library is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedBy {
    /// An option of the command.
    Option,
    /// The variable of the library.
    Variable,
}

impl BackendError {
    /// What a runtime that has our operators said as it failed.
    #[cfg(feature = "ort")]
    pub(super) fn failure(backend: &'static str, stage: &'static str, text: &str) -> Self {
        let text = text.to_owned();
        match text.contains(moa_schema::LOGITS_NOT_FINITE) {
            true => Self::NotFinite { backend, stage, text },
            false => Self::Failed { backend, stage, text },
        }
    }

    /// The same; where the operator library is at fault, of one that is wanted for `what`.
    pub(super) fn with_use(mut self, what: LibraryUse) -> Self {
        if let Self::RuntimeMissing { library: RuntimeLibrary::Operators(found), .. }
        | Self::RuntimeUnusable { library: RuntimeLibrary::Operators(found), .. } = &mut self
        {
            *found = what;
        }
        self
    }

    /// The error without the places where a library was looked for.
    pub fn brief(&self) -> String {
        match self {
            Self::RuntimeMissing { library, .. } => format!("{library} not found"),
            error => error.to_string(),
        }
    }

    /// Class of the error.
    pub const fn kind(&self) -> BackendErrorKind {
        match self {
            Self::RuntimeMissing { .. }
            | Self::RuntimeUnusable { .. }
            | Self::RuntimeTooOld { .. }
            | Self::RuntimeUnknown { .. } => BackendErrorKind::Runtime,
            Self::Unsupported { .. } | Self::Inline(_) => BackendErrorKind::Unsupported,
            Self::Input { .. } => BackendErrorKind::Input,
            Self::Model(_) | Self::Beside { .. } => BackendErrorKind::Model,
            Self::Engine(error) => error.kind(),
            Self::NotFinite { .. } => BackendErrorKind::NotFinite,
            Self::Failed { .. } => BackendErrorKind::Failed,
        }
    }

    /// Whether the runtime is not there, or cannot take this kind of model; anything else is a failure.
    pub const fn is_skip(&self) -> bool {
        match self {
            Self::RuntimeMissing { .. }
            | Self::RuntimeUnusable { .. }
            | Self::RuntimeTooOld { .. }
            | Self::RuntimeUnknown { .. }
            | Self::Unsupported { .. } => true,
            Self::Engine(error) => error.is_skip(),
            Self::Input { .. }
            | Self::Model(_)
            | Self::Beside { .. }
            | Self::Inline(_)
            | Self::NotFinite { .. }
            | Self::Failed { .. } => false,
        }
    }

    /// Whether the environment names the library that is not there, or cannot be used.
    pub fn is_asked_for(&self) -> bool {
        let library = match self {
            Self::RuntimeMissing { library, .. } | Self::RuntimeUnusable { library, .. } => *library,
            Self::RuntimeTooOld { .. } | Self::RuntimeUnknown { .. } => RuntimeLibrary::OnnxRuntime,
            Self::Engine(error) => return error.is_asked_for(),
            _ => return false,
        };
        library.named().is_some()
    }

    /// Whether files are at fault, those of the model or what the user gave the backend beside it, and not what it
    /// computes.
    pub const fn is_given(&self) -> bool {
        match self {
            Self::Model(_) | Self::Beside { .. } => true,
            Self::Engine(error) => error.is_of_plan(),
            _ => false,
        }
    }

    /// What the user can do, where that is known.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::RuntimeMissing { named_by: Some(NamedBy::Option), .. } => Some("correct or leave out --library"),
            Self::RuntimeMissing { library, named_by: Some(NamedBy::Variable), .. } => Some(library.help_if_misnamed()),
            Self::RuntimeMissing { library, .. } => Some(library.help_if_missing()),
            Self::RuntimeUnusable { library, path, .. } => Some(library.help_in_place_of(path)),
            Self::RuntimeTooOld { .. } | Self::RuntimeUnknown { .. } if self.is_asked_for() => {
                Some(RuntimeLibrary::OnnxRuntime.help_if_misnamed())
            }
            Self::RuntimeTooOld { .. } | Self::RuntimeUnknown { .. } => {
                Some("python3 -m pip install --upgrade onnxruntime, or set ORT_DYLIB_PATH")
            }
            Self::Unsupported { help, .. } => *help,
            Self::Model(error) => error.help(),
            Self::Beside { source, .. } => Some(match source.kind() {
                ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                    "let your user write to the folder, or give a copy in one that it may write to"
                }
                _ => "check that there is room, and that not too many files are open",
            }),
            Self::Engine(error) => error.help(),
            Self::Input { .. } => Some("`moa-export inspect MODEL` lists what a model takes"),
            Self::NotFinite { .. } => Some(
                "look for NaN in the inputs, or run `moa-export verify` on the export; one in fp16 overflows beyond 65504, where \
                 --dtype bf16 and fp32 do not",
            ),
            Self::Inline(_) | Self::Failed { .. } => None,
        }
    }
}
