//! Bytes that are no model, bombs, and mutated models.

use std::collections::BTreeSet;

use moa_export::{
    checkpoint::Checkpoint,
    export::{ExportOptions, export},
    moa_graphs::{Form, Options, Precision},
    moa_schema::GateMode,
};

#[path = "../common/data.rs"]
mod data;

use super::*;
use data::data;

#[test]
fn bytes_that_are_no_model() {
    let whole = valid().encode_to_vec();
    let cut = &whole[..whole.len() - 3];
    let huge_length = [0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let cases: [(&[u8], ErrorKind); 8] = [
        (b"", Malformed),
        (b"garbage", Malformed),
        (&[0; 64], Malformed),
        (cut, Malformed),
        (&huge_length, Malformed),
        (&[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Malformed),
        (&[0x0b, 0x0c], Malformed),
        (b"\x80\x02version https://git-lfs", Malformed),
    ];
    for (bytes, kind) in cases {
        let error = read_bytes(bytes).expect_err("no model");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let cuts: Vec<_> = (0..whole.len()).map(|end| read_bytes(&whole[..end])).collect();
    assert!(cuts.iter().flat_map(Result::as_ref).count() <= 2, "only cuts between the last fields leave a model");
    assert!(cuts.iter().filter_map(|cut| cut.as_ref().err()).all(|error| error.kind() == Malformed));
}

#[test]
fn bombs_are_refused_before_they_are_decoded() {
    let empty_nodes = [0x0a, 0x00].repeat(20_000_000);
    let mut bomb = vec![0x08, 0x09, 0x3a];
    prost::encoding::encode_varint(empty_nodes.len() as u64, &mut bomb);
    bomb.extend(empty_nodes);
    let error = read_bytes(&bomb).expect_err("twenty million nodes");
    assert_eq!(error.kind(), Limit, "{error}");

    // Fewer fields than are allowed, each of which takes more than a thousand bytes.
    let attributes = vec![AttributeProto::default(); 1];
    let node = NodeProto { op_type: "Cast".into(), attribute: attributes, ..NodeProto::default() };
    let mut graph = prost::Message::encode_to_vec(&GraphProto { node: vec![node], ..GraphProto::default() });
    assert!(graph.ends_with(&[0x2a, 0x00]), "an empty attribute ends the graph");
    let empty_attributes = [0x2a, 0x00].repeat(1_000_000);
    let node = [&graph[2..], &empty_attributes].concat();
    graph = vec![0x0a];
    prost::encoding::encode_varint(node.len() as u64, &mut graph);
    graph.extend(node);
    let mut bomb = vec![0x08, 0x09, 0x3a];
    prost::encoding::encode_varint(graph.len() as u64, &mut bomb);
    bomb.extend(graph);
    let error = read_bytes(&bomb).expect_err("a million attributes");
    assert_eq!(error.kind(), Limit, "{error}");

    let mut integers = weight("w", &[0], &[]);
    integers.int64_data = vec![0; (1 << 26) + 1];
    let mut model = valid();
    *weight_of(&mut model) = integers;
    assert_eq!(read(&model).expect_err("packed integers").kind(), Limit);

    let mut inner = GraphProto::default();
    for _ in 0..34 {
        let attribute = AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) };
        let node = NodeProto { op_type: "If".into(), attribute: vec![attribute], ..NodeProto::default() };
        inner = GraphProto { node: vec![node], ..GraphProto::default() };
    }
    let deep = ModelProto { graph: Some(inner), ..valid() };
    assert_eq!(read(&deep).expect_err("34 graphs").kind(), Limit);
}

#[test]
fn graphs_may_nest_sixteen_deep() {
    let nested = |depth: usize| {
        let mut inner = GraphProto::default();
        for _ in 1..depth {
            let attribute = AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) };
            let node = NodeProto { op_type: "If".into(), attribute: vec![attribute], ..NodeProto::default() };
            inner = graph(vec![node], vec![], vec![], vec![weight("", &[0], &[])]);
            inner.initializer.clear();
        }
        inner.input = vec![value("x", DataType::Float, &[])];
        inner.output = inner.input.clone();
        read(&ModelProto { graph: Some(inner), ..valid() })
    };
    assert!(nested(16).is_ok());
    assert_eq!(nested(17).expect_err("17 graphs").kind(), Limit);
}

