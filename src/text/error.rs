//! Why a vocabulary file is refused.

use std::{
    io,
    path::{Path, PathBuf},
};

pub(super) const MARKED: &str = "begins with a byte order mark; save it as UTF-8 without one";

const CODES: &str = "give the codes that the training's texts were cut with, as `subword-nmt learn-bpe` writes them, \
                     with --bpe-codes FILE, or as bpe.codes beside the dictionary";

const DICTIONARY: &str =
    "give the dict.txt that fairseq-preprocess wrote for the training: a symbol and its count a line";

/// A vocabulary file or `generation.json` was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The system refused to read the file.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A folder stands where a file was expected.
    #[error("{}: expected a file, found a folder", .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
    },
    /// The content breaks the format.
    #[error("{}: {what}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was found, and where.
        what: String,
    },
    /// A file is no dictionary of fairseq.
    #[error("{}: {what}", .path.display())]
    Dictionary {
        /// The file.
        path: PathBuf,
        /// What was found, and where.
        what: String,
    },
    /// A file holds no merges of subword-nmt.
    #[error("{}: {what}", .path.display())]
    Codes {
        /// The file.
        path: PathBuf,
        /// What was found, and where.
        what: String,
    },
    /// The file is larger than this program is willing to read.
    #[error("{}: more than {limit} bytes", .path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// Most bytes that are read.
        limit: u64,
    },
}

impl TextError {
    /// What the user can give in place of a file of another kind.
    pub const fn help(&self) -> Option<&'static str> {
        match self {
            Self::Dictionary { .. } => Some(DICTIONARY),
            Self::Codes { .. } => Some(CODES),
            _ => None,
        }
    }

    pub(super) fn malformed(path: &Path, what: impl Into<String>) -> Self {
        Self::Malformed { path: path.into(), what: what.into() }
    }
}
