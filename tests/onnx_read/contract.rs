//! Nodes of our operators that are not as the contract says.

use moa_export::onnx::proto::{
    AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, attribute_proto::AttributeType,
    tensor_proto::DataType,
};
use moa_export::onnx::read::ErrorKind::{self, Malformed, Unsupported};

use crate::support_onnx::{
    feed_forward_model, function, graph, import, int, model, node, node_of, text, value, weight,
};
use crate::{graph_of, read};

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: name.into(), r#type: kind as i32, ..AttributeProto::default() }
}

fn node_in(model: &mut ModelProto) -> &mut NodeProto {
    &mut graph_of(model).node[0]
}

/// Replaces, or removes, the attribute `name`.
fn change(model: &mut ModelProto, name: &str, by: Option<AttributeProto>) {
    let attributes = &mut node_in(model).attribute;
    let place = attributes.iter().position(|attribute| attribute.name == name).unwrap();
    attributes.remove(place);
    attributes.extend(by);
}

#[test]
fn a_node_as_the_contract_says_is_read() {
    read(&feed_forward_model()).unwrap();
    let mut prepared = feed_forward_model();
    node_in(&mut prepared).attribute.extend([int("present_inputs", 0xF), text("plugin_version", "1")]);
    read(&prepared).unwrap();
    for level in [0, 3, 4] {
        let mut rounding = feed_forward_model();
        node_in(&mut rounding).attribute.push(int("accuracy_level", level));
        read(&rounding).unwrap();
    }
}

#[test]
fn damaged_nodes_are_refused_before_a_runtime_sees_them() {
    type Edit = fn(&mut ModelProto);
    let cases: [(ErrorKind, &str, Edit); 21] = [
        (Malformed, "`top_k` must be at least 1, found 0", |m| change(m, "top_k", Some(int("top_k", 0)))),
        (Malformed, "attribute `top_k` of type INT is missing", |m| change(m, "top_k", Some(int("tpo_k", 2)))),
        (Malformed, "attribute `top_k` of type INT is missing", |m| change(m, "top_k", Some(text("top_k", "2")))),
        (Malformed, "`gated` must be 0 or 1, found 2", |m| change(m, "gated", Some(int("gated", 2)))),
        (Malformed, "attribute `gated` of type INT is missing", |m| change(m, "gated", None)),
        (Malformed, "must be one of softmax_topk, softmax_topk_renorm, topk_softmax, found `soft\\nmax`", |m| {
            change(m, "gate_mode", Some(text("gate_mode", "soft\nmax")));
        }),
        (Malformed, "must be one of relu, gelu, gelu_tanh, silu, found `tanh`", |m| {
            change(m, "activation", Some(text("activation", "tanh")));
        }),
        (Malformed, "the input `output_weight` is missing", |m| drop(node_in(m).input.pop())),
        (Malformed, "the input `router_weight` is missing", |m| node_in(m).input[1].clear()),
        (Malformed, "it has 9 inputs, and its operator at most 8", |m| {
            node_in(m).input.extend(["x", "x", "x", "x", "x"].map(String::from));
        }),
        (Malformed, "it has 4 outputs, and its operator at most 3", |m| {
            node_in(m).output.extend(["a".into(), "b".into(), "c".into()]);
        }),
        (Malformed, "`present_inputs` tells of other inputs", |m| node_in(m).attribute.push(int("present_inputs", 7))),
        (Malformed, "the input `output_weight` is missing", |m| {
            node_in(m).attribute.push(int("present_inputs", 0x17));
        }),
        (Malformed, "the input `input_scale` is for weights in integers, and `input_weight` is float32", |m| {
            node_in(m).input.extend(["", "", "x", "x"].map(String::from));
        }),
        (Malformed, "the input `output_scale` is for weights in integers, and `output_weight` is float32", |m| {
            node_in(m).input.push("x".into());
            node_in(m).attribute.push(int("present_inputs", 0b1000_1111));
        }),
        (Malformed, "`accuracy_level` must be 0, 3 or 4, found 2", |m| {
            node_in(m).attribute.push(int("accuracy_level", 2));
        }),
        (Malformed, "`accuracy_level` must be of type INT", |m| {
            node_in(m).attribute.push(text("accuracy_level", "3"));
        }),
        (Malformed, "its operator has no attribute `window`", |m| {
            node_in(m).attribute.push(int("window", 3));
        }),
        (Malformed, "attribute `plugin_version` must be of type STRING", |m| {
            node_in(m).attribute.push(int("plugin_version", 1));
        }),
        (Unsupported, "version `2` of the operators ai.moa", |m| {
            node_in(m).attribute.push(text("plugin_version", "2"));
        }),
        (Unsupported, "ai.moa has no such operator", |m| node_in(m).op_type = "MoE".into()),
    ];
    for (kind, text, edit) in cases {
        let mut model = feed_forward_model();
        edit(&mut model);
        let error = read(&model).expect_err(text);
        let message = error.to_string();
        assert!(message.contains("node 0 `MoEFeedForward_y` (`M") && message.contains(text), "{text}: {message}");
        assert_eq!((error.kind(), error.help().is_some()), (kind, true), "{message}");
    }
}

