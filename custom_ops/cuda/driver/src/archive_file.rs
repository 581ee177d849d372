//! Where the compiled kernels come from.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fs::File;
use std::{env, fs};

use moa_schema::ARCHIVE_VARIABLE;

use crate::error::Error;

/// The archive that was named at build time, empty where none was.
static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

/// The file that the environment names.
fn named() -> Option<OsString> {
    env::var_os(ARCHIVE_VARIABLE).filter(|place| !place.is_empty())
}

/// Whether [`find_archive`] has something to read.
pub fn has_archive() -> bool {
    let is_there =
        |place: &OsString| File::open(place).and_then(|file| file.metadata()).is_ok_and(|data| data.is_file());
    named().as_ref().map_or(!EMBEDDED.is_empty(), is_there)
}

/// The bytes of the kernel archive: the file that [`ARCHIVE_VARIABLE`] names, else the one in this build.
///
/// # Errors
///
/// The file cannot be read, or there is neither.
pub fn find_archive() -> Result<Cow<'static, [u8]>, Error> {
    if let Some(place) = named() {
        let read = fs::read(&place).map(Cow::Owned);
        return read.map_err(|error| Error::ArchiveFile {
            place: place.to_string_lossy().into_owned(),
            why: error.to_string(),
        });
    }
    if EMBEDDED.is_empty() {
        return Err(Error::NoArchive { variable: ARCHIVE_VARIABLE });
    }
    Ok(Cow::Borrowed(EMBEDDED))
}
