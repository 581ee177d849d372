//! JetMoE beside goldens of the Hugging Face implementation: reference, ONNX Runtime and tract.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::{columns, data, golden::tolerance, integers, json, read_tensors};
use moa_export::{
    backend::{self, Backend, OrtOptions, Runner},
    checkpoint::Checkpoint,
    export::{ExportOptions, export, import},
    onnx::read_model,
    reference::{Part, Reference},
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{
    Form, LowerError, Options, Precision, lower,
    model::{MoaLayer, Model},
};
use serde_json::Value;

/// Folders with their number of layers, key/value heads and head width.
const MODELS: [(&str, [usize; 3]); 2] = [("jetmoe/sharded", [2, 2, 16]), ("jetmoe/bf16", [2, 2, 16])];

/// Something that computes the graph.
type Run<'a> = Box<dyn FnMut(&NamedTensors) -> NamedTensors + 'a>;

fn reference(folder: &str) -> Run<'static> {
    let model = import(&Checkpoint::open(&data(folder), None).unwrap(), None).unwrap();
    let reference = Reference::new(&model).unwrap();
    Box::new(move |inputs| reference.run(Part::Model, inputs, None).unwrap_or_else(|error| panic!("{error}")).outputs)
}

fn exported(folder: &str, backend: &dyn Backend, form: Form, precision: Precision) -> Run<'static> {
    let directory = tempfile::tempdir().unwrap();
    let graph = Options { form, precision, router_outputs: false, last_logits: false };
    let options = ExportOptions { graph, ..ExportOptions::default() };
    let out = directory.path().join("out");
    export(&Checkpoint::open(&data(folder), None).unwrap(), &out, &options).unwrap();
    let mut runner: Box<dyn Runner> = backend.load(&read_model(&out.join("model.onnx")).unwrap()).unwrap();
    Box::new(move |inputs| runner.run(inputs).unwrap_or_else(|error| panic!("{error}")))
}

/// Everything that must agree with the goldens, by name.
fn implementations(folder: &str) -> Vec<(String, Run<'static>)> {
    let ort = backend::ort(OrtOptions::default()).unwrap();
    let bodies = backend::ort_function(OrtOptions::default()).unwrap();
    let tract = backend::tract().unwrap();
    let mut all = vec![(format!("{folder} reference"), reference(folder))];
    for (backend, form) in [
        (&ort, Form::Function),
        (&ort, Form::Fused),
        (&bodies, Form::Function),
        (&bodies, Form::Standard),
        (&tract, Form::Standard),
    ] {
        let name = format!("{folder} on {} in {} form", backend.name(), form.as_str());
        all.push((name, exported(folder, backend.as_ref(), form, Precision::Fp32)));
    }
    // What is stored as bf16 loses nothing in an export that stores bf16.
    if folder == "jetmoe/bf16" {
        for (backend, form) in [(&ort, Form::Function), (&bodies, Form::Standard)] {
            let name = format!("{folder} on {} in {} form, as bf16", backend.name(), form.as_str());
            all.push((name, exported(folder, backend.as_ref(), form, Precision::Bf16)));
        }
    }
    all
}

fn counted(rows: usize, from: usize, to: usize) -> Tensor {
    let row = (from..to).map(|position| i64::try_from(position).unwrap());
    integers(&[rows, to - from], (0..rows).flat_map(|_| row.clone()).collect())
}

fn empty_past([layers, heads, head]: [usize; 3], batch: usize) -> NamedTensors {
    let names = (0..layers).flat_map(|layer| ["key", "value"].map(|part| format!("past_key_values.{layer}.{part}")));
    names.map(|name| (name, Tensor::new([batch, heads, 0, head], TensorData::F32(Vec::new())).unwrap())).collect()
}

fn past_of(outputs: &NamedTensors) -> NamedTensors {
    let caches = outputs.iter().filter_map(|(name, value)| Some((name.strip_prefix("present.")?, value)));
    caches.map(|(name, value)| (format!("past_key_values.{name}"), value.clone())).collect()
}

fn inputs(ids: Tensor, mask: Tensor, positions: Tensor, past: NamedTensors) -> NamedTensors {
    let mut inputs = past;
    inputs.insert("input_ids".into(), ids);
    inputs.insert("attention_mask".into(), mask);
    inputs.insert("position_ids".into(), positions);
    inputs
}

