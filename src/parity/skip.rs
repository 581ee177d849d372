//! Backends that a verification does without.

use crate::backend::{BackendError, BackendErrorKind};

/// Why a backend was not used.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Skip {
    /// What kind of reason that is.
    pub kind: SkipKind,
    /// For a line of text.
    pub why: String,
    /// The same without the places that were looked at.
    #[serde(skip)]
    pub brief: String,
    /// What to do, where that is known.
    pub help: Option<&'static str>,
    /// Whether the environment names what is not there.
    #[serde(skip)]
    pub is_asked_for: bool,
}

/// Kinds of reasons why a backend was not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SkipKind {
    /// A runtime or library is missing, too old or cannot be loaded.
    Runtime,
    /// It does not take this model.
    Unsupported,
    /// Another backend ran the same.
    Same,
    /// ONNX Runtime failed to run a graph, and other runtimes may not even end on it.
    Failed,
}

impl Skip {
    pub(super) fn of(error: &BackendError) -> Self {
        let kind = match error.kind() {
            BackendErrorKind::Unsupported => SkipKind::Unsupported,
            _ => SkipKind::Runtime,
        };
        let (help, is_asked_for) = (error.help(), error.is_asked_for());
        Self { why: error.to_string(), brief: error.brief(), kind, help, is_asked_for }
    }

    pub(super) fn same() -> Self {
        Self::without_help(SkipKind::Same, SAME.to_owned())
    }

    /// After `graph` has failed on `backend`.
    pub(super) fn failed(backend: &str, graph: &str) -> Self {
        let why = format!("{graph} failed on {backend}, and other runtimes may hang or crash on such a graph");
        Self::without_help(SkipKind::Failed, why)
    }

    fn without_help(kind: SkipKind, why: String) -> Self {
        Self { brief: why.clone(), why, kind, help: None, is_asked_for: false }
    }
}

/// Why ONNX Runtime is not used a second time without the operator library.
pub const SAME: &str = "the same as ort: the model has none of our operators";
