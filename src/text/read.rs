//! Reading files of text.

use std::{fs::File, io::Read, path::Path};

use super::TextError;

/// Whether there is a file, or what the system says where it does not let anybody look.
pub(super) fn is_there(path: &Path) -> Result<bool, TextError> {
    path.try_exists().map_err(|source| TextError::Io { path: path.into(), source })
}

/// The text of a regular file of at most `limit` bytes.
pub(super) fn read_text(path: &Path, limit: u64) -> Result<String, TextError> {
    String::from_utf8(read_bytes(path, limit)?).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        TextError::malformed(path, format!("byte {place} is not UTF-8: this is no text file"))
    })
}

/// The bytes of a regular file of at most `limit` bytes: a pipe may never begin, and a device never end.
pub(crate) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, TextError> {
    let io = |source| TextError::Io { path: path.into(), source };
    let metadata = path.metadata().map_err(io)?;
    if metadata.is_dir() {
        return Err(TextError::Folder { path: path.into() });
    }
    if !metadata.is_file() {
        return Err(TextError::malformed(path, "not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path).map_err(io)?.take(limit + 1).read_to_end(&mut bytes).map_err(io)?;
    match bytes.len() as u64 > limit {
        true => Err(TextError::Limit { path: path.into(), limit }),
        false => Ok(bytes),
    }
}
