//! Exports that store or compute in other floats than f32, or store integers.

use moa_export::{
    backend::{self, OrtOptions},
    export::export,
    metadata,
    onnx::proto::{AttributeProto, ModelProto, NodeProto},
    parity::{Verification, VerifyOptions, verify},
};
use moa_graphs::{FloatType, Form, Precision};
use prost::{Message, bytes::Bytes};

use super::{check, checkpoint, differing_constants, edit_values, seen_in_numbers, stored_as, tensor};

#[test]
fn reduced_precision_passes_where_the_backend_has_the_types() {
    let all = [Precision::Int8, Precision::Int4, Precision::Fp16, Precision::Bf16, Precision::Bf16Products].as_slice();
    for (folder, forms, precisions) in [
        ("variants/v_ffd_moe", &Form::ALL[..], all),
        ("jetmoe/sharded", &Form::ALL[..1], &all[..3]),
        ("jetmoe/sharded", &Form::ALL[1..], &all[..2]),
        ("molm/mlp", &Form::ALL[..], all),
        ("mlm", &Form::ALL[..1], &all[..2]),
    ] {
        for form in forms {
            let has_none = |precision: &Precision| *form == Form::Standard && *precision == Precision::Bf16Products;
            for precision in precisions.iter().copied().filter(|precision| !has_none(precision)) {
                let directory = tempfile::tempdir().unwrap();
                let out = directory.path().join("out");
                export(&checkpoint(folder), &out, &stored_as(*form, precision)).unwrap();
                let result = check(&out, folder);
                assert!(result.passed(), "{folder} {form:?} {precision:?}: {result:?}");
                assert_eq!(result.dtype, precision.as_str());
                for report in &result.backends {
                    let unknown = match (report.backend.as_str(), precision) {
                        ("tract", Precision::Bf16 | Precision::Bf16Products) => Some("bfloat16"),
                        ("tract", Precision::Int4) => Some("int4"),
                        _ => None,
                    };
                    let no_operator = report.backend != "ort" && *form == Form::Fused;
                    let is_skipped = no_operator || unknown.is_some();
                    assert_eq!(report.skipped.is_some(), is_skipped, "{}: {report:?}", report.backend);
                    let why = report.skipped.as_ref().map_or("", |skip| skip.why.as_str());
                    assert!(no_operator || unknown.is_none_or(|kind| why.contains(kind)), "{why}");
                }
            }
        }
    }
}

/// Both 4-bit integers of a byte with the other sign; -8 has none, and stays.
fn negated_halves(byte: u8) -> u8 {
    (byte & 0xf).wrapping_neg() & 0xf | (byte & 0xf0).wrapping_neg()
}

/// The tolerances of fewer bytes a number still tell right from wrong.
#[test]
fn a_changed_expert_is_seen_in_numbers_of_reduced_precision() {
    for precision in [Precision::Fp16, Precision::Bf16, Precision::Bf16Products, Precision::Int8, Precision::Int4] {
        let part = precision.integers().map_or(String::new(), |integers| format!("/{integers}"));
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("jetmoe/bf16"), &out, &stored_as(Form::Function, precision)).unwrap();
        let path = out.join("model.onnx");
        let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
        let experts = tensor(&mut model, &format!("layers.0.mlp.output_linear.weight/transposed.021{part}"));
        let mut values = experts.raw_data.as_ref().unwrap().to_vec();
        // The sign of every weight of the first expert.
        let first = values.len() / usize::try_from(experts.dims[0]).unwrap();
        match precision {
            Precision::Int8 => values[..first].iter_mut().for_each(|byte| *byte = byte.wrapping_neg()),
            Precision::Int4 => values[..first].iter_mut().for_each(|byte| *byte = negated_halves(*byte)),
            _ => values[..first].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80),
        }
        experts.raw_data = Some(Bytes::from(values));
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let result = check(&out, "jetmoe/bf16");
        assert_eq!(differing_constants(&result), 1);
        assert!(seen_in_numbers(&result), "{precision:?}");
    }
}

/// Cases in which routers meet near-ties, which the precision of the first layer decides.
#[test]
fn half_precision_is_the_same_with_and_without_routing() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("mlm"), &out, &stored_as(Form::Function, Precision::Fp16)).unwrap();
    let backends = [backend::ort(OrtOptions::default()).unwrap()];
    let options = VerifyOptions { seed: 7, ..VerifyOptions::default() };
    let result = verify(&out, &checkpoint("mlm"), &backends, options).unwrap();
    assert!(result.passed(), "{:?}", result.backends);
    assert_eq!(result.backends[0].graphs[0].altered, None);
}

