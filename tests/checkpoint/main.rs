//! Checkpoints: what opens, what is refused and how, and that values are exact.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/data.rs"]
mod data;
mod files;
mod folders;
mod properties;
mod values;

use std::fs;

use moa_export::checkpoint::{Checkpoint, CheckpointError, ErrorKind};
use tempfile::TempDir;

/// A folder that is removed at the end of a test, with a `config.json`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    folder
}

/// A safetensors file of a header and data.
fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// The header of one tensor.
fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#"{name:?}:{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

/// A file of one tensor "x".
fn single(dtype: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    file_of(&format!("{{{}}}", entry("x", dtype, shape, 0, data.len() as u64)), data)
}

fn open_bytes(folder: &TempDir, bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let path = folder.path().join("model.safetensors");
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path, None)
}

/// The error of a file, checked to be one harmless line that names the file.
fn refusal(bytes: &[u8]) -> (ErrorKind, String) {
    refusal_in(&folder(), "model.safetensors", bytes)
}

fn refusal_in(folder: &TempDir, name: &str, bytes: &[u8]) -> (ErrorKind, String) {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    described(Checkpoint::open(&path, None), name)
}

fn described(result: Result<Checkpoint, CheckpointError>, file: &str) -> (ErrorKind, String) {
    let error = result.expect_err("must be refused");
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.contains(file), "{text}");
    assert!(error.help().is_none_or(|help| !help.is_empty() && !help.contains('\n')));
    (error.kind(), text)
}

#[track_caller]
fn assert_refused(bytes: &[u8], kind: ErrorKind, parts: &[&str]) {
    let (found, text) = refusal(bytes);
    assert_eq!(found, kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[track_caller]
fn assert_header_refused(header: &str, data: &[u8], kind: ErrorKind, parts: &[&str]) {
    assert_refused(&file_of(header, data), kind, parts);
}
