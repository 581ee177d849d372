//! Hands the hash of the kernel sources to the crate.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rustc-env=MOA_CUDA_SOURCE_HASH={}", source_hash(Path::new("kernels"))?);
    Ok(())
}

/// As `source_hash` in `tools/compile_cuda.py`: names and contents, each with a zero behind it.
fn source_hash(folder: &Path) -> io::Result<String> {
    let entries: io::Result<Vec<PathBuf>> = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let mut files = entries?;
    files.retain(|path| path.extension().is_some_and(|ending| ending == "cu" || ending == "cuh"));
    files.sort();
    let mut hash = Sha256::new();
    for file in files {
        hash.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        hash.update([0]);
        hash.update(fs::read(file)?);
        hash.update([0]);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
