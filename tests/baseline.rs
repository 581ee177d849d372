//! A standard Transformer on every backend. Needs `ORT_DYLIB_PATH`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(all(feature = "ort", feature = "tract"))]

use std::path::Path;

use moa_export::{
    backend::{Backend, OrtOptions, ort_function, tract},
    export::{ExportOptions, export_model},
    inspect::preset::Preset,
    onnx::read_model,
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{Form, Options, Precision, SyntheticTensors, families, model::Model};
use serde_json::json;

fn ints(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::new(shape, TensorData::I64(values.to_vec())).unwrap()
}

/// Logits of three target tokens, after an encoder with a padded row.
fn logits(folder: &Path, backend: &dyn Backend) -> Vec<f64> {
    let load = |name: &str| backend.load(&read_model(&folder.join(name)).unwrap()).unwrap();
    let source = NamedTensors::from([
        ("input_ids".into(), ints(&[2, 4], &[5, 6, 7, 2, 1, 1, 9, 2])),
        ("attention_mask".into(), ints(&[2, 4], &[1, 1, 1, 1, 0, 0, 1, 1])),
    ]);
    let encoded = load("encoder_model.onnx").run(&source).unwrap();
    let mut inputs = NamedTensors::from([
        ("input_ids".into(), ints(&[2, 3], &[2, 8, 30, 2, 4, 11])),
        ("attention_mask".into(), ints(&[2, 3], &[1; 6])),
        ("encoder_attention_mask".into(), source["attention_mask"].clone()),
    ]);
    for (name, value) in encoded.iter().filter(|(name, _)| name.starts_with("present.")) {
        let past = name.replace("present.", "past_key_values.");
        let empty = Tensor::new([2, value.shape()[1], 0, value.shape()[3]], TensorData::F32(Vec::new())).unwrap();
        let empty = if matches!(value.data(), TensorData::F16(_)) { empty.to_f16() } else { empty };
        inputs.insert(past.replace(".encoder.", ".decoder."), empty);
        inputs.insert(past, value.clone());
    }
    load("decoder_model.onnx").run(&inputs).unwrap()["logits"].to_f64()
}

/// A standard Transformer of two small layers on each side, with random weights.
fn small_transformer() -> Model {
    let preset = Preset::find("transformer-base").unwrap();
    let sizes =
        [("encoder_embed_dim", 64), ("encoder_ffn_embed_dim", 96), ("encoder_layers", 2), ("decoder_layers", 2)];
    let config = sizes.into_iter().fold(preset.config(), |config, (key, size)| config.with(key, json!(size)));
    let config = config.with("vocab_size", json!(40));
    families::import(&config, &SyntheticTensors::random("seed", 5), Default::default()).unwrap()
}

fn export(model: &Model, out: &Path, form: Form, precision: Precision) {
    let graph = Options { form, precision, ..Options::default() };
    let options = ExportOptions { graph, force: true, ..Default::default() };
    export_model("transformer", model, out, &options, &()).unwrap();
}

fn largest(values: impl IntoIterator<Item = f64>) -> f64 {
    values.into_iter().fold(0.0, |largest: f64, value| if value.is_nan() { value } else { largest.max(value.abs()) })
}

fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    largest(a.iter().zip(b).map(|(a, b)| a - b))
}

#[test]
fn every_backend_computes_the_same() {
    let model = small_transformer();
    let options = OrtOptions { threads: Some(1), ..OrtOptions::default() };
    let (ort, tract) = (ort_function(options).unwrap(), tract().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for (form, backend) in [(Form::Standard, &ort), (Form::Fused, &ort), (Form::Standard, &tract)] {
        let out = folder.path().join(form.as_str());
        export(&model, &out, form, Precision::Fp32);
        found.push(logits(&out, backend.as_ref()));
    }
    assert!(largest(found[0].iter().copied()) > 0.1);
    for other in &found[1..] {
        assert!(largest_difference(&found[0], other) < 1e-5 && other.len() == 2 * 3 * 40);
    }
}

/// In fewer bits logits are near those in f32, and no masked key is seen.
#[test]
fn every_precision_is_near_f32() {
    let model = small_transformer();
    let ort = ort_function(OrtOptions { threads: Some(1), ..OrtOptions::default() }).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = |precision: Precision| folder.path().join(precision.as_str());
    for form in [Form::Standard, Form::Fused] {
        export(&model, &out(Precision::Fp32), form, Precision::Fp32);
        let expected = logits(&out(Precision::Fp32), ort.as_ref());
        for precision in [Precision::Fp16, Precision::Bf16] {
            export(&model, &out(precision), form, precision);
            let found = logits(&out(precision), ort.as_ref());
            let part = largest_difference(&expected, &found) / largest(expected.iter().copied());
            assert!(part > 1e-5 && part < 0.02, "{form:?} in {precision:?}: {part}");
        }
    }
}
