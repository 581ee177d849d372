//! Where a model uses the operators of this project.

use std::collections::BTreeSet;

use crate::onnx::proto::{ModelProto, NodeProto};
use crate::onnx::read::for_each_node;

/// Names of the operators of the `ai.moa` domain that the model uses.
pub(super) fn used(model: &ModelProto) -> BTreeSet<String> {
    of_domain(model, moa_schema::DOMAIN)
}

/// Names of the operators of `domain` that the model uses.
pub(super) fn of_domain(model: &ModelProto, domain: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let bodies = model.functions.iter().map(|function| function.node.as_slice());
    let graph = model.graph.iter().map(|graph| graph.node.as_slice());
    for nodes in graph.chain(bodies) {
        for_each_node(nodes, &mut |node: &NodeProto| {
            if node.domain == domain {
                names.insert(node.op_type.clone());
            }
        });
    }
    names
}

/// Says that the operators `missing` have no body.
#[cfg(any(feature = "ort", feature = "tract"))]
pub(super) fn without_bodies(missing: &BTreeSet<String>) -> String {
    let names: Vec<&str> = missing.iter().map(String::as_str).collect();
    let have = if names.len() == 1 { "has" } else { "have" };
    format!("{} {have} no body", names.join(", "))
}

/// Names of those that the model does not define by a function.
#[cfg(any(feature = "ort", feature = "tract"))]
pub(super) fn without_body(model: &ModelProto) -> BTreeSet<String> {
    let mut names = used(model);
    for function in model.functions.iter().filter(|function| function.domain == moa_schema::DOMAIN) {
        names.remove(&function.name);
    }
    names
}