/// Compares logits at real tokens.
fn assert_logits(what: &str, found: &Tensor, golden: &Tensor, mask: &Tensor, f64_maxdiff: f64) {
    assert_eq!(found.shape(), golden.shape(), "{what}");
    let vocabulary = golden.shape()[2];
    let bound = tolerance(f64_maxdiff, golden);
    let (found, golden, mask) = (found.to_f64(), golden.to_f64(), mask.as_i64().unwrap());
    for (token, _) in mask.iter().enumerate().filter(|(_, real)| **real == 1) {
        let row = token * vocabulary..(token + 1) * vocabulary;
        for (a, b) in found[row.clone()].iter().zip(&golden[row]) {
            assert!((a - b).abs() <= bound, "{what}: token {token}: {a} instead of {b}");
        }
    }
}

#[test]
fn whole_passes_agree_with_upstream() {
    for (folder, sizes) in MODELS {
        let golden = read_tensors(format!("{folder}/goldens.safetensors"));
        let manifest = json(format!("{folder}/goldens.json"));
        for (name, mut run) in implementations(folder) {
            for case in ["full", "one", "long", "right", "left", "left_pos"] {
                let ids = golden[&format!("{case}.input_ids")].clone();
                let [batch, length] = [ids.shape()[0], ids.shape()[1]];
                let given = |part: &str| golden.get(&format!("{case}.{part}")).cloned();
                let mask =
                    given("attention_mask").unwrap_or_else(|| integers(&[batch, length], vec![1; batch * length]));
                let positions = given("position_ids").unwrap_or_else(|| counted(batch, 0, length));
                let outputs = run(&inputs(ids, mask.clone(), positions, empty_past(sizes, batch)));
                let maxdiff = manifest[case]["f64_maxdiff"].as_f64().unwrap();
                let logits = &golden[&format!("{case}.logits")];
                assert_logits(&format!("{name}, {case}"), &outputs["logits"], logits, &mask, maxdiff);
            }
        }
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
            let first =
                inputs(columns(ids, 0, prefill), ones(prefill), counted(batch, 0, prefill), empty_past(sizes, batch));
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
                let next =
                    inputs(columns(ids, at, at + 1), ones(at + 1), counted(batch, at, at + 1), past_of(&outputs));
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

/// Greedy continuation of one prompt, one token a step.
fn generate(run: &mut Run<'_>, sizes: [usize; 3], prompt: &[i64], count: usize) -> Vec<i64> {
    let mut tokens = Vec::new();
    let mut past = empty_past(sizes, 1);
    let (mut next, mut seen) = (prompt.to_vec(), 0);
    while tokens.len() < count {
        let length = next.len();
        let mask = integers(&[1, seen + length], vec![1; seen + length]);
        let outputs = run(&inputs(integers(&[1, length], next), mask, counted(1, seen, seen + length), past));
        let logits = outputs["logits"].to_f64();
        let last = &logits[logits.len() - outputs["logits"].shape()[2]..];
        let best = (0..last.len()).max_by(|a, b| last[*a].total_cmp(&last[*b]).then(b.cmp(a))).unwrap();
        tokens.push(i64::try_from(best).unwrap());
        past = past_of(&outputs);
        seen += length;
        next = vec![tokens[tokens.len() - 1]];
    }
    tokens
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
                assert_eq!(generate(&mut run, sizes, &prompt, expected.len()), expected, "{name}: {prompt:?}");
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
    assert_eq!(norms.map(|norm| norm.epsilon).collect::<Vec<_>>(), [1e-6; 4]);
    assert_eq!(model.norm.epsilon, 0.25);
    assert_eq!(model.output.shape(), model.tokens.shape());
    assert_ne!(model.output.to_f32().unwrap(), model.tokens.to_f32().unwrap(), "the head of this model is its own");
}

/// A logit is `r / sqrt(m + ε)` with `r` and `m` of its token, so that the inverse of its square rises evenly with the
/// last ε. Layers have another, so that caches stay.
#[test]
fn logits_shrink_with_the_root_of_the_last_epsilon() {
    let epsilons = [1e-6, 0.25, 0.75];
    let folders = epsilons.map(|epsilon| configured("rms_norm_eps", epsilon.into()));
    let all = folders.each_ref().map(|folder| implementations(folder.path().to_str().unwrap()));
    let (ids, ones) = (integers(&[1, 4], vec![5, 9, 77, 31]), integers(&[1, 4], vec![1; 4]));
    let inputs = inputs(ids, ones, counted(1, 0, 4), empty_past(MODELS[0].1, 1));
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
            let options = Options { form, precision: Precision::Fp32, router_outputs: false, last_logits: false };
            let refused = lower(&layer, options).unwrap_err();
            assert_eq!(refused, LowerError::NoPositions { module: module.clone() });
        }
    }
}
