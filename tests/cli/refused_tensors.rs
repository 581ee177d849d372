//! Tensors that make no model.

use safetensors::Dtype;

use crate::{
    model::{Model, Stored},
    scene::Scene,
};

const FC1: &str = "encoder.layers.0.fc1.weight";
const FC1_AGAIN: &str = "encoder.layers.0.ffd.0.weight";
const GATE: &str = "decoder.layers.1.encoder_attn.q_proj.w_gate";

#[track_caller]
fn refused(edit: impl FnOnce(&mut Model), code: u8, parts: &[&str]) {
    let mut model = Model::translator();
    edit(&mut model);
    let scene = Scene::with(&model);
    let parts: Vec<_> = parts.iter().copied().chain(["ck"]).collect();
    scene.refuses("ck -o new/out", code, &parts);
}

#[test]
fn values_that_are_no_numbers() {
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let parts = [&format!("\"{GATE}\""), "1 value that is NaN or infinite as f32", "index 17"];
        refused(|model| model.tensor(GATE).set(17, value), 3, &parts);
    }
    let all = |model: &mut Model| (0..96).for_each(|index| model.tensor(GATE).set(index, f32::NAN));
    refused(all, 3, &[GATE, "96 values that are NaN", "index 0"]);
}

#[test]
fn doubles_beyond_the_range_of_floats() {
    let mut model = Model::layer();
    model.convert(Dtype::F64);
    model.tensor("k_proj.weight").bytes[..8].copy_from_slice(&1e300f64.to_le_bytes());
    Scene::with(&model).refuses("ck -o m.onnx", 3, &["k_proj.weight", "infinite as f32", "index 0"]);
}

#[test]
fn values_beyond_the_range_of_half_floats() {
    let mut model = Model::translator();
    model.tensor(FC1).set(5, -65520.0);
    model.tensor(FC1_AGAIN).set(5, -65520.0);
    let scene = Scene::with(&model);
    let parts = ["ck", FC1, "-65520", "index 5", "65504", "--dtype bf16"];
    scene.refuses("ck -o new/out --dtype fp16", 4, &parts);
    scene.accepts("ck -o bf16 --dtype bf16");
    model.tensor(FC1).set(5, 65519.0);
    model.tensor(FC1_AGAIN).set(5, 65519.0);
    Scene::with(&model).accepts("ck -o fp16 --dtype fp16");
}

#[test]
fn tensors_that_are_missing_or_too_many() {
    refused(|model| drop(model.tensors.remove(GATE)), 3, &[GATE, "[24, 4]", "is missing"]);
    let more = |model: &mut Model| drop(model.tensors.insert("zz.extra".into(), Stored::floats(&[2, 3], &[0.0; 6])));
    refused(more, 3, &["\"zz.extra\"", "1 such in all", "[2, 3]"]);
    refused(|model| model.tensors.clear(), 3, &["is missing"]);
    for (name, kept) in [("encoder.layers.7.fc1.weight", FC1), ("decoder.project_out_dim.weight", GATE)] {
        let alias = |model: &mut Model| drop(model.metadata.insert(name.into(), kept.into()));
        refused(alias, 3, &[name, "1 such in all", "belongs to no part"]);
    }
}

#[test]
fn shapes_name_expected_and_found() {
    refused(|model| model.tensor(GATE).shape = vec![4, 24], 3, &[GATE, "[4, 24]", "expected [24, 4]"]);
    refused(|model| model.tensor(GATE).shape = vec![24, 4, 1], 3, &[GATE, "[24, 4, 1]", "expected [24, 4]"]);
    let none = |model: &mut Model| *model.tensor(GATE) = Stored::floats(&[24, 0], &[]);
    refused(none, 3, &[GATE, "[24, 0]", "expected [24, 4]"]);
}

#[test]
fn types_that_are_no_weights() {
    for (dtype, width, name) in
        [(Dtype::I64, 8, "I64"), (Dtype::F8_E4M3, 1, "F8_E4M3"), (Dtype::U8, 1, "U8"), (Dtype::BOOL, 1, "BOOL")]
    {
        let edit = |model: &mut Model| {
            *model.tensor(GATE) = Stored { dtype, shape: vec![24, 4], bytes: vec![0; 96 * width] };
        };
        refused(edit, 4, &[GATE, name, "F16, BF16, F32, F64"]);
    }
}

/// Parameters that are one in the model may be stored twice, but not differently.
#[test]
fn copies_of_a_shared_parameter_must_agree() {
    let parts = [FC1, FC1_AGAIN, "differ from index 5"];
    refused(|model| model.tensor(FC1_AGAIN).set(5, 9.0), 3, &parts);
    let tied = ["decoder.embed_tokens.weight", "encoder.embed_tokens.weight", "index 30"];
    refused(|model| model.tensor("encoder.embed_tokens.weight").set(30, 9.0), 3, &tied);
    let output = ["decoder.embed_tokens.weight", "decoder.output_projection.weight", "index 479"];
    refused(|model| model.tensor("decoder.output_projection.weight").set(479, 9.0), 3, &output);
}

