//! Exports that store or compute in other floats than f32, or store integers.

use moa_export::{
    backend::{self, OrtOptions},
    export::export,
    metadata,
    onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, tensor_proto::DataType},
    parity::{Verification, VerifyOptions, verify},
    reference::Factors,
};
use moa_graphs::{Form, Precision};
use moa_schema::{AccuracyLevel, IntegerType};
use prost::{Message, bytes::Bytes};

use super::{check, checkpoint, differing_constants, edit_values, seen_in_numbers, stored_as, tensor};

#[test]
fn reduced_precision_passes_where_the_backend_has_the_types() {
    let all = [
        Precision::Int8,
        Precision::Int8Products,
        Precision::Int4,
        Precision::Int4Products,
        Precision::Fp16,
        Precision::Bf16,
        Precision::Bf16Products,
    ]
    .as_slice();
    for (folder, forms, precisions) in [
        ("variants/v_ffd_moe", &Form::ALL[..], all),
        ("jetmoe/sharded", &Form::ALL[..1], &all[..5]),
        ("jetmoe/sharded", &Form::ALL[1..], &all[..4]),
        ("molm/mlp", &Form::ALL[..], all),
        ("mlm", &Form::ALL[..1], &all[..4]),
    ] {
        for form in forms {
            let has_none = |of: &Precision| *form == Form::Standard && *of != of.without_products();
            for precision in precisions.iter().copied().filter(|precision| !has_none(precision)) {
                let directory = tempfile::tempdir().unwrap();
                let out = directory.path().join("out");
                export(&checkpoint(folder), &out, &stored_as(*form, precision)).unwrap();
                let result = check(&out, folder);
                assert!(result.passed(), "{folder} {form:?} {precision:?}: {result:?}");
                assert_eq!(result.dtype, precision);
                for report in &result.backends {
                    let unknown = match (report.backend.as_str(), precision) {
                        ("tract", Precision::Bf16 | Precision::Bf16Products) => Some("bfloat16"),
                        ("tract", Precision::Int4 | Precision::Int4Products) => Some("int4"),
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
    for precision in Precision::ALL.into_iter().skip(1) {
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
        match precision.integers() {
            Some(IntegerType::Int8) => values[..first].iter_mut().for_each(|byte| *byte = byte.wrapping_neg()),
            Some(IntegerType::Int4) => values[..first].iter_mut().for_each(|byte| *byte = negated_halves(*byte)),
            None => values[..first].iter_mut().skip(1).step_by(2).for_each(|byte| *byte ^= 0x80),
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
    let result = verify(&out, &checkpoint("mlm"), &backends, &options).unwrap();
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

const LEVEL: &str = "accuracy_level";

/// Lets every node of ours say another level.
fn say(model: &mut ModelProto, level: AccuracyLevel) {
    let said = AttributeProto { name: LEVEL.into(), r#type: 2, i: Some(level.number()), ..AttributeProto::default() };
    ours(model).for_each(|node| {
        node.attribute.retain(|attribute| attribute.name != LEVEL);
        node.attribute.extend((level != AccuracyLevel::Activations).then(|| said.clone()));
    });
}

fn forget_dtype(model: &mut ModelProto) {
    model.metadata_props.retain(|entry| entry.key != metadata::DTYPE);
}

const PRODUCTS: [(Precision, Factors); 3] = [
    (Precision::Bf16Products, Factors::Bf16),
    (Precision::Int8Products, Factors::Int8),
    (Precision::Int4Products, Factors::Int8),
];

/// Without metadata, nodes tell whether products may be rounded; with them, nodes that say more are others.
#[test]
fn the_accuracy_of_products_is_what_nodes_and_metadata_say() {
    for precision in Precision::ALL {
        let result = of_products(precision, forget_dtype);
        assert!(result.passed() && result.audits[0].nodes().unwrap().difference.is_none(), "{result:?}");
        assert_eq!(result.dtype, precision);
        let factors = PRODUCTS.iter().find(|(products, _)| *products == precision).map(|(_, factors)| *factors);
        for report in &result.backends {
            assert_eq!(report.products, factors.filter(|_| report.backend == "ort"), "{report:?}");
        }
    }
    for (precision, _) in PRODUCTS {
        let stored = precision.without_products();
        let gained = of_products(stored, |model| say(model, precision.accuracy_level()));
        let lost = of_products(precision, |model| say(model, AccuracyLevel::Activations));
        for (result, dtype) in [(&gained, stored), (&lost, precision)] {
            assert_exact(result, dtype);
        }
        assert!(lost.passed(), "{lost:?}");
        // The library rounds where the processor has the instruction, and is then held to what the metadata say.
        let bodies = gained.backends.iter().filter(|report| report.backend != "ort");
        assert!(bodies.flat_map(|report| &report.graphs).all(|graph| graph.passed()), "{gained:?}");
    }
}

/// Nodes are others than those of an export, and no backend is granted rounded products.
fn assert_exact(result: &Verification, dtype: Precision) {
    let difference = result.audits[0].nodes().unwrap().difference.clone();
    assert!(difference.is_some_and(|found| found.starts_with("node ")), "{result:?}");
    assert_eq!(result.dtype, dtype);
    assert!(result.backends.iter().all(|report| report.products.is_none()), "{result:?}");
}

/// No export says bf16 of integers or int8 of floats, with metadata or without.
#[test]
fn levels_of_other_matrices_grant_nothing() {
    for precision in Precision::ALL.into_iter().filter(|precision| *precision != Precision::Fp16) {
        let [said, other] = match precision.integers() {
            Some(_) => [Precision::Int8Products.accuracy_level(), AccuracyLevel::Bf16],
            None => [AccuracyLevel::Bf16, AccuracyLevel::Int8],
        };
        assert!([AccuracyLevel::Activations, said].contains(&precision.accuracy_level()));
        let stated = of_products(precision, |model| say(model, other));
        let unstated = of_products(precision, |model| {
            forget_dtype(model);
            say(model, other);
        });
        assert_exact(&stated, precision);
        assert_exact(&unstated, precision.without_products());
        // There is nothing that a kernel could round to int8, and the level is no export's all the same.
        let runs = [&stated, &unstated].map(|result| precision.integers().is_some() || !seen_in_numbers(result));
        assert!(runs == [true; 2] && !stated.passed() && !unstated.passed(), "{stated:?} {unstated:?}");
    }
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
    for (precision, (what, constants, fault)) in PRODUCTS.into_iter().flat_map(|(precision, _)| {
        [("router", 1, router), ("scale", 0, scale), ("gates", 0, gates)].map(|fault| (precision, fault))
    }) {
        let result = of_products(precision, fault);
        let what = format!("{what} in {}", precision.as_str());
        assert_eq!(differing_constants(&result), constants, "{what}");
        // Bodies have the values of attributes in them.
        let reads = |name: &str| name == "ort" || constants > 0 && name == "ort-function";
        for report in result.backends.iter().filter(|report| reads(&report.backend)) {
            let [graph] = report.graphs.as_slice() else { panic!("{report:?}") };
            assert!(!graph.passed(), "{what} on {}: {graph:?}", report.backend);
            assert!(constants == 0 || graph.routing.unexplained_count > 0, "{what}: {graph:?}");
        }
        assert!(!result.passed(), "{what}");
    }
}

/// Where factors of products may be rounded, a tenth more is less than the largest effect of rounding on a logit.
#[test]
fn outputs_that_rounding_does_not_explain_in_all_are_found() {
    for precision in [Precision::Bf16Products, Precision::Int8Products] {
        let directory = tempfile::tempdir().unwrap();
        let out = directory.path().join("out");
        export(&checkpoint("jetmoe/bf16"), &out, &stored_as(Form::Function, precision)).unwrap();
        for (growth, is_sound) in [(1.0f32, true), (1.1, false)] {
            let path = out.join("model.onnx");
            let mut model = ModelProto::decode(std::fs::read(&path).unwrap().as_slice()).unwrap();
            grow_logits(model.graph.as_mut().unwrap(), growth);
            let grown = directory.path().join(format!("{growth}"));
            std::fs::create_dir(&grown).unwrap();
            std::fs::write(grown.join("model.onnx"), model.encode_to_vec()).unwrap();
            let result = check(&grown, "jetmoe/bf16");
            let graphs = || result.backends.iter().flat_map(|report| &report.graphs);
            assert_eq!(!seen_in_numbers(&result), is_sound, "{result:?}");
            let ours = graphs().next().unwrap();
            assert_eq!((ours.outputs.passed(), ours.excess.is_none()), (true, is_sound), "{ours:?}");
            assert!(is_sound || ours.excess.as_ref().unwrap().starts_with("logits: differs by "), "{ours:?}");
        }
    }
}

/// Multiplies the logits by `growth`.
fn grow_logits(graph: &mut GraphProto, growth: f32) {
    let node = graph.node.iter_mut().find(|node| node.output.iter().any(|name| name == "logits")).unwrap();
    node.output[0] = "logits.before".into();
    graph.node.push(crate::graphs::node("Mul", &["logits.before", "growth"], "logits"));
    let raw_data = Some(growth.to_le_bytes().to_vec().into());
    let data_type = DataType::Float as i32;
    graph.initializer.push(TensorProto { name: "growth".into(), data_type, raw_data, ..TensorProto::default() });
}
