//! `inspect`: checkpoints, configurations, graphs and the paper's tables.

use std::fs;

use moa_export::onnx::proto::StringStringEntryProto;
use serde_json::Value;

use crate::{common::data, model::Model, scene::Scene};

fn json(scene: &Scene, line: &str) -> Value {
    serde_json::from_str(&scene.accepts(&format!("{line} --json"))).unwrap()
}

#[test]
fn a_checkpoint_its_configuration_and_its_export_have_the_same_numbers() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    let lengths = "--source 20 --target 30";
    let checkpoint = json(&scene, &format!("inspect ck {lengths}"));
    let configuration = json(&scene, &format!("inspect --config ck/config.json {lengths}"));
    let export = json(&scene, &format!("inspect out {lengths}"));
    assert_eq!(checkpoint["total"], configuration["total"]);
    assert_eq!(checkpoint["lengths"]["target"], 30);
    for key in ["parameters", "active_parameters", "paper_macs", "full_macs"] {
        assert!(checkpoint["total"][key].as_u64().is_some_and(|number| number > 0));
        assert_eq!(checkpoint["total"][key], export["total"][key], "{key}");
    }
    assert_eq!(export["files"][0]["name"], "encoder_model.onnx");
    assert_eq!(export["files"][1]["metadata"]["moa.part"], "decoder_model");
    let single = json(&scene, "inspect out/encoder_model.onnx --source 20");
    assert!(single["total"]["parameters"].as_u64() < export["total"]["parameters"].as_u64());
}

#[test]
fn the_configuration_of_an_export_is_taken_for_no_checkpoints() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let parts =
        ["out/config.json: it is the configuration of an export", "help: name the checkpoint's with --config FILE"];
    for line in ["inspect --config out/config.json", "ck -o other --config out/config.json"] {
        scene.refuses(line, 4, &parts);
    }
}

/// Four bits are for experts, so that of the embeddings alone is one tensor of eight.
#[test]
fn one_tensor_is_told_as_one() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx --dtype int4");
    let printed = scene.accepts("inspect m.onnx");
    assert!(printed.contains(" values in 1 tensor of int8, "), "{printed}");
}

/// Shapes, types and operators stand in the model; other commands need its values.
#[test]
fn a_graph_is_inspected_without_its_data_file() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out --external-data always");
    let whole = scene.accepts("inspect out");
    fs::remove_file(scene.path("out/decoder_model.onnx.data")).unwrap();
    let outcome = scene.moa("inspect out");
    let told = "note: out/decoder_model.onnx.data is not there; what is shown of its weights is what the model says\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), told));
    assert_eq!(outcome.stdout, whole);
    scene.refuses("run out/decoder_model.onnx --random", 5, &["MOA-E0503", "decoder_model.onnx.data"]);
}

