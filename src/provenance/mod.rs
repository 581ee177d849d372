//! Where a result comes from: the machine, libraries, and files by their hashes.

mod machine;

use std::{
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

pub use machine::{Machine, Moment, Ticks};
pub(crate) use machine::{reset_peak_memory, resident_memory};

use crate::{digest::sha256_of_file, files::name_of};

/// A library that computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Library {
    /// What it is.
    pub name: String,
    /// Its version, or what it says of its build.
    pub version: String,
    /// SHA-256 of the file, where it is one.
    pub sha256: Option<String>,
}

/// A file of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFile {
    /// Model that it belongs to.
    pub model: String,
    /// File name.
    pub file: String,
    /// Its bytes.
    pub bytes: u64,
    /// SHA-256 of them.
    pub sha256: String,
}

impl ModelFile {
    /// Reads the file at `path`, which belongs to `model`.
    ///
    /// # Errors
    ///
    /// Where it cannot be read.
    pub fn of(model: &str, path: &Path) -> Result<Self, ProvenanceError> {
        let (sha256, bytes) = hash_file(path)?;
        Ok(Self { model: model.to_owned(), file: name_of(path), bytes, sha256 })
    }
}

/// A file that a result comes from cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct ProvenanceError {
    /// The file.
    pub path: PathBuf,
    /// Reason the system gave.
    pub source: io::Error,
}

/// SHA-256 and size of a file.
///
/// # Errors
///
/// Where it cannot be read.
pub fn hash_file(path: &Path) -> Result<(String, u64), ProvenanceError> {
    sha256_of_file(path).map_err(|source| ProvenanceError { path: path.to_path_buf(), source })
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_name_and_an_error_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        std::fs::write(&path, "abc").unwrap();
        let file = ModelFile::of("m", &path).unwrap();
        assert_eq!((file.model.as_str(), file.file.as_str(), file.bytes), ("m", "abc", 3));
        let nowhere = folder.path().join("nowhere");
        let error = ModelFile::of("m", &nowhere).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}: ", nowhere.display())), "{error}");
    }
}
