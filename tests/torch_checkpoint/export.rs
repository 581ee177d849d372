//! The same weights make the same model, whatever file they come from.

use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};

use moa_export::{
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
};
use moa_graphs::TensorDirectory;
use serde_json::Value;

use super::{
    data::data,
    root,
    writer::{Py, global, namespace, storage, tensor, text},
    zip,
};

/// Names and bytes of the exported files.
fn exported(checkpoint: &Path) -> Vec<(String, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(checkpoint, None).unwrap();
    let report = export(&checkpoint, folder.path(), &ExportOptions::default()).unwrap();
    let named = |path: &Path| (path.file_name().unwrap().to_string_lossy().into_owned(), fs::read(path).unwrap());
    report.files.iter().map(|file| named(&file.path)).collect()
}

#[track_caller]
pub(super) fn assert_same_export(torch: &Path, safetensors: &Path) {
    let (left, right) = (exported(torch), exported(safetensors));
    assert!(!left.is_empty());
    assert_eq!(left.len(), right.len());
    for ((name, bytes), other) in left.iter().zip(&right) {
        assert!((name, bytes) == (&other.0, &other.1), "{name} of {}", torch.display());
    }
}

#[test]
fn fairseq_checkpoints_are_exported_like_their_safetensors() {
    for variant in ["v_ffd_moe", "v_postnorm"] {
        let folder = data("variants").join(variant);
        assert_same_export(&folder.join("checkpoint.pt"), &folder.join("model.safetensors"));
    }
}

#[test]
fn values_are_those_of_the_safetensors() {
    for variant in ["v_ffd_moe", "v_postnorm"] {
        let folder = data("variants").join(variant);
        let torch = Checkpoint::open(&folder.join("checkpoint.pt"), None).unwrap();
        let other = Checkpoint::open(&folder.join("model.safetensors"), None).unwrap();
        for name in other.names() {
            let (left, right) = (torch.tensor(name).unwrap(), other.tensor(name).unwrap());
            assert_eq!((left.shape(), left.stored_type()), (right.shape(), right.stored_type()), "{name}");
            assert_eq!(left.to_f32().unwrap(), right.to_f32().unwrap(), "{name}");
        }
        let tied = torch.tensor("encoder.embed_tokens.weight").unwrap();
        assert_eq!(tied.name(), "decoder.embed_tokens.weight");
    }
}

/// Keys of storages by their bytes.
type Storages = BTreeMap<Vec<u8>, String>;

/// The tensors of a checkpoint as `torch.save` describes them, with `prefix` before all names, and their storages,
/// which equal tensors share.
pub(super) fn tensors_of(checkpoint: &Checkpoint, prefix: &str) -> (Vec<(Py, Py)>, Storages) {
    let mut storages = Storages::new();
    let mut tensors = Vec::new();
    for name in checkpoint.names() {
        let weight = checkpoint.tensor(name).unwrap();
        let mut bytes = Vec::new();
        let mut keep = |block: &[u8]| {
            bytes.extend(block);
            ControlFlow::Continue(())
        };
        weight.read_bytes(&mut keep).unwrap();
        let class = match weight.stored_type() {
            "F32" => "FloatStorage",
            "I8" => "CharStorage",
            other => panic!("{name} is {other}"),
        };
        let shape: Vec<i64> = weight.shape().iter().map(|size| *size as i64).collect();
        let strides: Vec<i64> = (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
        let next = storages.len().to_string();
        let key = storages.entry(bytes).or_insert(next);
        let values = storage(global("torch", class), key, shape.iter().product());
        tensors.push((text(&format!("{prefix}{name}")), tensor(values, 0, &shape, &strides)));
    }
    (tensors, storages)
}

/// The checkpoint of a folder as fairseq writes it.
fn resaved(folder: &Path, prefix: &str, changed: &[(&str, Py)]) -> Vec<u8> {
    let checkpoint = Checkpoint::open(folder, None).unwrap();
    let (tensors, storages) = tensors_of(&checkpoint, prefix);
    let scalar = |value: &Value| match value {
        Value::Bool(flag) => Some(Py::Bool(*flag)),
        Value::String(word) => Some(text(word)),
        Value::Number(number) => number.as_i64().map(Py::Int).or(number.as_f64().map(Py::Float)),
        _ => None,
    };
    let keys = checkpoint.config().keys();
    let keys = keys.iter().filter(|(key, _)| !changed.iter().any(|(name, _)| key == name));
    let keys = keys.filter_map(|(key, value)| Some((text(key), scalar(value)?)));
    let keys = keys.chain(changed.iter().map(|(key, value)| (text(key), value.clone()))).collect();
    let storages: Vec<_> = storages.iter().map(|(bytes, key)| (&**key, &**bytes)).collect();
    zip(&root(Py::Dict(tensors), namespace(Py::Dict(keys))).pickle(), &storages)
}

/// Exports the same checkpoint as it is and as PyTorch's parallel and compiled modules name it.
#[track_caller]
fn assert_prefix_is_no_part(folder: &Path, changed: &[(&str, Py)]) {
    let place = tempfile::tempdir().unwrap();
    let [plain, parallel, compiled] = ["", "module.", "_orig_mod."].map(|prefix| {
        let path = place.path().join(format!("{prefix}pt"));
        fs::write(&path, resaved(folder, prefix, changed)).unwrap();
        path
    });
    assert_same_export(&parallel, &plain);
    assert_same_export(&compiled, &plain);
}

/// Tied tensors are asked for under all of their names where the configuration does not tie them.
#[test]
fn tied_tensors_of_parallel_modules_are_found() {
    let untied = ["share_all_embeddings", "share_decoder_input_output_embed"].map(|key| (key, Py::Bool(false)));
    assert_prefix_is_no_part(&data("variants/v_postnorm"), &untied);
}

/// The family is told by the names of tensors too.
#[test]
fn masked_language_models_of_parallel_modules_are_known() {
    assert_prefix_is_no_part(&data("mlm"), &[]);
}