/// A value of metadata that others wrote is one line, whatever it holds.
#[test]
fn metadata_makes_no_lines() {
    let scene = Scene::exported("mlm", "");
    let (key, value) = ("note".to_owned(), "\"x\"\nform               standard".to_owned());
    scene.edit("m.onnx", |model| model.metadata_props.push(StringStringEntryProto { key, value }));
    let printed = scene.accepts("inspect m.onnx");
    assert!(printed.contains(r#"note = "x"\nform               standard"#), "{printed}");
    assert_eq!(printed.lines().filter(|line| line.starts_with("form")).count(), 1, "{printed}");
}

/// `run` and `verify` take a graph whatever its name is.
#[test]
fn a_graph_is_known_without_its_ending() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    scene.write("m", scene.read("m.onnx"));
    assert_eq!(json(&scene, "inspect m")["total"], json(&scene, "inspect m.onnx")["total"]);
    scene.write("w", b"\x08\x01\x12\0\0\0\0\0{");
    scene.refuses("inspect w", 3, &["w: ", "cut short"]);
    scene.write("m.ort", b"\x1c\0\0\0ORTM");
    scene.refuses("inspect m.ort", 3, &["m.ort: an ONNX Runtime model (.ort)", "give the .onnx file"]);
}

#[test]
fn text_names_what_it_counts() {
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out --form standard");
    let standard = scene.accepts("inspect out");
    for part in ["moa_transformer", "not told by the graph: ", "past_key_values.{0..2}.decoder.key float32", "–"] {
        assert!(standard.contains(part), "{part:?} is not in\n{standard}");
    }
    assert!(scene.accepts("inspect ck").contains("multiply-accumulates for 10 tokens; paper: "));
}

#[test]
fn a_vocabulary_replaces_that_of_the_configuration() {
    let scene = Scene::with_fixture("nmt");
    let rows = |rows: u64| {
        let found = json(&scene, &format!("inspect --config ck/config.json --vocab {rows}"));
        found["total"]["parameters"].as_u64().unwrap()
    };
    assert_eq!(rows(1_000) - rows(900), 100 * 128);
    let mut config: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    config.as_object_mut().unwrap().retain(|key, _| !key.ends_with("vocab_size"));
    scene.write("bare.json", config.to_string());
    scene.refuses("inspect --config bare.json", 3, &["bare.json: key \"vocab_size\" is missing", "help: "]);
    scene.accepts("inspect --config bare.json --vocab 120");
}

#[test]
fn an_engine_is_not_taken_for_a_damaged_checkpoint() {
    let scene = Scene::new();
    scene.write("model.plan", [0xa5; 64]);
    for line in ["inspect model.plan", "model.plan -o model.onnx"] {
        scene.refuses(line, 3, &["model.plan: ", "help: an engine is no checkpoint"]);
    }
}

#[test]
fn presets_and_tables_are_listed() {
    let scene = Scene::new();
    let list = scene.accepts("inspect --preset list");
    assert!(list.contains("transformer-base  Transformer base\n") && list.contains("moa-big "), "{list}");
    assert_eq!(json(&scene, "inspect --preset jetmoe-8b")["total"]["parameters"], 8_522_237_952_u64);
    let table = scene.accepts("inspect --table 3");
    assert!(table.contains("14 of 16 printed figures are reproduced"), "{table}");
    let row = table.lines().find(|line| line.contains("(E)") && line.contains("MACs")).unwrap();
    assert!(row.contains("841M") && row.contains("842.95M") && row.contains("not reproduced: "), "{row}");
    assert_eq!(json(&scene, "inspect --table")["rows"].as_array().unwrap().len(), 40);
}

#[test]
fn a_length_that_counts_nothing_is_refused() {
    let scene = Scene::with(&Model::layer());
    scene.accepts("ck -o layer.onnx");
    Model::translator().write(&scene.path("nmt"));
    scene.accepts("nmt -o out");
    scene.accepts("nmt -o standard --form standard");
    for line in ["nmt", "out", "out/decoder_model.onnx", "--config nmt/config.json", "--preset moa-base"] {
        scene.accepts(&format!("inspect {line} --target-seq 7"));
    }
    for line in
        ["ck", "layer.onnx", "out/encoder_model.onnx", "standard", "--config ck/config.json", "--preset jetmoe-8b"]
    {
        let parts = ["--target-seq counts nothing here", "help: give --seq alone"];
        scene.refuses(&format!("inspect {line} --target-seq 7"), 2, &parts);
    }
    for line in ["ck", "layer.onnx", "nmt", "out", "out/encoder_model.onnx", "out/decoder_model.onnx"] {
        scene.accepts(&format!("inspect {line} --seq 7"));
    }
    scene.refuses("inspect standard --seq 7", 2, &["--seq counts nothing here", "help: leave out --seq"]);
    for option in ["--seq 7", "--target-seq 7", "--vocab 7"] {
        let flag = option.split(' ').next().unwrap_or_default();
        let part = format!("{flag} counts nothing here: --preset list names");
        scene.refuses(&format!("inspect --preset list {option}"), 2, &[&part, "--preset NAME"]);
    }
}

#[test]
fn what_cannot_be_inspected_is_refused() {
    let scene = Scene::with(&Model::layer());
    scene.write("not.onnx", "no model");
    scene.accepts("ck -o model.onnx");
    scene.refuses("inspect", 2, &["required", "help: "]);
    scene.refuses("inspect nowhere.onnx", 5, &["nowhere.onnx"]);
    scene.refuses("inspect not.onnx", 3, &["not.onnx"]);
    scene.write("CONFIG.JSON", scene.read("ck/config.json"));
    for file in ["ck/config.json", "CONFIG.JSON"] {
        let help = format!("inspect --config {file}");
        scene.refuses(&format!("inspect {file}"), 2, &["is no checkpoint", &help]);
    }
    scene.refuses("inspect model.onnx --config ck/config.json", 2, &["--config belongs to a checkpoint"]);
    scene.refuses("inspect --preset moa-bas", 2, &["there is no preset \"moa-bas\"", "moa-base"]);
    scene.refuses("inspect --preset moa-base --table 1", 2, &["cannot be used with"]);
    for number in ["0", "4"] {
        scene.refuses(&format!("inspect --table {number}"), 2, &[&format!("{number} is not in 1 to 3")]);
    }
    for option in ["--seq 5", "--target-seq 5"] {
        scene.refuses(&format!("inspect --table 3 {option}"), 2, &["cannot be used with", "--table"]);
    }
    scene.refuses("inspect ck --seq 0", 2, &["--seq"]);
    scene.refuses("inspect ck --target-seq 99999999999", 2, &["--target-seq"]);
    scene.refuses("inspect --config nowhere.json", 5, &["nowhere.json"]);
    scene.write("family.json", r#"{"model_type": "bert"}"#);
    scene.refuses("inspect --config family.json", 4, &["bert", "moa_transformer"]);
}

/// A file that was made of the model beside it is no part of it.
#[test]
fn other_files_of_a_folder_are_not_counted() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    scene.accepts("ck -o out");
    let before = json(&scene, "inspect out");
    let prepared = scene.accepts("prepare out/model.onnx -o out/model.trt.onnx");
    assert!(prepared.contains("wrote out/model.trt.onnx"), "{prepared}");
    let outcome = scene.moa("inspect out --json");
    assert_eq!(serde_json::from_str::<Value>(&outcome.stdout).unwrap(), before);
    assert!(outcome.stderr.contains("note: out/model.trt.onnx is not counted"), "{}", outcome.stderr);
    let alone = json(&scene, "inspect out/model.trt.onnx");
    assert_eq!((&alone["form"], &alone["total"]), (&"fused".into(), &before["total"]));
}

#[test]
fn the_bytes_of_a_checkpoint_are_those_of_its_tensors() {
    for (fixture, dtype, width) in [("nmt", "F32", 4), ("jetmoe/bf16", "BF16", 2)] {
        let scene = Scene::with_fixture(fixture);
        let file = scene.read("ck/model.safetensors");
        let values = file.len() as u64 - 8 - u64::from_le_bytes(*file.first_chunk().unwrap());
        let weights = &json(&scene, "inspect ck")["weights"];
        assert_eq!(weights.as_array().map(Vec::len), Some(1), "{weights}");
        let [bytes, count] = ["bytes", "values"].map(|key| weights[0][key].as_u64().unwrap());
        assert_eq!((weights[0]["dtype"].as_str(), bytes), (Some(dtype), width * count), "{weights}");
        assert!(bytes <= values && bytes * 2 > values, "{weights}, {values}");
        let digits = bytes.to_string().into_bytes();
        let groups: Vec<_> = digits.rchunks(3).rev().map(|group| std::str::from_utf8(group).unwrap()).collect();
        let shown = scene.accepts("inspect ck");
        assert!(shown.contains(&format!(" of {dtype}, {} bytes\n", groups.join(","))), "{shown}");
    }
}

#[test]
fn a_checkpoint_beside_a_graph_is_what_is_counted() {
    for fixture in ["jetmoe/bf16", "molm/pickled"] {
        let scene = Scene::new();
        fs::create_dir(scene.path("ck")).unwrap();
        for entry in fs::read_dir(data(fixture)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), scene.path("ck").join(entry.file_name())).unwrap();
        }
        let before = scene.accepts("inspect ck");
        scene.accepts("ck -o ck/model.onnx");
        assert!(before.contains("\nstored ") && scene.accepts("inspect ck") == before, "{before}");
    }
}

