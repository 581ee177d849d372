//! One model, stored in other ways.

use std::{fs, os::unix::fs::symlink};

use half::f16;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::{
    common::data,
    model::{Model, Stored},
    scene::{Entry, NO_DICTIONARY, NO_TOKENIZER, Outcome, Scene, require_runtime},
};

/// What an export writes; equal for equal exports.
fn exported(scene: &Scene, checkpoint: &str, out: &str) -> Vec<(String, Vec<u8>)> {
    scene.accepts(&format!("{checkpoint} -o {out} --external-data always"));
    scene.names(out).into_iter().map(|name| (name.clone(), scene.read(&format!("{out}/{name}")))).collect()
}

#[test]
fn the_same_command_writes_the_same_bytes() {
    for form in ["function", "fused", "standard"] {
        let scene = Scene::with(&Model::translator());
        for out in ["one", "two"] {
            scene.accepts(&format!("ck -o {out} --form {form} --router-outputs"));
        }
        let snapshot = scene.snapshot();
        for name in ["encoder_model.onnx", "decoder_model.onnx"] {
            let [one, two] = ["one", "two"].map(|out| &snapshot[&std::path::Path::new(out).join(name)]);
            assert!(matches!(one, Entry::File(_)) && one == two, "{form}, {name}");
        }
    }
}

/// onnxruntime-genai takes the library from the folder alone, so an export that names it and lacks it says so.
#[test]
fn a_folder_that_lacks_the_library_it_names_says_so() {
    let scene = Scene::new();
    scene.write("lib", "a library with RegisterCustomOps");
    let checkpoint = data("jetmoe/bf16");
    for (options, told) in [
        ("--form fused", Some("note: genai_config.json names the operator library")),
        ("--form fused --with-library", None),
        ("--form function", Some("note: out/")),
        ("--form function --with-library", None),
    ] {
        let mut command = scene.command(&format!("{} -o out --force {options}", checkpoint.display()));
        let outcome = Outcome::from(command.env("MOA_ORT_LIBRARY", scene.path("lib")).output().unwrap());
        let notes = outcome.stderr.replace(NO_TOKENIZER, "");
        assert_eq!((outcome.code, notes.lines().count()), (Some(0), told.iter().count()), "{notes}");
        assert!(told.is_none_or(|told| notes.starts_with(told)), "{options}: {notes}");
    }
    let told = ["--with-library copies the operator library, which computes nothing in --form standard"];
    scene.refuses(&format!("{} -o other --form standard --with-library", checkpoint.display()), 2, &told);
    scene.write("lib", "no library");
    let mut command = scene.command(&format!("{} -o other --with-library", checkpoint.display()));
    let outcome = Outcome::from(command.env("MOA_ORT_LIBRARY", scene.path("lib")).output().unwrap());
    assert_eq!((outcome.code, scene.path("other").exists()), (Some(6), false), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("lib cannot be loaded: it has no entry RegisterCustomOps"), "{}", outcome.stderr);
}

