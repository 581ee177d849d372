//! Graph audit: the nodes of a file, and the bodies of its operators, beside those that the checkpoint gives today.
//!
//! Runs show what a graph computes for their inputs; this shows that it computes nothing else for others.

use moa_graphs::graph::Graph;

use super::node_values::other_value;
use crate::onnx::{
    OPSETS, OnnxFile, expose_routing,
    proto::{FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto},
    read::{Dim, ValueInfo, dims_text, value_info},
    structure,
};

/// Outcome of the audit of one file.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct NodeAudit {
    /// Nodes of the graph that the checkpoint gives.
    #[serde(rename = "count")]
    pub nodes: usize,
    /// The first thing that is another one than in that graph, if something is.
    pub difference: Option<String>,
    /// Whether that is more than the version of the standard operators.
    #[serde(skip)]
    pub(super) is_rewritten: bool,
    /// What stands where an input or an output belongs that the graph has elsewhere, if something does: a caller that
    /// counts them gets another one. Looked at where the file says that it is an export.
    pub order: Option<String>,
    /// The first number in a node that the checkpoint gives otherwise, where its operator and its output stayed. Looked
    /// at where the file says that it is an export.
    pub value: Option<String>,
    /// The first input or output that is declared with dimensions that it cannot have: a caller may take its buffers
    /// from them. Looked at where the file says that it is an export.
    pub shape: Option<String>,
}

impl NodeAudit {
    /// Compares the graph of `file`, its weights apart, with `expected`.
    pub(super) fn run(file: &OnnxFile, expected: &Graph, is_stated: bool) -> Self {
        let found = file.model();
        let expected = structure(expected, opset(found));
        let order = is_stated.then(|| other_order(found, &expected)).flatten();
        let value = is_stated.then(|| other_value(found, &expected)).flatten();
        let shape = is_stated.then(|| other_shape(found, &expected)).flatten();
        let (graph, inner) = (graph_difference(found, &expected), inner_difference(found, &expected));
        let is_rewritten = graph.is_some() || inner.is_some();
        let difference = graph.or_else(|| other_opset(found)).or(inner);
        Self { nodes: nodes(&expected).len(), difference, is_rewritten, order, value, shape }
    }

    /// What makes the graph another one, whatever it computes for the inputs of a run.
    pub fn fault(&self) -> Option<&str> {
        self.order.as_deref().or(self.value.as_deref()).or(self.shape.as_deref())
    }
}

/// The first module of `expected` whose routing the graph of `file` does not show.
pub(super) fn hidden_module(file: &OnnxFile, expected: &Graph) -> Option<String> {
    let modules = |mut model: ModelProto| expose_routing(&mut model);
    let shown = modules(file.model().clone());
    modules(structure(expected, 1)).into_iter().find(|module| !shown.contains(module))
}

pub(super) fn nodes(model: &ModelProto) -> &[NodeProto] {
    model.graph.as_ref().map_or(&[], |graph| &graph.node)
}

/// The first node, input or output that is another one.
fn graph_difference(found: &ModelProto, expected: &ModelProto) -> Option<String> {
    let ends = || {
        let inputs = [found, expected].map(|model| values(model, |graph| &graph.input));
        let outputs = [found, expected].map(|model| values(model, |graph| &graph.output));
        let named = |what: &str, [found, expected]: [Vec<ValueInfoProto>; 2]| {
            let other = found.iter().find(|value| !expected.contains(value));
            let gone = expected.iter().find(|value| !found.contains(value));
            let value = other.or(gone).map(|value| format!("{what} \"{}\"", value.name));
            value.or_else(|| (found != expected).then(|| format!("the order of {what}s")))
        };
        named("input", inputs).or_else(|| named("output", outputs))
    };
    first_node(nodes(found), nodes(expected)).or_else(ends)
}

/// The first body, or type of a value in between, that is another one.
fn inner_difference(found: &ModelProto, expected: &ModelProto) -> Option<String> {
    let body = |function: &FunctionProto| {
        let counterpart = expected.functions.iter().find(|other| name(other) == name(function));
        first_of_body(function, counterpart)
    };
    let gone = |function: &&FunctionProto| found.functions.iter().all(|other| name(other) != name(function));
    let missing = || expected.functions.iter().find(gone).map(|function| format!("the body of {}", function.name));
    let types = || {
        let [found, expected] = [found, expected].map(|model| values(model, |graph| &graph.value_info));
        let other = |value: &&ValueInfoProto| {
            expected.iter().any(|expected| expected.name == value.name && contradict(value, expected))
        };
        found.iter().find(other).map(|value| format!("the type of \"{}\"", value.name))
    };
    found.functions.iter().find_map(body).or_else(missing).or_else(types)
}