#[test]
fn functions_may_call_each_other_sixty_four_deep() {
    let chain = |depth: usize| {
        let mut model = valid();
        model.functions.clear();
        for level in 0..depth {
            let next = format!("F{}", level + 1);
            let call =
                if level + 1 < depth { node_of("local", &next, &["a"], &["b"]) } else { node("Neg", &["a"], &["b"]) };
            let mut function = function("local", &format!("F{level}"), &["a"], &["b"], vec![call]);
            function.opset_import.push(import("local", 1));
            model.functions.push(function);
        }
        graph_of(&mut model).node[1].op_type = "F0".into();
        model
    };
    let deepest = read(&chain(64)).expect("64 calls");
    let inlined = inline_functions(&deepest).expect("one node is left of them");
    assert_eq!(inlined.graph.unwrap().node.len(), 2);
    let error = read(&chain(65)).expect_err("65 calls");
    assert_eq!(error.kind(), Limit, "{error}");
    assert!(error.to_string().contains("function `F0` begins a chain of 65 calls"), "{error}");
    assert_eq!(read(&chain(20_000)).expect_err("20000 calls").kind(), Limit);

    let callees_first = |depth: usize| {
        let mut model = chain(depth);
        model.functions.reverse();
        read(&model)
    };
    callees_first(64).expect("64 calls, callees first");
    let error = callees_first(65).expect_err("65 calls, callees first");
    assert!(error.to_string().contains("function `F0` begins a chain of 65 calls"), "{error}");
    assert_eq!(callees_first(20_000).expect_err("20000 calls, callees first").kind(), Limit);
}

/// `indices` as the rows of a table of `rows` positions, found by counting ones behind `nodes`.
fn entry(key: &str, value: &str) -> StringStringEntryProto {
    StringStringEntryProto { key: key.into(), value: value.into() }
}

#[test]
fn names_hold_no_control_characters() {
    const WHY: &str = "holds a control character";
    check(&[
        case(Unsupported, WHY, |m| m.producer_name = "a\u{1b}[31m".into()),
        case(Unsupported, WHY, |m| graph_of(m).name = "a\nb".into()),
        case(Unsupported, r"`a\nverified`", |m| graph_of(m).node[0].name = "a\nverified".into()),
        case(Unsupported, WHY, |m| graph_of(m).initializer.push(weight("w\r", &[1], &[1.0]))),
        case(Unsupported, WHY, |m| graph_of(m).input[0] = value("x", DataType::Float, &["a\tb"])),
        case(Unsupported, WHY, |m| {
            let body = vec![node("Neg", &["a"], &["b"])];
            m.functions.push(function("local", "a\n", &["a"], &["b"], body));
        }),
        case(Unsupported, WHY, |m| {
            let inner = graph(vec![node("Neg", &["a"], &["b\n"])], vec![], vec![], vec![]);
            let default = AttributeProto { name: "body".into(), g: Some(inner), ..AttributeProto::default() };
            let default = AttributeProto { r#type: AttributeType::Graph as i32, ..default };
            m.functions[0].attribute_proto.push(default);
        }),
        case(Unsupported, "the graph `a\\n`", |m| {
            let inner = GraphProto { name: "a\n".into(), ..graph(vec![], vec![], vec![], vec![]) };
            with_attribute(m, AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) });
        }),
        case(Unsupported, "the value `x\\n`", |m| {
            graph_of(m).value_info.push(value("x\n", DataType::Float, &["a"]));
        }),
        case(Unsupported, "the metadata key `a\\nb`", |m| m.metadata_props.push(entry("a\nb", ""))),
        case(Unsupported, WHY, |m| m.metadata_props.push(entry("moa.form", "fused\nverified"))),
    ]);
    let mut model = valid();
    model.metadata_props.push(entry("notes", "two\nlines"));
    read(&model).unwrap();
}

fn looks_up(rows: i64, nodes: Vec<NodeProto>, constants: Vec<TensorProto>) -> ModelProto {
    let mut all = vec![node("CumSum", &["mask", "axis"], &["count"])];
    all.extend(nodes);
    all.push(node("Gather", &["table", "indices"], &["y"]));
    let table = weight("table", &[rows, 1], &vec![0.0; usize::try_from(rows).unwrap()]);
    let mut weights = vec![table, integer("axis", 1)];
    weights.extend(constants);
    let mask = value("mask", DataType::Int64, &["batch", "tokens"]);
    model(graph(all, vec![mask], vec![value("y", DataType::Float, &["batch", "tokens", "1"])], weights))
}

fn integer(name: &str, value: i64) -> TensorProto {
    let raw_data = Some(value.to_le_bytes().to_vec().into());
    TensorProto { name: name.into(), data_type: DataType::Int64 as i32, raw_data, ..TensorProto::default() }
}

fn positions(model: &ModelProto) -> Vec<usize> {
    let (_folder, file) = support_onnx::file(model);
    let _ = (file.longest_row(), file.given_positions(), file.looked_up_rows(), file.masks());
    file.position_tables().into_iter().map(|table| table.positions).collect()
}

