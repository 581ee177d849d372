//! Folders: what belongs to a checkpoint, sharded or not, and its configuration.

use std::fs;
#[cfg(unix)]
use std::path::Path;

use moa_export::checkpoint::{Checkpoint, ErrorKind, fuzzing};
use moa_graphs::{TensorDirectory, families::ImportOptions};
use tempfile::TempDir;

#[cfg(unix)]
use super::single;
use super::{data::data, described, entry, file_of, folder};

const INDEX: &str = "model.safetensors.index.json";

/// A file of one-element F32 tensors with values from 1 on.
fn shard(names: &[&str]) -> Vec<u8> {
    shard_with("", names)
}

fn shard_with(metadata: &str, names: &[&str]) -> Vec<u8> {
    let entries: Vec<_> = (0..).step_by(4).zip(names).map(|(at, name)| entry(name, "F32", "[1]", at, at + 4)).collect();
    let data: Vec<_> = (1..=names.len()).flat_map(|value| (value as f32).to_le_bytes()).collect();
    file_of(&format!("{{{metadata}{}}}", entries.join(",")), &data)
}

/// A folder with an index of `weight_map` and the given files.
fn sharded(weight_map: &str, files: &[(&str, Vec<u8>)]) -> TempDir {
    let folder = folder();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    fs::write(folder.path().join(INDEX), format!(r#"{{"metadata":{{}},"weight_map":{{{weight_map}}}}}"#)).unwrap();
    folder
}

#[track_caller]
fn assert_folder_refused(folder: &TempDir, kind: ErrorKind, parts: &[&str]) {
    let (found, text) = described(Checkpoint::open(folder.path(), None), "");
    assert_eq!(found, kind, "{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}

#[track_caller]
fn assert_index_refused(text: &str, kind: ErrorKind, parts: &[&str]) {
    let error = fuzzing::shard_index(text.as_bytes()).expect_err("must be refused");
    let shown = error.to_string();
    assert_eq!(error.kind(), kind, "{shown}");
    assert!(!shown.chars().any(char::is_control), "{shown:?}");
    for part in parts {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
}

fn two_shards() -> [(&'static str, Vec<u8>); 2] {
    [("b.safetensors", shard(&["x", "z"])), ("a.safetensors", shard(&["y"]))]
}

const TWO: &str = r#""x":"b.safetensors","y":"a.safetensors","z":"b.safetensors""#;

#[test]
fn shards_are_one_checkpoint() {
    let folder = sharded(TWO, &two_shards());
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.names(), ["x", "y", "z"]);
    assert_eq!(checkpoint.origin(), folder.path().to_str().unwrap());
    assert!(checkpoint.warnings().is_empty());
    for (name, value, file) in [("x", 1.0, "b.safetensors"), ("y", 1.0, "a.safetensors"), ("z", 2.0, "b.safetensors")] {
        let weight = checkpoint.tensor(name).unwrap();
        assert_eq!(weight.to_f32().unwrap(), [value]);
        assert!(weight.origin().ends_with(file));
    }
}

#[test]
fn shards_without_their_index_say_so() {
    for (ending, first, index) in [
        ("safetensors", "model-00001-of-00002", INDEX),
        ("bin", "pytorch_model-00001-of-00002", "pytorch_model.bin.index.json"),
    ] {
        let folder = folder();
        for number in [2, 1] {
            let name = first.replace("00001", &format!("0000{number}"));
            fs::write(folder.path().join(format!("{name}.{ending}")), shard(&["x"])).unwrap();
        }
        let shard = format!("holds {first}.{ending}, one of several shards, and no {index}, which lists them");
        assert_folder_refused(&folder, ErrorKind::Io, &[&shard]);
    }
}

#[test]
fn shards_may_be_links() {
    let folder = sharded(TWO, &two_shards());
    let blobs = tempfile::tempdir().unwrap();
    for name in ["a.safetensors", "b.safetensors", "config.json", INDEX] {
        let (link, blob) = (folder.path().join(name), blobs.path().join(name));
        fs::copy(&link, &blob).unwrap();
        fs::remove_file(&link).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(blob, link).unwrap();
        #[cfg(not(unix))]
        fs::copy(blob, link).unwrap();
    }
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.tensor("z").unwrap().to_f32().unwrap(), [2.0]);
    fs::remove_file(blobs.path().join("a.safetensors")).unwrap();
    #[cfg(unix)]
    assert_folder_refused(&folder, ErrorKind::Io, &["a.safetensors"]);
}

#[test]
fn names_of_shards_stay_in_the_folder() {
    let long = "s".repeat(256);
    for name in ["../../etc/x", "/etc/x", "a/b", "a\\\\b", "..", ".", "", "a\\u0000b", "C:x", "a\\nb", &long] {
        let text = format!(r#"{{"weight_map":{{"x":"{name}"}}}}"#);
        assert_index_refused(&text, ErrorKind::Malformed, &["tensor \"x\"", "not a plain file name"]);
    }
}

#[test]
fn index_is_strict() {
    let malformed = |text: &str, part: &str| assert_index_refused(text, ErrorKind::Malformed, &[part]);
    malformed("", "not valid JSON");
    malformed("[]", "expected an object");
    malformed("{}", "\"weight_map\" is missing");
    malformed(r#"{"weight_map":[]}"#, "expected an object of file names");
    malformed(r#"{"weight_map":{"x":5}}"#, "expected a string");
    malformed(r#"{"weight_map":{"x":"a","x":"a"}}"#, "\"x\" is repeated");
    malformed(r#"{"weight_map":{},"weight_map":{}}"#, "\"weight_map\" is repeated");
    malformed(r#"{"metadata":{"a":1,"a":1},"weight_map":{}}"#, "\"a\" is repeated");
    malformed(r#"{"metadata":[],"weight_map":{}}"#, "expected an object");
    malformed(r#"{"weight_map":{"a\nb":"a"}}"#, "control character");
    malformed(r#"{"weight_map":{}} x"#, "trailing characters");
    let ok =
        r#"{"metadata":{"total_size":1e3,"a":[[{}]],"b":{"c":null},"d":true,"e":-1},"weight_map":{"x":"a"},"y":[1]}"#;
    assert_eq!(fuzzing::shard_index(ok.as_bytes()).unwrap(), 1);
}

#[test]
fn index_has_limits() {
    let shards: Vec<_> = (0..4097).map(|index| format!("\"t{index}\":\"s{index}\"")).collect();
    let text = format!(r#"{{"weight_map":{{{}}}}}"#, shards.join(","));
    assert_index_refused(&text, ErrorKind::Limit, &["shards", "4096"]);
    let tensors: Vec<_> = (0..200_001).map(|index| format!("\"{index}\":\"s\"")).collect();
    let text = format!(r#"{{"weight_map":{{{}}}}}"#, tensors.join(","));
    assert_index_refused(&text, ErrorKind::Limit, &["tensors", "200000"]);
    let text = format!(r#"{{"weight_map":{{"{}":"s"}}}}"#, "n".repeat(1025));
    assert_index_refused(&text, ErrorKind::Limit, &["name", "1024"]);
    let folder = sharded("", &[]);
    fs::File::create(folder.path().join(INDEX)).unwrap().set_len((64 << 20) + 1).unwrap();
    assert_folder_refused(&folder, ErrorKind::Limit, &["shard index", "67108864"]);
}

#[test]
fn index_and_shards_must_agree() {
    let missing = sharded(TWO, &two_shards()[..1]);
    assert_folder_refused(&missing, ErrorKind::Io, &["a.safetensors"]);
    let absent = sharded(&format!(r#"{TWO},"w":"a.safetensors""#), &two_shards());
    assert_folder_refused(&absent, ErrorKind::Malformed, &["a.safetensors", "lacks tensors", "\"w\""]);
    let unlisted = sharded(r#""x":"b.safetensors","y":"a.safetensors""#, &two_shards());
    assert_folder_refused(&unlisted, ErrorKind::Malformed, &["b.safetensors", "not in the index: \"z\""]);
    let mut twice = two_shards();
    twice[1].1 = shard(&["y", "x"]);
    let twice = sharded(TWO, &twice);
    assert_folder_refused(&twice, ErrorKind::Malformed, &["a.safetensors", "another shard: \"x\""]);
    let names: Vec<_> = (0..25).map(|index| format!("t{index:02}")).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let many = sharded("\"x\":\"a.safetensors\"", &[("a.safetensors", shard(&names))]);
    assert_folder_refused(&many, ErrorKind::Malformed, &["\"t00\"", "\"t09\" and 15 more"]);
}

#[test]
fn total_size_only_warns() {
    let folder = sharded("", &two_shards());
    for (size, warns) in [("12", false), ("12.0", false), ("13", true), ("\"12\"", false)] {
        let text = format!(r#"{{"metadata":{{"total_size":{size}}},"weight_map":{{{TWO}}}}}"#);
        fs::write(folder.path().join(INDEX), text).unwrap();
        let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
        assert_eq!(checkpoint.warnings().len(), usize::from(warns), "{size}");
        assert!(checkpoint.warnings().iter().all(|line| line.contains("13") && line.contains("12 bytes")));
    }
}

#[test]
fn aliases_come_from_shards_and_index() {
    let files = [
        ("b.safetensors", shard_with(r#""__metadata__":{"format":"pt","tied":"y"},"#, &["x", "z"])),
        ("a.safetensors", shard(&["y"])),
    ];
    let folder = sharded(TWO, &files);
    fs::write(
        folder.path().join(INDEX),
        format!(r#"{{"metadata":{{"total_size":12,"knot":"x","tied":"y"}},"weight_map":{{{TWO}}}}}"#),
    )
    .unwrap();
    let checkpoint = Checkpoint::open(folder.path(), None).unwrap();
    assert_eq!(checkpoint.names(), ["x", "y", "z"]);
    assert_eq!(checkpoint.tensor("tied").unwrap().name(), "y");
    assert_eq!(checkpoint.tensor("knot").unwrap().name(), "x");
    fs::write(folder.path().join(INDEX), format!(r#"{{"metadata":{{"tied":"x"}},"weight_map":{{{TWO}}}}}"#)).unwrap();
    assert_folder_refused(&folder, ErrorKind::Malformed, &["\"tied\"", "\"x\"", "\"y\""]);
}

#[test]
fn folder_must_hold_one_model() {
    let none = folder();
    assert_folder_refused(&none, ErrorKind::Io, &["no checkpoint", "model.safetensors, model.safetensors.index.json"]);
    let both = sharded(TWO, &two_shards());
    fs::write(both.path().join("model.safetensors"), shard(&["x"])).unwrap();
    assert_folder_refused(&both, ErrorKind::Malformed, &["several checkpoints", "model.safetensors", INDEX]);
    let one = folder();
    fs::write(one.path().join("model.safetensors"), shard(&["x"])).unwrap();
    fs::write(one.path().join("goldens.safetensors"), shard(&["x"])).unwrap();
    assert_eq!(Checkpoint::open(one.path(), None).unwrap().names(), ["x"]);
}

/// transformers applies it where it loads the folder.
#[test]
fn folders_with_an_adapter_are_refused() {
    let folder = folder();
    fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
    let refused = || {
        assert_folder_refused(&folder, ErrorKind::Unsupported, &["holds a PEFT adapter (adapter_config.json)"]);
        Checkpoint::open(folder.path(), None).unwrap_err().help().unwrap()
    };
    let alone = refused();
    assert!(alone.contains("merge_and_unload()") && alone.ends_with("and give its folder"), "{alone}");
    let single = folder.path().join("model.safetensors");
    fs::write(&single, shard(&["x"])).unwrap();
    assert!(refused().ends_with("give model.safetensors itself to export the base model"));
    assert_eq!(Checkpoint::open(&single, None).unwrap().names(), ["x"]);
    fs::rename(&single, folder.path().join("a.safetensors")).unwrap();
    fs::write(folder.path().join(INDEX), r#"{"metadata":{},"weight_map":{"x":"a.safetensors"}}"#).unwrap();
    assert!(refused().ends_with("move adapter_config.json away to export the base model"));
    fs::remove_file(folder.path().join("adapter_config.json")).unwrap();
    Checkpoint::open(folder.path(), None).unwrap();
}

#[test]
fn missing_files_are_named() {
    let empty = tempfile::tempdir().unwrap();
    let path = empty.path().join("model.safetensors");
    assert_eq!(described(Checkpoint::open(&path, None), "model.safetensors").0, ErrorKind::Io);
    fs::write(&path, shard(&["x"])).unwrap();
    let (kind, text) = described(Checkpoint::open(&path, None), "config.json");
    assert_eq!((kind, text.contains("no such configuration")), (ErrorKind::Io, true), "{text}");
    let error = Checkpoint::open(&path, None).unwrap_err();
    assert!(error.help().unwrap().contains("--config"));
    let other = empty.path().join("other.json");
    fs::write(&other, "{\"a\":1}").unwrap();
    let checkpoint = Checkpoint::open(&path, Some(&other)).unwrap();
    assert!(checkpoint.config().origin().ends_with("other.json"));
}

#[cfg(unix)]
#[test]
fn pipes_folders_and_devices_are_refused_at_once() {
    let folder = folder();
    let pipe = folder.path().join("model.safetensors");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (kind, text) = described(Checkpoint::open(&pipe, None), "model.safetensors");
    assert_eq!((kind, text.contains("expected a regular file")), (ErrorKind::Io, true), "{text}");
    assert_folder_refused(&folder, ErrorKind::Io, &["expected a regular file"]);
    let (kind, _) = described(Checkpoint::open(Path::new("/dev/zero"), None), "/dev/zero");
    assert_eq!(kind, ErrorKind::Io);
    fs::remove_file(&pipe).unwrap();
    fs::create_dir(&pipe).unwrap();
    assert_folder_refused(&folder, ErrorKind::Io, &["model.safetensors: expected a regular file, found a folder"]);
    fs::remove_dir(&pipe).unwrap();
    fs::write(&pipe, single("F32", "[1]", &[0; 4])).unwrap();
    let error = Checkpoint::open(&pipe, Some(Path::new("/dev/null"))).unwrap_err();
    let (text, help) = (error.to_string(), error.help().unwrap());
    assert_eq!(
        (error.kind(), text.as_str()),
        (ErrorKind::Io, "/dev/null: expected a regular file, found a pipe, socket or device")
    );
    assert!(help.contains("a file of JSON") && !help.contains("safetensors"), "{help}");
    fs::remove_file(folder.path().join("config.json")).unwrap();
    fs::create_dir(folder.path().join("config.json")).unwrap();
    assert_folder_refused(&folder, ErrorKind::Io, &["config.json: expected a regular file"]);
}

#[test]
fn configuration_is_strict() {
    let malformed = |text: &str, part: &str| {
        let error = fuzzing::config(text.as_bytes()).expect_err(text);
        let shown = error.to_string();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{shown}");
        assert!(shown.contains(part) && !shown.contains("secret"), "{shown}");
    };
    malformed("", "not valid JSON");
    malformed("secret", "not valid JSON");
    malformed("\"secret\"", "expected an object");
    malformed("[1]", "expected an object");
    malformed("{\"a\":NaN}", "not valid JSON");
    malformed("{\"a\":1e999}", "not valid JSON: number out of range");
    malformed("{\"a\":1,\"a\":1}", "\"a\" is repeated");
    malformed("{\"a\":[{\"b\":{\"c\":1,\"c\":1}}]}", "\"c\" is repeated");
    malformed("{\"a\":1}}", "trailing characters");
    assert!(fuzzing::config("\u{feff}{\"a\":1}".as_bytes()).unwrap().keys().contains_key("a"));
    let nested = |levels: usize| format!("{{\"a\":{}{}}}", "[".repeat(levels - 1), "]".repeat(levels - 1));
    fuzzing::config(nested(64).as_bytes()).unwrap();
    for levels in [65, 100_000] {
        assert_eq!(fuzzing::config(nested(levels).as_bytes()).unwrap_err().kind(), ErrorKind::Limit);
    }
    fuzzing::config(br#"{"a":9223372036854775808,"b":-1,"c":0.5,"d":"8","e":null,"f":[true,{}]}"#).unwrap();
}

#[test]
fn configuration_has_a_limit() {
    let folder = folder();
    fs::write(folder.path().join("model.safetensors"), shard(&["x"])).unwrap();
    let mut text = "{}".to_owned();
    text.push_str(&" ".repeat((4 << 20) - 2));
    fs::write(folder.path().join("config.json"), &text).unwrap();
    Checkpoint::open(folder.path(), None).unwrap();
    text.push(' ');
    fs::write(folder.path().join("config.json"), &text).unwrap();
    assert_folder_refused(&folder, ErrorKind::Limit, &["config.json", "4194304"]);
}

#[test]
fn trained_models_open() {
    let mlm = Checkpoint::open(&data("mlm"), None).unwrap();
    assert_eq!(mlm.names().len(), 62);
    let tied = mlm.tensor("encoder.sentence_encoder.embed_tokens.weight").unwrap();
    assert_eq!(tied.name(), "encoder.lm_head.weight");
    let stored = mlm.tensor("encoder.sentence_encoder.layers.2.ffd.3.bias").unwrap();
    assert_eq!(stored.name(), "encoder.sentence_encoder.layers.2.fc2.bias");
    assert!(mlm.tensor("format").is_none());
    let nmt = Checkpoint::open(&data("nmt").join("model.safetensors"), None).unwrap();
    assert_eq!(nmt.names().len(), 104);
    let variants = fs::read_dir(data("variants")).unwrap();
    let variants: Vec<_> = variants.map(|entry| Checkpoint::open(&entry.unwrap().path(), None).unwrap()).collect();
    assert_eq!(variants.len(), 8);
    for checkpoint in variants.iter().chain([&mlm, &nmt]) {
        assert!(checkpoint.warnings().is_empty());
        for name in checkpoint.names().into_iter().filter(|name| !name.ends_with("_float_tensor")) {
            let weight = checkpoint.tensor(name).unwrap();
            let (single, double) = (weight.to_f32().unwrap(), weight.to_f64().unwrap());
            assert_eq!(single.len(), weight.shape().iter().product::<usize>());
            assert!(single.iter().zip(double).all(|(single, double)| f64::from(*single) == double));
        }
    }
    for checkpoint in variants.iter().chain([&mlm, &nmt]) {
        moa_graphs::families::import(checkpoint.config(), checkpoint, ImportOptions::default()).unwrap();
    }
}