/// Values of the graph, without what is written for readers alone.
fn values(model: &ModelProto, of: fn(&GraphProto) -> &Vec<ValueInfoProto>) -> Vec<ValueInfoProto> {
    model.graph.as_ref().map_or_else(Vec::new, |graph| bare(of(graph)))
}

/// The standard operators, where they are of a version that no export has: nodes that look the same may mean another
/// thing in it.
fn other_opset(found: &ModelProto) -> Option<String> {
    let version = opset(found);
    (!OPSETS.contains(&version)).then(|| format!("opset {version}"))
}

fn opset(model: &ModelProto) -> i64 {
    let standard = model.opset_import.iter().find(|import| import.domain.is_empty());
    standard.map_or(0, |import| import.version)
}

/// The first input or output that another one stands in place of; those that one of the graphs lacks do not count.
fn other_order(found: &ModelProto, expected: &ModelProto) -> Option<String> {
    let other = |what: &str, of: fn(&GraphProto) -> &Vec<ValueInfoProto>| {
        let names = |model: &ModelProto| -> Vec<String> {
            model.graph.iter().flat_map(of).map(|value| value.name.clone()).collect()
        };
        let [mut found, mut expected] = [found, expected].map(names);
        found.retain(|name| expected.contains(name));
        expected.retain(|name| found.contains(name));
        let (found, expected) = found.iter().zip(&expected).find(|(found, expected)| found != expected)?;
        Some(format!("{what} \"{found}\" stands where \"{expected}\" belongs"))
    };
    other("input", |graph| &graph.input).or_else(|| other("output", |graph| &graph.output))
}

pub(super) fn name(function: &FunctionProto) -> (&str, &str) {
    (&function.domain, &function.name)
}

/// The first input or output whose declared dimensions contradict those of the checkpoint's.
fn other_shape(found: &ModelProto, expected: &ModelProto) -> Option<String> {
    let other = |what: &str, of: fn(&GraphProto) -> &Vec<ValueInfoProto>| {
        let values = |model: &ModelProto| model.graph.iter().flat_map(of).filter_map(value_info).collect::<Vec<_>>();
        let expected = values(expected);
        values(found).into_iter().find_map(|ValueInfo { name, dims: found, .. }| {
            let (found, expected) = (found?, expected.iter().find(|other| other.name == name)?.dims.as_deref()?);
            let told = || {
                let [found, expected] = [&found, expected].map(dims_text);
                format!("{what} \"{name}\" is declared as {found}, and the checkpoint gives {expected}")
            };
            dims_contradict(&found, expected).then(told)
        })
    };
    other("input", |graph| &graph.input).or_else(|| other("output", |graph| &graph.output))
}

fn dims_contradict(some: &[Dim], others: &[Dim]) -> bool {
    let differ =
        |(one, other): (&Dim, &Dim)| matches!((one, other), (Dim::Fixed(one), Dim::Fixed(other)) if one != other);
    some.len() != others.len() || some.iter().zip(others).any(differ)
}

/// Whether no value can be of both types; what one leaves open contradicts nothing.
fn contradict(one: &ValueInfoProto, other: &ValueInfoProto) -> bool {
    let (Some(one), Some(other)) = (value_info(one), value_info(other)) else { return false };
    let dims = one.dims.zip(other.dims);
    one.data_type != other.data_type || dims.is_some_and(|(dims, others)| dims_contradict(&dims, &others))
}

/// Without what is written for readers alone.
fn bare(values: &[ValueInfoProto]) -> Vec<ValueInfoProto> {
    values.iter().map(|value| ValueInfoProto { doc_string: String::new(), ..value.clone() }).collect()
}

fn first_of_body(function: &FunctionProto, expected: Option<&FunctionProto>) -> Option<String> {
    let body = format!("the body of {}", function.name);
    let Some(expected) = expected else { return Some(body) };
    let node = first_node(&function.node, &expected.node).map(|node| format!("{node} in {body}"));
    let plain = |of: &FunctionProto| FunctionProto {
        node: Vec::new(),
        value_info: Vec::new(),
        doc_string: String::new(),
        ..of.clone()
    };
    let others = || (plain(function) != plain(expected)).then(|| format!("the signature of {body}"));
    node.or_else(others)
}

/// The first node that is another one, by its name, or by its operator where it has none.
fn first_node(found: &[NodeProto], expected: &[NodeProto]) -> Option<String> {
    let same = |(a, b): &(&NodeProto, &NodeProto)| {
        let plain = |node: &NodeProto| NodeProto { doc_string: String::new(), ..node.clone() };
        plain(a) == plain(b)
    };
    let first = found.iter().zip(expected).take_while(same).count();
    let node = found.get(first).or_else(|| expected.get(first))?;
    Some(format!("node {first} \"{}\"", called(node)))
}

/// The name of a node, or its operator where it has none.
pub(super) fn called(node: &NodeProto) -> &str {
    if node.name.is_empty() { &node.op_type } else { &node.name }
}