/// Source: `base_architecture` of `fairseq/models/roberta/model.py`, 0.12.2.
#[test]
fn a_masked_language_model_has_the_sizes_of_its_own_source() {
    let scene = Scene::new();
    let keys = r#"{"model_type": "roberta", "vocab_size": 50265, "encoder_attention_heads": 12"#;
    let total = |more: &str| {
        scene.write("config.json", format!("{keys}{more}}}"));
        json(&scene, "inspect --config config.json")["total"].clone()
    };
    let sizes = r#", "encoder_layers": 12, "encoder_embed_dim": 768, "encoder_ffn_embed_dim": 3072"#;
    assert_eq!(total(""), total(sizes));
    let positions = total(r#", "max_positions": 40"#);
    assert_eq!(total(r#", "max_positions": 40, "max_source_positions": 99"#), positions);
    assert_ne!(total(r#", "max_source_positions": 99"#), positions);
}

#[test]
fn sizes_of_dimensions_are_numbers_and_names_texts() {
    let scene = Scene::with_fixture("mlm");
    scene.accepts("ck -o m.onnx");
    let value = json(&scene, "inspect m.onnx");
    assert_eq!(value["files"][0]["outputs"][0]["shape"], serde_json::json!(["batch", "sequence", 67]));
    assert!(scene.accepts("inspect m.onnx").contains("logits float32 [batch, sequence, 67]"));
}
