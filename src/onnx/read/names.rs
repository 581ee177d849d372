//! Names that results and messages show as they are.

use super::error::{Fault, shown};
use super::structure::for_each_node;
use crate::metadata;
use crate::onnx::proto::tensor_shape_proto::dimension;
use crate::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, type_proto,
};

/// Refuses control characters in names: a line end in one would make lines of a result that nobody wrote.
///
/// # Errors
///
/// The first such name.
pub(super) fn check(model: &ModelProto) -> Result<(), Fault> {
    let mut found = None;
    let mut look = |what: &'static str, text: &str| {
        if found.is_none() && text.chars().any(char::is_control) {
            let text = format!("{what} {} holds a control character, which no output could show", shown(text));
            found = Some(Fault::unsupported(text).help("change it with the onnx package"));
        }
    };
    for name in [&model.producer_name, &model.producer_version] {
        look("the producer", name);
    }
    for import in &model.opset_import {
        look("the operator set", &import.domain);
    }
    for entry in &model.metadata_props {
        look("the metadata key", &entry.key);
        if entry.key.starts_with(metadata::PREFIX) {
            look("the metadata value", &entry.value);
        }
    }
    model.functions.iter().for_each(|function| of_function(function, &mut look));
    if let Some(graph) = &model.graph {
        of_graph(graph, &mut look);
        of_nodes(&graph.node, &mut look);
    }
    found.map_or(Ok(()), Err)
}

fn of_function(function: &FunctionProto, look: &mut impl FnMut(&'static str, &str)) {
    for name in [&function.name, &function.domain, &function.overload] {
        look("the function", name);
    }
    let values = function.input.iter().chain(&function.output).chain(&function.attribute);
    values.for_each(|name| look("the parameter", name));
    of_values(&function.value_info, look);
    of_attributes(&function.attribute_proto, look);
    let defaults = function.attribute_proto.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
    defaults.for_each(|graph| of_nodes(&graph.node, look));
    of_nodes(&function.node, look);
}

fn of_nodes(nodes: &[NodeProto], look: &mut impl FnMut(&'static str, &str)) {
    for_each_node(nodes, &mut |node| {
        look("the node", &node.name);
        for name in [&node.op_type, &node.domain, &node.overload] {
            look("the operator", name);
        }
        node.input.iter().chain(&node.output).for_each(|name| look("the value", name));
        of_attributes(&node.attribute, look);
    });
}

/// Of attributes but for the nodes of their graphs.
fn of_attributes(attributes: &[AttributeProto], look: &mut impl FnMut(&'static str, &str)) {
    for attribute in attributes {
        look("the attribute", &attribute.name);
        attribute.g.iter().chain(&attribute.graphs).for_each(|graph| of_graph(graph, look));
    }
}

/// Of a graph but for its nodes.
fn of_graph(graph: &GraphProto, look: &mut impl FnMut(&'static str, &str)) {
    look("the graph", &graph.name);
    graph.initializer.iter().for_each(|tensor| look("the weight", &tensor.name));
    [&graph.input, &graph.output, &graph.value_info].into_iter().for_each(|values| of_values(values, look));
}

fn of_values(values: &[ValueInfoProto], look: &mut impl FnMut(&'static str, &str)) {
    for value in values {
        look("the value", &value.name);
        dims(value).for_each(|name| look("the dimension", name));
    }
}

/// Names of the dimensions of a tensor.
fn dims(value: &ValueInfoProto) -> impl Iterator<Item = &str> {
    let shape = value.r#type.iter().filter_map(|kind| match &kind.value {
        Some(type_proto::Value::TensorType(tensor)) => tensor.shape.as_ref(),
        _ => None,
    });
    shape.flat_map(|shape| &shape.dim).filter_map(|dim| match &dim.value {
        Some(dimension::Value::DimParam(name)) => Some(name.as_str()),
        _ => None,
    })
}
