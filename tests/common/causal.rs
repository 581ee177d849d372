//! What tests of causal language models share: everything that computes one, and its inputs.

use moa_export::{
    backend::{self, Backend, OrtOptions, Runner},
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
    onnx::read_model,
    reference::Reference,
    source::import,
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::{Form, Options, Part, Precision};

use super::{data, golden::tolerance, integers, json, read_tensors};

/// Folders whose weights are bf16.
const BF16: [&str; 2] = ["jetmoe/bf16", "molm/linear"];

/// Something that computes the graph.
pub(crate) type Run<'a> = Box<dyn FnMut(&NamedTensors) -> NamedTensors + 'a>;

fn reference(folder: &str) -> Run<'static> {
    let model = import(&Checkpoint::open(&data(folder), None).unwrap(), None).unwrap();
    let reference = Reference::new(&model).unwrap();
    Box::new(move |inputs| reference.run(Part::Model, inputs, None).unwrap_or_else(|error| panic!("{error}")).outputs)
}

fn exported(folder: &str, backend: &dyn Backend, form: Form, precision: Precision) -> Run<'static> {
    let directory = tempfile::tempdir().unwrap();
    let graph = Options { form, precision, ..Options::default() };
    let options = ExportOptions { graph, ..ExportOptions::default() };
    let out = directory.path().join("out");
    export(&Checkpoint::open(&data(folder), None).unwrap(), &out, &options).unwrap();
    let mut runner: Box<dyn Runner> = backend.load(&read_model(&out.join("model.onnx")).unwrap()).unwrap();
    Box::new(move |inputs| runner.run(inputs).unwrap_or_else(|error| panic!("{error}")))
}

/// Everything that must agree with the goldens, by name.
pub(crate) fn implementations(folder: &str) -> Vec<(String, Run<'static>)> {
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
    if BF16.contains(&folder) {
        for (backend, form) in [(&ort, Form::Function), (&bodies, Form::Standard)] {
            let name = format!("{folder} on {} in {} form, as bf16", backend.name(), form.as_str());
            all.push((name, exported(folder, backend.as_ref(), form, Precision::Bf16)));
        }
    }
    all
}

/// Positions from `from` to `to`, in every row.
pub(crate) fn counted(rows: usize, from: usize, to: usize) -> Tensor {
    let row = (from..to).map(|position| i64::try_from(position).unwrap());
    integers(&[rows, to - from], (0..rows).flat_map(|_| row.clone()).collect())
}

/// Caches of no token.
pub(crate) fn empty_past([layers, heads, head]: [usize; 3], batch: usize) -> NamedTensors {
    let names = (0..layers).flat_map(|layer| ["key", "value"].map(|part| format!("past_key_values.{layer}.{part}")));
    names.map(|name| (name, Tensor::new([batch, heads, 0, head], TensorData::F32(Vec::new())).unwrap())).collect()
}

/// The caches of a step as those of the next.
pub(crate) fn past_of(outputs: &NamedTensors) -> NamedTensors {
    let caches = outputs.iter().filter_map(|(name, value)| Some((name.strip_prefix("present.")?, value)));
    caches.map(|(name, value)| (format!("past_key_values.{name}"), value.clone())).collect()
}

/// `positions` where the model has them.
pub(crate) fn inputs(ids: Tensor, mask: Tensor, positions: Option<Tensor>, past: NamedTensors) -> NamedTensors {
    let mut inputs = past;
    inputs.insert("input_ids".into(), ids);
    inputs.insert("attention_mask".into(), mask);
    inputs.extend(positions.map(|positions| ("position_ids".into(), positions)));
    inputs
}

/// Compares logits at real tokens.
pub(crate) fn assert_logits(what: &str, found: &Tensor, golden: &Tensor, mask: &Tensor, f64_maxdiff: f64) {
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

/// The mask of a case, all real where none is given.
pub(crate) fn mask_of(golden: &NamedTensors, case: &str, ids: &Tensor) -> Tensor {
    let given = golden.get(&format!("{case}.attention_mask")).cloned();
    given.unwrap_or_else(|| integers(ids.shape(), vec![1; ids.shape().iter().product()]))
}

/// Compares the logits of every implementation with the goldens of `cases`; positions are those that a case gives, or
/// counted, where the model has them.
pub(crate) fn assert_whole_passes(folder: &str, sizes: [usize; 3], has_positions: bool, cases: &[&str]) {
    let golden = read_tensors(format!("{folder}/goldens.safetensors"));
    let manifest = json(format!("{folder}/goldens.json"));
    for (name, mut run) in implementations(folder) {
        for case in cases {
            let ids = golden[&format!("{case}.input_ids")].clone();
            let [batch, length] = *ids.shape() else { panic!("{case}: {:?}", ids.shape()) };
            let mask = mask_of(&golden, case, &ids);
            let given = golden.get(&format!("{case}.position_ids")).cloned();
            let positions = has_positions.then(|| given.unwrap_or_else(|| counted(batch, 0, length)));
            let outputs = run(&inputs(ids, mask.clone(), positions, empty_past(sizes, batch)));
            let maxdiff = manifest[*case]["f64_maxdiff"].as_f64().unwrap();
            let logits = &golden[&format!("{case}.logits")];
            assert_logits(&format!("{name}, {case}"), &outputs["logits"], logits, &mask, maxdiff);
        }
    }
}

/// Greedy continuation of one prompt, one token a step.
pub(crate) fn generate(
    run: &mut Run<'_>,
    sizes: [usize; 3],
    has_positions: bool,
    prompt: &[i64],
    count: usize,
) -> Vec<i64> {
    let mut tokens = Vec::new();
    let mut past = empty_past(sizes, 1);
    let (mut next, mut seen) = (prompt.to_vec(), 0);
    while tokens.len() < count {
        let length = next.len();
        let mask = integers(&[1, seen + length], vec![1; seen + length]);
        let positions = has_positions.then(|| counted(1, seen, seen + length));
        let outputs = run(&inputs(integers(&[1, length], next), mask, positions, past));
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
