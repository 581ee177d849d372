//! Numbers that stand in the nodes of a file beside those that the checkpoint gives.
//!
//! Whatever another program made of a graph, a node that still computes the same output by the same operator does so
//! by the same numbers, such as an epsilon, a scale or the score of what is masked. Integers of standard operators are
//! left out: a program that turns a tensor changes axes with it.

use std::collections::BTreeMap;

use moa_schema::{ACCURACY_LEVEL, DOMAIN};
use prost::bytes::Bytes;

use super::nodes::{called, name, nodes};
use crate::onnx::{
    proto::{AttributeProto, ModelProto, NodeProto, TensorProto, tensor_proto::DataType},
    read::inline_bytes,
};

/// The first number of a node of `found`, the bodies of its operators included, that the node of `expected` with the
/// same output has otherwise.
pub(super) fn other_value(found: &ModelProto, expected: &ModelProto) -> Option<String> {
    let in_graph = other_of(nodes(found), nodes(expected));
    in_graph.or_else(|| {
        found.functions.iter().find_map(|function| {
            let is_same = |other: &&_| name(other) == name(function);
            let counterpart = expected.functions.iter().find(is_same)?;
            let other = other_of(&function.node, &counterpart.node)?;
            Some(format!("{other} in the body of {}", function.name))
        })
    })
}

fn other_of(found: &[NodeProto], expected: &[NodeProto]) -> Option<String> {
    let by_output: BTreeMap<_, _> = expected.iter().filter_map(|node| Some((node.output.first()?, node))).collect();
    found.iter().find_map(|node| {
        let other = by_output.get(node.output.first()?)?;
        let is_same = node.op_type == other.op_type && node.domain == other.domain;
        let value = is_same.then(|| other_attribute(node, other)).flatten()?;
        Some(format!("{value} in node \"{}\"", called(node)))
    })
}

fn other_attribute(found: &NodeProto, expected: &NodeProto) -> Option<String> {
    let ours = expected.domain == DOMAIN;
    found.attribute.iter().find_map(|attribute| {
        let name = &attribute.name;
        let told = |value: &str| Some(format!("`{name}` is {}, and the checkpoint gives {value}", shown(attribute)));
        match expected.find_attribute(name) {
            Some(other) if differs(attribute, other, ours) => told(&shown(other)),
            None if ours && name == ACCURACY_LEVEL => told("none"),
            _ => None,
        }
    })
}

fn differs(found: &AttributeProto, expected: &AttributeProto, ours: bool) -> bool {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    let float = |attribute: &AttributeProto| attribute.f.map(f32::to_bits);
    let tensor = |attribute: &AttributeProto| attribute.t.as_ref().and_then(floats);
    let plain = |attribute: &AttributeProto| (attribute.i, attribute.s.clone());
    float(found) != float(expected)
        || bits(&found.floats) != bits(&expected.floats)
        || matches!((tensor(found), tensor(expected)), (Some(found), Some(expected)) if found != expected)
        || ours && plain(found) != plain(expected)
}

/// Type and bytes of a tensor of floats that stands in a node.
fn floats(tensor: &TensorProto) -> Option<(i32, Bytes)> {
    let kinds = [DataType::Float, DataType::Float16, DataType::Bfloat16, DataType::Double].map(|kind| kind as i32);
    kinds.contains(&tensor.data_type).then(|| Some((tensor.data_type, inline_bytes(tensor)?))).flatten()
}

fn shown(attribute: &AttributeProto) -> String {
    match (attribute.f, attribute.i, &attribute.s) {
        (Some(value), ..) => value.to_string(),
        (_, Some(value), _) => value.to_string(),
        (_, _, Some(text)) => format!("\"{}\"", String::from_utf8_lossy(text).escape_debug()),
        _ => "another value".into(),
    }
}