/// Exports whose products may be rounded, once `edit` has changed the graph.
fn of_products(precision: Precision, edit: impl FnOnce(&mut ModelProto)) -> Verification {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    export(&checkpoint("jetmoe/bf16"), &out, &stored_as(Form::Function, precision)).unwrap();
    let path = out.join("model.onnx");
    let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
    edit(&mut model);
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    check(&out, "jetmoe/bf16")
}

fn ours(model: &mut ModelProto) -> impl Iterator<Item = &mut NodeProto> {
    model.graph.as_mut().unwrap().node.iter_mut().filter(|node| node.domain == moa_schema::DOMAIN)
}

fn level() -> AttributeProto {
    AttributeProto { name: "accuracy_level".into(), r#type: 2, i: Some(3), ..AttributeProto::default() }
}

/// Without metadata, nodes tell whether products may be rounded; with them, nodes that say more are others.
#[test]
fn the_accuracy_of_products_is_what_nodes_and_metadata_say() {
    let unstated = |model: &mut ModelProto| model.metadata_props.retain(|entry| entry.key != metadata::DTYPE);
    for precision in [Precision::Bf16, Precision::Bf16Products, Precision::Fp32] {
        let result = of_products(precision, unstated);
        assert!(result.passed() && result.audits[0].nodes.as_ref().unwrap().difference.is_none(), "{result:?}");
        assert_eq!(result.dtype, precision.as_str());
        for report in &result.backends {
            let may_round = precision == Precision::Bf16Products && report.backend == "ort";
            assert_eq!(report.products, may_round.then_some(FloatType::Bf16), "{report:?}");
        }
    }
    let gained = of_products(Precision::Bf16, |model| ours(model).for_each(|node| node.attribute.push(level())));
    let lost = of_products(Precision::Bf16Products, |model| {
        ours(model).for_each(|node| node.attribute.retain(|attribute| attribute.name != level().name));
    });
    for (result, dtype) in [(&gained, "bf16"), (&lost, "bf16-products")] {
        let difference = result.audits[0].nodes.as_ref().unwrap().difference.clone();
        assert!(difference.is_some_and(|found| found.starts_with("node ")), "{result:?}");
        assert_eq!(result.dtype, dtype);
        assert!(result.backends.iter().all(|report| report.products.is_none()), "{result:?}");
    }
    assert!(lost.passed(), "{lost:?}");
    // The library rounds where the processor has the instruction, and is then held to what the metadata say.
    let bodies = gained.backends.iter().filter(|report| report.backend != "ort");
    assert!(bodies.flat_map(|report| &report.graphs).all(|graph| graph.passed()), "{gained:?}");
}

/// Of these, the tolerance of rounded products explains none.
#[test]
fn faults_are_seen_where_products_may_be_rounded() {
    type Fault = fn(&mut ModelProto);
    let router: Fault = |model| {
        edit_values(tensor(model, "layers.0.mlp.router.layer.weight/transposed.10"), |values| values.reverse());
    };
    let scale: Fault = |model| {
        let attributes = ours(model).flat_map(|node| &mut node.attribute);
        attributes.filter(|attribute| attribute.name == "scale").for_each(|scale| scale.f = scale.f.map(|f| 1.5 * f));
    };
    let gates: Fault = |model| {
        let attributes = ours(model).flat_map(|node| &mut node.attribute);
        let gates = attributes.filter(|attribute| attribute.name == "gate_mode");
        gates.for_each(|gate| gate.s = Some(b"softmax_topk".to_vec()));
    };
    for (what, constants, fault) in [("router", 1, router), ("scale", 0, scale), ("gates", 0, gates)] {
        let result = of_products(Precision::Bf16Products, fault);
        assert_eq!(differing_constants(&result), constants, "{what}");
        // Bodies have the values of attributes in them.
        let reads = |name: &str| name == "ort" || constants > 0 && name == "ort-function";
        for report in result.backends.iter().filter(|report| reads(&report.backend)) {
            let [graph] = report.graphs.as_slice() else { panic!("{report:?}") };
            assert!(!graph.passed(), "{what} on {}: {graph:?}", report.backend);
            assert!(what != "router" || graph.routing.unexplained_count > 0, "{graph:?}");
        }
        assert!(!result.passed(), "{what}");
    }
}
