//! A causal language model whose graph has no mask: rows of one batch have one length, so that none has padding.

use std::fs;

use moa_export::{
    backend::OrtOperators,
    generate::Continuation,
    onnx::proto::{
        AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, attribute_proto::AttributeType,
        tensor_proto::DataType,
    },
};
use moa_graphs::Form;
use prost::Message;
use tempfile::TempDir;

use crate::{
    language_models::{GREEDY, exported, generator, goldens},
    out,
};

fn integer(name: &str, value: i64) -> TensorProto {
    let (name, data_type) = (name.to_owned(), DataType::Int64 as i32);
    TensorProto { name, data_type, dims: vec![1], int64_data: vec![value], ..TensorProto::default() }
}

/// A node that computes `output`; numbers are axes, attributes are left out.
fn node(op_type: &str, input: &[&str], output: &str) -> NodeProto {
    let input = input.iter().map(|name| (*name).to_owned()).collect();
    NodeProto { op_type: op_type.into(), input, output: vec![output.into()], ..NodeProto::default() }
}

/// Makes the mask within the graph, all ones and as long as the old and the new tokens.
fn without_mask(graph: &mut GraphProto) {
    graph.input.retain(|input| input.name != "attention_mask");
    let past = graph.input.iter().find(|input| input.name.starts_with("past_key_values")).unwrap().name.clone();
    let value = AttributeProto {
        name: "value".into(),
        r#type: AttributeType::Tensor as i32,
        t: Some(integer("", 1)),
        ..AttributeProto::default()
    };
    let mut ones = node("ConstantOfShape", &["shape"], "attention_mask");
    ones.attribute.push(value);
    let nodes = [
        node("Shape", &["input_ids"], "shape_of_ids"),
        node("Shape", &[&past], "shape_of_past"),
        node("Gather", &["shape_of_ids", "0"], "rows"),
        node("Gather", &["shape_of_ids", "1"], "new_tokens"),
        node("Gather", &["shape_of_past", "2"], "old_tokens"),
        node("Add", &["new_tokens", "old_tokens"], "tokens"),
        node("Concat", &["rows", "tokens"], "shape"),
        ones,
    ];
    graph.node.splice(..0, nodes);
    let axis = AttributeProto {
        name: "axis".into(),
        r#type: AttributeType::Int as i32,
        i: Some(0),
        ..AttributeProto::default()
    };
    graph.node[6].attribute.push(axis);
    graph.initializer.extend([integer("0", 0), integer("1", 1), integer("2", 2)]);
}

fn exported_without_mask(form: Form) -> TempDir {
    let folder = exported("jetmoe/bf16", form, false);
    let path = out(&folder).join("model.onnx");
    let mut model = ModelProto::decode(fs::read(&path).unwrap().as_slice()).unwrap();
    without_mask(model.graph.as_mut().unwrap());
    fs::write(&path, model.encode_to_vec()).unwrap();
    folder
}

#[test]
fn rows_of_a_graph_without_a_mask_see_no_padding() {
    let (prompts, expected): (Vec<_>, Vec<_>) = goldens("jetmoe/bf16").into_iter().unzip();
    // A blank prompt among the others, and prompts of one length that do not follow each other.
    let prompts = [&prompts[..], &["".into()], &prompts].concat();
    let expected = [&expected[..], &[vec![]], &expected].concat();
    for (form, operators) in [(Form::Function, OrtOperators::Library), (Form::Standard, OrtOperators::Functions)] {
        let folder = exported_without_mask(form);
        let found =
            |batch| -> Vec<Continuation> { generator(&folder, operators, batch).generate(&prompts, &GREEDY).unwrap() };
        let alone = found(1);
        for ((prompt, expected), found) in prompts.iter().zip(&expected).zip(&alone) {
            assert_eq!(found.tokens[..expected.len()], expected[..], "{form:?}: {prompt:?}");
        }
        for batch in [3, 32] {
            assert_eq!(alone, found(batch), "{form:?}, {batch}");
        }
    }
}
