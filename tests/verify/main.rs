//! `verify` accepts sound exports and finds planted faults.
//!
//! `ORT_DYLIB_PATH` and `MOA_ORT_LIBRARY` name the runtime and the operator library.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/data.rs"]
mod data;
mod graphs;
mod integers;
mod precision;
mod sizes;
mod unseen;

use std::path::Path;

use data::data;
use moa_export::{
    backend::{self, Backend, BackendError, BackendKind, OrtOptions, Runner},
    checkpoint::Checkpoint,
    export::{ExportOptions, ExternalData, OPSETS, export},
    metadata,
    onnx::{
        OnnxFile,
        proto::{ModelProto, NodeProto, TensorProto},
    },
    parity::{AuditOutcome, Finding, Verification, VerifyOptions, verify},
    tensor::{NamedTensors, Tensor, TensorData},
    tensor_file,
};
use moa_graphs::{Form, Options, Precision};
use prost::{Message, bytes::Bytes};

fn checkpoint(folder: &str) -> Checkpoint {
    Checkpoint::open(&data(folder), None).unwrap()
}

fn backends() -> Vec<Box<dyn Backend>> {
    let options = OrtOptions::default;
    [backend::ort(options()), backend::ort_function(options()), backend::tract()].into_iter().flatten().collect()
}

fn options(form: Form) -> ExportOptions {
    stored_as(form, Precision::Fp32)
}

fn stored_as(form: Form, precision: Precision) -> ExportOptions {
    let graph = Options { form, precision, ..Options::default() };
    ExportOptions { graph, ..ExportOptions::default() }
}

fn last_logits(form: Form) -> ExportOptions {
    let graph = Options { form, precision: Precision::Fp32, router_outputs: false, last_logits: true };
    ExportOptions { graph, ..ExportOptions::default() }
}

fn check(path: &Path, folder: &str) -> Verification {
    verify(path, &checkpoint(folder), &backends(), &VerifyOptions::default()).unwrap()
}

/// Exports, applies `fault` to the file `name`, and verifies.
fn with_fault(folder: &str, form: Form, name: &str, fault: impl FnOnce(&mut ModelProto)) -> Verification {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint(folder), &out, &options(form)).unwrap();
    let path = out.join(name);
    let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    fault(&mut model);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    check(&out, folder)
}

fn tensor<'a>(model: &'a mut ModelProto, ending: &str) -> &'a mut TensorProto {
    let graph = model.graph.as_mut().unwrap();
    graph.initializer.iter_mut().find(|tensor| tensor.name.ends_with(ending)).unwrap_or_else(|| panic!("no {ending}"))
}

fn edit_values(tensor: &mut TensorProto, edit: impl FnOnce(&mut Vec<f32>)) {
    let (chunks, _) = tensor.raw_data.as_ref().unwrap().as_chunks::<4>();
    let mut values: Vec<f32> = chunks.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    edit(&mut values);
    tensor.raw_data = Some(Bytes::from(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>()));
}

/// Constants of the first file that differ from the checkpoint.
fn differing_constants(result: &Verification) -> usize {
    match &result.audits[0].outcome {
        AuditOutcome::Compared { weights, .. } => weights.fault_count,
        AuditOutcome::Skipped(why) => panic!("{why}"),
    }
}

/// Whether some backend saw the fault in what it computed.
fn seen_in_numbers(result: &Verification) -> bool {
    result.backends.iter().flat_map(|report| &report.graphs).any(|graph| !graph.passed())
}

#[test]
fn sound_exports_pass_on_every_backend() {
    for form in Form::ALL {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("variants/v_ffd_moe"), &out, &options(form)).unwrap();
        let result = check(&out, "variants/v_ffd_moe");
        assert!(result.passed(), "{form:?}: {result:?}");
        let used = result.backends.iter().filter(|report| report.skipped.is_none()).count();
        assert_eq!(used, if form == Form::Fused { 1 } else { 3 });
    }
}

/// Writes a layer whose weights are all `value`, but for what `change` makes of the tensor of a name.
fn constant_layer(folder: &Path, value: f32, change: impl Fn(&str, &mut Vec<f32>)) {
    let shapes: [(&str, &[usize]); 5] = [
        ("q_proj.w_gate", &[512, 8]),
        ("q_proj.experts.w", &[8, 512, 128]),
        ("q_proj.output_experts.w", &[8, 128, 512]),
        ("k_proj.weight", &[128, 512]),
        ("v_proj.weight", &[128, 512]),
    ];
    let tensors = shapes.map(|(name, shape)| {
        let mut values = vec![value; shape.iter().product()];
        change(name, &mut values);
        (name.to_owned(), Tensor::new(shape, TensorData::F32(values)).unwrap())
    });
    std::fs::create_dir(folder).unwrap();
    std::fs::write(folder.join("model.safetensors"), tensor_file::encode(&tensors.into()).unwrap()).unwrap();
    let config = r#"{"model_type": "moa_layer", "embed_dim": 512, "num_expert": 8, "top_k": 4, "head_dim": 128}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
}

