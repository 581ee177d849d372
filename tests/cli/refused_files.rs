//! Files and folders that are no checkpoint.

use std::{fs, os::unix::fs::symlink, process::Command};

use serde_json::{Value, json};

use crate::{
    common::data,
    model::Model,
    scene::{NO_TOKENIZER, Outcome, Scene},
};

const TENSOR: &str = r#""x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;

/// A safetensors file of a header and data.
fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A cache of the Hub, and a file of another name.
#[test]
fn what_a_folder_holds_in_place_of_a_checkpoint_is_named() {
    let scene = Scene::with(&Model::layer());
    let generic = "as a `checkpoint_best.pt` of fairseq";
    fs::create_dir_all(scene.path("hub/snapshots")).unwrap();
    scene.refuses("hub -o m.onnx", 5, &["holds no checkpoint", generic]);
    Model::layer().write(&scene.path("hub/snapshots/4f2a"));
    for folder in ["hub", "hub/snapshots"] {
        scene.refuses(&format!("{folder} -o m.onnx"), 5, &["help: did you mean hub/snapshots/4f2a?"]);
    }
    scene.accepts("hub/snapshots/4f2a -o m.onnx");
    Model::layer().write(&scene.path("hub/snapshots/other"));
    scene.refuses("hub -o m.onnx", 5, &[generic]);
    fs::rename(scene.path("ck/model.safetensors"), scene.path("ck/model.fp16.safetensors")).unwrap();
    scene.refuses("ck -o m.onnx", 5, &["help: did you mean ck/model.fp16.safetensors?"]);
    fs::rename(scene.path("ck/model.fp16.safetensors"), scene.path("ck/W.SAFETENSORS")).unwrap();
    scene.refuses("ck -o m.onnx", 5, &["help: did you mean ck/W.SAFETENSORS?"]);
    scene.write("ck/model.pt", "");
    scene.refuses("ck -o m.onnx", 5, &[generic]);
    for step in [500, 1500, 1000] {
        Model::layer().write(&scene.path(&format!("trainer/checkpoint-{step}")));
    }
    fs::create_dir(scene.path("trainer/checkpoint-9999")).unwrap();
    scene.refuses("trainer -o m.onnx", 5, &["help: did you mean trainer/checkpoint-1500?"]);
    fs::create_dir(scene.path("lightning")).unwrap();
    scene.write("lightning/last.ckpt", "");
    scene.refuses("lightning -o m.onnx", 5, &["help: did you mean lightning/last.ckpt?"]);
    scene.write("lightning/model.pt", "");
    scene.refuses("lightning -o m.onnx", 5, &["help: did you mean lightning/model.pt?"]);
}

