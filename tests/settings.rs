//! Settings that have one value in all goldens: exports follow them, and so does the reference.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/data.rs"]
mod data;

use std::{fs, path::Path};

use data::data;
use moa_export::{
    backend::{self, Backend, OrtOptions},
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
    parity::{Verification, VerifyOptions, verify},
};
use moa_graphs::{Form, Options};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A fixture with another value for a key of its configuration.
fn configured(fixture: &str, key: &str, value: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(data(fixture)).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("model") {
            fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut config: Value = serde_json::from_slice(&fs::read(data(fixture).join("config.json")).unwrap()).unwrap();
    assert_ne!(&config[key], value, "{fixture}: {key}");
    config[key] = value.clone();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn exported(checkpoint: &Path) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let graph = Options { form: Form::Function, ..Options::default() };
    let options = ExportOptions { graph, ..ExportOptions::default() };
    export(&Checkpoint::open(checkpoint, None).unwrap(), &folder.path().join("out"), &options).unwrap();
    folder
}

fn verified(export: &TempDir, checkpoint: &Path) -> Verification {
    let backends: Vec<Box<dyn Backend>> =
        [backend::ort(OrtOptions::default()), backend::ort_function(OrtOptions::default())]
            .into_iter()
            .flatten()
            .collect();
    let checkpoint = Checkpoint::open(checkpoint, None).unwrap();
    verify(&export.path().join("out"), &checkpoint, &backends, &VerifyOptions::default()).unwrap()
}

#[test]
fn what_a_configuration_says_is_computed() {
    for (fixture, key, value) in [
        ("jetmoe/sharded", "rope_theta", json!(50.0)),
        ("jetmoe/sharded", "activation_function", json!("gelu")),
        ("jetmoe/sharded", "activation_function", json!("relu")),
        ("jetmoe/sharded", "rms_norm_eps", json!(0.25)),
        ("molm/mlp", "activation_function", json!("gelu")),
        ("molm/linear", "activation_function", json!("silu")),
        ("molm/mlp", "k_att", json!(1)),
        ("variants/v_ffd_moe", "activation_fn", json!("gelu")),
        ("variants/v_ffd_moe", "layer_norm_eps", json!(0.25)),
        ("variants/v_prenorm", "activation_fn", json!("relu")),
        ("variants/v_prenorm", "layer_norm_eps", json!(0.25)),
        ("variants/v_prenorm", "no_scale_embedding", json!(true)),
        ("variants/v_learned_pos_lnemb", "layer_norm_eps", json!(0.25)),
    ] {
        let changed = configured(fixture, key, &value);
        let own = verified(&exported(changed.path()), changed.path());
        assert!(own.passed(), "{fixture}, {key} {value}: {own:#?}");
        let other = verified(&exported(&data(fixture)), changed.path());
        for report in &other.backends {
            let seen = report.graphs.iter().any(|graph| !graph.passed());
            assert!(seen, "{fixture}, {key} {value}: {} computes the same without it", report.backend);
        }
    }
}
