//! Faults that show at some sizes of calls alone, as where a kernel has a path of its own for them.

use moa_export::{
    backend::{self, Backend, BackendError, BackendKind, OrtOptions, Runner},
    export::export,
    onnx::{
        OnnxFile,
        proto::{AttributeProto, ModelProto, NodeProto, TensorProto},
    },
    parity::{Verification, VerifyOptions, verify},
    tensor::{NamedTensors, Tensor, TensorData},
};
use moa_graphs::Form;
use prost::{Message, bytes::Bytes};

use crate::{checkpoint, graphs::node, options, seen_in_numbers};

/// Two comparisons of sizes of a call with numbers.
type Sizes = [(&'static str, &'static str, i64); 2];

fn constant(name: &str, dims: &[i64], data_type: i32, bytes: Vec<u8>) -> TensorProto {
    let raw_data = Some(Bytes::from(bytes));
    TensorProto { name: name.into(), dims: dims.to_vec(), data_type, raw_data, ..TensorProto::default() }
}

/// Makes `output` larger by half in calls of these sizes: `batch`, `tokens`, `past`, `total` and `all` of a call.
fn larger_at(model: &mut ModelProto, output: &str, sizes: Sizes) {
    let graph = model.graph.as_mut().unwrap();
    let has_past = graph.input.iter().any(|input| input.name.starts_with("past_key_values"));
    for name in graph.node.iter_mut().flat_map(|node| &mut node.output).filter(|name| *name == output) {
        *name = "sound".into();
    }
    let number = |name: &str, dims: &[i64], value: i64| constant(name, dims, 7, value.to_le_bytes().to_vec());
    graph.initializer.extend([number("first", &[], 0), number("second", &[], 1)]);
    graph.initializer.push(constant("half", &[], 1, 0.5f32.to_le_bytes().to_vec()));
    let total = if has_past { "attention_mask" } else { "input_ids" };
    graph.node.extend([
        node("Shape", &["input_ids"], "ids_shape"),
        node("Shape", &[total], "mask_shape"),
        node("Gather", &["ids_shape", "first"], "batch"),
        node("Gather", &["ids_shape", "second"], "tokens"),
        node("Gather", &["mask_shape", "second"], "total"),
        node("Sub", &["total", "tokens"], "past"),
        node("Mul", &["batch", "tokens"], "all"),
    ]);
    for (index, (size, comparison, value)) in sizes.into_iter().enumerate() {
        graph.initializer.push(number(&format!("limit {index}"), &[], value));
        graph.node.push(node(comparison, &[size, &format!("limit {index}")], &format!("is so {index}")));
    }
    let to = AttributeProto { name: "to".into(), r#type: 2, i: Some(1), ..AttributeProto::default() };
    graph.node.extend([
        node("And", &["is so 0", "is so 1"], "is so"),
        NodeProto { attribute: vec![to], ..node("Cast", &["is so"], "one where so") },
        node("Mul", &["one where so", "half"], "half where so"),
        node("Mul", &["sound", "half where so"], "more"),
        node("Add", &["sound", "more"], output),
    ]);
}

fn verified_on(backend: Box<dyn Backend>, folder: &str, fault: impl FnOnce(&mut ModelProto)) -> Verification {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint(folder), &out, &options(Form::Function)).unwrap();
    let path = out.join(if folder == "nmt" { "decoder_model.onnx" } else { "model.onnx" });
    let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    fault(&mut model);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    verify(&out, &checkpoint(folder), &[backend], &VerifyOptions::default()).unwrap()
}

#[test]
fn calls_of_every_size_that_kernels_tell_apart_are_checked() {
    let cached: [Sizes; 5] = [
        [("batch", "Equal", 1), ("past", "Greater", 0)],
        [("tokens", "Equal", 1), ("total", "Greater", 32)],
        [("tokens", "Greater", 1), ("past", "Greater", 12)],
        [("batch", "Equal", 1), ("tokens", "Greater", 32)],
        [("past", "Equal", 0), ("all", "Greater", 191)],
    ];
    let mut cases: Vec<_> =
        ["jetmoe/bf16", "nmt"].into_iter().flat_map(|folder| cached.map(|at| (folder, at))).collect();
    cases.push(("mlm", [("batch", "Equal", 1), ("tokens", "Greater", 127)]));
    for (folder, sizes) in cases {
        let bodies = backend::ort_function(OrtOptions::default()).unwrap();
        let result = verified_on(bodies, folder, |model| larger_at(model, "logits", sizes));
        assert!(seen_in_numbers(&result), "{folder}: {sizes:?}");
    }
}

/// A backend whose caches go wrong where they are updated in place.
struct WrongInPlace(Box<dyn Backend>);

impl Backend for WrongInPlace {
    fn kind(&self) -> BackendKind {
        self.0.kind()
    }

    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError> {
        Ok(Box::new(WrongRunner(self.0.load(model)?)))
    }
}

struct WrongRunner(Box<dyn Runner>);

impl Runner for WrongRunner {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        self.0.run(inputs)
    }

    /// The first rows of the caches are others once 40 are filled.
    fn run_in_place(&mut self, inputs: &NamedTensors, capacity: usize) -> Result<Option<NamedTensors>, BackendError> {
        let mut outputs = self.0.run_in_place(inputs, capacity)?;
        let caches = outputs.iter_mut().flatten().filter(|(name, _)| name.starts_with("present") && capacity > 40);
        for (_, cache) in caches {
            let moved = cache.to_f64().iter().map(|value| *value as f32 + 1.0).collect();
            *cache = Tensor::new(cache.shape().to_vec(), TensorData::F32(moved)).unwrap();
        }
        Ok(outputs)
    }
}

/// By the library alone; the bodies, and the standard form, have no such caches.
#[test]
fn caches_updated_in_place_are_checked() {
    for folder in ["jetmoe/bf16", "nmt"] {
        let library = || backend::ort(OrtOptions::default()).unwrap();
        let sound = verified_on(library(), folder, |_| {});
        assert!(sound.passed(), "{folder}: {sound:?}");
        let faulty = verified_on(Box::new(WrongInPlace(library())), folder, |_| {});
        let first = faulty.backends[0].graphs.last().unwrap().outputs.first.as_ref().unwrap();
        assert!(first.place.contains(", caches updated in place: present."), "{folder}: {first:?}");
        let bodies = backend::ort_function(OrtOptions::default()).unwrap();
        assert!(verified_on(Box::new(WrongInPlace(bodies)), folder, |_| {}).passed(), "{folder}");
    }
}