/// The roundings of equal terms do not cancel: they add up, in every runtime, and so they do in the tolerance.
#[test]
fn layers_of_one_constant_pass_and_a_fault_in_them_is_seen() {
    for value in [0.1, 1.0] {
        let directory = tempfile::tempdir().unwrap();
        let [sound, faulty, out] = ["sound", "faulty", "out.onnx"].map(|name| directory.path().join(name));
        constant_layer(&sound, value, |_, _| {});
        let open = |folder: &Path| Checkpoint::open(folder, None).unwrap();
        export(&open(&sound), &out, &options(Form::Function)).unwrap();
        let verified = |folder: &Path| verify(&out, &open(folder), &backends(), &VerifyOptions::default()).unwrap();
        let result = verified(&sound);
        assert!(result.passed(), "{value}: {result:?}");
        constant_layer(&faulty, value, |name, values| {
            if name == "v_proj.weight" {
                values.iter_mut().take(512).for_each(|weight| *weight *= 1.1);
            }
        });
        assert!(seen_in_numbers(&verified(&faulty)), "{value}");
    }
}

/// tract takes them for 0.
#[test]
fn numbers_below_the_smallest_normal_one_may_be_0() {
    let directory = tempfile::tempdir().unwrap();
    let [folder, out] = ["checkpoint", "out.onnx"].map(|name| directory.path().join(name));
    constant_layer(&folder, 1e-21, |_, _| {});
    let checkpoint = Checkpoint::open(&folder, None).unwrap();
    export(&checkpoint, &out, &options(Form::Function)).unwrap();
    let result = verify(&out, &checkpoint, &backends(), &VerifyOptions::default()).unwrap();
    assert!(result.passed() && result.backends.len() == 3, "{result:?}");
}

/// A runtime ignores them, and a file that says more than the checkpoint is none of it.
#[test]
fn constants_that_the_checkpoint_does_not_give_are_found() {
    let result = with_fault("variants/v_ffd_moe", Form::Standard, "encoder_model.onnx", |model| {
        let graph = model.graph.as_mut().unwrap();
        let more = graph.initializer.iter().find(|tensor| tensor.dims.len() == 1).unwrap().clone();
        graph.initializer.push(TensorProto { name: "one.more".into(), ..more });
    });
    assert_eq!((differing_constants(&result), seen_in_numbers(&result), result.passed()), (1, false, false));
    let AuditOutcome::Compared { weights, .. } = &result.audits[0].outcome else { panic!("{result:?}") };
    assert_eq!(weights.faults, ["constant \"one.more\" does not come from the checkpoint"]);
}

/// What ONNX Runtime saves of a table that is tied to the output: a second constant, turned, under the name of the node
/// that turned it. It is compared like every other.
#[test]
fn a_weight_that_a_runtime_has_turned_is_compared() {
    let folded = |change: u8| {
        with_fault("mlm", Form::Standard, "model.onnx", |model| {
            let graph = model.graph.as_mut().unwrap();
            let place = graph.node.iter().position(|node| node.output[0] == "lm_head/Transpose").unwrap();
            let node = graph.node.remove(place);
            let table = graph.initializer.iter().find(|tensor| tensor.name == node.input[0]).unwrap();
            let (rows, columns) = (table.dims[0] as usize, table.dims[1] as usize);
            let bytes = table.raw_data.as_ref().unwrap();
            let turned = (0..columns).flat_map(|column| (0..rows).map(move |row| 4 * (row * columns + column)));
            let mut turned: Vec<u8> = turned.flat_map(|at| bytes[at..at + 4].to_vec()).collect();
            turned[2] ^= change;
            graph.initializer.push(TensorProto {
                name: node.output[0].clone(),
                dims: vec![table.dims[1], table.dims[0]],
                data_type: table.data_type,
                raw_data: Some(Bytes::from(turned)),
                ..TensorProto::default()
            });
        })
    };
    let sound = folded(0);
    assert!(sound.passed() && differing_constants(&sound) == 0, "{sound:?}");
    assert!(sound.audits[0].nodes().unwrap().difference.is_some());
    let faulty = folded(1);
    assert_eq!((differing_constants(&faulty), faulty.passed()), (1, false));
}

