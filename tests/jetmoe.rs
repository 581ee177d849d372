//! JetMoE beside goldens of the Hugging Face implementation: reference, ONNX Runtime and tract.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{
    causal::{assert_logits, assert_whole_passes, counted, empty_past, generate, implementations, inputs, past_of},
    columns, data, integers, json, read_tensors,
};
use moa_export::{
    checkpoint::Checkpoint,
    source::import,
    tensor::{Tensor, TensorData},
};
use moa_graphs::{
    Form, LowerError, Options, lower,
    model::{MoaLayer, Model, Norm},
};
use serde_json::Value;

/// Folders with their number of layers, key/value heads and head width.
const MODELS: [(&str, [usize; 3]); 2] = [("jetmoe/sharded", [2, 2, 16]), ("jetmoe/bf16", [2, 2, 16])];

#[test]
fn whole_passes_agree_with_upstream() {
    for (folder, sizes) in MODELS {
        assert_whole_passes(folder, sizes, true, &["full", "one", "long", "right", "left", "left_pos"]);
    }
}

#[test]
fn cached_steps_agree_with_upstream() {
    for (folder, sizes) in MODELS {
        let golden = read_tensors(format!("{folder}/goldens.safetensors"));
        let maxdiff = json(format!("{folder}/goldens.json"))["full"]["f64_maxdiff"].as_f64().unwrap();
        let ids = &golden["steps.input_ids"];
        let (batch, prefill) = (ids.shape()[0], 8);
        let ones = |length: usize| integers(&[batch, length], vec![1; batch * length]);
        for (name, mut run) in implementations(folder) {
            let positions = |from, to| Some(counted(batch, from, to));
            let past = empty_past(sizes, batch);
            let first = inputs(columns(ids, 0, prefill), ones(prefill), positions(0, prefill), past);
            let mut outputs = run(&first);
            let logits = &golden["steps.prefill_logits"];
            assert_logits(&name, &outputs["logits"], logits, &ones(prefill), maxdiff);
            for layer in 0..sizes[0] {
                for part in ["key", "value"] {
                    let expected = &golden[&format!("steps.prefill_cache.{layer}.{part}")];
                    let found = &outputs[&format!("present.{layer}.{part}")];
                    common::golden::assert_output(&format!("{name}, cache {layer}"), found, expected, maxdiff);
                }
            }
            let decoded = &golden["steps.decode_logits"];
            for step in 0..decoded.shape()[1] {
                let at = prefill + step;
                let past = past_of(&outputs);
                let next = inputs(columns(ids, at, at + 1), ones(at + 1), positions(at, at + 1), past);
                outputs = run(&next);
                let vocabulary = decoded.shape()[2];
                let rows = decoded.to_f64();
                let rows = rows.chunks(vocabulary).skip(step).step_by(decoded.shape()[1]).flatten().copied().collect();
                let expected = Tensor::new([batch, 1, vocabulary], TensorData::F64(rows)).unwrap();
                assert_logits(&format!("{name}, step {step}"), &outputs["logits"], &expected, &ones(1), maxdiff);
            }
        }
    }
}

#[test]
fn generated_tokens_are_upstreams() {
    for (folder, sizes) in MODELS {
        let manifest = json(format!("{folder}/goldens.json"));
        let ids = |value: &Value| value.as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect::<Vec<_>>();
        for (name, mut run) in implementations(folder) {
            let mut compared = 0;
            for single in manifest["generate"]["singles"].as_array().unwrap() {
                let (prompt, mut expected) = (ids(&single["prompt"]), ids(&single["new_tokens"]));
                // The padding token has a zero embedding: after it every router is a tie, which upstream breaks
                // in no stated order.
                if let Some(first) = expected.iter().position(|id| *id == 0) {
                    expected.truncate(first + 1);
                }
                compared += expected.len();
                assert_eq!(generate(&mut run, sizes, true, &prompt, expected.len()), expected, "{name}: {prompt:?}");
            }
            assert!(compared > 100, "only {compared} tokens of {name} were compared");
        }
    }
}

