//! Numbers that stand in the nodes of a file beside those that the checkpoint gives.
//!
//! Whatever another program made of a graph, a node that still computes the same output by the same operator does so
//! by the same numbers, such as an epsilon, a scale or the score of what is masked. Integers of standard operators are
//! left out: a program that turns a tensor changes axes with it.

use std::collections::BTreeMap;

use moa_schema::{ACCURACY_LEVEL, DOMAIN};
use prost::bytes::Bytes;

use super::{
    nodes::{called, name, nodes},
    other_values::OtherValues,
};
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
        let told = |[found, given]: [String; 2]| Some(format!("`{name}` is {found}, and the checkpoint gives {given}"));
        match expected.find_attribute(name) {
            Some(other) if differs(attribute, other, ours) => told(shown(attribute, other)),
            None if ours && name == ACCURACY_LEVEL => told([number(attribute).unwrap_or_default(), "none".into()]),
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

/// Both values: of several numbers, the first that differ.
fn shown(found: &AttributeProto, expected: &AttributeProto) -> [String; 2] {
    if let (Some(found), Some(expected)) = (number(found), number(expected)) {
        return [found, expected];
    }
    first_other(found, expected).unwrap_or_else(|| ["another value".into(), "one of another type or length".into()])
}

fn number(attribute: &AttributeProto) -> Option<String> {
    Some(match (attribute.f, attribute.i, &attribute.s) {
        (Some(value), ..) => value.to_string(),
        (_, Some(value), _) => value.to_string(),
        (_, _, Some(text)) => format!("\"{}\"", String::from_utf8_lossy(text).escape_debug()),
        _ => return None,
    })
}

fn first_other(found: &AttributeProto, expected: &AttributeProto) -> Option<[String; 2]> {
    if found.floats.len() == expected.floats.len()
        && let Some((found, expected)) =
            found.floats.iter().zip(&expected.floats).find(|(found, expected)| found.to_bits() != expected.to_bits())
    {
        return Some([found, expected].map(|value| format!("{value:?}")));
    }
    let [(kind, found), (other, expected)] = [floats(found.t.as_ref()?)?, floats(expected.t.as_ref()?)?];
    let kind = DataType::try_from(kind).ok().filter(|kind| *kind as i32 == other && found.len() == expected.len())?;
    let OtherValues { found, expected, .. } = OtherValues::of_block(kind, 0, [&found, &expected])?;
    Some([found, expected])
}
