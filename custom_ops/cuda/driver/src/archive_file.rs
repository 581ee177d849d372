//! Where the compiled kernels come from.

use std::borrow::Cow;
use std::{env, fs};

use crate::error::Error;

/// Names a kernel archive that is used in place of the one in this build.
pub const ARCHIVE_VARIABLE: &str = "MOA_CUDA_KERNELS";

/// The archive that was named at build time, empty where none was.
static EMBEDDED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.bin"));

/// The bytes of the kernel archive: the file that [`ARCHIVE_VARIABLE`] names, else the one in this build.
///
/// # Errors
///
/// The file cannot be read, or there is neither.
pub fn find_archive() -> Result<Cow<'static, [u8]>, Error> {
    if let Some(place) = env::var_os(ARCHIVE_VARIABLE).filter(|place| !place.is_empty()) {
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
