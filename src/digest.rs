//! SHA-256 of files and bytes, in hexadecimal.

use std::{
    fs::File,
    io::{self, BufReader},
    path::Path,
};

use sha2::{Digest, Sha256};

/// Bytes of a file that are read at once.
const READ_AT_ONCE: usize = 1 << 20;

/// SHA-256 of `bytes`.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

/// SHA-256 and size of a file, which is never whole in memory.
///
/// # Errors
///
/// Where it cannot be read.
pub fn sha256_of_file(path: &Path) -> io::Result<(String, u64)> {
    let mut hasher = Sha256::new();
    let bytes = io::copy(&mut BufReader::with_capacity(READ_AT_ONCE, File::open(path)?), &mut hasher)?;
    Ok((hexadecimal(&hasher.finalize()), bytes))
}

/// A hash as text.
pub(crate) fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_its_bytes_have_one_hash() {
        // The example of FIPS 180-2.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(b"abc"), expected);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"abc").unwrap();
        assert_eq!(sha256_of_file(file.path()).unwrap(), (expected.to_owned(), 3));
    }
}
