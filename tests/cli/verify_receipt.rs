//! What `moa-export verify` says of where files and their differences come from.

use moa_export::{
    digest::sha256,
    onnx::proto::{ModelProto, StringStringEntryProto},
};
use prost::Message;
use serde_json::Value;

use crate::{
    common::data,
    scene::{Outcome, Scene, json, require_runtime},
    verify::{damage, exported},
};

const VERIFY: &str = "verify m.onnx --checkpoint ck --backends ort";

#[test]
fn a_result_names_files_and_libraries_by_their_hashes() {
    require_runtime();
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --external-data always");
    let line = format!("{VERIFY},tract --seed 3 --threads 1 --report page.html --json -");
    let value = json(&scene.accepts(&line));
    let receipt = &value["receipt"];
    assert_eq!((&value["format"], &value["of_other_weights"]), (&1.into(), &Value::Null));
    assert_eq!((&receipt["seed"], &receipt["threads"]), (&3.into(), &1.into()));
    let model = scene.model("m.onnx");
    let is_source = |entry: &&StringStringEntryProto| entry.key == "moa.source.sha256";
    assert_eq!(receipt["checkpoint_sha256"], model.metadata_props.iter().find(is_source).unwrap().value);
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    let files = receipt["files"].as_array().unwrap();
    assert_eq!(files.len(), 2, "{receipt}");
    for (file, name) in files.iter().zip(["m.onnx", "m.onnx.data"]) {
        let hash = sha256(&scene.read(name));
        assert_eq!((&file["file"], &file["sha256"]), (&name.into(), &Value::from(hash.as_str())));
        assert!(page.contains(&hash), "{name}");
    }
    let runtimes = receipt["runtimes"].as_array().unwrap();
    let names: Vec<_> = runtimes.iter().map(|runtime| &runtime["name"]).collect();
    assert_eq!(names, ["ONNX Runtime", "libmoa_ort", "tract"]);
    let library = std::fs::read(std::env::var_os("MOA_ORT_LIBRARY").unwrap()).unwrap();
    assert_eq!(runtimes[1]["sha256"], sha256(&library));
}

