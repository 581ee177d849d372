//! `bench --inputs`: with a folder of several graphs, and where inputs cannot be drawn.

use moa_export::onnx::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, attribute_proto::AttributeType,
    tensor_proto::DataType,
};

use super::exported;
use crate::{
    run::{causal, ids, mask, write_inputs},
    scene::{Scene, json, require_runtime},
};

#[test]
fn a_graph_that_inputs_leave_out_is_named() {
    require_runtime();
    let scene = Scene::with_fixture("nmt");
    scene.accepts("ck -o out");
    let [ids, mask] = [[5, 9, 2], [1; 3]].map(|values: [i64; 3]| values.map(i64::to_le_bytes).concat());
    let view = |data| safetensors::tensor::TensorView::new(safetensors::Dtype::I64, vec![1, 3], data).unwrap();
    let write = |names: [&'static str; 2]| {
        let inputs = names.into_iter().zip([view(&ids), view(&mask)]);
        scene.write("i.safetensors", safetensors::serialize(inputs, None).unwrap());
    };
    let line = "bench out --samples 4 --warm-up 0.05 --no-operators --inputs i.safetensors --csv -";
    write(["input_ids", "attention_mask"]);
    let outcome = scene.moa(line);
    let note = "note: decoder_model is not timed: i.safetensors has no \"encoder_attention_mask\", which \
                out/decoder_model.onnx takes\n";
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), note));
    let timed: Vec<_> = outcome.stdout.lines().skip(1).filter_map(|line| line.split(',').nth(2)).collect();
    assert_eq!(timed, ["encoder_model"; 2]);
    write(["input_ids", "encoder_attention_mask"]);
    let parts =
        ["MOA-E0316", "no \"attention_mask\", which out/encoder_model.onnx takes", "out/decoder_model.onnx takes"];
    scene.refuses(line, 3, &parts);
}

#[test]
fn caches_and_positions_may_be_left_out() {
    let scene = causal("");
    write_inputs(&scene, &[ids(&[1, 3]), mask(&[1, 3])]);
    let line = "bench m.onnx --samples 4 --warm-up 0.05 --no-operators --inputs inputs.safetensors --json -";
    let result = json(&scene.accepts(line));
    let point = &result["rows"][0]["point"];
    assert_eq!((&point["sequence"], &point["past_sequence"]), (&3.into(), &0.into()), "{point}");
    scene.accepts("ck -o halves.onnx --dtype fp16");
    let both = json(&scene.accepts(&line.replace("m.onnx", "m.onnx halves.onnx")));
    assert_eq!(both["rows"].as_array().unwrap().len(), 4, "each has caches of its own type");
}

/// Routers of MoLM read an input of their own, or the hidden states.
#[test]
fn routers_with_an_input_are_steered() {
    require_runtime();
    for (fixture, used) in [("molm/mlp", 2), ("molm/linear", 3)] {
        let scene = Scene::with_fixture(fixture);
        scene.accepts("ck -o m.onnx");
        let line = "bench m.onnx --samples 4 --warm-up 0.05 --no-operators --seq 6 --routing single --json -";
        let result: serde_json::Value = serde_json::from_str(&scene.accepts(line)).unwrap();
        let experts = result["experts"].as_array().unwrap();
        let attention = experts.iter().find(|one| one["module"].as_str().unwrap().ends_with("q_proj")).unwrap();
        let counts: Vec<_> =
            attention["counts"].as_array().unwrap().iter().map(|count| count.as_u64().unwrap()).collect();
        let expected: Vec<u64> = (0..4).map(|expert| if expert < used { 6 } else { 0 }).collect();
        assert_eq!(counts, expected, "{fixture}");
    }
}

#[test]
fn operators_in_the_graph_of_a_node_are_compared_with_their_bodies() {
    let scene = exported("");
    scene.accepts("run m.onnx --random --seq 6 --save-inputs in.safetensors");
    scene.edit("m.onnx", put_in_branches);
    let text = scene.accepts("bench m.onnx --samples 12 --warm-up 0.05 --no-operators --inputs in.safetensors");
    assert!(text.contains("m.onnx on ort: agrees with ort-function"), "{text}");
}

/// Puts all nodes into both branches of an `If`.
fn put_in_branches(model: &mut ModelProto) {
    let graph = model.graph.as_mut().unwrap();
    let (node, output) = (std::mem::take(&mut graph.node), graph.output.clone());
    let branch = GraphProto { node, output, name: "branch".into(), ..GraphProto::default() };
    let attribute = ["then_branch", "else_branch"].map(|name| AttributeProto {
        name: name.into(),
        r#type: AttributeType::Graph as i32,
        g: Some(branch.clone()),
        ..AttributeProto::default()
    });
    graph.initializer.push(TensorProto {
        name: "is_true".into(),
        data_type: DataType::Bool as i32,
        raw_data: Some(vec![1].into()),
        ..TensorProto::default()
    });
    graph.node.push(NodeProto {
        op_type: "If".into(),
        input: vec!["is_true".into()],
        output: graph.output.iter().map(|value| value.name.clone()).collect(),
        attribute: attribute.into(),
        ..NodeProto::default()
    });
}
