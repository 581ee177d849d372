//! A file of results that appears whole when the work is done.

use std::path::{Path, PathBuf};

use super::{Failure, run::output_place};
use crate::onnx::{Staging, WriteError};

/// A file that appears when its content is known; that it can is known before.
pub(super) struct ReportFile {
    path: PathBuf,
    name: String,
    staging: Staging,
}

impl ReportFile {
    pub(super) fn begin(path: &Path, force: bool) -> Result<Self, Failure> {
        let (folder, name) = output_place(path)?;
        let staging = Staging::begin(&folder, std::slice::from_ref(&name), force)?;
        Ok(Self { path: path.into(), name, staging })
    }

    pub(super) fn write(mut self, text: &str) -> Result<(), Failure> {
        self.staging.file::<WriteError>(&self.name, |writer| {
            writer.write_all(text.as_bytes()).map_err(|source| WriteError::Io { path: self.path.clone(), source })
        })?;
        self.staging.commit()?;
        Ok(())
    }
}