/// What an export writes beside its graphs is named too; what it cannot have written is not.
#[test]
fn a_result_names_what_lies_beside_the_graphs() {
    require_runtime();
    let scene = Scene::with_fixture("nmt");
    for name in ["dict.txt", "bpe.codes"] {
        std::fs::copy(data("nmt").join(name), scene.path("ck").join(name)).unwrap();
    }
    scene.accepts("ck -o out --with-library");
    for name in ["notes.txt", "tokenizer.json"] {
        scene.write(&format!("out/{name}"), b"{}");
    }
    let too_large = std::fs::File::create(scene.path("out/merges.txt")).unwrap();
    too_large.set_len((1 << 28) + 1).unwrap();
    let value = json(&scene.accepts("verify out --checkpoint ck --backends tract --json -"));
    let files = value["receipt"]["files"].as_array().unwrap();
    let names: Vec<_> = files.iter().map(|file| file["file"].as_str().unwrap()).collect();
    let library = format!("{}moa_ort{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let beside = ["tokenizer.json", "generation.json", "dict.txt", "bpe.codes", &library];
    assert_eq!(names, [&["encoder_model.onnx", "decoder_model.onnx"], &beside[..]].concat());
    for (file, name) in files.iter().zip(names) {
        assert_eq!(file["sha256"], sha256(&scene.read(&format!("out/{name}"))), "{name}");
    }
}

#[test]
fn where_constants_that_differ_come_from_is_told() {
    const GUESS: &str = "most constants differ: this may be an export of another checkpoint";
    let scene = exported("");
    let model = scene.model("m.onnx");
    let mut bytes = scene.read("ck/model.safetensors");
    let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    bytes[header..].iter_mut().step_by(4).for_each(|byte| *byte ^= 1);
    scene.write("ck/model.safetensors", &bytes);
    let outcome = scene.moa(&format!("{VERIFY} --report page.html"));
    let says = "the export was made from another checkpoint: moa.source.sha256 is not the hash of this one";
    let page = String::from_utf8(scene.read("page.html")).unwrap();
    assert!(outcome.code == Some(1) && outcome.stdout.contains(says) && page.contains(says), "{}", outcome.stdout);
    let unsigned = ModelProto {
        metadata_props: model.metadata_props.into_iter().filter(|entry| entry.key != "moa.source.sha256").collect(),
        ..model
    };
    scene.write("m.onnx", unsigned.encode_to_vec());
    let outcome = scene.moa(VERIFY);
    assert!(outcome.code == Some(1) && outcome.stdout.contains(GUESS), "{}", outcome.stdout);
    let scene = exported("");
    damage(&scene);
    let outcome = scene.moa(VERIFY);
    let says =
        "the export was made from these weights; its files were changed, or another configuration or version was used";
    assert!(outcome.stdout.contains(says) && !outcome.stdout.contains(GUESS), "{}", outcome.stdout);
}

/// A script must not take a wrong checkpoint for a model that is not supported.
#[test]
fn a_graph_without_modules_of_the_checkpoint_is_a_fault() {
    require_runtime();
    let scene = Scene::with_fixture("variants/v_ffd_moe");
    scene.accepts("ck -o out");
    let (checkpoint, parts) =
        (data("nmt"), ["MOA-E0118", "it was made from another checkpoint", "help: give the checkpoint"]);
    let line = format!("verify out --backends ort --checkpoint {}", checkpoint.display());
    scene.refuses(&line, 1, &parts);
}

/// What the exit code says of a backend that was asked for, the JSON says too.
#[test]
fn a_verification_without_a_named_library_is_incomplete() {
    let scene = exported("");
    let verify = |options: &str| {
        let mut command = scene.command(&format!("verify m.onnx --checkpoint ck {options}"));
        command.env("MOA_ORT_LIBRARY", "/nowhere/a.so");
        Outcome::of(command)
    };
    let printed = verify("--report page.html");
    let told = "INCOMPLETE: verified on 2 of 4 backends, 2 skipped";
    assert!(printed.code == Some(6) && printed.stdout.ends_with(&format!("\n{told}\n")), "{}", printed.stdout);
    assert!(String::from_utf8(scene.read("page.html")).unwrap().contains(told));
    let outcome = verify("--json -");
    let value = json(&outcome.stdout);
    assert_eq!((outcome.code, &value["passed"], &value["verdict"]), (Some(6), &false.into(), &"incomplete".into()));
    let [library, bodies] = [0, 1].map(|place| &value["backends"][place]);
    assert_eq!(library["skipped"]["kind"], "runtime");
    assert!(library["skipped"]["why"].as_str().unwrap().contains("/nowhere/a.so"), "{library}");
    assert!(bodies["skipped"].is_null() && bodies["graphs"][0]["outputs"].is_object(), "{bodies}");
}

/// Without operators of ours ONNX Runtime runs the same with the library and without, which is one run, unless both are
/// named.
#[test]
fn a_graph_of_standard_operators_is_run_once_by_onnx_runtime() {
    let scene = exported("--form standard");
    let printed = scene.accepts("verify m.onnx --checkpoint ck");
    let told = "ort-function was skipped: the same as ort: the model has none of our operators\n";
    assert!(printed.contains(told) && printed.ends_with("\nverified on 2 of 4 backends, 2 skipped\n"), "{printed}");
    let value = json(&scene.accepts("verify m.onnx --checkpoint ck --json -"));
    let [library, bodies] = [0, 1].map(|place| &value["backends"][place]);
    assert!(library["skipped"].is_null() && bodies["graphs"] == Value::Array(Vec::new()), "{value}");
    assert_eq!((&bodies["backend"], &bodies["skipped"]["kind"]), (&"ort-function".into(), &"same".into()));
    for backends in ["ort,ort-function", "ort-function"] {
        let printed = scene.accepts(&format!("verify m.onnx --checkpoint ck --backends {backends}"));
        assert!(printed.ends_with(&format!("\nverified on {}\n", backends.replace(',', ", "))), "{printed}");
    }
}