/// The model with zeros of these dimensions in place of inputs; a last one of 0 is none.
fn with_weights(weights: &[(&str, [i64; 3])]) -> ModelProto {
    let mut model = feed_forward_model();
    for (name, dims) in weights {
        graph_of(&mut model).input.retain(|input| input.name != *name);
        let dims: Vec<i64> = dims.iter().copied().filter(|dim| *dim != 0).collect();
        let values = vec![0.0; usize::try_from(dims.iter().product::<i64>()).unwrap()];
        graph_of(&mut model).initializer.push(weight(name, &dims, &values));
    }
    model
}

#[test]
fn weights_fit_each_other_and_the_attributes() {
    let (router, input, output) = (("r", [6, 4, 0]), ("i", [4, 6, 10]), ("o", [4, 5, 6]));
    for weights in [&[router, input, output][..], &[router], &[input, output], &[router, output]] {
        read(&with_weights(weights)).unwrap();
    }
    for (top_k, weights, text) in [
        (9, &[router, input, output][..], "top_k is 9, but the router has 4 experts"),
        (5, &[router], "top_k is 5, but the router has 4 experts"),
        (2, &[router, ("i", [3, 6, 10])], "`input_weight` must be [E, C, F], or [E, C, 2 * F] where gated, found"),
        (2, &[router, ("i", [4, 6, 9]), output], "found [4, 6, 9] where [4, 6, 10] is needed"),
        (2, &[input, ("o", [4, 6, 0])], "`output_weight` must be [E, F, C], found [4, 6]"),
    ] {
        let mut model = with_weights(weights);
        change(&mut model, "top_k", Some(int("top_k", top_k)));
        let error = read(&model).expect_err(text);
        let message = error.to_string();
        assert!(
            message.contains("node 0 `MoEFeedForward_y` (`MoEFeedForward`): ") && message.contains(text),
            "{message}"
        );
        assert!(!message.contains("MoEFeedForward: "), "{message}");
        assert_eq!((error.kind(), error.help().is_some()), (Malformed, true), "{message}");
    }
}

#[test]
fn a_body_chooses_as_many_experts_as_its_node() {
    let constants = [
        |count| AttributeProto { ints: vec![count], ..attribute("value_ints", AttributeType::Ints) },
        |count| int("value_int", count),
        |count| {
            let values = TensorProto {
                dims: vec![1],
                data_type: DataType::Int64 as i32,
                int64_data: vec![count],
                ..TensorProto::default()
            };
            AttributeProto { t: Some(values), ..attribute("value", AttributeType::Tensor) }
        },
    ];
    let with_body = |constant: AttributeProto, overload: &str| {
        let mut model = feed_forward_model();
        let mut count = node("Constant", &[], &["k"]);
        count.attribute.push(constant);
        let nodes = vec![count, node("TopK", &["a", "k"], &["c", "d"])];
        let body = function("ai.moa", "MoEFeedForward", &["a", "r", "i", "o"], &["c"], nodes);
        model.functions.push(FunctionProto { overload: overload.into(), ..body });
        model
    };
    for constant in constants {
        read(&with_body(constant(2), "")).unwrap();
        read(&with_body(constant(3), "another")).unwrap();
        let error = read(&with_body(constant(3), "")).unwrap_err();
        let text = "attribute `top_k` is 2, and the body of its function chooses 3";
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!((error.kind(), error.help().is_some()), (Malformed, true));
    }
}

/// The model with matrices of the types `kinds`, where they are known, and `scales` behind the other inputs: `x` is
/// float32, `s` bfloat16 and `?` of a type that is not known.
fn of_types(kinds: [Option<DataType>; 2], scales: &[&str]) -> ModelProto {
    let mut model = feed_forward_model();
    for (name, kind) in ["i", "o"].into_iter().zip(kinds) {
        let graph = graph_of(&mut model);
        graph.input.retain(|input| input.name != name);
        match kind {
            Some(kind) => graph.input.push(value(name, kind, &[])),
            None => graph.node.insert(0, node("Identity", &["r"], &[name])),
        }
    }
    // The bias of the output, then what a router reads, then the scales.
    let (bias, scales) = scales.split_at(scales.len().min(1));
    let inputs = bias.iter().chain(bias).chain(scales).map(|name| (*name).to_owned());
    graph_of(&mut model).input.push(value("s", DataType::Bfloat16, &[]));
    let nodes = &mut graph_of(&mut model).node;
    nodes.insert(0, node("Identity", &["r"], &["?"]));
    nodes.last_mut().unwrap().input.extend(inputs);
    model
}