/// As transformers saves the model without its head, and as older versions saved the frequencies too.
#[test]
fn jetmoe_without_prefixes_and_with_frequencies() {
    const BUFFER: &str = "model.layers.1.self_attention.rotary_emb.inv_freq";
    let plain = Model::read("jetmoe/bf16");
    let scene = Scene::with(&plain);
    let expected = exported(&scene, "ck", "out");
    let short =
        |(name, tensor): (&String, &Stored)| (name.strip_prefix("model.").unwrap_or(name).to_owned(), tensor.clone());
    let bare = Model { tensors: plain.tensors.iter().map(short).collect(), ..plain.clone() };
    assert!(bare.tensors.contains_key("norm.weight"));
    bare.write(&scene.path("bare"));
    assert!(exported(&scene, "bare", "from_bare") == expected);

    let frequencies: Vec<_> = (0..8u8).map(|index| 10_000f32.powf(-f32::from(index) / 8.0)).collect();
    let mut buffered = plain.clone();
    buffered.tensors.insert(BUFFER.into(), Stored::floats(&[8], &frequencies));
    buffered.write(&scene.path("buffered"));
    assert!(exported(&scene, "buffered", "from_buffered") == expected);
    buffered.convert_one(BUFFER, Dtype::BF16);
    buffered.write(&scene.path("rounded"));
    assert!(exported(&scene, "rounded", "from_rounded") == expected);
    let rounded = frequencies.iter().map(|value| f16::from_f32(*value).to_f32()).collect::<Vec<_>>();
    buffered.tensors.insert(BUFFER.into(), Stored::floats(&[8], &rounded));
    buffered.write(&scene.path("widened"));
    assert!(exported(&scene, "widened", "from_widened") == expected);

    let near = (0..8u8).map(|index| 10_075f32.powf(-f32::from(index) / 8.0)).collect::<Vec<_>>();
    buffered.tensors.insert(BUFFER.into(), Stored::floats(&[8], &near));
    buffered.write(&scene.path("near"));
    scene.refuses("near -o out2", 4, &["near/config.json", BUFFER, "at index 1", "rope_theta"]);
    buffered.tensors.insert(BUFFER.into(), Stored::floats(&[8], &frequencies));
    buffered.tensor(BUFFER).set(3, 0.5);
    buffered.write(&scene.path("other"));
    scene.refuses("other -o out2", 4, &["other/config.json", BUFFER, "0.5 at index 3", "rope_theta"]);
    buffered.tensors.insert(BUFFER.into(), Stored::floats(&[4], &frequencies[..4]));
    buffered.write(&scene.path("short"));
    scene.refuses("short -o out2", 3, &[BUFFER, "[4]", "[8]"]);
    let mut mixed = bare.clone();
    mixed.tensors.insert("model.norm.weight".into(), bare.tensors["norm.weight"].clone());
    mixed.write(&scene.path("mixed"));
    scene.refuses("mixed -o out2", 3, &["model.embed_tokens.weight", "is missing"]);
}

/// As PyTorch's parallel and compiled modules name their state.
#[test]
fn names_of_parallel_and_compiled_modules() {
    for plain in [Model::read("jetmoe/bf16"), Model::translator()] {
        let scene = Scene::with(&plain);
        let expected = exported(&scene, "ck", "out");
        let renamed = |rename: &dyn Fn(&str) -> String| {
            let tensors = plain.tensors.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect();
            Model { tensors, ..plain.clone() }
        };
        for (index, held) in ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."].into_iter().enumerate()
        {
            let mut wrapped = renamed(&|name| format!("{held}{name}"));
            wrapped.write(&scene.path(&format!("wrapped{index}")));
            assert!(
                exported(&scene, &format!("wrapped{index}"), &format!("from_wrapped{index}")) == expected,
                "{held}"
            );
            wrapped.tensors.insert("other.weight".into(), Stored::floats(&[1], &[0.0]));
            wrapped.write(&scene.path("mixed"));
            scene.refuses("mixed -o out2", 3, &["is missing", &format!("help: the checkpoint has \"{held}")]);
        }
        renamed(&|name| name.replace(".layers.0.", ".layers.0._orig_mod.")).write(&scene.path("inner"));
        scene.refuses("inner -o out2", 3, &["is missing", "help: the checkpoint has \"", ".layers.0._orig_mod."]);
    }
}

/// The second name of a tensor is read however the names of all are prefixed.
#[test]
fn aliases_have_the_prefixes_of_their_tensors() {
    const NAMES: [&str; 2] = ["model.embed_tokens.weight", "lm_head.weight"];
    let mut plain = Model::read("jetmoe/bf16");
    plain.set("tie_word_embeddings", false);
    let embedding = plain.tensors.remove(NAMES[0]).unwrap();
    let scene = Scene::new();
    for [kept, alias] in [NAMES, [NAMES[1], NAMES[0]]] {
        let full = |name: &str| name.to_owned();
        let bare = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
        let write = |folder: &str, rename: &dyn Fn(&str) -> String| {
            let tensors = plain.tensors.iter().map(|(name, tensor)| (rename(name), tensor.clone()));
            let mut model = Model { tensors: tensors.collect(), ..plain.clone() };
            model.tensors.insert(rename(kept), embedding.clone());
            model.metadata.insert(rename(alias), rename(kept));
            model.write(&scene.path(folder));
            exported(&scene, folder, &format!("of-{folder}"))
        };
        let of = |start: &str| format!("{start}.{kept}");
        let expected = write(&of("full"), &full);
        assert!(write(&of("bare"), &bare) == expected, "{kept}");
        assert!(write(&of("module"), &|name| format!("module.{name}")) == expected, "{kept}");
        assert!(write(&of("compiled"), &|name| format!("module._orig_mod.{name}")) == expected, "{kept}");
        assert!(write(&of("both"), &|name| format!("module.{}", bare(name))) == expected, "{kept}");
    }
}

