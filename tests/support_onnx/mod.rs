//! Small ONNX models, built by hand; no test uses every helper.

#![allow(dead_code)]

use std::path::{Path, PathBuf};

use moa_export::onnx::proto::attribute_proto::AttributeType;
use moa_export::onnx::proto::tensor_proto::{DataLocation, DataType};
use moa_export::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use moa_export::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    TensorProto, TensorShapeProto, TypeProto, ValueInfoProto, type_proto,
};
use moa_export::onnx::read::{OnnxFile, read_model};
use prost::Message;

/// A node of the standard domain.
pub(crate) fn node(op_type: &str, input: &[&str], output: &[&str]) -> NodeProto {
    NodeProto {
        name: format!("{op_type}_{}", output.first().unwrap_or(&"")),
        op_type: op_type.into(),
        input: texts(input),
        output: texts(output),
        ..NodeProto::default()
    }
}

/// A node of another domain.
pub(crate) fn node_of(domain: &str, op_type: &str, input: &[&str], output: &[&str]) -> NodeProto {
    NodeProto { domain: domain.into(), ..node(op_type, input, output) }
}

/// An attribute of type `INT`.
pub(crate) fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: name.into(), r#type: AttributeType::Int as i32, i: Some(value), ..AttributeProto::default() }
}

/// An attribute of type `STRING`.
pub(crate) fn text(name: &str, value: &str) -> AttributeProto {
    let (kind, s) = (AttributeType::String as i32, Some(value.into()));
    AttributeProto { name: name.into(), r#type: kind, s, ..AttributeProto::default() }
}

/// `y = MoEFeedForward(x, r, i, o)`, without a body.
pub(crate) fn feed_forward_model() -> ModelProto {
    let mut feed_forward = node_of("ai.moa", "MoEFeedForward", &["x", "r", "i", "o"], &["y"]);
    feed_forward.attribute =
        vec![int("top_k", 2), text("gate_mode", "topk_softmax"), text("activation", "silu"), int("gated", 1)];
    let inputs = ["x", "r", "i", "o"].map(|name| value(name, DataType::Float, &[]));
    let outputs = vec![value("y", DataType::Float, &[])];
    let mut model = model(graph(vec![feed_forward], inputs.to_vec(), outputs, Vec::new()));
    model.opset_import.push(import("ai.moa", 1));
    model
}

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// An input or output; a dimension that is no number is a symbol.
pub(crate) fn value(name: &str, data_type: DataType, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = text.parse().map(dimension::Value::DimValue);
        Dimension { value: Some(value.unwrap_or_else(|_| dimension::Value::DimParam((*text).to_owned()))) }
    };
    let shape = TensorShapeProto { dim: dims.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: data_type as i32, shape: Some(shape) };
    let value = Some(type_proto::Value::TensorType(tensor));
    ValueInfoProto { name: name.into(), r#type: Some(TypeProto { value }), ..ValueInfoProto::default() }
}

/// A weight of f32 values in the model file.
pub(crate) fn weight(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    TensorProto { raw_data: Some(bytes(values).into()), ..empty_weight(name, dims) }
}

/// A weight of f32 values without data.
pub(crate) fn empty_weight(name: &str, dims: &[i64]) -> TensorProto {
    TensorProto { name: name.into(), dims: dims.to_vec(), data_type: DataType::Float as i32, ..TensorProto::default() }
}

/// A weight of f32 values in a file of their own.
pub(crate) fn external_weight(name: &str, dims: &[i64], entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto { key: (*key).into(), value: (*value).into() };
    TensorProto {
        external_data: entries.iter().map(entry).collect(),
        data_location: DataLocation::External as i32,
        ..empty_weight(name, dims)
    }
}

/// Little-endian bytes of f32 values.
pub(crate) fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// An import of an operator set.
pub(crate) fn import(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: domain.into(), version }
}

/// A graph.
pub(crate) fn graph(
    node: Vec<NodeProto>,
    input: Vec<ValueInfoProto>,
    output: Vec<ValueInfoProto>,
    initializer: Vec<TensorProto>,
) -> GraphProto {
    GraphProto { node, name: "graph".into(), input, output, initializer, ..GraphProto::default() }
}

/// A model of IR version 9 and opset 18.
pub(crate) fn model(graph: GraphProto) -> ModelProto {
    ModelProto { ir_version: 9, opset_import: vec![import("", 18)], graph: Some(graph), ..ModelProto::default() }
}

/// A function of a domain, for opset 18.
pub(crate) fn function(
    domain: &str,
    name: &str,
    input: &[&str],
    output: &[&str],
    node: Vec<NodeProto>,
) -> FunctionProto {
    FunctionProto {
        name: name.into(),
        domain: domain.into(),
        input: texts(input),
        output: texts(output),
        node,
        opset_import: vec![import("", 18)],
        ..FunctionProto::default()
    }
}

/// Writes the model into the folder.
pub(crate) fn write(folder: &Path, model: &ModelProto) -> PathBuf {
    let path = folder.join("model.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    path
}

/// Writes the model into a folder of its own, and reads it back.
pub(crate) fn file(model: &ModelProto) -> (tempfile::TempDir, OnnxFile) {
    let folder = tempfile::tempdir().unwrap();
    let file = read_model(&write(folder.path(), model)).unwrap();
    (folder, file)
}
