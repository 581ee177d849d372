//! The configuration beside the tensors.

use std::{io, path::Path};

use moa_graphs::families::Config;

use super::{
    error::CheckpointError,
    input::read_text,
    json::{Reader, StrictObject},
    limits,
};
use crate::{file_names::REPLACED_SIZES, files::BYTE_ORDER_MARK};

/// Reads a `config.json`.
pub(super) fn read(path: &Path) -> Result<Config, CheckpointError> {
    let (input, text) =
        read_text(path, "the size of the configuration", limits::CONFIG).map_err(|error| match error {
            CheckpointError::Io { file, source } if source.kind() == io::ErrorKind::NotFound => {
                CheckpointError::NoConfig { file }
            }
            CheckpointError::NotAFile { file, found } if found != "a folder" => {
                CheckpointError::ConfigNotAFile { file, found }
            }
            error => error,
        })?;
    parse(input.shown(), &text)
}

/// Parses the text of the configuration file `file`; a byte order mark before it is no part of it.
pub(super) fn parse(file: &str, text: &[u8]) -> Result<Config, CheckpointError> {
    let text = text.strip_prefix(BYTE_ORDER_MARK.as_bytes()).unwrap_or(text);
    let reader = Reader::new(file, "its text");
    let keys = reader.parse(text, StrictObject(&reader))?;
    match keys.contains_key(REPLACED_SIZES) {
        true => Err(CheckpointError::ConfigOfExport { file: file.into() }),
        false => Ok(Config::new(file, keys)),
    }
}