/// Shards, aliases, metadata and the order of tensors are no part of a model.
#[test]
fn the_same_weights_give_the_same_bytes_however_they_are_stored() {
    let plain = Model::translator();
    let scene = Scene::with(&plain);
    let expected = exported(&scene, "ck", "out");

    plain.write_sharded(&scene.path("shards"), 3);
    let mut named = plain.clone();
    named.metadata.insert("format".into(), "other".into());
    named.write(&scene.path("named"));
    let mut single = plain.clone();
    single.metadata.clear();
    for name in plain.tensors.keys().filter(|name| name.contains(".ffd.") || name.ends_with("_float_tensor")) {
        single.tensors.remove(name);
    }
    single.tensors.remove("decoder.output_projection.weight");
    single.write(&scene.path("single"));
    let mut aliased = single.clone();
    aliased.tensors.remove("encoder.embed_tokens.weight");
    for alias in ["encoder.embed_tokens.weight", "decoder.output_projection.weight"] {
        aliased.metadata.insert(alias.into(), "decoder.embed_tokens.weight".into());
    }
    aliased.write(&scene.path("aliased"));
    aliased.write_sharded(&scene.path("both"), 4);

    for checkpoint in ["shards", "named", "single", "aliased", "both"] {
        assert!(exported(&scene, checkpoint, &format!("out-{checkpoint}")) == expected, "{checkpoint}");
    }
}

/// Where a bias and a norm are one tensor, each has the type of its use.
#[test]
fn a_tensor_of_two_uses_has_the_type_of_each() {
    let [kept, alias] = ["encoder.layers.0.final_layer_norm.bias", "encoder.layers.0.fc2.bias"];
    let mut shared = Model::translator();
    shared.tensors.retain(|name, _| name != alias && !name.contains(".ffd."));
    shared.metadata.insert(alias.into(), kept.into());
    require_runtime();
    let scene = Scene::with(&shared);
    for form in ["function", "standard"] {
        let out = format!("out-{form}");
        scene.accepts(&format!("ck -o {out} --dtype fp16 --form {form}"));
        scene.accepts(&format!("verify {out} --checkpoint ck --backends ort-function"));
    }
}

/// Where one parameter is stored under two names, either name will do alone; the trained values are the same.
#[test]
fn either_name_of_a_shared_parameter_is_enough() {
    let plain = Model::translator();
    let scene = Scene::with(&plain);
    let mut other = plain.clone();
    other.tensors.retain(|name, _| !name.contains(".fc1.") && !name.contains(".fc2."));
    other.write(&scene.path("other"));
    let [one, two] = ["ck -o a --json", "other -o b --json"].map(|line| {
        let report: serde_json::Value = serde_json::from_str(&scene.accepts(line)).unwrap();
        report["source_sha256"].clone()
    });
    assert_eq!(one, two);
}

/// Folders of the Hugging Face cache are links to blobs.
#[test]
fn inputs_may_be_links() {
    let scene = Scene::with(&Model::layer());
    fs::create_dir(scene.path("cache")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        symlink(format!("../ck/{name}"), scene.path("cache").join(name)).unwrap();
    }
    symlink("cache", scene.path("latest")).unwrap();
    scene.accepts("ck -o a.onnx");
    scene.accepts("latest -o b.onnx");
    assert_eq!(scene.read("a.onnx"), scene.read("b.onnx"));
}

/// Half, brain and double floats are widened or rounded; the export is still what the checkpoint says.
#[test]
fn other_types_of_float_are_exported_and_verified() {
    require_runtime();
    for dtype in [Dtype::F16, Dtype::BF16, Dtype::F64] {
        let mut model = Model::translator();
        model.convert(dtype);
        let scene = Scene::with(&model);
        let printed = scene.accepts("ck -o out --verify");
        assert!(printed.contains("\nverified on "), "{dtype:?}: {printed}");
        scene.accepts("verify out --checkpoint ck --backends ort");
    }
}

/// In fewer bits the export is what is left of the checkpoint.
#[test]
fn every_precision_is_exported_and_verified() {
    require_runtime();
    for dtype in ["fp16", "bf16", "bf16-products", "int8", "int8-products", "int4", "int4-products"] {
        for stored in [None, Some(Dtype::F64)] {
            let mut model = Model::translator();
            if let Some(stored) = stored {
                model.convert(stored);
            }
            let scene = Scene::with(&model);
            let printed = scene.accepts(&format!("ck -o out --dtype {dtype} --verify"));
            assert!(printed.contains("\nverified on "), "{dtype} from {stored:?}: {printed}");
        }
    }
}

