//! Dictionaries of tensors without anything around them, as transformers saved models before there was safetensors.

use std::{collections::BTreeMap, fs};

use moa_export::checkpoint::{Checkpoint, CheckpointError, ErrorKind};
use moa_graphs::TensorDirectory;
use serde_json::json;
use tempfile::TempDir;

use super::{
    data::data,
    export::{assert_same_export, tensors_of},
    f32s, keys, root,
    writer::{Py, dict, global, ordered_dict, storage, tensor, text, whole},
    zip,
};

const SINGLE: &str = "pytorch_model.bin";
const INDEX: &str = "pytorch_model.bin.index.json";
const SHARD: &str = "pytorch_model-00001-of-00002.bin";
const OTHER: &str = "pytorch_model-00002-of-00002.bin";

/// A folder of these files, with a configuration that any family could have.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files.iter().chain(&[("config.json", b"{}".as_slice())]) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The dictionary of these tensors of one float each, which share storages of the same key.
fn floats(tensors: &[(&str, &str)]) -> Vec<u8> {
    let entries = tensors.iter().map(|(name, key)| (text(name), whole("FloatStorage", key, 1))).collect();
    let storages: BTreeMap<&str, Vec<u8>> =
        tensors.iter().map(|(_, key)| (*key, f32s(&[key.parse::<f32>().unwrap()]))).collect();
    let storages: Vec<_> = storages.iter().map(|(key, bytes)| (*key, &**bytes)).collect();
    zip(&ordered_dict(entries).pickle(), &storages)
}

fn index(places: &[(&str, &str)], bytes: u64) -> Vec<u8> {
    let map: BTreeMap<_, _> = places.iter().copied().collect();
    json!({ "metadata": { "total_size": bytes }, "weight_map": map }).to_string().into_bytes()
}

fn value(checkpoint: &Checkpoint, name: &str) -> (String, Vec<f32>) {
    let weight = checkpoint.tensor(name).unwrap();
    (weight.name().to_owned(), weight.to_f32().unwrap())
}

#[track_caller]
fn assert_refused(folder: &TempDir, path: &str, kind: ErrorKind, parts: &[&str]) {
    let error: CheckpointError = Checkpoint::open(&folder.path().join(path), None).unwrap_err();
    let text = format!("{error}; {}", error.help().unwrap_or_default());
    assert_eq!(error.kind(), kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

/// transformers 4.38.2 and torch 2.15.0 wrote the shards, of a model of ModuleFormer's released code, by
/// `save_pretrained(FOLDER, safe_serialization=False, max_shard_size="20KB")`.
#[test]
fn shards_of_transformers_are_exported_like_its_safetensors() {
    let pickled = data("molm/pickled");
    assert_same_export(&pickled, &data("molm/mlp"));
    assert!(Checkpoint::open(&pickled, None).unwrap().warnings().is_empty());
}

#[test]
fn one_file_is_exported_like_safetensors_in_a_folder_and_alone() {
    let original = data("molm/mlp");
    let (tensors, storages) = tensors_of(&Checkpoint::open(&original, None).unwrap(), "");
    let storages: Vec<_> = storages.iter().map(|(bytes, key)| (&**key, &**bytes)).collect();
    let place = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json"] {
        fs::copy(original.join(name), place.path().join(name)).unwrap();
    }
    fs::write(place.path().join(SINGLE), zip(&ordered_dict(tensors).pickle(), &storages)).unwrap();
    assert_same_export(place.path(), &original);
    fs::rename(place.path().join(SINGLE), place.path().join("weights.pt")).unwrap();
    assert_same_export(&place.path().join("weights.pt"), &original);
}

/// transformers stores as safetensors what comes first in its own order.
#[test]
fn tied_tensors_keep_the_first_name_of_the_dictionary() {
    let folder = folder(&[(SINGLE, &floats(&[("model.embed", "7"), ("lm_head", "7"), ("a", "3")]))]);
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.names(), ["a", "model.embed"]);
    assert_eq!(checkpoint.aliases(), ["lm_head"]);
    assert_eq!(value(&checkpoint, "lm_head"), ("model.embed".into(), vec![7.0]));
}

