//! Faults that all checks but one overlook.

use moa_export::{
    checkpoint::Checkpoint,
    export::export,
    onnx::proto::AttributeProto,
    parity::{VerifyOptions, verify},
    tensor::{NamedTensors, Tensor, TensorData},
    tensor_file,
};
use moa_graphs::{Form, Precision};

use crate::{backends, differing_constants, stored_as, with_fault};

/// The smallest scores in place of the largest: constants agree, and so do the outputs of the experts that were chosen.
#[test]
fn the_wrong_experts_are_found_where_all_else_is_right() {
    for form in [Form::Function, Form::Standard] {
        let result = with_fault("mlm", form, "model.onnx", |model| {
            let bodies = model.functions.iter_mut().flat_map(|function| &mut function.node);
            for node in bodies.chain(&mut model.graph.as_mut().unwrap().node) {
                if node.op_type == "TopK" {
                    let largest = node.attribute.iter_mut().find(|attribute| attribute.name == "largest");
                    match largest {
                        Some(attribute) => attribute.i = Some(0),
                        None => node.attribute.push(AttributeProto {
                            name: "largest".into(),
                            r#type: 2,
                            i: Some(0),
                            ..AttributeProto::default()
                        }),
                    }
                }
            }
        });
        assert_eq!(differing_constants(&result), 0);
        // The library computes nodes without their bodies.
        let reads_bodies = |backend: &str| form == Form::Standard || backend != "ort";
        for report in result.backends.iter().filter(|report| reads_bodies(&report.backend)) {
            let graph = &report.graphs[0];
            assert!(graph.outputs.passed() && !graph.routing.passed() && !graph.passed(), "{}", report.backend);
            assert_eq!((&graph.routing.first_divergent, graph.routing.unexplained.is_some()), (&None, true));
        }
        assert!(!result.passed());
    }
}

/// What rounding to f16 makes infinite in the reference too is no excuse for it.
#[test]
fn values_beyond_the_range_of_f16_fail() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("layer");
    std::fs::create_dir(&folder).unwrap();
    let config = r#"{"model_type": "moa_layer", "embed_dim": 8, "num_expert": 3, "top_k": 2, "head_dim": 4}"#;
    std::fs::write(folder.join("config.json"), config).unwrap();
    let weight = |count: usize, factor: f32| (0..count).map(|i| factor * ((i % 7) as f32 - 3.0)).collect::<Vec<_>>();
    let mut weights = NamedTensors::new();
    for (name, shape, factor) in [
        ("q_proj.w_gate", &[8, 3][..], 0.1),
        ("q_proj.experts.w", &[3, 8, 4], 0.1),
        ("q_proj.output_experts.w", &[3, 4, 8], 0.1),
        ("k_proj.weight", &[4, 8], 0.1),
        ("v_proj.weight", &[4, 8], 2e4),
    ] {
        let values = TensorData::F32(weight(shape.iter().product(), factor));
        weights.insert(name.into(), Tensor::new(shape.to_vec(), values).unwrap());
    }
    std::fs::write(folder.join("model.safetensors"), tensor_file::encode(&weights).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(&folder, None).unwrap();
    let out = directory.path().join("out");
    export(&checkpoint, &out, &stored_as(Form::Function, Precision::Fp16)).unwrap();
    let result = verify(&out, &checkpoint, &backends(), &VerifyOptions::default()).unwrap();
    for report in result.backends.iter().filter(|report| report.skipped.is_none()) {
        assert!(!report.graphs[0].outputs.passed(), "{}: {:?}", report.backend, report.graphs[0].outputs);
    }
    assert!(!result.passed());
}