#[test]
fn products_that_may_be_rounded_need_operators_of_ours() {
    let scene = Scene::with(&Model::layer());
    for stored in ["bf16", "int8", "int4"] {
        let dtype = format!("{stored}-products");
        let why = format!(
            "error[MOA-E0409]: dtype \"{dtype}\" is for products of our operators, and the form \"standard\" has none"
        );
        let line = format!("ck -o m.onnx --dtype {dtype} --form standard");
        scene.refuses(&line, 4, &[&why, &format!("help: export with --dtype {stored}\n")]);
        scene.accepts(&format!("ck -o m.onnx --dtype {stored} --form standard --force"));
    }
}

#[test]
fn sharded_folders_are_exported_and_verified() {
    require_runtime();
    let scene = Scene::new();
    Model::read("variants/v_untied").write_sharded(&scene.path("ck"), 3);
    scene.accepts("ck -o out");
    assert!(scene.accepts("verify out --checkpoint ck").contains("\nverified on "));
}

/// What is odd and does no harm is said once by every command.
#[test]
fn oddities_of_checkpoints_are_noted() {
    require_runtime();
    let scene = Scene::new();
    Model::read("variants/v_untied").write_sharded(&scene.path("ck"), 2);
    let index = "ck/model.safetensors.index.json";
    let mut value: Value = serde_json::from_slice(&scene.read(index)).unwrap();
    value["metadata"]["total_size"] = json!(13);
    scene.write(index, value.to_string());
    for line in ["ck -o out --verify", "verify out --checkpoint ck", "inspect ck"] {
        let outcome = scene.moa(line);
        let note = "note: ck/model.safetensors.index.json: \"total_size\" is 13, but the tensors have ";
        assert!(outcome.code == Some(0) && outcome.stderr.starts_with(note), "{line}: {}", outcome.stderr);
        assert_eq!(outcome.stderr.replace(NO_DICTIONARY, "").lines().count(), 1, "{line}: {}", outcome.stderr);
    }
}

/// fairseq's files hold their configuration, and another one beside them is told.
#[test]
fn a_configuration_that_is_not_read_is_noted() {
    let scene = Scene::new();
    fs::copy(data("variants/v_postnorm/checkpoint.pt"), scene.path("checkpoint.pt")).unwrap();
    let own = scene.moa("checkpoint.pt -o own");
    assert!(own.code == Some(0) && !own.stderr.contains("config.json"), "{}", own.stderr);
    scene.write("config.json", "{}");
    let outcome = scene.moa("checkpoint.pt -o out");
    let told = "note: config.json is not read: checkpoint.pt holds its own configuration; --config takes another\n";
    assert!(outcome.code == Some(0) && outcome.stderr.contains(told), "{}", outcome.stderr);
    assert!(scene.read("own/encoder_model.onnx") == scene.read("out/encoder_model.onnx"));
}

/// A key that nothing reads is told where it may be one that is absent.
#[test]
fn misspelt_keys_are_noted() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    let original: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    for line in ["ck -o m.onnx", "inspect ck"] {
        assert_eq!(scene.moa(line).stderr, "", "{line}");
    }
    let mut config = original.as_object().unwrap().clone();
    let theta = config.remove("rope_theta").unwrap();
    config.insert("rope_thetta".into(), theta);
    config.insert("a_key_of_another_program".into(), json!(1));
    scene.write("ck/config.json", Value::Object(config).to_string());
    let told = "note: ck/config.json: nothing reads \"rope_thetta\"; did you mean \"rope_theta\"?\n";
    for line in
        ["ck -o n.onnx", "inspect ck", "inspect --config ck/config.json", "baseline --config ck/config.json -o b"]
    {
        let outcome = scene.moa(line);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), told), "{line}");
    }
}

/// What is not read does no harm: buffers of integers, and values that are no numbers among them.
#[test]
fn buffers_are_not_weights() {
    let mut model = Model::translator();
    let scene = Scene::with(&model);
    scene.accepts("ck -o a");
    let buffer = model.tensor("encoder.version");
    (buffer.dtype, buffer.bytes) = (Dtype::I64, vec![7; 8]);
    model.tensor("decoder.version").set(0, f32::NAN);
    model.tensors.insert("encoder.layers.0._extra_state".into(), Stored::floats(&[1], &[f32::NAN]));
    model.write(&scene.path("ck"));
    scene.accepts("ck -o b");
    assert_eq!(scene.read("a/encoder_model.onnx"), scene.read("b/encoder_model.onnx"));
}

