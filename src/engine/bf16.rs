//! Casts around operators whose matrices are bf16.
//!
//! Exports in bf16 keep their activations in f32, and the CUDA kernels take one type for both. So what flows into such
//! an operator is rounded to bf16, and what flows out of it is widened again, which is exact; routers stay in f32.

use std::collections::{BTreeMap, BTreeSet};

use moa_schema::{ElementType, Operator, Parameter};

use crate::onnx::proto::{AttributeProto, GraphProto, NodeProto, tensor_proto::DataType, type_proto};

/// Names of values that are cast already, by the values that they were cast from.
pub(super) type Casts = BTreeMap<String, String>;

/// Names of weights that are bf16.
pub(super) fn bf16_weights(graph: &GraphProto) -> BTreeSet<String> {
    let weights = graph.initializer.iter().filter(|weight| weight.data_type == DataType::Bfloat16 as i32);
    weights.map(|weight| weight.name.clone()).collect()
}

/// Names of values that a cast makes bf16.
pub(super) fn cast_to_bf16(graph: &GraphProto) -> BTreeSet<String> {
    let is_to =
        |node: &&NodeProto| node.op_type == "Cast" && node.int_attribute("to") == Some(DataType::Bfloat16 as i64);
    graph.node.iter().filter(is_to).flat_map(|node| node.output.iter().cloned()).collect()
}

/// Names of values that are declared with another type of floats than f32.
pub(super) fn declared_narrow(graph: &GraphProto) -> BTreeSet<String> {
    let is_narrow = |kind: i32| kind == DataType::Float16 as i32 || kind == DataType::Bfloat16 as i32;
    let values = graph.input.iter().chain(&graph.value_info).filter_map(|value| {
        let Some(type_proto::Value::TensorType(tensor)) = &value.r#type.as_ref()?.value else { return None };
        is_narrow(tensor.elem_type).then(|| value.name.clone())
    });
    values.collect()
}

/// Whether a matrix of `node` is bf16.
pub(super) fn has_bf16_matrices(node: &NodeProto, operator: &Operator, bf16: &BTreeSet<String>) -> bool {
    positions(operator.inputs, ElementType::Weight)
        .any(|index| node.input.get(index).is_some_and(|name| bf16.contains(name)))
}

/// The activations that `node` reads, of those that are there.
pub(super) fn activations<'a>(node: &'a NodeProto, operator: &Operator) -> impl Iterator<Item = &'a String> {
    let read = positions(operator.inputs, ElementType::Activation).filter_map(|index| node.input.get(index));
    read.filter(|name| !name.is_empty())
}

fn positions(parameters: &'static [Parameter], element: ElementType) -> impl Iterator<Item = usize> {
    parameters.iter().enumerate().filter(move |(_, parameter)| parameter.element == element).map(|(index, _)| index)
}

/// Lets `node` compute in bf16; gives the casts that go before it and after it. Values that `casts` knows are not cast
/// again.
pub(super) fn cast_edges(node: &mut NodeProto, operator: &Operator, casts: &mut Casts) -> [Vec<NodeProto>; 2] {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for index in positions(operator.inputs, ElementType::Activation) {
        let Some(name) = node.input.get_mut(index).filter(|name| !name.is_empty()) else { continue };
        let narrow = casts.entry(name.clone()).or_insert_with(|| {
            let narrow = format!("{name}.bf16");
            before.push(cast(name, &narrow, DataType::Bfloat16));
            narrow
        });
        name.clone_from(narrow);
    }
    for index in positions(operator.outputs, ElementType::Activation) {
        let Some(name) = node.output.get_mut(index).filter(|name| !name.is_empty()) else { continue };
        let narrow = format!("{name}.bf16");
        after.push(cast(&narrow, name, DataType::Float));
        // What reads the output as bf16 takes it as it is.
        casts.insert(name.clone(), narrow.clone());
        *name = narrow;
    }
    [before, after]
}

/// A node that makes `to`, of the type `kind`, of the value `from`.
pub(super) fn cast(from: &str, to: &str, kind: DataType) -> NodeProto {
    NodeProto {
        name: format!("cast.{to}"),
        op_type: "Cast".into(),
        input: vec![from.into()],
        output: vec![to.into()],
        attribute: vec![AttributeProto::int("to", kind as i64)],
        ..NodeProto::default()
    }
}
