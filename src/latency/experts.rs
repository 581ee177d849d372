//! How many tokens each expert really got.

use std::collections::BTreeMap;

use moa_schema::{RoutingPart, parameter};
use serde::{Deserialize, Serialize};

use super::shapes::Point;
use crate::onnx::{
    OnnxFile,
    proto::NodeProto,
    read::{module_of, operator_input, operator_of},
};

/// Tokens by expert, in one module on one input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// Model.
    pub model: String,
    /// Part of the model.
    pub part: String,
    /// Module of the layer.
    pub module: String,
    /// Shape of the input.
    pub point: Point,
    /// Routed tokens; those whose every weight is 0 are padding.
    pub tokens: u64,
    /// Tokens that went to each expert.
    pub counts: Vec<u64>,
}

impl ExpertLoad {
    /// The largest count beside the mean one; 1 where all are equal.
    #[allow(clippy::cast_precision_loss)]
    pub fn imbalance(&self) -> f64 {
        let sum: u64 = self.counts.iter().sum();
        let mean = sum as f64 / self.counts.len().max(1) as f64;
        self.counts.iter().max().map_or(1.0, |most| *most as f64 / mean.max(f64::MIN_POSITIVE))
    }
}

/// Routed tokens, and how many of them went to each of `experts`; `indices` and `weights` are `[tokens, top_k]`.
pub(super) fn count(indices: &[i64], weights: &[f64], top_k: usize, experts: usize) -> (u64, Vec<u64>) {
    let mut counts = vec![0; experts];
    let mut tokens = 0;
    for (indices, weights) in indices.chunks(top_k.max(1)).zip(weights.chunks(top_k.max(1))) {
        if weights.iter().all(|weight| *weight == 0.0) {
            continue;
        }
        tokens += 1;
        for expert in indices.iter().filter_map(|expert| usize::try_from(*expert).ok()) {
            if expert >= counts.len() {
                counts.resize(expert + 1, 0);
            }
            counts[expert] += 1;
        }
    }
    (tokens, counts)
}

/// Experts of every routed module, as far as the graph says: the columns of its router.
pub(super) fn experts_by_module(file: &OnnxFile) -> BTreeMap<String, usize> {
    let nodes = || file.graph().into_iter().flat_map(|graph| &graph.node);
    let columns = |name: &str| usize::try_from(*file.initializer(name)?.dims.get(1)?).ok();
    let producer = |name: &String| nodes().find(|node| node.output.contains(name));
    let mut experts = BTreeMap::new();
    for node in nodes() {
        let found = match operator_of(node) {
            Some(_) => operator_input(node, parameter::ROUTER_WEIGHT)
                .and_then(|weight| Some((module_of(node).to_owned(), columns(weight)?))),
            None => standard_module(node).and_then(|module| {
                let scores = producer(node.input.first()?)?;
                let logits = if scores.op_type == "Softmax" { producer(scores.input.first()?)? } else { scores };
                Some((module, columns(logits.input.get(1).filter(|_| logits.op_type == "MatMul")?)?))
            }),
        };
        experts.extend(found);
    }
    experts
}

/// The module that a node of the standard form routes.
fn standard_module(node: &NodeProto) -> Option<String> {
    let module = node.output.iter().find_map(|name| RoutingPart::Indices.module(name))?;
    (node.op_type == "TopK").then(|| module.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_is_not_counted_and_idle_experts_are() {
        let (tokens, counts) = count(&[0, 2, 2, 0, 1, 1], &[0.7, 0.2, 0.5, 0.1, 0.0, 0.0], 2, 4);
        assert_eq!((tokens, counts.as_slice()), (2, [2, 0, 2, 0].as_slice()));
        let load = ExpertLoad {
            model: String::new(),
            part: String::new(),
            module: String::new(),
            point: Point::new(),
            tokens: 4,
            counts: vec![4, 0, 4, 0],
        };
        assert!((load.imbalance() - 2.0).abs() < 1e-12);
    }
}