#[test]
fn damaged_files_say_where() {
    let sound = Model::layer().file();
    let whole = sound.len();
    let found = format!("found {}", whole - 1);
    let expected = format!("expected {whole} bytes");
    let longer = [sound.as_slice(), b"PK\x03\x04"].concat();
    let repeated = file_of(&format!("{{{TENSOR},{TENSOR}}}"), &[0; 4]);
    let cases: [(&str, Vec<u8>, u8, &[&str]); 12] = [
        ("empty", Vec::new(), 3, &["0 bytes"]),
        ("short", vec![1, 2, 3], 3, &["3 bytes"]),
        ("cut in the header", sound[..100].to_vec(), 3, &["header"]),
        ("cut in the tensors", sound[..whole - 1].to_vec(), 3, &[&expected, &found, "cut short"]),
        ("longer", longer, 3, &[&expected, &format!("found {}", whole + 4)]),
        ("endless header", [&[0xff; 8], &sound[8..]].concat(), 3, &["header"]),
        ("noise", (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect(), 3, &["header"]),
        ("header is no object", file_of("[1]", &[]), 3, &["header"]),
        ("repeated name", repeated, 3, &["\"x\" is repeated"]),
        ("hole", file_of(r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, &[0; 8]), 3, &["\"x\""]),
        (
            "unknown type",
            file_of(&format!("{{{}}}", TENSOR.replace("F32", "F128")), &[0; 4]),
            4,
            &["\"x\"", "\"F128\""],
        ),
        ("large header", file_of(&" ".repeat((16 << 20) + 1), &[]), 7, &["header", "16777216"]),
    ];
    for (what, bytes, code, parts) in cases {
        let scene = Scene::with(&Model::layer());
        scene.write("ck/model.safetensors", bytes);
        let parts: Vec<_> = parts.iter().copied().chain(["ck/model.safetensors"]).collect();
        for line in ["ck -o out", "ck/model.safetensors -o new/m.onnx"] {
            scene.refuses(&format!("{line} --form standard"), code, &parts);
        }
        assert_eq!(scene.names("."), ["ck"], "{what}");
    }
}

#[test]
fn other_formats_are_recognised() {
    let cases: [(&[u8], &[&str]); 7] = [
        (b"PK\x03\x04 and so on and on, for as long as an archive must be", &["a zip archive"]),
        (b"\x80\x02}q\x00(X\x05\x00\x00\x00model", &["pickle"]),
        (b"GGUF\x03\0\0\0\0\0\0\0", &["a GGUF model"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", &["Git LFS pointer", "git lfs pull"]),
        (b"<!DOCTYPE html><html>", &["an HTML page"]),
        (b"\x1f\x8b\x08\0\0\0\0\0", &["a gzip archive"]),
        (b"{\"model_type\": \"moa_layer\"}", &["a JSON text"]),
    ];
    for (bytes, parts) in cases {
        let scene = Scene::with(&Model::layer());
        scene.write("ck/checkpoint.pt", bytes);
        let parts: Vec<_> = parts.iter().copied().chain(["ck/checkpoint.pt", "supported"]).collect();
        scene.refuses("ck/checkpoint.pt -o m.onnx", 4, &parts);
    }
    let torch = [b"PK\x03\x04".as_slice(), &[0; 26], b"archive/data.pkl", &[0; 500]].concat();
    let scene = Scene::with(&Model::layer());
    scene.write("ck/checkpoint.pt", &torch);
    scene.refuses("ck/checkpoint.pt -o m.onnx", 3, &["ck/checkpoint.pt", "cut short"]);
    scene.accepts("ck -o m.onnx");
    scene.refuses("m.onnx -o n.onnx --config ck/config.json", 4, &["m.onnx", "an ONNX model"]);
}

/// A name that says PyTorch is answered in its terms.
#[test]
fn pytorch_files_that_are_none_say_so() {
    let noise: Vec<u8> = (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 | 1).collect();
    let cases: [(&[u8], &str); 4] = [
        (&noise, "neither a zip archive nor a pickle"),
        (b"", "neither a zip archive nor a pickle"),
        (b"PK\x03\x04", "cut short"),
        (b"PK\x03\x04 and so on and on", "cut short"),
    ];
    for (bytes, problem) in cases {
        for name in ["x.pt", "x.PTH", "pytorch_model.bin"] {
            let scene = Scene::new();
            scene.write(name, bytes);
            scene.refuses(&format!("{name} -o m.onnx"), 3, &[name, problem, "torch.save"]);
        }
    }
    let scene = Scene::with(&Model::layer());
    fs::rename(scene.path("ck/model.safetensors"), scene.path("ck/model.pt")).unwrap();
    scene.accepts("ck/model.pt -o m.onnx");
}

#[test]
fn configurations_that_cannot_be_read() {
    let deep = format!("{{\"a\": {}{}}}", "[".repeat(100), "]".repeat(100));
    let cases: [(&[u8], u8, &[&str]); 9] = [
        (b"", 3, &["line 1"]),
        (b"{\"model_type\": ", 3, &["line 1"]),
        (b"[1, 2]", 3, &["expected an object"]),
        (b"\"moa_layer\"", 3, &["expected an object"]),
        (b"{\"a\": 1, \"a\": 2}", 3, &["\"a\" is repeated"]),
        (b"{\"a\": NaN}", 3, &["line 1 column"]),
        (b"\xff\xfe{}", 3, &["UTF-8"]),
        (deep.as_bytes(), 7, &["64"]),
        (&[b' '; (4 << 20) + 1], 7, &["4194304"]),
    ];
    for (text, code, parts) in cases {
        let scene = Scene::with(&Model::layer());
        scene.write("ck/config.json", text);
        let parts: Vec<_> = parts.iter().copied().chain(["ck/config.json"]).collect();
        scene.refuses("ck -o out", code, &parts);
    }
}

#[test]
fn configurations_that_are_not_there() {
    let scene = Scene::with(&Model::layer());
    fs::rename(scene.path("ck/config.json"), scene.path("other.json")).unwrap();
    scene.refuses("ck -o out", 5, &["ck/config.json: no such configuration", "--config FILE"]);
    scene.refuses("ck -o out --config nowhere.json", 5, &["nowhere.json: no such configuration"]);
    scene.refuses("ck -o out --config ck", 5, &["ck: expected a regular file, found a folder"]);
    scene.accepts("ck -o out --config other.json");
}

#[test]
fn folders_that_hold_no_checkpoint() {
    let scene = Scene::with(&Model::layer());
    fs::create_dir(scene.path("empty")).unwrap();
    scene.refuses("empty -o out", 5, &["empty: ", "model.safetensors"]);
    scene.refuses("empty -o out", 5, &["empty: ", "pytorch_model.bin.index.json"]);
    fs::rename(scene.path("ck/model.safetensors"), scene.path("ck/weights.safetensors")).unwrap();
    scene.refuses("ck -o out", 5, &["ck: ", "model.safetensors"]);
    scene.accepts("ck/weights.safetensors -o out");
    scene.refuses("out -o again", 5, &["out: holds an export and no checkpoint", "help: an exported model is no"]);
    fs::create_dir(scene.path("ck/model.safetensors")).unwrap();
    scene.refuses("ck -o out2", 5, &["ck/model.safetensors", "found a folder"]);
}

#[test]
fn a_shard_alone_is_no_checkpoint() {
    let scene = Scene::new();
    Model::layer().write_sharded(&scene.path("ck"), 2);
    let parts = ["is one of the shards that model.safetensors.index.json lists", "help: give the folder"];
    scene.refuses("ck/model-00001-of-00002.safetensors -o m.onnx", 4, &parts);
    let parts = ["is no checkpoint", "help: give the folder that holds it: ck"];
    scene.refuses("inspect ck/model.safetensors.index.json", 2, &parts);
    fs::create_dir(scene.path("lone")).unwrap();
    let shard = "lone/model-00001-of-00002.safetensors";
    fs::copy(scene.path("ck/model-00001-of-00002.safetensors"), scene.path(shard)).unwrap();
    let parts = ["lone: holds model-00001-of-00002.safetensors, one of several shards", "help: copy or download"];
    scene.refuses(&format!("{shard} -o m.onnx"), 5, &parts);
    Model::layer().write(&scene.path("whole"));
    for name in ["model-00001-of-00001.safetensors", "epoch-3-of-10.safetensors"] {
        fs::copy(scene.path("whole/model.safetensors"), scene.path("whole").join(name)).unwrap();
        scene.accepts(&format!("whole/{name} -o {name}.onnx"));
    }
    scene.accepts("ck -o m.onnx");
}

/// Every way in which an index and its shards can disagree.
#[test]
fn shards_that_disagree_with_their_index() {
    type Edit = fn(&mut Value);
    const SECOND: &str = "model-00002-of-00002.safetensors";
    let cases: [(Edit, u8, &[&str]); 12] = [
        (|index| index["weight_map"]["k_proj.weight"] = "./../x".into(), 3, &["k_proj.weight", "\"../x\""]),
        (|index| index["weight_map"]["k_proj.weight"] = "./".into(), 3, &["k_proj.weight", "plain file name"]),
        (|index| index["weight_map"]["k_proj.weight"] = ".//etc/x".into(), 3, &["k_proj.weight", "\"/etc/x\""]),
        (|index| index["weight_map"]["k_proj.weight"] = "a/../x".into(), 3, &["k_proj.weight", "\"a/../x\""]),
        (
            |index| index["weight_map"]["k_proj.weight"] = "model-00003-of-00002.safetensors".into(),
            3,
            &["k_proj.weight"],
        ),
        (|index| index["weight_map"]["k_proj.weight"] = "../x".into(), 3, &["k_proj.weight", "\"../x\""]),
        (|index| index["weight_map"]["k_proj.weight"] = "/etc/passwd".into(), 3, &["k_proj.weight", "/etc/passwd"]),
        (|index| index["weight_map"]["k_proj.weight"] = 7.into(), 3, &["expected"]),
        (|index| index["weight_map"]["more"] = SECOND.into(), 3, &[SECOND, "lacks", "\"more\""]),
        (|index| drop(index["weight_map"].as_object_mut().unwrap().remove("v_proj.weight")), 3, &["v_proj.weight"]),
        (|index| drop(index.as_object_mut().unwrap().remove("weight_map")), 3, &["weight_map"]),
        (|index| *index = json!([]), 3, &["expected an object"]),
    ];
    for (edit, code, parts) in cases {
        let scene = Scene::new();
        Model::layer().write_sharded(&scene.path("ck"), 2);
        let mut index: Value = serde_json::from_slice(&scene.read("ck/model.safetensors.index.json")).unwrap();
        edit(&mut index);
        scene.write("ck/model.safetensors.index.json", index.to_string());
        scene.refuses("ck -o out", code, parts);
    }
    let scene = Scene::new();
    Model::layer().write_sharded(&scene.path("ck"), 2);
    let index = "ck/model.safetensors.index.json";
    let text = String::from_utf8(scene.read(index)).unwrap();
    scene.write(index, text.replacen("\"model-0000", "\"./model-0000", 3));
    scene.accepts("ck -o out");
    fs::remove_dir_all(scene.path("out")).unwrap();
    fs::remove_file(scene.path("ck").join(SECOND)).unwrap();
    scene.refuses("ck -o out", 5, &[SECOND, "is not there", "all its shards again"]);
    scene.write("ck/model.safetensors", Model::layer().file());
    scene.refuses("ck -o out", 3, &["several checkpoints"]);
}

/// Files that would cut no word, so that a model would be fed characters.
#[test]
fn codes_that_are_none() {
    let scene = Scene::with_fixture("nmt");
    fs::copy(data("nmt/dict.txt"), scene.path("ck/dict.txt")).unwrap();
    let help = "subword-nmt learn-bpe";
    for (codes, found) in [
        (Vec::new(), "bpe.codes: holds no merges; a line is expected to be two symbols"),
        (b"#version: 0.2\n".to_vec(), "bpe.codes: holds no merges"),
        (scene.read("ck/dict.txt"), "bpe.codes: line 1: the first merge must be of two characters, found"),
        (b"#version: 0.2\ne n\nen d x\n".to_vec(), "bpe.codes: line 3: expected two symbols that merge"),
    ] {
        scene.write("ck/bpe.codes", codes);
        scene.refuses("ck -o out", 3, &[found, help]);
    }
    fs::copy(data("nmt/bpe.codes"), scene.path("ck/bpe.codes")).unwrap();
    scene.accepts("ck -o out");
}

#[test]
fn dictionaries_that_are_none_say_what_one_is() {
    let scene = Scene::with_fixture("nmt");
    fs::copy(data("nmt/bpe.codes"), scene.path("bpe.codes")).unwrap();
    let parts = ["bpe.codes: line ", "expected a symbol and its count", "help: give the dict.txt"];
    scene.refuses("ck -o out --dict bpe.codes", 3, &parts);
}

/// As a cache of Hugging Face is that was copied without its blobs: what is missing is no file that was left out.
#[test]
fn side_files_that_lead_nowhere_are_missing() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    for name in ["tokenizer.json", "generation_config.json"] {
        let _ = fs::remove_file(scene.path("ck").join(name));
        symlink("../../blobs/0", scene.path("ck").join(name)).unwrap();
        scene.refuses("ck -o out", 5, &[name, "No such file"]);
        fs::remove_file(scene.path("ck").join(name)).unwrap();
    }
    let scene = Scene::with_fixture("nmt");
    symlink("nowhere", scene.path("ck/dict.txt")).unwrap();
    scene.refuses("ck -o out", 5, &["dict.txt", "No such file"]);
}

/// A device never ends, and a pipe may never begin.
#[test]
fn side_files_that_are_no_files_are_not_read() {
    for (fixture, names) in [("jetmoe/bf16", &["tokenizer.json", "tokenizer.model"][..]), ("nmt", &["dict.txt"])] {
        let scene = Scene::with_fixture(fixture);
        for name in names {
            let path = scene.path("ck").join(name);
            symlink("/dev/zero", &path).unwrap();
            scene.refuses("ck -o out", 3, &[name, "not a regular file"]);
            fs::remove_file(path).unwrap();
        }
    }
}

/// Inputs and earlier results too; a pipe that ends is as good as a file.
#[test]
fn devices_are_no_files_and_pipes_are() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let found = "/dev/zero: expected a file, found a device";
    scene.refuses("run out/model.onnx --inputs /dev/zero --outputs o.safetensors", 5, &[found]);
    scene.refuses("bench out --compare /dev/zero", 5, &[found]);
    scene.refuses("profile out --inputs /dev/zero", 3, &["/dev/zero: not a regular file"]);
    for line in ["verify /dev/zero --checkpoint ck", "run /dev/zero --inputs i --outputs o", "bench /dev/zero"] {
        scene.refuses(line, 3, &["/dev/zero: not a regular file"]);
    }
    scene.write("empty", "");
    let mut shell = Command::new("sh");
    let line = "cat empty | \"$0\" run out/model.onnx --inputs /dev/fd/0 --outputs o.safetensors";
    shell.current_dir(scene.folder()).args(["-c", line, env!("CARGO_BIN_EXE_moa-export")]);
    let piped = Outcome::from(shell.output().unwrap());
    assert_eq!(piped.code, Some(3), "{}", piped.stderr);
    assert!(piped.stderr.contains("/dev/fd/0 is no safetensors file"), "{}", piped.stderr);
}

/// It is copied for programs that may know it; `generate` then takes token ids.
#[test]
fn a_tokenizer_that_cannot_be_read_is_noted() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.write("ck/tokenizer.json", r#"{"version": "9.9"}"#);
    let outcome = scene.moa("ck -o out");
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let [before, after] = [
        "note: out/tokenizer.json: is no tokenizer of Hugging Face: ",
        "; `generate` takes token ids with --token-ids alone\n",
    ];
    assert!(outcome.stderr.starts_with(before) && outcome.stderr.ends_with(after), "{}", outcome.stderr);
    assert_eq!(scene.read("out/tokenizer.json"), scene.read("ck/tokenizer.json"));
    fs::remove_file(scene.path("ck/tokenizer.json")).unwrap();
    for (line, told) in [("ck -o bare", NO_TOKENIZER), ("ck -o json --json", NO_TOKENIZER), ("ck -o bare.onnx", "")] {
        let outcome = scene.moa(line);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), told), "{line}");
    }
    scene.write("ck/tokenizer.model", "pieces");
    let outcome = scene.moa("ck -o pieces");
    let told = "note: no tokenizer.json lies beside the checkpoint; transformers makes it of the files there: \
                AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER); `generate` takes token ids with \
                --token-ids alone\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), told));
}
