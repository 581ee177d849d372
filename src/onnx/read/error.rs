//! Why a file is refused.

use std::io;
use std::path::{Path, PathBuf};

use crate::files::{ErrorKind, escaped, help_with};

/// An ONNX file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The content of the file was refused.
    #[error("{}: {text}", path.display())]
    Refused {
        /// The model file.
        path: PathBuf,
        /// Class of the refusal.
        kind: ErrorKind,
        /// What was found, and where.
        text: String,
        /// What to do about it.
        help: Option<&'static str>,
    },
    /// The file with the weights is not there.
    #[error("{}: its weights lie in {}, which is not there", path.display(), data.display())]
    NoData {
        /// The model file.
        path: PathBuf,
        /// What it names.
        data: PathBuf,
    },
    /// The system refused to read the file or its data.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file that could not be read.
        path: PathBuf,
        /// Reason the system gave.
        source: io::Error,
    },
}

impl ReadError {
    /// Class of the error.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused { kind, .. } => *kind,
            Self::NoData { .. } | Self::Io { .. } => ErrorKind::Io,
        }
    }

    /// What the user can do, where that is known.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Refused { help, .. } => *help,
            Self::NoData { .. } => Some("copy it beside the model, under this name; both are one export"),
            Self::Io { source, .. } => help_with(source),
        }
    }

    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }
}

/// A refusal that does not know its file yet.
#[derive(Debug)]
pub(super) struct Fault {
    kind: ErrorKind,
    text: String,
    help: Option<&'static str>,
}

impl Fault {
    pub(super) const fn malformed(text: String) -> Self {
        Self { kind: ErrorKind::Malformed, text, help: None }
    }

    pub(super) const fn unsupported(text: String) -> Self {
        Self { kind: ErrorKind::Unsupported, text, help: None }
    }

    pub(super) const fn limit(text: String) -> Self {
        Self { kind: ErrorKind::Limit, text, help: None }
    }

    pub(super) const fn help(mut self, help: &'static str) -> Self {
        self.help = Some(help);
        self
    }

    /// The same refusal, with the place in front of its text.
    pub(super) fn within(mut self, place: &str) -> Self {
        self.text = format!("{place}: {}", self.text);
        self
    }

    pub(super) fn at(self, path: &Path) -> ReadError {
        ReadError::Refused { path: path.to_owned(), kind: self.kind, text: self.text, help: self.help }
    }
}

/// A name from the file, safe to print: escaped, and shortened where it is long.
pub(super) fn shown(name: &str) -> String {
    const LONGEST: usize = 96;
    format!("`{}`", escaped(name, LONGEST))
}