#[test]
fn matrices_of_integers_and_their_scales_go_together() {
    let (int8, int4, float) = (Some(DataType::Int8), Some(DataType::Int4), Some(DataType::Float));
    for (kinds, scales) in [
        ([float, float], &[][..]),
        ([float, float], &["", "", ""]),
        ([int8, int8], &["", "x", "x"]),
        ([None, int8], &["", "x", "x"]),
        ([int8, None], &["", "?", "s"]),
        ([int4, int4], &["", "s", "s"]),
        ([int4, int4], &["", "?", "s"]),
        ([int4, None], &["", "s", "x"]),
        ([None, None], &["", "x", "x"]),
        ([None, None], &[]),
    ] {
        read(&of_types(kinds, scales)).unwrap();
    }
    for (kinds, scales, text) in [
        ([int8, int8], &[][..], "`input_weight` is int8, and the input `input_scale` is missing"),
        ([int8, int8], &["", "x"], "`output_weight` is int8, and the input `output_scale` is missing"),
        ([int4, int4], &[], "`input_weight` is int4, and the input `input_scale` is missing"),
        ([int8, float], &["", "x", "x"], "`output_scale` is for weights in integers, and `output_weight` is float32"),
        ([int4, float], &["", "s", "s"], "`output_scale` is for weights in integers, and `output_weight` is float32"),
        ([int8, int8], &["", "s", "x"], "`input_scale` is bfloat16, and scales of int8 weights are float32"),
        ([int4, int4], &["", "s", "x"], "`output_scale` is float32, and scales of int4 weights are bfloat16"),
        ([int8, int4], &["", "x", "s"], "`input_weight` is int8, and `output_weight` is int4"),
        ([int4, int8], &["", "s", "x"], "`input_weight` is int4, and `output_weight` is int8"),
        ([Some(DataType::Uint4), None], &["", "s", "s"], "and `input_weight` is uint4"),
        ([int8, float], &["", "x"], "`input_weight` has scales, and `output_weight` has none"),
        ([float, int8], &["", "", "x"], "`output_weight` has scales, and `input_weight` has none"),
        ([None, None], &["", "x"], "`input_weight` has scales, and `output_weight` has none"),
        ([Some(DataType::Float16), None], &["", "x", "x"], "and `input_weight` is float16"),
    ] {
        let error = read(&of_types(kinds, scales)).expect_err(text);
        assert!(error.to_string().contains(text), "{text}: {error}");
        assert_eq!((error.kind(), error.help().is_some()), (Malformed, true), "{error}");
    }
}

/// `y = LMHead(x, w, s)`, with a matrix and scales of the types `kinds`, or without the scales.
fn head_model(kinds: [DataType; 2], has_scales: bool) -> ModelProto {
    let inputs = [("x", DataType::Float, &["b", "t", "2"][..]), ("w", kinds[0], &["2", "3"]), ("s", kinds[1], &["3"])];
    let [x, w, s] = inputs.map(|(name, kind, dims)| value(name, kind, dims));
    let names = if has_scales { &["x", "w", "s"][..] } else { &["x", "w"] };
    let head = node_of("ai.moa", "LMHead", names, &["y"]);
    let mut model = model(graph(vec![head], vec![x, w, s], vec![value("y", DataType::Float, &[])], Vec::new()));
    model.opset_import.push(import("ai.moa", 1));
    model
}

#[test]
fn a_head_has_a_matrix_of_integers_and_its_scales_or_one_of_bf16() {
    let (int8, float) = (DataType::Int8, DataType::Float);
    read(&head_model([DataType::Bfloat16, float], false)).unwrap();
    read(&head_model([int8, float], true)).unwrap();
    read(&head_model([DataType::Int4, DataType::Bfloat16], true)).unwrap();
    for (kinds, has_scales, text) in [
        ([int8, float], false, "`output_weight` is int8, and the input `output_scale` is missing"),
        (
            [DataType::Bfloat16, float],
            true,
            "`output_scale` is for weights in integers, and `output_weight` is bfloat16",
        ),
        ([float; 2], true, "the input `output_scale` is for weights in integers, and `output_weight` is float32"),
        ([float; 2], false, "`output_weight` is float32, for which ONNX has MatMul"),
        ([DataType::Float16, float], false, "`output_weight` is float16, for which ONNX has MatMul"),
        ([int8, DataType::Bfloat16], true, "`output_scale` is bfloat16, and scales of int8 weights are float32"),
    ] {
        let error = read(&head_model(kinds, has_scales)).expect_err(text);
        let message = error.to_string();
        assert!(message.contains("node 0 `LMHead_y` (`LMHead`") && message.contains(text), "{text}: {message}");
        assert_eq!((error.kind(), error.help().is_some()), (Malformed, true), "{message}");
    }
}

#[test]
fn nodes_with_a_body_of_the_model_and_nodes_of_bodies_are_its_own() {
    let mut model = feed_forward_model();
    node_in(&mut model).op_type = "Twice".into();
    let inner = node_of("ai.moa", "MoEFeedForward", &["a"], &["b"]);
    let double = node("Add", &["b", "b"], &["c"]);
    let mut body = function("ai.moa", "Twice", &["a", "r", "i", "o"], &["c"], vec![inner, double]);
    body.opset_import.push(import("ai.moa", 1));
    model.functions.push(body);
    read(&model).unwrap();
}
