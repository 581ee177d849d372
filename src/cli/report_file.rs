//! A file of results that appears whole when the work is done.

use std::path::{Path, PathBuf};

use super::{Failure, interrupt::Ending, run::output_place};
use crate::onnx::{Staging, WriteError};

/// A file that appears when its content is known; that it can is known before.
pub(super) struct ReportFile {
    path: PathBuf,
    name: String,
    staging: Staging,
}

/// What stands for the standard output where a file of results is named.
pub(super) const STDOUT: &str = "-";

/// Whether `path` is [`STDOUT`].
pub(super) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == STDOUT
}

impl ReportFile {
    /// Begins the file `path`; none where nothing is named, or the standard output.
    ///
    /// # Errors
    ///
    /// Where there can be no such file, or there is one and `force` is not set.
    pub(super) fn begin(path: Option<&Path>, force: bool) -> Result<Option<Self>, Failure> {
        let Some(path) = path.filter(|path| !is_stdout(path)) else { return Ok(None) };
        let (folder, name) = output_place(path)?;
        let staging = Staging::begin(&folder, std::slice::from_ref(&name), force)?;
        Ok(Some(Self { path: path.into(), name, staging }))
    }

    /// Writes the content, which has its name only after [`Self::commit`].
    pub(super) fn fill(mut self, text: &str) -> Result<Self, Failure> {
        self.staging.file::<WriteError>(&self.name, |writer| {
            writer.write_all(text.as_bytes()).map_err(|source| WriteError::Io { path: self.path.clone(), source })
        })?;
        Ok(self)
    }

    /// Moves the file to its place.
    pub(super) fn commit(self) -> Result<(), Failure> {
        self.staging.commit()?;
        Ok(())
    }
}

/// Moves all files that could be filled to their places; the first fault is told when that is done.
pub(super) fn commit_all<const COUNT: usize>(
    files: [Option<Result<ReportFile, Failure>>; COUNT],
    ending: &Ending,
) -> Result<(), Failure> {
    ending.place(|| {
        let placed: Vec<_> = files.into_iter().flatten().map(|file| file.and_then(ReportFile::commit)).collect();
        placed.into_iter().collect()
    })
}