#[test]
fn positions_are_found_whatever_lies_before_them() {
    let plus = |value| looks_up(9, vec![node("Add", &["count", "one"], &["indices"])], vec![integer("one", value)]);
    assert_eq!(positions(&plus(1)), [7]);
    for value in [i64::MAX, i64::MIN] {
        assert!(positions(&plus(value)).is_empty(), "{value} overflows");
    }
    // As many ways as 2^60 lead from the indices to the count.
    let name = |level: usize| if level == 60 { "indices".to_owned() } else { format!("n{level}") };
    let mut squares = vec![node("Cast", &["count"], &["n0"])];
    squares.extend((1..=60).map(|level| node("Mul", &[&name(level - 1), &name(level - 1)], &[&name(level)])));
    assert_eq!(positions(&looks_up(9, squares, vec![])), [8]);
}

#[test]
fn the_standard_domain_has_two_spellings() {
    let mut spelled = looks_up(9, vec![node("Cast", &["count"], &["indices"])], vec![]);
    let plain = read(&spelled).unwrap();
    spelled.opset_import[0].domain = "ai.onnx".into();
    graph_of(&mut spelled).node.iter_mut().for_each(|node| node.domain = "ai.onnx".into());
    assert_eq!(read(&spelled).unwrap(), plain, "one spelling is left");
    assert_eq!(positions(&spelled), [8]);

    // Functions, what they import, and graphs in attributes.
    let of = |domain: &str| {
        let mut model = valid();
        model.opset_import.push(import(domain, 18));
        let function = &mut model.functions[0];
        function.opset_import[0].domain = domain.into();
        function.node[0].domain = domain.into();
        let twice = support_onnx::function(domain, "Twice", &["a"], &["b"], function.node.clone());
        model.functions.push(twice);
        let inner = graph(vec![node_of(domain, "Neg", &["x"], &["b"])], vec![], vec![], vec![]);
        with_attribute(&mut model, AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) });
        model
    };
    assert_eq!(read(&of("ai.onnx")).unwrap(), of(""), "one spelling is left");
}

/// In the graph, in bodies of functions and in graphs in attributes.
#[test]
fn inputs_end_with_the_last_that_is_there() {
    let of = |absent: &[&str]| {
        let mut model = valid();
        let inner = graph(vec![node("Clip", &["x"], &["b"])], vec![], vec![], vec![]);
        with_attribute(&mut model, AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) });
        graph_of(&mut model).node.push(node("Clip", &["x", "", "w"], &["clipped"]));
        model.functions[0].node.iter_mut().for_each(|node| node.op_type = "Clip".into());
        let extend = |node: &mut NodeProto| node.input.extend(absent.iter().map(|name| (*name).to_owned()));
        model.functions[0].node.iter_mut().for_each(extend);
        let nodes = &mut graph_of(&mut model).node;
        extend(nodes.last_mut().unwrap());
        let inner = nodes.iter_mut().flat_map(|node| &mut node.attribute).filter_map(|found| found.g.as_mut());
        inner.for_each(|graph| graph.node.iter_mut().for_each(extend));
        model
    };
    assert_eq!(read(&of(&["", ""])).unwrap(), of(&[]));
}

/// No runtime loads such a node, also where the last of its inputs are absent.
#[test]
fn nodes_have_no_more_inputs_than_their_operators() {
    for (op_type, inputs, most) in [
        ("MatMul", ["x", "x", "", ""].as_slice(), 2),
        ("Cast", &["x", ""], 1),
        ("LayerNormalization", &["x", "w", "", ""], 3),
        ("Where", &["x", "x", "x", "x"], 3),
    ] {
        let mut model = valid();
        graph_of(&mut model).node.push(node(op_type, inputs, &["more"]));
        let found = inputs.len();
        let expected = format!("it has {found} inputs, absent ones included, and its operator takes at most {most}");
        let error = read(&model).expect_err(op_type);
        assert!(error.kind() == Malformed && error.to_string().contains(&expected), "{error}");
        graph_of(&mut model).node.last_mut().unwrap().input.truncate(most);
        read(&model).unwrap();
    }
    let mut model = valid();
    graph_of(&mut model).node[1].input.push(String::new());
    let error = read(&model).expect_err("a call").to_string();
    assert!(
        error.contains("the call of function `Negate` that gives `")
            && error.contains("` has 2 inputs, absent ones included, and the function has 1"),
        "{error}"
    );
}

