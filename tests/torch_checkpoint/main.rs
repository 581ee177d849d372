//! PyTorch checkpoints: what opens, what is refused and how, and that values are exact.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod archives;
mod configuration;
#[path = "../common/data.rs"]
mod data;
mod export;
mod pickles;
mod properties;
mod state_dict;
mod tensors;
mod writer;

use std::fs;

use moa_export::checkpoint::{Checkpoint, CheckpointError, ErrorKind};
use tempfile::TempDir;
use writer::{Member, Py, TRAILING, Zip, dict, namespace, text};

const NAME: &str = "checkpoint.pt";

/// The configuration of every checkpoint that a test does not give one.
fn keys() -> Py {
    namespace(dict([("arch", text("moa_transformer_base"))]))
}

/// The root of a checkpoint.
fn root(model: Py, keys: Py) -> Py {
    dict([("args", Py::None), ("cfg", dict([("model", keys)])), ("model", model), ("extra_state", dict([]))])
}

/// The entries that `torch.save` writes.
fn members(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<Member> {
    let mut members = vec![
        Member::new("checkpoint/data.pkl", pickle),
        Member::new("checkpoint/.format_version", b"1"),
        Member::new("checkpoint/byteorder", b"little"),
    ];
    members.extend(storages.iter().map(|(key, data)| Member::new(&format!("checkpoint/data/{key}"), data)));
    members.push(Member::new("checkpoint/version", b"3\n"));
    for member in &mut members {
        member.flags = TRAILING;
    }
    members
}

fn zip(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    Zip { members: members(pickle, storages), ..Zip::default() }.bytes()
}

/// A file of these tensors.
fn file_of<const COUNT: usize>(tensors: [(&str, Py); COUNT], storages: &[(&str, &[u8])]) -> Vec<u8> {
    zip(&root(dict(tensors), keys()).pickle(), storages)
}

fn open_bytes(folder: &TempDir, bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let path = folder.path().join(NAME);
    fs::write(&path, bytes).unwrap();
    Checkpoint::open(&path, None)
}

/// An open checkpoint, and the folder that must outlive it.
fn opened(bytes: &[u8]) -> (Checkpoint, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (open_bytes(&folder, bytes).unwrap(), folder)
}

/// The error of a file, checked to be one harmless line that names the file.
fn refusal(bytes: &[u8]) -> (ErrorKind, String) {
    let error = open_bytes(&tempfile::tempdir().unwrap(), bytes).expect_err("must be refused");
    let text = error.to_string();
    assert!(!text.chars().any(char::is_control), "{text:?}");
    assert!(text.contains(NAME), "{text}");
    assert!(text.len() < 1000, "{text}");
    assert!(error.help().is_some_and(|help| !help.is_empty() && !help.contains('\n')));
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

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}
