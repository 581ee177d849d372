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
use moa_graphs::{Form, Options, Precision, SyntheticTensors, families};
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
        inputs.insert(past.replace(".encoder.", ".decoder."), empty);
        inputs.insert(past, value.clone());
    }
    load("decoder_model.onnx").run(&inputs).unwrap()["logits"].to_f64()
}

#[test]
fn every_backend_computes_the_same() {
    let preset = Preset::find("transformer-base").unwrap();
    let sizes =
        [("encoder_embed_dim", 64), ("encoder_ffn_embed_dim", 96), ("encoder_layers", 2), ("decoder_layers", 2)];
    let config = sizes.into_iter().fold(preset.config(), |config, (key, size)| config.with(key, json!(size)));
    let config = config.with("vocab_size", json!(40));
    let model = families::import(&config, &SyntheticTensors::random("seed", 5), Default::default()).unwrap();
    let options = OrtOptions { threads: Some(1), operator_library: None };
    let (ort, tract) = (ort_function(options).unwrap(), tract().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for (form, backend) in [(Form::Standard, &ort), (Form::Fused, &ort), (Form::Standard, &tract)] {
        let out = folder.path().join(form.as_str());
        let graph = Options { form, precision: Precision::Fp32, router_outputs: false, last_logits: false };
        let options = ExportOptions { graph, force: true, ..Default::default() };
        export_model("transformer", &model, &out, &options).unwrap();
        found.push(logits(&out, backend.as_ref()));
    }
    let largest = found[0].iter().fold(0f64, |largest, value| largest.max(value.abs()));
    assert!(largest > 0.1, "{largest}");
    for other in &found[1..] {
        let worst = found[0].iter().zip(other).fold(0f64, |worst, (a, b)| worst.max((a - b).abs()));
        assert!(worst < 1e-5 && other.len() == 2 * 3 * 40, "{worst}");
    }
}