/// Standard operators of what `options` export of a checkpoint, those of bodies too.
fn operators_of(folder: &str, options: &ExportOptions) -> BTreeSet<String> {
    let out = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&data(folder), None).unwrap();
    let report = export(&checkpoint, &out.path().join("out"), options).unwrap();
    let graphs = report.files.iter().filter(|file| file.path.extension().is_some_and(|ending| ending == "onnx"));
    let models: Vec<ModelProto> =
        graphs.map(|file| ModelProto::decode(std::fs::read(&file.path).unwrap().as_slice()).unwrap()).collect();
    let bodies = models.iter().flat_map(|model| model.functions.iter().flat_map(|body| &body.node));
    let nodes = models.iter().flat_map(|model| &model.graph.as_ref().unwrap().node).chain(bodies);
    nodes.filter(|node| node.domain.is_empty()).map(|node| node.op_type.clone()).collect()
}

#[test]
fn inputs_are_counted_of_every_operator_that_exports_have() {
    let mut operators = BTreeSet::new();
    for form in [Form::Function, Form::Standard] {
        let options = |precision, opset, gate_mode| ExportOptions {
            graph: Options { form, precision, router_outputs: true, last_logits: true },
            opset,
            gate_mode,
            ..ExportOptions::default()
        };
        for folder in ["jetmoe/bf16", "molm/linear", "molm/mlp"] {
            for (precision, opset) in [(Precision::Fp32, None), (Precision::Fp16, None), (Precision::Int4, Some(21))] {
                operators.extend(operators_of(folder, &options(precision, opset, None)));
            }
        }
        for folder in ["v_ffd_moe", "v_learned_pos_lnemb", "v_noisy_gating_k_enc3_dec1", "v_nopos_kE"] {
            for gate_mode in [None, Some(GateMode::SoftmaxTopkRenorm)] {
                let options = ExportOptions {
                    graph: Options { form, ..Options::default() },
                    ..options(Precision::Fp32, None, gate_mode)
                };
                operators.extend(operators_of(&format!("variants/{folder}"), &options));
            }
        }
    }
    let mut inputs = [""; 20];
    inputs[0] = "x";
    for operator in operators {
        let mut model = valid();
        graph_of(&mut model).node.push(node(&operator, &inputs, &["more"]));
        let error = read(&model).expect_err(&operator).to_string();
        assert!(error.contains("absent ones included") || error.contains("has no name"), "{operator}: {error}");
    }
}

/// Nodes of the operators that lookups follow, each reading values that stand before it.
fn woven(choices: &[(usize, [prop::sample::Index; 3])]) -> Vec<NodeProto> {
    const OPERATORS: [(&str, usize); 9] = [
        ("Add", 2),
        ("Mul", 2),
        ("Where", 3),
        ("Cast", 1),
        ("Slice", 3),
        ("CumSum", 2),
        ("Less", 2),
        ("Gather", 2),
        ("Constant", 0),
    ];
    let mut names: Vec<String> = ["count", "mask", "axis", "table", "big"].map(str::to_owned).to_vec();
    let mut nodes = Vec::new();
    for (operator, inputs) in choices {
        let (op_type, arity) = OPERATORS[operator % OPERATORS.len()];
        let read: Vec<String> = inputs[..arity].iter().map(|index| names[index.index(names.len())].clone()).collect();
        let read: Vec<&str> = read.iter().map(String::as_str).collect();
        let output = format!("n{}", nodes.len());
        nodes.push(node(op_type, &read, &[&output]));
        names.push(output);
    }
    nodes.push(node("Add", &[names.last().map_or("count", String::as_str), "big"], &["indices"]));
    nodes
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = read_bytes(&bytes);
    }

    #[test]
    fn mutated_models_never_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = valid().encode_to_vec();
        for (index, byte) in edits {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        if let Ok(model) = read_bytes(&bytes) {
            let _ = inline_functions(&model);
        }
    }

    #[test]
    fn lookups_end_on_any_graph(
        choices in proptest::collection::vec((any::<usize>(), any::<[prop::sample::Index; 3]>()), 0..40),
        big in any::<i64>(),
    ) {
        let model = looks_up(3, woven(&choices), vec![integer("big", big)]);
        prop_assume!(read(&model).is_ok());
        let found = positions(&model);
        prop_assert!(found.iter().all(|positions| isize::try_from(*positions).is_ok()), "{found:?}");
    }

    #[test]
    fn shuffled_nodes_are_read_only_in_order(order in Just([0usize, 1, 2, 3]).prop_shuffle()) {
        let names = ["x", "a", "b", "c", "y"];
        let chain: Vec<NodeProto> = (0..4).map(|i| node("Neg", &[names[i]], &[names[i + 1]])).collect();
        let nodes = order.iter().map(|i| chain[*i].clone()).collect();
        let value = |name| vec![value(name, DataType::Float, &["n"])];
        let result = read(&model(graph(nodes, value("x"), value("y"), vec![])));
        prop_assert_eq!(result.is_ok(), order == [0, 1, 2, 3]);
    }
}