/// Names that all have a prefix, or lack one, are told as they are stored.
#[test]
fn names_are_those_of_the_file() {
    let told = |plain: Model, rename: fn(&str) -> String, edit: &dyn Fn(&mut Model), names: &[&str]| {
        let tensors = plain.tensors.iter().map(|(name, tensor)| (rename(name), tensor.clone()));
        let mut model = Model { tensors: tensors.collect(), ..plain.clone() };
        edit(&mut model);
        let names: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        Scene::with(&model).refuses("ck -o new/out", 3, &names);
    };
    let [gate, fc1, again] = [GATE, FC1, FC1_AGAIN].map(|name| format!("module.{name}"));
    let parallel = |edit: &dyn Fn(&mut Model), names: &[&str]| {
        told(Model::translator(), |name| format!("module.{name}"), edit, names);
    };
    parallel(&|model| drop(model.tensors.remove(&gate)), &[&gate]);
    parallel(&|model| model.tensor(&gate).shape = vec![4, 24], &[&gate]);
    let extra = |model: &mut Model| drop(model.tensors.insert("module.zz".into(), Stored::floats(&[1], &[0.0])));
    parallel(&extra, &["module.zz"]);
    parallel(&|model| model.tensor(&again).set(5, 9.0), &[&fc1, &again]);
    let tokens = "module.decoder.embed_tokens.weight";
    parallel(&|model| model.set("pad_token_id", 20), &["pad_token_id", tokens]);

    let bare = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    let jetmoe = |edit: &dyn Fn(&mut Model), name: &str| told(Model::read("jetmoe/bf16"), bare, edit, &[name]);
    jetmoe(&|model| drop(model.tensors.remove("norm.weight")), "norm.weight");
    jetmoe(&|model| drop(model.tensors.insert("zz".into(), Stored::floats(&[1], &[0.0]))), "zz");
}

/// Parts of what is said of a layer whose tensor `name` is stored as `other`, in the shape `shape`.
#[track_caller]
fn renamed(name: &str, other: &str, shape: &[usize], parts: &[&str]) {
    let mut model = Model::layer();
    let mut stored = model.tensors.remove(name).unwrap();
    stored.shape = shape.to_vec();
    stored.bytes.resize(4 * shape.iter().product::<usize>(), 0);
    model.tensors.insert(other.into(), stored);
    let name = format!("\"{name}\"");
    let parts: Vec<_> = [name.as_str(), "is missing"].into_iter().chain(parts.iter().copied()).collect();
    Scene::with(&model).refuses("ck -o m.onnx", 3, &parts);
}

#[test]
fn what_belongs_to_no_part_may_be_what_is_missing() {
    let layer = Model::layer();
    let shape_of = |name: &str| layer.tensors[name].shape.clone();
    let keys = shape_of("k_proj.weight");
    let text = format!("has \"key_proj.weight\" of shape {keys:?}, which belongs to no part of the model");
    renamed("k_proj.weight", "key_proj.weight", &keys, &[&text, "save it under that name"]);
    let mut gate = shape_of("q_proj.w_gate");
    gate.reverse();
    let text = format!("has \"q_proj.gate.weight\" of shape {gate:?}");
    renamed("q_proj.w_gate", "q_proj.gate.weight", &gate, &[&text, "with its last two dimensions exchanged"]);
    let flat = [keys.iter().product()];
    renamed("k_proj.weight", "wk", &flat, &["has \"wk\" of shape", "save it in that shape"]);
}

/// Buffers, which upstream stores beside weights in the same shapes, one of several that fit, and what cannot become
/// the tensor.
#[test]
fn what_cannot_be_told_is_not_taken_for_what_is_missing() {
    const OTHER: &str = "help: configuration and checkpoint must come from the same model";
    let mut model = Model::layer();
    let mut gate = model.tensors.remove("q_proj.w_gate").unwrap();
    model.tensors.insert("q_proj.w_noise".into(), gate.clone());
    gate.shape.reverse();
    model.tensors.insert("q_proj.gate.weight".into(), gate);
    Scene::with(&model).refuses("ck -o m.onnx", 3, &["\"q_proj.w_gate\"", "the checkpoint has \"q_proj.gate.weight\""]);
    let mut model = Model::layer();
    for (name, other) in [("k_proj.weight", "kv.first"), ("v_proj.weight", "kv.second")] {
        let stored = model.tensors.remove(name).unwrap();
        model.tensors.insert(other.into(), stored);
    }
    Scene::with(&model).refuses("ck -o m.onnx", 3, &["\"k_proj.weight\"", OTHER]);
    renamed("k_proj.weight", "wk", &[7, 3], &[OTHER]);
    let mut deeper = Model::translator();
    deeper.tensors.insert("encoder.version".into(), Stored::floats(&[1], &[3.0]));
    deeper.set("encoder_layers", 3);
    Scene::with(&deeper).refuses("ck -o new/out", 3, &["encoder.layers.2.", "is missing", OTHER]);
}

/// Names come from the file: what they hold must not reach a terminal.
#[test]
fn names_are_shown_harmlessly() {
    for name in ["a\u{1b}[31mb", "a\nerror[MOA-E9999]: b", "\u{7}"] {
        let mut model = Model::layer();
        model.tensors.insert(name.into(), Stored::floats(&[1], &[0.0]));
        let scene = Scene::with(&model);
        let outcome = scene.moa("ck -o m.onnx");
        outcome.assert_refused(name, 3, &["model.safetensors"]);
        assert!(!outcome.stderr.replace('\n', "").chars().any(char::is_control), "{:?}", outcome.stderr);
    }
}

/// Whatever the form and wherever weights go, the same tensor is refused.
#[test]
fn every_form_refuses() {
    let mut model = Model::layer();
    model.tensor("q_proj.experts.w").set(1, f32::NAN);
    let scene = Scene::with(&model);
    for form in ["function", "fused", "standard"] {
        for data in ["auto", "always", "never"] {
            let line = format!("ck -o m.onnx --form {form} --external-data {data} --verify");
            scene.refuses(&line, 3, &["q_proj.experts.w", "index 1"]);
        }
    }
}