/// transformers 5 writes the base of the rotary embedding into an object, and a head's width may have its other name.
#[test]
fn both_ways_to_write_a_jetmoe_configuration_are_read() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    let original: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    let export = |name: &str, change: &[(&str, Value)]| {
        let mut config = original.clone();
        for (key, value) in change {
            config[key] = value.clone();
        }
        scene.write("ck/config.json", config.to_string());
        scene.accepts(&format!("ck -o {name}.onnx"));
        scene.read(&format!("{name}.onnx"))
    };
    let default = export("default", &[]);
    let older = export("older", &[("rope_theta", json!(100.0)), ("rope_scaling", Value::Null)]);
    let parameters = json!({"rope_theta": 100.0, "rope_type": "default"});
    let newer = export("newer", &[("rope_theta", Value::Null), ("rope_parameters", parameters)]);
    assert!(older == newer && older != default);
    let renamed = export("renamed", &[("kv_channels", Value::Null), ("head_dim", json!(16))]);
    assert!(renamed == default);
}

/// JetMoE's class writes its own ids into every configuration, whatever the vocabulary is.
#[test]
fn tokens_that_no_model_gives_are_left_out_and_named() {
    let scene = Scene::with_fixture("jetmoe/bf16");
    let mut config: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    config["bos_token_id"] = 999.into();
    config["eos_token_id"] = json!([2, 500]);
    scene.write("ck/config.json", config.to_string());
    let check = |out: &str, ids: [Value; 2], told: [&str; 2]| {
        let outcome = scene.moa(&format!("ck -o {out}"));
        assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
        for told in told {
            let line = format!("note: {told} is left out: the model has 128 tokens, and never gives it\n");
            assert!(outcome.stderr.contains(&line), "{}", outcome.stderr);
        }
        let genai: Value = serde_json::from_slice(&scene.read(&format!("{out}/genai_config.json"))).unwrap();
        assert_eq!(["bos_token_id", "eos_token_id"].map(|key| genai["model"][key].clone()), ids);
    };
    let of_config = |id, key| format!("ck/config.json: token {id} of \"{key}\"");
    let [bos, eos] = [of_config(999, "bos_token_id"), of_config(500, "eos_token_id")];
    check("out", [1.into(), 2.into()], [&bos, &eos]);
    scene.write("ck/generation_config.json", json!({ "eos_token_id": 128, "bos_token_id": 3 }).to_string());
    let eos = "ck/generation_config.json: token 128 of \"eos_token_id\"";
    check("generation", [3.into(), json!([])], [eos, eos]);
}

/// What fairseq's RoBERTa takes for granted shows in no tensor: its activation, and embeddings that are not scaled.
#[test]
fn masked_language_models_have_the_defaults_of_roberta() {
    let scene = Scene::with_fixture("mlm");
    let stated: Value = serde_json::from_slice(&scene.read("ck/config.json")).unwrap();
    scene.accepts("ck -o stated.onnx");
    let mut silent = stated.clone();
    for key in ["activation_fn", "no_scale_embedding", "encoder_learned_pos", "layernorm_embedding"] {
        assert!(silent.as_object_mut().unwrap().remove(key).is_some(), "{key}");
    }
    let positions = silent["max_source_positions"].take();
    scene.write("ck/config.json", silent.to_string());
    scene.refuses("ck -o silent.onnx", 3, &["embed_positions.weight", "expected [514, 128]"]);
    silent["tokens_per_sample"] = positions;
    scene.write("ck/config.json", silent.to_string());
    scene.accepts("ck -o silent.onnx");
    assert!(scene.read("silent.onnx") == scene.read("stated.onnx"));
    for (key, value) in [("activation_fn", json!("relu")), ("no_scale_embedding", json!(false))] {
        let mut other = stated.clone();
        other[key] = value;
        scene.write("ck/config.json", other.to_string());
        scene.accepts(&format!("ck -o {key}.onnx"));
        assert!(scene.read(&format!("{key}.onnx")) != scene.read("stated.onnx"), "{key}");
    }
}