#[test]
fn every_opset_that_can_be_written_runs() {
    for opset in OPSETS {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("jetmoe/bf16"), &out, &ExportOptions { opset: Some(opset), ..options(Form::Function) })
            .unwrap();
        let model = ModelProto::decode(std::fs::read(out.join("model.onnx")).unwrap().as_slice()).unwrap();
        let bodies = model.functions.iter().flat_map(|body| &body.opset_import);
        let written: Vec<_> = model.opset_import.iter().chain(bodies).filter(|set| set.domain.is_empty()).collect();
        assert!(written.len() > 1 && written.iter().all(|set| set.version == opset), "{opset}: {written:?}");
        let result = check(&out, "jetmoe/bf16");
        assert!(
            result.passed() && result.backends.iter().all(|report| report.skipped.is_none()),
            "{opset}: {result:?}"
        );
    }
}

#[test]
fn last_logits_are_those_of_the_full_pass_and_for_language_models_only() {
    for form in [Form::Function, Form::Standard] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        export(&checkpoint("jetmoe/bf16"), &out, &last_logits(form)).unwrap();
        let result = check(&out, "jetmoe/bf16");
        assert!(result.passed(), "{result:#?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let error = export(&checkpoint("mlm"), &folder.path().join("out"), &last_logits(Form::Function)).unwrap_err();
    assert!(error.to_string().contains("causal language models"), "{error}");
}

#[test]
fn positions_that_a_graph_ignores_are_found() {
    let result = with_fault("jetmoe/bf16", Form::Standard, "model.onnx", |model| {
        // Every position becomes the first one: `p * 0`.
        let graph = model.graph.as_mut().unwrap();
        let zero = TensorProto {
            name: "zero".into(),
            data_type: 7,
            raw_data: Some(Bytes::from(0i64.to_le_bytes().to_vec())),
            ..TensorProto::default()
        };
        graph.initializer.push(zero);
        for node in &mut graph.node {
            for input in node.input.iter_mut().filter(|input| *input == "position_ids") {
                *input = "no_positions".into();
            }
        }
        let node = NodeProto {
            input: vec!["position_ids".into(), "zero".into()],
            output: vec!["no_positions".into()],
            op_type: "Mul".into(),
            ..NodeProto::default()
        };
        graph.node.insert(0, node);
    });
    assert!(!result.passed() && seen_in_numbers(&result), "{result:#?}");
}

#[test]
fn one_changed_weight_is_found_even_where_no_input_reaches_it() {
    let result = with_fault("variants/v_postnorm", Form::Function, "encoder_model.onnx", |model| {
        edit_values(tensor(model, "embed_positions.sinusoids"), |values| {
            let last = values.len() - 1;
            values[last] = f32::from_bits(values[last].to_bits() ^ 1);
        });
    });
    assert!(!result.passed());
    assert!(!seen_in_numbers(&result));
    assert_eq!(differing_constants(&result), 1);
    let Finding::Differs(found) = result.finding(&result.backends[0]) else { panic!("{result:?}") };
    let ending = "embed_positions.sinusoids\" differs in 1 of 1560 values; at [64, 23] it is ";
    assert!(found.contains(ending) && found.contains(", the checkpoint gives "), "{found}");
}

#[test]
fn a_changed_expert_is_found_by_constants_and_by_numbers() {
    for form in [Form::Function, Form::Standard] {
        let ending = if form == Form::Function { "output_experts.w" } else { "output_experts.w/reshaped.32x24" };
        let result = with_fault("variants/v_postnorm", form, "encoder_model.onnx", |model| {
            edit_values(tensor(model, ending), |values| values[5] += 0.5);
        });
        assert!(!result.passed());
        assert!(seen_in_numbers(&result));
        assert_eq!(differing_constants(&result), 1);
    }
}

#[test]
fn renormalised_gates_are_found() {
    let result = with_fault("variants/v_postnorm", Form::Function, "decoder_model.onnx", |model| {
        for node in &mut model.graph.as_mut().unwrap().node {
            for attribute in node.attribute.iter_mut().filter(|attribute| attribute.name == "gate_mode") {
                attribute.s = Some(b"softmax_topk_renorm".to_vec());
            }
        }
    });
    assert!(!result.passed());
    let ort = &result.backends[0];
    assert!(!ort.graphs[1].outputs.passed());
    assert_eq!(ort.graphs[1].routing.first_divergent.as_deref(), Some("decoder.layers.0.self_attn.q_proj"));
}

#[test]
fn an_export_with_other_gates_is_no_other_model_by_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let gate_mode = Some(moa_schema::GateMode::SoftmaxTopkRenorm);
    export(&checkpoint("mlm"), &out, &ExportOptions { gate_mode, ..options(Form::Function) }).unwrap();
    assert!(check(&out, "mlm").passed(), "the export says which gates it has");
    let path = out.join("model.onnx");
    let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    model.metadata_props.retain(|entry| entry.key != metadata::GATE_MODE);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    let result = check(&out, "mlm");
    assert!(result.backends.iter().all(|report| !report.graphs[0].passed()), "the checkpoint's gates are others");
}

