//! Functions that call each other, and what cannot be inlined.

use super::*;
use crate::onnx::proto::ValueInfoProto;

fn node(op_type: &str, domain: &str, input: &[&str], output: &[&str]) -> NodeProto {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    NodeProto {
        op_type: op_type.into(),
        domain: domain.into(),
        input: texts(input),
        output: texts(output),
        ..NodeProto::default()
    }
}

fn function(name: &str, input: &[&str], output: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
    let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    FunctionProto {
        name: name.into(),
        domain: "f".into(),
        input: texts(input),
        output: texts(output),
        node: nodes,
        opset_import: vec![import("", 18), import("f", 1)],
        ..FunctionProto::default()
    }
}

fn import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: domain.into(), version }
}

fn model(nodes: Vec<NodeProto>, functions: Vec<FunctionProto>) -> ModelProto {
    let value = |name: &str| ValueInfoProto { name: name.into(), ..ValueInfoProto::default() };
    let graph = GraphProto { node: nodes, input: vec![value("x")], output: vec![value("y")], ..GraphProto::default() };
    let opset_import = vec![import("", 18), import("f", 1)];
    ModelProto { ir_version: 9, graph: Some(graph), opset_import, functions, ..ModelProto::default() }
}

fn lines(model: &ModelProto) -> Vec<String> {
    let nodes = &model.graph.as_ref().unwrap().node;
    nodes.iter().map(|n| format!("{} {} -> {}", n.op_type, n.input.join(" "), n.output.join(" "))).collect()
}

#[test]
fn nested_calls_are_replaced_and_inner_names_are_unique() {
    let inner =
        function("Inner", &["a"], &["b"], vec![node("Neg", "", &["a"], &["t"]), node("Abs", "", &["t"], &["b"])]);
    let outer =
        function("Outer", &["a"], &["b"], vec![node("Inner", "f", &["a"], &["t"]), node("Inner", "f", &["t"], &["b"])]);
    let calls = vec![node("Outer", "f", &["x"], &["m"]), node("Outer", "f", &["m"], &["y"])];
    let inlined = inline_functions(&model(calls, vec![outer, inner])).unwrap();
    assert_eq!(
        lines(&inlined),
        [
            "Neg x -> Outer/Inner/t",
            "Abs Outer/Inner/t -> Outer/t",
            "Neg Outer/t -> Outer/Inner_2/t",
            "Abs Outer/Inner_2/t -> m",
            "Neg m -> Outer_2/Inner/t",
            "Abs Outer_2/Inner/t -> Outer_2/t",
            "Neg Outer_2/t -> Outer_2/Inner_2/t",
            "Abs Outer_2/Inner_2/t -> y",
        ]
    );
    assert_eq!(inlined.opset_import, [import("", 18)]);
    assert!(inlined.functions.is_empty());
}

#[test]
fn absent_inputs_and_outputs_stay_absent_or_get_fresh_names() {
    let body = vec![node("Clip", "", &["a", "low", "high"], &["b"]), node("Shape", "", &["a"], &["c"])];
    let calls = vec![node("F", "f", &["x", "", "x"], &["y"])];
    let inlined =
        inline_functions(&model(calls, vec![function("F", &["a", "low", "high"], &["b", "c"], body)])).unwrap();
    assert_eq!(lines(&inlined), ["Clip x  x -> y", "Shape x -> F/c"]);
}

#[test]
fn attributes_come_from_the_call_then_from_the_default() {
    let int = |name: &str, i| AttributeProto {
        name: name.into(),
        i,
        r#type: AttributeType::Int as i32,
        ..AttributeProto::default()
    };
    let refer = |name: &str, to: &str| AttributeProto { ref_attr_name: to.into(), ..int(name, None) };
    let mut softmax = node("Softmax", "", &["a"], &["b"]);
    softmax.attribute = vec![refer("axis", "given"), refer("other", "defaulted"), refer("gone", "absent")];
    let mut f = function("F", &["a"], &["b"], vec![softmax]);
    f.attribute = vec!["given".into(), "absent".into()];
    f.attribute_proto = vec![int("defaulted", Some(5))];
    let mut call = node("F", "f", &["x"], &["y"]);
    call.attribute = vec![int("given", Some(-1))];
    let inlined = inline_functions(&model(vec![call], vec![f])).unwrap();
    let found = &inlined.graph.unwrap().node[0].attribute;
    assert_eq!(found, &[int("axis", Some(-1)), int("other", Some(5))]);
}

