//! Where the fixtures are.

use std::path::{Path, PathBuf};

/// A file or folder of the fixtures.
pub(crate) fn data(path: impl AsRef<Path>) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(path)
}