#[test]
fn swapped_keys_and_values_are_found() {
    let result = with_fault("variants/v_prenorm", Form::Fused, "encoder_model.onnx", |model| {
        let kv = tensor(model, "layers.0.self_attn.kv_proj.weight");
        let columns = usize::try_from(kv.dims[1]).unwrap();
        edit_values(kv, |values| values.chunks_mut(columns).for_each(|row| row.rotate_left(columns / 2)));
    });
    assert!(!result.passed());
    let graph = &result.backends[0].graphs[0];
    assert!(!graph.outputs.passed());
    assert_eq!(graph.routing.last_agreeing.as_deref(), Some("encoder.layers.0.self_attn.q_proj"));
    assert_eq!(graph.routing.first_divergent.as_deref(), Some("encoder.layers.1.self_attn.q_proj"));
}

#[test]
fn a_transposed_expert_is_found() {
    let result = with_fault("variants/v_ffd_moe", Form::Function, "encoder_model.onnx", |model| {
        let experts = tensor(model, "layers.1.ffd.experts.w");
        let width = usize::try_from(experts.dims[1]).unwrap();
        assert_eq!(experts.dims[1], experts.dims[2], "only a square matrix transposes without an error");
        edit_values(experts, |values| {
            let expert = values[..width * width].to_vec();
            for row in 0..width {
                for column in 0..width {
                    values[column * width + row] = expert[row * width + column];
                }
            }
        });
    });
    assert!(!result.passed());
    assert!(seen_in_numbers(&result));
}

/// A backend that computes other values where no routing is asked for.
struct Altering(Box<dyn Backend>);

impl Backend for Altering {
    fn kind(&self) -> BackendKind {
        self.0.kind()
    }

    fn load(&self, model: &OnnxFile) -> Result<Box<dyn Runner>, BackendError> {
        let is_routed =
            model.model().graph.iter().flat_map(|graph| &graph.output).any(|o| o.name.starts_with("router."));
        let runner = self.0.load(model)?;
        Ok(if is_routed { runner } else { Box::new(Altered(runner)) })
    }
}

struct Altered(Box<dyn Runner>);

impl Runner for Altered {
    fn run(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, BackendError> {
        let mut outputs = self.0.run(inputs)?;
        for tensor in outputs.values_mut() {
            let moved = tensor.to_f64().iter().map(|value| *value as f32 + 1.0).collect();
            *tensor = Tensor::new(tensor.shape().to_vec(), TensorData::F32(moved)).unwrap();
        }
        Ok(outputs)
    }
}

#[test]
fn a_backend_that_hides_its_routing_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("mlm"), &out, &options(Form::Function)).unwrap();
    let judged = |backend| {
        let result = verify(&out, &checkpoint("mlm"), &[backend], &VerifyOptions::default()).unwrap();
        result.backends[0].graphs[0].clone()
    };
    let bodies = || backend::ort_function(OrtOptions::default()).unwrap();
    assert_eq!(judged(bodies()).altered, None);
    let graph = judged(Box::new(Altering(bodies())));
    assert!(!graph.passed() && graph.routing.passed());
    assert!(graph.altered.is_some());
}

#[test]
fn nan_never_passes() {
    let result = with_fault("mlm", Form::Standard, "model.onnx", |model| {
        edit_values(tensor(model, "lm_head.bias"), |values| values[3] = f32::NAN);
    });
    for report in &result.backends {
        assert!(report.graphs[0].outputs.max_abs.is_infinite(), "{}", report.backend);
        assert!(!report.graphs[0].passed());
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    for form in Form::ALL {
        let outs = ["a", "b"].map(|name| directory.path().join(format!("{name}-{}", form.as_str())));
        let written = outs.each_ref().map(|out| {
            let report = export(&checkpoint("variants/v_ffd_moe"), out, &options(form)).unwrap();
            report.files.iter().map(|file| std::fs::read(&file.path).unwrap()).collect::<Vec<_>>()
        });
        assert_eq!(written[0], written[1]);
    }
}

#[test]
fn external_data_is_one_file_and_verifies_everywhere() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let options = ExportOptions { external_data: ExternalData::Always, ..options(Form::Function) };
    let report = export(&checkpoint("mlm"), &out, &options).unwrap();
    let mut names: Vec<_> =
        std::fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["model.onnx", "model.onnx.data"]);
    assert_eq!(report.files.len(), 2);
    for file in &report.files {
        assert_eq!(std::fs::metadata(&file.path).unwrap().len(), file.bytes);
    }
    assert!(report.files[0].bytes > 3_000_000 && report.files[1].bytes < 200_000);
    let result = check(&out, "mlm");
    assert!(result.passed(), "{result:?}");
}
