//! What can be wrong with a checkpoint.

use std::{io, path::Path};

use moa_graphs::WeightError;

use super::dtype::Dtype;

/// What a failure means for the caller, independent of its details.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The input breaks its format.
    Malformed,
    /// The input is well formed, but this program cannot use it.
    Unsupported,
    /// The input cannot be read, is not there, or changed.
    Io,
    /// The input is larger than a limit.
    Limit,
}

/// Why a checkpoint cannot be opened.
///
/// Every message is one line that starts with the file; names from the file are escaped, and nothing else
/// of its content is shown.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{file}: {source}")]
    Io {
        /// File or folder.
        file: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// A directory, pipe or device stands where a file was expected.
    #[error("{file}: expected a regular file, found {found}")]
    NotAFile {
        /// The path.
        file: String,
        /// What it is.
        found: &'static str,
    },
    /// The file was written to or replaced while it was read.
    #[error("{file}: changed while it was read")]
    Changed {
        /// The file.
        file: String,
    },
    /// A folder holds no tensor file under a known name.
    #[error("{folder}: holds no checkpoint; looked for {looked_for}")]
    NoModel {
        /// The folder.
        folder: String,
        /// File names that would do.
        looked_for: String,
    },
    /// A folder holds several checkpoints.
    #[error("{folder}: holds several checkpoints: {found}")]
    SeveralModels {
        /// The folder.
        folder: String,
        /// Their file names.
        found: String,
    },
    /// The configuration is not where it was looked for.
    #[error("{file}: no such configuration file")]
    NoConfig {
        /// The path.
        file: String,
    },
    /// A file of another kind than safetensors.
    #[error("{file}: {found} is not supported (supported: a .safetensors file, a Hugging Face folder)")]
    FileKind {
        /// The file.
        file: String,
        /// Its kind, by content.
        found: &'static str,
    },
    /// A tensor has an element type that the format does not know.
    #[error("{file}: tensor {tensor} has element type {found}, which is not supported (known: {})", Dtype::known())]
    UnknownDtype {
        /// The file.
        file: String,
        /// Name of the tensor, quoted and escaped.
        tensor: String,
        /// The element type, quoted and escaped.
        found: String,
    },
    /// A file is larger or smaller than its header says.
    #[error("{file}: expected {expected} bytes by its header, found {found}")]
    Size {
        /// The file.
        file: String,
        /// Bytes by the header.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A file is no safetensors file.
    #[error("{file}: {problem}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// A text is not the JSON that it should be.
    #[error("{file}: {problem}")]
    Json {
        /// The file.
        file: String,
        /// What is wrong, and where.
        problem: String,
    },
    /// The description of a tensor contradicts itself.
    #[error("{file}: tensor {tensor}: {problem}")]
    Tensor {
        /// The file.
        file: String,
        /// Name of the tensor, quoted and escaped.
        tensor: String,
        /// Expected and found.
        problem: String,
    },
    /// A shard index and its shards contradict each other.
    #[error("{file}: {problem}")]
    Index {
        /// Index, or the shard that disagrees with it.
        file: String,
        /// What is wrong.
        problem: String,
    },
    /// The input is larger than a limit.
    #[error("{file}: {what} exceeds the limit of {limit}")]
    Limit {
        /// The file.
        file: String,
        /// What is too large.
        what: &'static str,
        /// The largest value that is read.
        limit: u64,
    },
}

impl CheckpointError {
    /// What the failure means for the caller.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { .. }
            | Self::NotAFile { .. }
            | Self::Changed { .. }
            | Self::NoModel { .. }
            | Self::NoConfig { .. } => ErrorKind::Io,
            Self::FileKind { .. } | Self::UnknownDtype { .. } => ErrorKind::Unsupported,
            Self::Limit { .. } => ErrorKind::Limit,
            Self::SeveralModels { .. }
            | Self::Size { .. }
            | Self::Header { .. }
            | Self::Json { .. }
            | Self::Tensor { .. }
            | Self::Index { .. } => ErrorKind::Malformed,
        }
    }

    /// How to put it right, in one line, where there is such a way.
    pub fn help(&self) -> Option<String> {
        let help = match self {
            Self::NotAFile { .. } => "give a .safetensors file or a Hugging Face folder",
            Self::Changed { .. } => "wait until nothing writes to the checkpoint, then try again",
            Self::NoModel { .. } => "give the .safetensors file itself",
            Self::SeveralModels { .. } => "give the .safetensors file itself, or keep only one of them in the folder",
            Self::NoConfig { .. } => "put config.json beside the checkpoint, or name it with --config FILE",
            Self::FileKind { found, .. } => return super::file_kind::help(found),
            Self::UnknownDtype { .. } => "store the tensor as F32, F16 or BF16",
            Self::Size { expected, found, .. } if found < expected => {
                "the file is cut short; copy or download it again"
            }
            Self::Size { .. } => "remove what follows the tensors, or write the file again",
            Self::Header { .. } | Self::Tensor { .. } => {
                "the file is damaged or was written by a faulty program; write it again with the safetensors library"
            }
            Self::Index { .. } => "copy or download the index and all its shards again",
            Self::Limit { .. } => "no model of a supported family needs that much; check where the file comes from",
            Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => "check the path",
            Self::Io { .. } | Self::Json { .. } => return None,
        };
        Some(help.into())
    }
}

impl From<&WeightError> for ErrorKind {
    /// Element types that are no weights are reported as [`io::ErrorKind::Unsupported`].
    fn from(error: &WeightError) -> Self {
        match error {
            WeightError::Io { source, .. } if source.kind() == io::ErrorKind::Unsupported => Self::Unsupported,
            WeightError::Io { .. } => Self::Io,
            _ => Self::Malformed,
        }
    }
}

/// A path as messages show it: without control characters.
pub(super) fn shown(path: &Path) -> String {
    let mut text = String::new();
    for c in path.to_string_lossy().chars() {
        match c {
            '\\' | '"' | '\'' => text.push(c),
            _ => text.extend(c.escape_debug()),
        }
    }
    text
}

/// A name from a file as messages show it: quoted, escaped, cut where it is long.
pub(super) fn quoted(name: &str) -> String {
    const LONGEST: usize = 160;
    match name.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}

/// Up to ten names, and how many more there are.
pub(super) fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    const MOST: usize = 10;
    let more = names.len().saturating_sub(MOST);
    let text = names.take(MOST).map(quoted).collect::<Vec<_>>().join(", ");
    if more == 0 { text } else { format!("{text} and {more} more") }
}