#[test]
fn names_that_fairseq_gives_its_parts_may_be_tensors() {
    let folder = folder(&[(SINGLE, &floats(&[("model", "1"), ("args", "2")]))]);
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.names(), ["args", "model"]);
}

#[test]
fn shards_are_read_and_tied_tensors_found_in_them() {
    let places = [("b", SHARD), ("a", SHARD), ("c", OTHER)];
    for bytes in [8, 12] {
        let folder = folder(&[
            (INDEX, &index(&places, bytes)),
            (SHARD, &floats(&[("b", "1"), ("a", "1")])),
            (OTHER, &floats(&[("c", "2")])),
        ]);
        let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
        assert_eq!((checkpoint.names(), checkpoint.aliases()), (vec!["b", "c"], vec!["a"]));
        assert_eq!(value(&checkpoint, "a"), ("b".into(), vec![1.0]));
        assert_eq!(value(&checkpoint, "c"), ("c".into(), vec![2.0]));
        assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
        assert_eq!(checkpoint.files().len(), 3);
    }
}

/// What tensors have beyond their storages is bounded for all shards together.
#[test]
fn repeated_elements_of_all_shards_count() {
    let side = 1 << 14;
    let shard = |name: &str| {
        let value = storage(global("torch", "FloatStorage"), "0", 1);
        zip(&dict([(name, tensor(value, 0, &[side, side], &[0, 0]))]).pickle(), &[("0", &f32s(&[1.0]))])
    };
    let alone = folder(&[(SINGLE, &shard("a"))]);
    assert_eq!(Checkpoint::open(alone.path(), None).unwrap().names(), ["a"]);
    let both = folder(&[(INDEX, &index(&[("a", SHARD), ("b", OTHER)], 8)), (SHARD, &shard("a")), (OTHER, &shard("b"))]);
    assert_refused(&both, "", ErrorKind::Limit, &[OTHER, "\"b\"", "beyond their storages"]);
}

/// Rows of transposed tensors at the same place of two files are not taken for each other.
#[test]
fn strided_tensors_of_shards_are_their_own() {
    let shard = |name: &str, values: &[f32]| {
        let values_of = storage(global("torch", "FloatStorage"), "0", 4);
        zip(&dict([(name, tensor(values_of, 0, &[2, 2], &[1, 2]))]).pickle(), &[("0", &f32s(values))])
    };
    let folder = folder(&[
        (INDEX, &index(&[("a", SHARD), ("b", OTHER)], 32)),
        (SHARD, &shard("a", &[1.0, 2.0, 3.0, 4.0])),
        (OTHER, &shard("b", &[5.0, 6.0, 7.0, 8.0])),
    ]);
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    for _ in 0..2 {
        assert_eq!(value(&checkpoint, "a").1, [1.0, 3.0, 2.0, 4.0]);
        assert_eq!(value(&checkpoint, "b").1, [5.0, 7.0, 6.0, 8.0]);
    }
}

#[cfg(unix)]
#[test]
fn shards_that_disagree_with_their_index_are_refused() {
    let [one, two] = [floats(&[("a", "1")]), floats(&[("b", "2")])];
    let both: &[_] = &[("a", SHARD), ("b", OTHER)];
    let refused = |places: &[_], second: &[u8], part| {
        let folder = folder(&[(INDEX, &index(places, 8)), (SHARD, &one), (OTHER, second)]);
        assert_refused(&folder, "", ErrorKind::Malformed, &[OTHER, part]);
    };
    let three = [("a", SHARD), ("b", OTHER), ("c", OTHER)];
    refused(&three, &two, "lacks tensors that the index places here: \"c\"");
    refused(&[("a", SHARD), ("c", OTHER)], &two, "holds tensors that are not in the index: \"b\"");
    refused(both, &floats(&[("b", "2"), ("a", "2")]), "the index places in another shard: \"a\"");
    let folder = folder(&[(INDEX, &index(both, 8)), (SHARD, &one)]);
    assert_refused(&folder, "", ErrorKind::Io, &[OTHER, "this shard of the index is not there"]);
    for keys in [keys(), Py::Int(5)] {
        let tensors = dict([("b", whole("FloatStorage", "0", 1))]);
        fs::write(folder.path().join(OTHER), zip(&root(tensors, keys).pickle(), &[("0", &f32s(&[1.0]))])).unwrap();
        assert_refused(
            &folder,
            "",
            ErrorKind::Malformed,
            &[OTHER, "is a checkpoint of fairseq, expected a dictionary"],
        );
    }
    let legacy = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    fs::write(folder.path().join(OTHER), legacy).unwrap();
    assert_refused(&folder, "", ErrorKind::Unsupported, &["of the old format", &format!("{OTHER}.new.pt && mv ")]);
    fs::write(folder.path().join(OTHER), b"no shard at all").unwrap();
    assert_refused(&folder, "", ErrorKind::Malformed, &[OTHER, "neither a zip archive nor a pickle"]);
    fs::write(folder.path().join(OTHER), &two).unwrap();
    fs::write(folder.path().join(INDEX), index(both, 9)).unwrap();
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert!(matches!(checkpoint.warnings(), [warning] if warning.ends_with("is 9, but the tensors have 8 bytes")));
}

