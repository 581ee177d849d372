//! MoLM beside goldens of ModuleFormer's released code: reference, ONNX Runtime and tract.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    causal::{assert_logits, assert_whole_passes, empty_past, generate, implementations, inputs, mask_of, past_of},
    columns, data,
    golden::{assert_output, assert_routing},
    json, read_tensors,
};
use moa_export::{
    checkpoint::Checkpoint,
    export::{ExportOptions, SideFileOptions, export},
    reference::Reference,
    source::import,
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{
    Form, LowerError, Options, Part, lower,
    model::{Attention, MoaLayer, Model},
};
use moa_schema::AttentionMode;
use serde_json::Value;

/// Folders, each with a kind of gate, and number of layers, key/value heads and head width.
const MODELS: [(&str, [usize; 3]); 2] = [("molm/mlp", [2, 1, 16]), ("molm/linear", [1, 1, 16])];

/// Tokens of each call of a cached run.
const CALLS: [usize; 3] = [5, 1, 3];

#[test]
fn whole_passes_agree_with_upstream() {
    for (folder, sizes) in MODELS {
        assert_whole_passes(folder, sizes, false, &["full", "one", "right", "left"]);
    }
}

/// Routing of a pass, which upstream gives with its probabilities; padding is routed too.
#[test]
fn routing_agrees_with_upstream() {
    for (folder, sizes) in MODELS {
        let golden = read_tensors(format!("{folder}/goldens.safetensors"));
        let model = import(&Checkpoint::open(&data(folder), None).unwrap(), None).unwrap();
        let reference = Reference::new(&model).unwrap();
        for case in ["full", "one", "right", "left", "steps", "pad_steps"] {
            let ids = golden[&format!("{case}.input_ids")].clone();
            let mask = mask_of(&golden, case, &ids);
            let past = empty_past(sizes, ids.shape()[0]);
            let run = reference.run(Part::Model, &inputs(ids, mask, None, past), None).unwrap();
            let report = assert_routing(&golden, &format!("{case}."), &run.routing, 1e-5);
            assert_eq!(report.decided, report.routed, "{folder}, {case}: every choice has a margin");
        }
    }
}

#[test]
fn cached_steps_agree_with_upstream() {
    for (folder, sizes) in MODELS {
        let golden = read_tensors(format!("{folder}/goldens.safetensors"));
        let manifest = json(format!("{folder}/goldens.json"));
        for (name, mut run) in implementations(folder) {
            for case in ["steps", "pad_steps"] {
                let what = format!("{name}, {case}");
                let maxdiff = manifest[case]["f64_maxdiff"].as_f64().unwrap();
                let expected = |part: &str| &golden[&format!("{case}.{part}")];
                let ids = expected("input_ids");
                let mask = mask_of(&golden, case, ids);
                let (mut past, mut seen) = (empty_past(sizes, ids.shape()[0]), 0);
                for (call, tokens) in CALLS.into_iter().enumerate() {
                    let (from, to) = (seen, seen + tokens);
                    let outputs = run(&inputs(columns(ids, from, to), columns(&mask, 0, to), None, past));
                    let logits = match call {
                        0 => expected("prefill_logits").clone(),
                        _ => tokens_of(expected("decode_logits"), from - CALLS[0]..to - CALLS[0]),
                    };
                    let real = columns(&mask, from, to);
                    assert_logits(&format!("{what}, {from}"), &outputs["logits"], &logits, &real, maxdiff);
                    let caches = ["prefill_cache", "", "decode_cache"][call];
                    assert_caches(&what, &outputs, &golden, &format!("{case}.{caches}"), maxdiff);
                    (past, seen) = (past_of(&outputs), to);
                }
            }
        }
    }
}

/// Compares the caches that upstream has under `prefix`, if it has any.
fn assert_caches(what: &str, outputs: &NamedTensors, golden: &NamedTensors, prefix: &str, maxdiff: f64) {
    for (name, expected) in golden {
        if let Some(cache) = name.strip_prefix(&format!("{prefix}.")).filter(|_| !prefix.ends_with('.')) {
            assert_output(&format!("{what}, {name}"), &outputs[&format!("present.{cache}")], expected, maxdiff);
        }
    }
}

/// Rows `range` of `[B, T, V]`.
fn tokens_of(logits: &Tensor, range: std::ops::Range<usize>) -> Tensor {
    let [batch, tokens, vocabulary] = *logits.shape() else { panic!("{:?}", logits.shape()) };
    let values = logits.to_f64();
    let rows = (0..batch).flat_map(|row| range.clone().map(move |token| row * tokens + token));
    let values = rows.flat_map(|row| values[row * vocabulary..(row + 1) * vocabulary].to_vec()).collect();
    Tensor::new([batch, range.len(), vocabulary], TensorData::F64(values)).unwrap()
}

#[test]
fn generated_tokens_are_upstreams() {
    for (folder, sizes) in MODELS {
        let manifest = json(format!("{folder}/goldens.json"));
        let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect::<Vec<_>>();
        for (name, mut run) in implementations(folder) {
            for single in manifest["generate"]["singles"].as_array().unwrap() {
                let (prompt, expected) = (ids(&single["prompt"]), ids(&single["new_tokens"]));
                assert!(expected.len() > 5, "{folder}: {prompt:?}");
                let found = generate(&mut run, sizes, false, &prompt, expected.len());
                assert_eq!(found, expected, "{name}: {prompt:?}");
            }
        }
    }
}

/// What lies beside a graph without positions, for the tokens that the model was trained on at a time.
#[test]
fn the_folder_says_what_the_graph_takes() {
    let checkpoint = tempfile::tempdir().unwrap();
    std::fs::copy(data("molm/mlp/model.safetensors"), checkpoint.path().join("model.safetensors")).unwrap();
    for (keys, context, eos) in [
        (&[][..], Value::from(16), Value::from(2)),
        (&[("history_length", Value::from(0))], 8.into(), 2.into()),
        (
            &[("history_length", Value::Null), ("block_size", 30.into()), ("eos_token_id", 9.into())],
            542.into(),
            9.into(),
        ),
    ] {
        let mut config = json("molm/mlp/config.json");
        keys.iter().for_each(|(key, value)| config[*key] = value.clone());
        std::fs::write(checkpoint.path().join("config.json"), config.to_string()).unwrap();
        let out = checkpoint.path().join("out");
        let side_files = SideFileOptions { beside: Some(checkpoint.path().into()), ..SideFileOptions::default() };
        let options = ExportOptions { side_files, force: true, ..ExportOptions::default() };
        export(&Checkpoint::open(checkpoint.path(), None).unwrap(), &out, &options).unwrap();
        let read = |name: &str| -> Value { serde_json::from_slice(&std::fs::read(out.join(name)).unwrap()).unwrap() };
        let model = &read("genai_config.json")["model"];
        assert_eq!((&model["context_length"], &model["eos_token_id"]), (&context, &eos), "{keys:?}");
        let inputs: Vec<_> = model["decoder"]["inputs"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(inputs, ["attention_mask", "input_ids", "past_key_names", "past_value_names"]);
        let written = read("config.json");
        assert_eq!((&written["model_type"], &written["n_layer"]), (&"moduleformer".into(), &2.into()));
        assert_eq!((&written["dtype"], written.get("torch_dtype")), (&"float32".into(), None));
    }
}

/// No checkpoint gives such layers, and attention to a memory would leave out what its operator has no place for.
#[test]
fn attention_to_a_memory_is_no_stick_breaking() {
    let checkpoint = Checkpoint::open(&data("molm/mlp"), None).unwrap();
    let Model::CausalLm(model) = import(&checkpoint, None).unwrap() else { panic!("not a causal language model") };
    let sticks = model.layers[0].attention.clone();
    let softmax = Attention { attention_mode: AttentionMode::Softmax, ..sticks.clone() };
    for attention in [sticks, softmax] {
        let module = attention.module.clone();
        let layer = Model::Layer(MoaLayer { attention, cross_attention: true });
        for form in Form::ALL {
            let options = Options { form, ..Options::default() };
            assert_eq!(lower(&layer, options).unwrap_err(), LowerError::CrossAttention { module: module.clone() });
        }
    }
}