#[test]
fn graphs_within_functions_are_renamed() {
    let value = |name: &str| ValueInfoProto { name: name.into(), ..ValueInfoProto::default() };
    let branch =
        GraphProto { node: vec![node("Neg", "", &["a"], &["t"])], output: vec![value("t")], ..GraphProto::default() };
    let mut choice = node("If", "", &["c"], &["b"]);
    choice.attribute = vec![AttributeProto {
        name: "then_branch".into(),
        r#type: AttributeType::Graph as i32,
        g: Some(branch),
        ..AttributeProto::default()
    }];
    let calls = vec![node("F", "f", &["x", "x"], &["y"])];
    let inlined = inline_functions(&model(calls, vec![function("F", &["a", "c"], &["b"], vec![choice])])).unwrap();
    let graph = inlined.graph.unwrap().node[0].attribute[0].g.clone().unwrap();
    assert_eq!((graph.node[0].input[0].as_str(), graph.node[0].output[0].as_str()), ("x", "F/t"));
    assert_eq!(graph.output[0].name, "F/t");
}

#[test]
fn an_input_passed_through_is_copied() {
    let calls = vec![node("F", "f", &["x"], &["y"])];
    let inlined = inline_functions(&model(calls, vec![function("F", &["a"], &["a"], vec![])])).unwrap();
    assert_eq!(lines(&inlined), ["Identity x -> y"]);
}

#[test]
fn prefixes_avoid_every_name_of_the_model() {
    let calls = vec![node("Neg", "", &["x"], &["F/t"]), node("F", "f", &["F/t"], &["y"])];
    let body = vec![node("Neg", "", &["a"], &["t"]), node("Neg", "", &["t"], &["b"])];
    let inlined = inline_functions(&model(calls, vec![function("F", &["a"], &["b"], body)])).unwrap();
    assert_eq!(lines(&inlined), ["Neg x -> F/t", "Neg F/t -> F_2/t", "Neg F_2/t -> y"]);
}

#[test]
fn what_cannot_be_inlined_is_refused() {
    let f = |nodes| function("F", &["a"], &["b"], nodes);
    let call = || vec![node("F", "f", &["x"], &["y"])];
    let recursive = inline_functions(&model(call(), vec![f(call())]));
    assert_eq!(recursive, Err(InlineError::Recursive { function: "F".into() }));
    let mut newer = f(vec![]);
    newer.opset_import[0].version = 20;
    assert!(matches!(inline_functions(&model(call(), vec![newer])), Err(InlineError::OpsetMismatch { .. })));
    let wide = vec![node("F", "f", &["x", "x"], &["y"])];
    assert!(matches!(inline_functions(&model(wide, vec![f(vec![])])), Err(InlineError::Call { .. })));
    let mut bomb: Vec<_> = (0..40)
        .map(|i| {
            let callee = format!("F{}", i + 1);
            let nodes = vec![node(&callee, "f", &["a"], &["t"]), node(&callee, "f", &["t"], &["b"])];
            function(&format!("F{i}"), &["a"], &["b"], nodes)
        })
        .collect();
    bomb.push(function("F40", &["a"], &["b"], vec![node("Neg", "", &["a"], &["b"])]));
    let calls = vec![node("F0", "f", &["x"], &["y"])];
    assert_eq!(inline_functions(&model(calls, bomb)), Err(InlineError::TooLarge));
}

fn inlined(functions: Vec<FunctionProto>, nodes: Vec<NodeProto>) -> Result<ModelProto, InlineError> {
    let graph = GraphProto { node: nodes, ..GraphProto::default() };
    let opset_import = vec![import("", 18), import("f", 1)];
    inline_functions(&ModelProto { graph: Some(graph), functions, opset_import, ..ModelProto::default() })
}

#[test]
fn every_node_gets_a_name_of_its_own() {
    let body = vec![node("Neg", "", &["x"], &["t"]), node("Neg", "", &["t"], &["u"]), node("Neg", "", &["u"], &["y"])];
    let calls = (0..3).map(|i| node("F", "f", &["a"], &[&format!("b{i}")])).collect();
    let model = inlined(vec![function("F", &["x"], &["y"], body)], calls).unwrap();
    let names: Vec<_> = model.graph.unwrap().node.into_iter().map(|node| node.name).collect();
    assert_eq!(names[..4], ["F/Neg", "F/Neg_2", "F/Neg_3", "F_2/Neg"]);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), 9);
}

#[test]
fn what_would_take_more_memory_than_it_has_bytes_is_refused() {
    let mut large = node("Neg", "", &["x"], &["y"]);
    large.attribute = vec![AttributeProto::default(); 10_000];
    let calls = (0..100).map(|i| node("F", "f", &["a"], &[&format!("b{i}")])).collect();
    assert_eq!(inlined(vec![function("F", &["x"], &["y"], vec![large])], calls), Err(InlineError::TooLarge));
}
