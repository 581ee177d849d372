//! Weights that a graph reads from elsewhere than its initializers, and initializers that it does not read.

use std::collections::BTreeSet;

use crate::onnx::{
    proto::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, tensor_proto::DataType},
    read::for_each_node,
};

/// Names of the constants that nodes of `model` give out, or that graphs in nodes hold. Single numbers and the integers
/// of shapes and axes are left out: other programs write those as they fold or convert nodes.
pub(super) fn constants_in_nodes(model: &ModelProto) -> Vec<&str> {
    let mut found = Vec::new();
    let mut visit = |node| found.extend(constants_of(node));
    for nodes in model.graph.iter().map(|graph| &graph.node).chain(model.functions.iter().map(|body| &body.node)) {
        for_each_node(nodes, &mut visit);
    }
    found
}

fn constants_of(node: &NodeProto) -> Vec<&str> {
    let is_large = |attribute: &AttributeProto| {
        attribute.floats.len() > 1 || attribute.sparse_tensor.is_some() || attribute.t.as_ref().is_some_and(is_weight)
    };
    let given = (node.op_type == "Constant" && node.attribute.iter().any(is_large)).then(|| node.output.first());
    let graphs = node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
    let inner = graphs.flat_map(|graph| &graph.initializer).filter(|tensor| is_weight(tensor));
    given.flatten().map(String::as_str).into_iter().chain(inner.map(|tensor| tensor.name.as_str())).collect()
}

fn is_weight(tensor: &TensorProto) -> bool {
    let is_index = [DataType::Int64, DataType::Int32, DataType::Bool].iter().any(|of| *of as i32 == tensor.data_type);
    !is_index && tensor.dims.iter().any(|dim| *dim > 1)
}

/// Every value that a node of `graph` reads, or that is an output.
pub(super) fn values_read(graph: &GraphProto) -> BTreeSet<&str> {
    let mut read: BTreeSet<&str> = graph.output.iter().map(|output| output.name.as_str()).collect();
    for_each_node(&graph.node, &mut |node| {
        read.extend(node.input.iter().map(String::as_str));
        let graphs = node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
        read.extend(graphs.flat_map(|graph| &graph.output).map(|output| output.name.as_str()));
    });
    read
}