#[test]
fn folders_with_several_models_and_shards_alone() {
    let one = floats(&[("a", "1")]);
    let listed = index(&[("a", SHARD)], 4);
    let folder = folder(&[(INDEX, &listed), (SHARD, &one), (SINGLE, &one)]);
    assert_refused(
        &folder,
        "",
        ErrorKind::Malformed,
        &["several checkpoints: pytorch_model.bin, pytorch_model.bin.index"],
    );
    assert_refused(
        &folder,
        SHARD,
        ErrorKind::Unsupported,
        &["one of the shards that pytorch_model.bin.index.json lists"],
    );
    assert_eq!(Checkpoint::open(&folder.path().join(SINGLE), None).unwrap().names(), ["a"]);
    fs::copy(data("molm/mlp").join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    assert!(Checkpoint::open(folder.path(), None).unwrap().names().len() > 1, "safetensors go first");
}

#[test]
fn tensors_under_model_without_keys_of_fairseq_are_of_any_family() {
    let tensors = dict([("b", whole("FloatStorage", "0", 1)), ("a", whole("FloatStorage", "0", 1))]);
    let root = dict([("model", tensors), ("optimizer", dict([])), ("args", Py::None)]);
    let folder = folder(&[(SINGLE, &zip(&root.pickle(), &[("0", &f32s(&[1.0]))]))]);
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!((checkpoint.names(), checkpoint.aliases()), (vec!["b"], vec!["a"]));
}

#[test]
fn what_lies_deeper_or_has_no_values_is_named() {
    let meta = Py::Call(Box::new(global("torch._utils", "_rebuild_meta_tensor_no_storage")), vec![Py::Int(1)]);
    let nested =
        dict([("state_dict", dict([("a", whole("FloatStorage", "0", 1))])), ("step", whole("FloatStorage", "0", 1))]);
    for (root, part) in [
        (dict([("a", meta)]), "tensor \"a\", which is on the device `meta`"),
        (nested, "tensor \"state_dict\" that is a dictionary of its own is not supported"),
    ] {
        let folder = folder(&[(SINGLE, &zip(&root.pickle(), &[("0", &f32s(&[1.0]))]))]);
        assert_refused(&folder, "", ErrorKind::Unsupported, &[part]);
    }
}

#[test]
fn what_is_no_tensor_is_named_and_left_out() {
    let root = dict([("weight", whole("FloatStorage", "0", 1)), ("epoch", Py::Int(1))]);
    let folder = folder(&[(SINGLE, &zip(&root.pickle(), &[("0", &f32s(&[1.0]))]))]);
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.names(), ["weight"]);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(
        warning.ends_with("left out of its dictionary of tensors, since they are no tensors: \"epoch\""),
        "{warning}"
    );
}

#[test]
fn a_configuration_must_lie_beside_it_or_be_named() {
    let folder = folder(&[(SINGLE, &floats(&[("a", "1")]))]);
    let config = folder.path().join("config.json");
    let other = folder.path().join("other.json");
    fs::rename(&config, &other).unwrap();
    assert_refused(&folder, SINGLE, ErrorKind::Io, &["config.json: no such configuration file", "--config FILE"]);
    assert_eq!(Checkpoint::open(folder.path(), Some(&other)).unwrap().names(), ["a"]);
}
