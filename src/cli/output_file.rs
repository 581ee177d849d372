//! A file that appears whole when the work is done.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

use super::{Failure, interrupt::Ending};
use crate::{
    files::{folder_of, has_ending},
    onnx::Staging,
};

/// A file that appears when its content is known; that it can is known before.
pub(super) struct OutputFile {
    name: String,
    staging: Staging,
}

/// What stands for the standard output where a file of results is named.
pub(super) const STDOUT: &str = "-";

/// Whether `path` is [`STDOUT`].
pub(super) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == STDOUT
}

impl OutputFile {
    /// Begins the file `path`.
    ///
    /// # Errors
    ///
    /// Where there can be no such file, or there is one and `force` is not set.
    pub(super) fn begin(path: &Path, force: bool) -> Result<Self, Failure> {
        let (folder, name) = output_place(path)?;
        let staging = Staging::begin(&folder, std::slice::from_ref(&name), force)?;
        Ok(Self { name, staging })
    }

    /// As [`Self::begin`], in a folder that is there; none where nothing is named, or the standard output.
    ///
    /// # Errors
    ///
    /// As there, and where the folder is missing: its name may be mistyped, and nobody would look for the result there.
    pub(super) fn of_option(path: Option<&Path>, force: bool) -> Result<Option<Self>, Failure> {
        let Some(path) = path.filter(|path| !is_stdout(path)) else { return Ok(None) };
        let folder = folder_of(path);
        if folder.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            return Err(Failure::no_folder(path, folder));
        }
        Self::begin(path, force).map(Some)
    }

    /// Writes the content, which has its name only after [`Self::commit`].
    pub(super) fn fill(mut self, bytes: impl AsRef<[u8]>) -> Result<Self, Failure> {
        self.staging.write(&self.name, bytes.as_ref())?;
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
    files: [Option<Result<OutputFile, Failure>>; COUNT],
    ending: &Ending,
) -> Result<(), Failure> {
    ending.place(|| {
        let placed: Vec<_> = files.into_iter().flatten().map(|file| file.and_then(OutputFile::commit)).collect();
        placed.into_iter().collect()
    })
}

/// Endings of results, by their format.
pub(super) const PAGE: &[&str] = &["html", "htm"];
pub(super) const JSON: &[&str] = &["json"];
pub(super) const CSV: &[&str] = &["csv"];
pub(super) const TENSORS: &[&str] = &["safetensors"];

/// Refuses the name of a result that has an ending which is none of `own`.
pub(super) fn own_ending(path: Option<&Path>, own: &[&str]) -> Result<(), Failure> {
    let has_one = |path: &Path| path.extension().is_some_and(|ending| !ending.is_empty());
    match path.filter(|path| has_one(path) && !has_ending(path, own)) {
        Some(path) => Err(other_format(path, own.first().unwrap_or(&""))),
        None => Ok(()),
    }
}

fn other_format(path: &Path, own: &str) -> Failure {
    let ending = path.extension().unwrap_or_default().display();
    let message = format!("{}: what is written is {own}, not .{ending}", path.display());
    Failure::output_name(message, &format!("give NAME.{own}"))
}

/// The folder of an output, and its name there.
pub(super) fn output_place(path: &Path) -> Result<(PathBuf, String), Failure> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
        let help = "give the name of a file in UTF-8, not of a folder";
        return Err(Failure::usage(format!("{} names no file", path.display()), help));
    };
    Ok((folder_of(path).to_path_buf(), name.to_owned()))
}