/// The sharded model, with another value for a key of its configuration.
fn configured(key: &str, value: Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(data("jetmoe/sharded")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let mut config = json("jetmoe/sharded/config.json");
    config[key] = value;
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

/// Upstream builds the norms of its layers without the epsilon of the configuration.
#[test]
fn the_epsilon_of_the_configuration_is_that_of_the_last_norm_alone() {
    let folder = configured("rms_norm_eps", 0.25.into());
    let Model::CausalLm(model) = import(&Checkpoint::open(folder.path(), None).unwrap(), None).unwrap() else {
        panic!("not a causal language model");
    };
    let norms = model.layers.iter().flat_map(|layer| [&layer.attention_norm, &layer.feed_forward_norm]);
    assert_eq!(norms.map(Norm::epsilon).collect::<Vec<_>>(), [1e-6; 4]);
    assert_eq!(model.norm.epsilon(), 0.25);
    assert_eq!(model.output.shape(), model.tokens.shape());
    assert_ne!(model.output.to_f32().unwrap(), model.tokens.to_f32().unwrap(), "the head of this model is its own");
}

/// A logit is `r / sqrt(m + ε)` with `r` and `m` of its token, so that the inverse of its square rises evenly with the
/// last ε. Layers have another, so that caches stay.
#[test]
fn logits_shrink_with_the_root_of_the_last_epsilon() {
    let epsilons = [0.0, 0.25, 4.0];
    let folders = epsilons.map(|epsilon| configured("rms_norm_eps", epsilon.into()));
    let all = folders.each_ref().map(|folder| implementations(folder.path().to_str().unwrap()));
    let (ids, ones) = (integers(&[1, 4], vec![5, 9, 77, 31]), integers(&[1, 4], vec![1; 4]));
    let inputs = inputs(ids, ones, Some(counted(1, 0, 4)), empty_past(MODELS[0].1, 1));
    let [first, second, third] = all;
    for (((name, mut first), (_, mut second)), (_, mut third)) in first.into_iter().zip(second).zip(third) {
        let outputs = [first(&inputs), second(&inputs), third(&inputs)];
        let [a, b, c] = outputs.each_ref().map(|outputs| {
            let logits = outputs["logits"].to_f64();
            let inverse = |row: &[f64]| 1.0 / row.iter().map(|logit| logit * logit).sum::<f64>();
            logits.chunks(outputs["logits"].shape()[2]).map(inverse).collect::<Vec<_>>()
        });
        for token in 0..4 {
            let rise = |to: &[f64], epsilon: f64| (to[token] - a[token]) / (epsilon - epsilons[0]);
            let (near, far) = (rise(&b, epsilons[1]), rise(&c, epsilons[2]));
            assert!(near > 0.0 && (near - far).abs() <= 1e-4 * far, "{name}, token {token}: {near} and {far}");
        }
        for (part, expected) in outputs[0].iter().filter(|(part, _)| part.starts_with("present.")) {
            assert_eq!(outputs[2][part], *expected, "{name}: {part}");
        }
    }
}

/// No checkpoint gives such layers, and no graph but a causal language model's has an input of positions.
#[test]
fn layers_that_rotate_need_positions() {
    let checkpoint = Checkpoint::open(&data("jetmoe/sharded"), None).unwrap();
    let Model::CausalLm(model) = import(&checkpoint, None).unwrap() else { panic!("not a causal language model") };
    let attention = model.layers[0].attention.clone();
    let module = attention.module.clone();
    for cross_attention in [false, true] {
        let layer = Model::Layer(MoaLayer { attention: attention.clone(), cross_attention });
        for form in [Form::Function, Form::Fused, Form::Standard] {
            let options = Options { form, ..Options::default() };
            let refused = lower(&layer, options).unwrap_err();
            assert_eq!(refused, LowerError::NoPositions { module: module.clone() });
        }
    }
}
