//! One way of writing what ONNX lets be written in two.

use super::structure::canonical_domain;
use crate::onnx::proto::{ModelProto, NodeProto};

/// Spells the standard domain, which has two names, as the empty one everywhere in `model`, and ends inputs of nodes
/// with the last that is there: ONNX Runtime reads some of those behind it without looking. Returns whether inputs were
/// cut.
pub(super) fn normalise(model: &mut ModelProto) -> bool {
    let mut cut = false;
    let mut pending: Vec<&mut [NodeProto]> = model.graph.iter_mut().map(|graph| graph.node.as_mut_slice()).collect();
    for function in &mut model.functions {
        unify(&mut function.domain);
        function.opset_import.iter_mut().for_each(|import| unify(&mut import.domain));
        pending.push(&mut function.node);
    }
    model.opset_import.iter_mut().for_each(|import| unify(&mut import.domain));
    while let Some(nodes) = pending.pop() {
        for node in nodes {
            unify(&mut node.domain);
            cut |= cut_absent(&mut node.input);
            let attributes = node.attribute.iter_mut();
            let graphs = attributes.flat_map(|attribute| attribute.g.iter_mut().chain(&mut attribute.graphs));
            pending.extend(graphs.map(|graph| graph.node.as_mut_slice()));
        }
    }
    cut
}

fn unify(domain: &mut String) {
    if canonical_domain(domain).is_empty() {
        domain.clear();
    }
}

fn cut_absent(inputs: &mut Vec<String>) -> bool {
    let present = inputs.iter().rposition(|input| !input.is_empty()).map_or(0, |last| last + 1);
    let is_shorter = present < inputs.len();
    inputs.truncate(present);
    is_shorter
}
