//! Goldens of the upstream code on every backend, in every form that the backend takes.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;

use common::{
    decoder_inputs,
    golden::{ModelCase, VARIANTS, assert_output, layer_cases, masked_lm, translation, variant},
    token_inputs,
};
use moa_export::{
    backend::{self, Backend, Installation, OrtOptions, Ranges, Runner, TensorRtOptions},
    engine::Plugin,
    export::DEFAULT_OPSET,
    onnx::{encode, read_model},
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{Form, Options, Precision, lower, model::Model};

/// One backend with one form.
struct Setting {
    backend: Box<dyn Backend>,
    form: Form,
}

impl Setting {
    fn all() -> Vec<Self> {
        let ort = || backend::ort(OrtOptions::default()).unwrap();
        let bodies = || backend::ort_function(OrtOptions::default()).unwrap();
        let tract = || backend::tract().unwrap();
        let mut all = vec![
            Self { backend: ort(), form: Form::Function },
            Self { backend: ort(), form: Form::Fused },
            Self { backend: bodies(), form: Form::Function },
            Self { backend: bodies(), form: Form::Standard },
            Self { backend: tract(), form: Form::Function },
            Self { backend: tract(), form: Form::Standard },
        ];
        // Before 10.0, TensorRT has no type for the routing that these cases compare.
        if Installation::open().is_ok_and(|here| here.release().plugin == Plugin::V3) {
            let ranges = Ranges { batch: [1, 2, 16], past: [0, 8, 256], tokens: [1, 8, 256], named: Vec::new() };
            let tensorrt =
                || backend::tensorrt(TensorRtOptions { ranges: ranges.clone(), ..TensorRtOptions::default() });
            all.push(Self { backend: tensorrt(), form: Form::Function });
            all.push(Self { backend: tensorrt(), form: Form::Standard });
        }
        all
    }

    fn label(&self, what: &str) -> String {
        format!("{what} on {} in {} form", self.backend.name(), self.form.as_str())
    }

    /// Runners of the graphs of `model`, with router outputs, in the order of the files.
    fn load(&self, model: &Model, folder: &Path) -> Vec<Box<dyn Runner>> {
        let graphs = lower(
            model,
            Options { form: self.form, precision: Precision::Fp32, router_outputs: true, last_logits: false },
        )
        .unwrap();
        graphs
            .iter()
            .map(|graph| {
                let path = folder.join(format!("{}.onnx", graph.part.as_str()));
                let mut file = std::fs::File::create(&path).unwrap();
                encode(&graph.graph, DEFAULT_OPSET, None).unwrap().write(&[], &mut file).unwrap();
                drop(file);
                self.backend.load(&read_model(&path).unwrap()).unwrap_or_else(|error| panic!("{error}"))
            })
            .collect()
    }
}

fn run(runner: &mut Box<dyn Runner>, inputs: &NamedTensors) -> NamedTensors {
    runner.run(inputs).unwrap_or_else(|error| panic!("{error}"))
}

/// The chosen experts among `outputs` are upstream's wherever its margin exceeds `1e-5`.
fn assert_same_experts(what: &str, outputs: &NamedTensors, golden: &NamedTensors, prefix: &str) -> usize {
    let mut compared = 0;
    for (name, indices) in outputs.iter().filter(|(name, _)| name.starts_with("router.") && name.ends_with("indices")) {
        let stem = name.strip_suffix("indices").unwrap();
        let Some(probs) = golden.get(&format!("{prefix}{stem}probs")) else { continue };
        let upstream = golden[&format!("{prefix}{stem}indices")].to_f64();
        let (experts, top_k) = (probs.shape()[2], indices.shape()[2]);
        let (probs, indices) = (probs.to_f64(), indices.to_f64());
        for (token, probs) in probs.chunks(experts).enumerate() {
            let mut ranked = probs.to_vec();
            ranked.sort_by(|a, b| b.total_cmp(a));
            let routed = probs.iter().sum::<f64>() > 0.5;
            let decided = top_k == experts || ranked[top_k - 1] - ranked[top_k] > 1e-5;
            if routed && decided {
                let set = |values: &[f64]| {
                    let mut values = values[token * top_k..(token + 1) * top_k].to_vec();
                    values.sort_by(f64::total_cmp);
                    values
                };
                assert_eq!(set(&indices), set(&upstream), "{what}: {name} of token {token}");
                compared += 1;
            }
        }
    }
    compared
}

#[test]
fn layers_agree_with_upstream() {
    let folder = tempfile::tempdir().unwrap();
    for setting in Setting::all() {
        let mut compared = 0;
        for case in layer_cases() {
            let what = setting.label(&case.name);
            let mut runners = setting.load(&case.model(), folder.path());
            let outputs = run(&mut runners[0], &case.inputs);
            assert_output(&what, &outputs["output"], &case.golden["output"], case.f64_maxdiff);
            compared += assert_same_experts(&what, &outputs, &case.golden, "");
            assert_padded_queries_are_zero(&what, &case.inputs, &outputs["output"]);
        }
        assert!(compared > 450, "only {compared} routing decisions were compared");
    }
}

fn assert_padded_queries_are_zero(what: &str, inputs: &NamedTensors, output: &Tensor) {
    let mask = inputs.get("query_attention_mask").unwrap_or(&inputs["attention_mask"]).as_i64().unwrap();
    let width = output.shape()[2];
    for (token, row) in output.as_f32().unwrap().chunks(width).enumerate() {
        assert!(row.iter().all(|value| value.is_finite()), "{what}: token {token}");
        assert!(mask[token] == 1 || row.iter().all(|value| *value == 0.0), "{what}: token {token} is padding");
    }
}

/// Whole rows, beside all goldens of a translation model.
fn assert_translation(setting: &Setting, case: &ModelCase, folder: &Path) -> usize {
    let mut runners = setting.load(&case.model, folder);
    let mut compared = 0;
    for batch in &case.batches {
        let what = setting.label(&format!("{} {}", case.folder, batch.prefix));
        let source = case.golden(&batch.prefix, "src_tokens");
        let target = case.golden(&batch.prefix, "prev_output_tokens");
        let encoded = run(&mut runners[0], &token_inputs(source));
        let golden = case.golden(&batch.prefix, "encoder_out");
        assert_output(&what, &encoded["last_hidden_state"], golden, batch.encoder_out_maxdiff);
        let inputs = decoder_inputs(source, target, (0, target.shape()[1]), &encoded, None);
        let decoded = run(&mut runners[1], &inputs);
        assert_output(&what, &decoded["logits"], case.golden(&batch.prefix, "logits"), batch.logits_maxdiff);
        compared += assert_same_experts(&what, &encoded, &case.golden, &batch.prefix);
        compared += assert_same_experts(&what, &decoded, &case.golden, &batch.prefix);
    }
    compared
}

/// One token at a time; returns the logits of all steps and the outputs of the last one.
fn decode_step_by_step(
    setting: &Setting,
    case: &ModelCase,
    prefix: &str,
    folder: &Path,
) -> (Tensor, NamedTensors, NamedTensors) {
    let mut runners = setting.load(&case.model, folder);
    let source = case.golden(prefix, "src_tokens");
    let target = case.golden(prefix, "prev_output_tokens");
    let encoded = run(&mut runners[0], &token_inputs(source));
    let mut steps: Vec<NamedTensors> = Vec::new();
    for token in 0..target.shape()[1] {
        let inputs = decoder_inputs(source, target, (token, token + 1), &encoded, steps.last());
        steps.push(run(&mut runners[1], &inputs));
    }
    let (batch, vocabulary) = (target.shape()[0], steps[0]["logits"].shape()[2]);
    let rows = (0..batch).flat_map(|row| steps.iter().map(move |step| (row, step)));
    let logits = rows
        .flat_map(|(row, step)| step["logits"].as_f32().unwrap()[row * vocabulary..(row + 1) * vocabulary].to_vec())
        .collect();
    let logits = Tensor::new([batch, steps.len(), vocabulary], TensorData::F32(logits)).unwrap();
    (logits, encoded, steps.pop().unwrap())
}

#[test]
fn variants_agree_with_upstream() {
    let folder = tempfile::tempdir().unwrap();
    for setting in Setting::all() {
        for name in VARIANTS {
            let case = variant(name);
            assert!(assert_translation(&setting, &case, folder.path()) > 150);
            let (logits, ..) = decode_step_by_step(&setting, &case, "single.", folder.path());
            let what = setting.label(&format!("{name} step by step"));
            let golden = case.golden("single.", "incremental_logits");
            assert_output(&what, &logits, golden, case.batch("single.").logits_maxdiff);
        }
    }
}

#[test]
fn the_trained_translator_agrees_with_upstream() {
    let folder = tempfile::tempdir().unwrap();
    let case = translation();
    for setting in Setting::all() {
        assert!(assert_translation(&setting, &case, folder.path()) > 3000);
        let (logits, encoded, last) = decode_step_by_step(&setting, &case, "inc.", folder.path());
        let bound = case.batch("b2.").logits_maxdiff;
        assert_output(&setting.label("nmt step by step"), &logits, case.golden("inc.", "logits"), bound);
        for layer in 0..3 {
            for part in ["key", "value"] {
                let own = &last[&format!("present.{layer}.decoder.{part}")];
                let cross = &encoded[&format!("present.{layer}.encoder.{part}")];
                for (name, cache) in [("self", own), ("cross", cross)] {
                    let golden = case.golden("inc.", &format!("cache.{layer}.{name}_{part}"));
                    let shape = [golden.shape()[0], 1, golden.shape()[1], golden.shape()[2]];
                    let golden = Tensor::new(shape, golden.data().clone()).unwrap();
                    assert_output(&setting.label("nmt caches"), cache, &golden, bound);
                }
            }
        }
    }
}

#[test]
fn the_trained_language_model_agrees_with_upstream() {
    let folder = tempfile::tempdir().unwrap();
    let case = masked_lm();
    for setting in Setting::all() {
        let mut runners = setting.load(&case.model, folder.path());
        let mut compared = 0;
        for batch in &case.batches {
            let what = setting.label(&format!("mlm {}", batch.prefix));
            let outputs = run(&mut runners[0], &token_inputs(case.golden(&batch.prefix, "tokens")));
            assert_output(&what, &outputs["logits"], case.golden(&batch.prefix, "logits"), batch.logits_maxdiff);
            compared += assert_same_experts(&what, &outputs, &case.golden, &batch.prefix);
        }
        assert!(compared > 2000, "only {compared} routing decisions were compared");
    }
}
