//! Replacing calls of model-local functions by the functions' nodes.
//!
//! The result has no functions, computes the same values, and keeps the names of inputs, outputs, weights and of
//! every value of the main graph. Names from within a function get the name of the calling node as a prefix.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use prost::Message;

use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use super::read::{canonical_domain, for_each_node};

const MAX_NODES: usize = 1 << 20;
const MAX_BYTES: usize = i32::MAX as usize;
const MAX_DECODED: usize = 1 << 30;

/// A model whose functions cannot be replaced by their nodes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InlineError {
    /// A function calls itself.
    #[error("function `{function}` calls itself")]
    Recursive {
        /// Name of the function.
        function: String,
    },
    /// A function needs another version of an operator set than the model imports.
    #[error("function `{function}` uses operator set `{domain}` {found}, the model {expected}")]
    OpsetMismatch {
        /// Name of the function.
        function: String,
        /// Operator set.
        domain: String,
        /// Version that the function imports.
        found: i64,
        /// Version that the model imports.
        expected: i64,
    },
    /// A node and the function that it calls do not fit together.
    #[error("node `{node}` does not fit function `{function}`: {why}")]
    Call {
        /// Name of the calling node.
        node: String,
        /// Name of the function.
        function: String,
        /// What does not fit.
        why: &'static str,
    },
    /// The model would grow beyond any bound.
    #[error("the model would exceed {MAX_NODES} nodes or 2 GiB")]
    TooLarge,
}

/// Replaces every node that calls a function of the model by the function's nodes.
///
/// The model must have passed the checks of [`read_model`](super::read::read_model).
///
/// # Errors
///
/// Where a call does not fit its function, operator set versions differ, or the result would be too large.
pub fn inline_functions(model: &ModelProto) -> Result<ModelProto, InlineError> {
    let key = |function: &FunctionProto| key(&function.domain, &function.name, &function.overload);
    let functions: HashMap<Key, &FunctionProto> = model.functions.iter().map(|f| (key(f), f)).collect();
    let mut inliner = Inliner {
        functions,
        imports: model.opset_import.clone(),
        used: used_names(model),
        numbers: HashMap::new(),
        active: Vec::new(),
        nodes: 0,
        bytes: 0,
        decoded: 0,
    };
    let graph = model.graph.as_ref().map(|graph| inliner.graph(graph)).transpose()?;
    let mut inlined = ModelProto {
        graph,
        functions: Vec::new(),
        opset_import: inliner.imports,
        ir_version: model.ir_version,
        producer_name: model.producer_name.clone(),
        producer_version: model.producer_version.clone(),
        domain: model.domain.clone(),
        model_version: model.model_version,
        doc_string: model.doc_string.clone(),
        metadata_props: model.metadata_props.clone(),
    };
    drop_unused_imports(model, &mut inlined);
    Ok(inlined)
}

type Key = (String, String, String);

fn key(domain: &str, name: &str, overload: &str) -> Key {
    (canonical_domain(domain).to_owned(), name.to_owned(), overload.to_owned())
}

/// Every name of the main graph: those of values and of nodes, nested graphs included.
fn used_names(model: &ModelProto) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut pending: Vec<&GraphProto> = model.graph.iter().collect();
    while let Some(graph) = pending.pop() {
        names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
        names.extend(graph.input.iter().chain(&graph.output).map(|value| value.name.clone()));
        for node in &graph.node {
            names.extend(node.input.iter().chain(&node.output).cloned());
            names.insert(node.name.clone());
            pending.extend(node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs)));
        }
    }
    names
}

/// Removes the imports of function domains that no node uses any more.
fn drop_unused_imports(model: &ModelProto, inlined: &mut ModelProto) {
    let mut needed = BTreeSet::from([String::new()]);
    if let Some(graph) = &inlined.graph {
        for_each_node(&graph.node, &mut |node| {
            needed.insert(canonical_domain(&node.domain).to_owned());
        });
    }
    let of_functions: BTreeSet<&str> = model.functions.iter().map(|f| canonical_domain(&f.domain)).collect();
    inlined.opset_import.retain(|import| {
        let domain = canonical_domain(&import.domain);
        needed.contains(domain) || !of_functions.contains(domain)
    });
}

struct Inliner<'a> {
    functions: HashMap<Key, &'a FunctionProto>,
    imports: Vec<OperatorSetIdProto>,
    used: BTreeSet<String>,
    /// The last number that made a prefix of this base a free one.
    numbers: HashMap<String, usize>,
    active: Vec<Key>,
    nodes: usize,
    bytes: usize,
    /// Bytes of nodes and attributes in memory, what they point to apart.
    decoded: usize,
}

impl<'a> Inliner<'a> {
    fn graph(&mut self, graph: &GraphProto) -> Result<GraphProto, InlineError> {
        let mut node = Vec::with_capacity(graph.node.len());
        for original in &graph.node {
            self.node(original.clone(), &mut node)?;
        }
        Ok(GraphProto {
            node,
            name: graph.name.clone(),
            initializer: graph.initializer.clone(),
            doc_string: graph.doc_string.clone(),
            input: graph.input.clone(),
            output: graph.output.clone(),
            value_info: graph.value_info.clone(),
            sparse_initializer: graph.sparse_initializer.clone(),
        })
    }

    /// Appends `node`, or what it calls, to `out`.
    fn node(&mut self, mut node: NodeProto, out: &mut Vec<NodeProto>) -> Result<(), InlineError> {
        let key = key(&node.domain, &node.op_type, &node.overload);
        let Some(function) = self.functions.get(&key).copied() else {
            for attribute in &mut node.attribute {
                for graph in attribute.g.iter_mut().chain(&mut attribute.graphs) {
                    *graph = self.graph(graph)?;
                }
            }
            out.push(node);
            return Ok(());
        };
        if self.active.contains(&key) {
            return Err(InlineError::Recursive { function: function.name.clone() });
        }
        self.import_for(function)?;
        let body = self.instantiate(function, &node)?;
        self.active.push(key);
        for inner in body {
            self.node(inner, out)?;
        }
        self.active.pop();
        Ok(())
    }

    /// Makes sure that the model imports what the nodes of `function` need.
    fn import_for(&mut self, function: &FunctionProto) -> Result<(), InlineError> {
        for import in &function.opset_import {
            let domain = canonical_domain(&import.domain);
            match self.imports.iter().find(|known| canonical_domain(&known.domain) == domain) {
                Some(known) if known.version != import.version => {
                    return Err(InlineError::OpsetMismatch {
                        function: function.name.clone(),
                        domain: import.domain.clone(),
                        found: import.version,
                        expected: known.version,
                    });
                }
                Some(_) => {}
                None => self.imports.push(import.clone()),
            }
        }
        Ok(())
    }

    /// The nodes of `function` with the names and attributes of the call `node`.
    fn instantiate(&mut self, function: &'a FunctionProto, node: &NodeProto) -> Result<Vec<NodeProto>, InlineError> {
        let misfit = |why| InlineError::Call { node: node.name.clone(), function: function.name.clone(), why };
        if node.input.len() > function.input.len() {
            return Err(misfit("it has more inputs"));
        }
        if node.output.len() > function.output.len() {
            return Err(misfit("it has more outputs"));
        }
        self.nodes = self.nodes.saturating_add(function.node.len().max(1));
        if self.nodes > MAX_NODES {
            return Err(InlineError::TooLarge);
        }
        let (names, copies) = bind(function, node);
        let renaming = Renaming { names, prefix: self.free_prefix(node), attributes: bound_attributes(function, node) };
        let mut body = Vec::with_capacity(function.node.len() + copies.len());
        let mut names = HashSet::new();
        let mut repeats = HashMap::<String, usize>::new();
        for inner in &function.node {
            let mut inner = renaming.node(inner).map_err(misfit)?;
            let written = inner.name.clone();
            while !names.insert(inner.name.clone()) {
                let number = repeats.entry(written.clone()).or_insert(1);
                *number += 1;
                inner.name = format!("{written}_{number}");
            }
            let held = size_of::<NodeProto>() + inner.attribute.len() * size_of::<AttributeProto>();
            self.bytes = self.bytes.saturating_add(inner.encoded_len());
            self.decoded = self.decoded.saturating_add(held);
            if self.bytes > MAX_BYTES || self.decoded > MAX_DECODED {
                return Err(InlineError::TooLarge);
            }
            self.used.extend(inner.output.iter().cloned());
            self.used.insert(inner.name.clone());
            body.push(inner);
        }
        for (input, output) in copies {
            let name = format!("{}{output}", renaming.prefix);
            let op_type = "Identity".to_owned();
            body.push(NodeProto { input: vec![input], output: vec![output], name, op_type, ..NodeProto::default() });
        }
        Ok(body)
    }

    /// A prefix with which no name of the model begins.
    fn free_prefix(&mut self, node: &NodeProto) -> String {
        let base = if node.name.is_empty() { &node.op_type } else { &node.name };
        let is_free = |prefix: &str| {
            let first =
                self.used.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded)).next();
            first.is_none_or(|name| !name.starts_with(prefix))
        };
        let numbered = |number: usize| if number == 1 { format!("{base}/") } else { format!("{base}_{number}/") };
        let mut number = self.numbers.get(base).copied().unwrap_or(1);
        while !is_free(&numbered(number)) {
            number += 1;
        }
        let prefix = numbered(number);
        self.numbers.insert(base.clone(), number);
        prefix
    }
}

/// Actual names by formal name, and the copies to make where an output of `function` is one of its inputs.
fn bind(function: &FunctionProto, node: &NodeProto) -> (BTreeMap<String, String>, Vec<(String, String)>) {
    let mut names = BTreeMap::new();
    let mut copies = Vec::new();
    for (index, formal) in function.input.iter().enumerate() {
        names.insert(formal.clone(), node.input.get(index).cloned().unwrap_or_default());
    }
    for (formal, actual) in function.output.iter().zip(&node.output).filter(|(_, actual)| !actual.is_empty()) {
        match names.get(formal) {
            Some(input) => copies.push((input.clone(), actual.clone())),
            None => drop(names.insert(formal.clone(), actual.clone())),
        }
    }
    (names, copies)
}

/// Values of the attributes of `function` in the call `node`.
fn bound_attributes<'a>(function: &'a FunctionProto, node: &'a NodeProto) -> BTreeMap<&'a str, &'a AttributeProto> {
    let defaults = function.attribute_proto.iter();
    defaults.chain(&node.attribute).map(|attribute| (attribute.name.as_str(), attribute)).collect()
}

/// How the names and attributes of one function body change in one call.
struct Renaming<'a> {
    names: BTreeMap<String, String>,
    prefix: String,
    attributes: BTreeMap<&'a str, &'a AttributeProto>,
}

impl Renaming<'_> {
    fn name(&self, name: &str) -> String {
        match self.names.get(name) {
            Some(actual) => actual.clone(),
            None if name.is_empty() => String::new(),
            None => format!("{}{name}", self.prefix),
        }
    }

    fn node(&self, node: &NodeProto) -> Result<NodeProto, &'static str> {
        let mut renamed = node.clone();
        renamed.name = format!("{}{}", self.prefix, if node.name.is_empty() { &node.op_type } else { &node.name });
        for name in renamed.input.iter_mut().chain(&mut renamed.output) {
            *name = self.name(name);
        }
        renamed.attribute = Vec::with_capacity(node.attribute.len());
        for attribute in &node.attribute {
            renamed.attribute.extend(self.attribute(attribute)?);
        }
        Ok(renamed)
    }

    /// The attribute in this call; `None` where it refers to one that is absent.
    fn attribute(&self, attribute: &AttributeProto) -> Result<Option<AttributeProto>, &'static str> {
        if attribute.ref_attr_name.is_empty() {
            let mut renamed = attribute.clone();
            for graph in renamed.g.iter_mut().chain(&mut renamed.graphs) {
                *graph = self.graph(graph)?;
            }
            return Ok(Some(renamed));
        }
        let Some(actual) = self.attributes.get(attribute.ref_attr_name.as_str()) else { return Ok(None) };
        if actual.r#type != attribute.r#type && attribute.r#type != AttributeType::Undefined as i32 {
            return Err("an attribute has another type");
        }
        if actual.g.is_some() || !actual.graphs.is_empty() {
            return Err("an attribute is a graph");
        }
        let mut renamed = (*actual).clone();
        renamed.name.clone_from(&attribute.name);
        Ok(Some(renamed))
    }

    fn graph(&self, graph: &GraphProto) -> Result<GraphProto, &'static str> {
        let mut renamed = graph.clone();
        for value in renamed.input.iter_mut().chain(&mut renamed.output).chain(&mut renamed.value_info) {
            value.name = self.name(&value.name);
        }
        for tensor in &mut renamed.initializer {
            tensor.name = self.name(&tensor.name);
        }
        renamed.node = graph.node.iter().map(|node| self.node(node)).collect::<Result<_, _>>()?;
        Ok(renamed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::ValueInfoProto;

    fn node(op_type: &str, domain: &str, input: &[&str], output: &[&str]) -> NodeProto {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        NodeProto {
            op_type: op_type.into(),
            domain: domain.into(),
            input: texts(input),
            output: texts(output),
            ..NodeProto::default()
        }
    }

    fn function(name: &str, input: &[&str], output: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
        let texts = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        FunctionProto {
            name: name.into(),
            domain: "f".into(),
            input: texts(input),
            output: texts(output),
            node: nodes,
            opset_import: vec![import("", 18), import("f", 1)],
            ..FunctionProto::default()
        }
    }

    fn import(domain: &str, version: i64) -> OperatorSetIdProto {
        OperatorSetIdProto { domain: domain.into(), version }
    }

    fn model(nodes: Vec<NodeProto>, functions: Vec<FunctionProto>) -> ModelProto {
        let value = |name: &str| ValueInfoProto { name: name.into(), ..ValueInfoProto::default() };
        let graph =
            GraphProto { node: nodes, input: vec![value("x")], output: vec![value("y")], ..GraphProto::default() };
        let opset_import = vec![import("", 18), import("f", 1)];
        ModelProto { ir_version: 9, graph: Some(graph), opset_import, functions, ..ModelProto::default() }
    }

    fn lines(model: &ModelProto) -> Vec<String> {
        let nodes = &model.graph.as_ref().unwrap().node;
        nodes.iter().map(|n| format!("{} {} -> {}", n.op_type, n.input.join(" "), n.output.join(" "))).collect()
    }

    #[test]
    fn nested_calls_are_replaced_and_inner_names_are_unique() {
        let inner =
            function("Inner", &["a"], &["b"], vec![node("Neg", "", &["a"], &["t"]), node("Abs", "", &["t"], &["b"])]);
        let outer = function(
            "Outer",
            &["a"],
            &["b"],
            vec![node("Inner", "f", &["a"], &["t"]), node("Inner", "f", &["t"], &["b"])],
        );
        let calls = vec![node("Outer", "f", &["x"], &["m"]), node("Outer", "f", &["m"], &["y"])];
        let inlined = inline_functions(&model(calls, vec![outer, inner])).unwrap();
        assert_eq!(
            lines(&inlined),
            [
                "Neg x -> Outer/Inner/t",
                "Abs Outer/Inner/t -> Outer/t",
                "Neg Outer/t -> Outer/Inner_2/t",
                "Abs Outer/Inner_2/t -> m",
                "Neg m -> Outer_2/Inner/t",
                "Abs Outer_2/Inner/t -> Outer_2/t",
                "Neg Outer_2/t -> Outer_2/Inner_2/t",
                "Abs Outer_2/Inner_2/t -> y",
            ]
        );
        assert_eq!(inlined.opset_import, [import("", 18)]);
        assert!(inlined.functions.is_empty());
    }

    #[test]
    fn absent_inputs_and_outputs_stay_absent_or_get_fresh_names() {
        let body = vec![node("Clip", "", &["a", "low", "high"], &["b"]), node("Shape", "", &["a"], &["c"])];
        let calls = vec![node("F", "f", &["x", "", "x"], &["y"])];
        let inlined =
            inline_functions(&model(calls, vec![function("F", &["a", "low", "high"], &["b", "c"], body)])).unwrap();
        assert_eq!(lines(&inlined), ["Clip x  x -> y", "Shape x -> F/c"]);
    }

    #[test]
    fn attributes_come_from_the_call_then_from_the_default() {
        let int = |name: &str, i| AttributeProto {
            name: name.into(),
            i,
            r#type: AttributeType::Int as i32,
            ..AttributeProto::default()
        };
        let refer = |name: &str, to: &str| AttributeProto { ref_attr_name: to.into(), ..int(name, None) };
        let mut softmax = node("Softmax", "", &["a"], &["b"]);
        softmax.attribute = vec![refer("axis", "given"), refer("other", "defaulted"), refer("gone", "absent")];
        let mut f = function("F", &["a"], &["b"], vec![softmax]);
        f.attribute = vec!["given".into(), "absent".into()];
        f.attribute_proto = vec![int("defaulted", Some(5))];
        let mut call = node("F", "f", &["x"], &["y"]);
        call.attribute = vec![int("given", Some(-1))];
        let inlined = inline_functions(&model(vec![call], vec![f])).unwrap();
        let found = &inlined.graph.unwrap().node[0].attribute;
        assert_eq!(found, &[int("axis", Some(-1)), int("other", Some(5))]);
    }

    #[test]
    fn graphs_within_functions_are_renamed() {
        let value = |name: &str| ValueInfoProto { name: name.into(), ..ValueInfoProto::default() };
        let branch = GraphProto {
            node: vec![node("Neg", "", &["a"], &["t"])],
            output: vec![value("t")],
            ..GraphProto::default()
        };
        let mut choice = node("If", "", &["c"], &["b"]);
        choice.attribute = vec![AttributeProto {
            name: "then_branch".into(),
            r#type: AttributeType::Graph as i32,
            g: Some(branch),
            ..AttributeProto::default()
        }];
        let calls = vec![node("F", "f", &["x", "x"], &["y"])];
        let inlined = inline_functions(&model(calls, vec![function("F", &["a", "c"], &["b"], vec![choice])])).unwrap();
        let graph = inlined.graph.unwrap().node[0].attribute[0].g.clone().unwrap();
        assert_eq!((graph.node[0].input[0].as_str(), graph.node[0].output[0].as_str()), ("x", "F/t"));
        assert_eq!(graph.output[0].name, "F/t");
    }

    #[test]
    fn an_input_passed_through_is_copied() {
        let calls = vec![node("F", "f", &["x"], &["y"])];
        let inlined = inline_functions(&model(calls, vec![function("F", &["a"], &["a"], vec![])])).unwrap();
        assert_eq!(lines(&inlined), ["Identity x -> y"]);
    }

    #[test]
    fn prefixes_avoid_every_name_of_the_model() {
        let calls = vec![node("Neg", "", &["x"], &["F/t"]), node("F", "f", &["F/t"], &["y"])];
        let body = vec![node("Neg", "", &["a"], &["t"]), node("Neg", "", &["t"], &["b"])];
        let inlined = inline_functions(&model(calls, vec![function("F", &["a"], &["b"], body)])).unwrap();
        assert_eq!(lines(&inlined), ["Neg x -> F/t", "Neg F/t -> F_2/t", "Neg F_2/t -> y"]);
    }

    #[test]
    fn what_cannot_be_inlined_is_refused() {
        let f = |nodes| function("F", &["a"], &["b"], nodes);
        let call = || vec![node("F", "f", &["x"], &["y"])];
        let recursive = inline_functions(&model(call(), vec![f(call())]));
        assert_eq!(recursive, Err(InlineError::Recursive { function: "F".into() }));
        let mut newer = f(vec![]);
        newer.opset_import[0].version = 20;
        assert!(matches!(inline_functions(&model(call(), vec![newer])), Err(InlineError::OpsetMismatch { .. })));
        let wide = vec![node("F", "f", &["x", "x"], &["y"])];
        assert!(matches!(inline_functions(&model(wide, vec![f(vec![])])), Err(InlineError::Call { .. })));
        let mut bomb: Vec<_> = (0..40)
            .map(|i| {
                let callee = format!("F{}", i + 1);
                let nodes = vec![node(&callee, "f", &["a"], &["t"]), node(&callee, "f", &["t"], &["b"])];
                function(&format!("F{i}"), &["a"], &["b"], nodes)
            })
            .collect();
        bomb.push(function("F40", &["a"], &["b"], vec![node("Neg", "", &["a"], &["b"])]));
        let calls = vec![node("F0", "f", &["x"], &["y"])];
        assert_eq!(inline_functions(&model(calls, bomb)), Err(InlineError::TooLarge));
    }

    fn inlined(functions: Vec<FunctionProto>, nodes: Vec<NodeProto>) -> Result<ModelProto, InlineError> {
        let graph = GraphProto { node: nodes, ..GraphProto::default() };
        let opset_import = vec![import("", 18), import("f", 1)];
        inline_functions(&ModelProto { graph: Some(graph), functions, opset_import, ..ModelProto::default() })
    }

    #[test]
    fn every_node_gets_a_name_of_its_own() {
        let body =
            vec![node("Neg", "", &["x"], &["t"]), node("Neg", "", &["t"], &["u"]), node("Neg", "", &["u"], &["y"])];
        let calls = (0..3).map(|i| node("F", "f", &["a"], &[&format!("b{i}")])).collect();
        let model = inlined(vec![function("F", &["x"], &["y"], body)], calls).unwrap();
        let names: Vec<_> = model.graph.unwrap().node.into_iter().map(|node| node.name).collect();
        assert_eq!(names[..4], ["F/Neg", "F/Neg_2", "F/Neg_3", "F_2/Neg"]);
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), 9);
    }

    #[test]
    fn what_would_take_more_memory_than_it_has_bytes_is_refused() {
        let mut large = node("Neg", "", &["x"], &["y"]);
        large.attribute = vec![AttributeProto::default(); 10_000];
        let calls = (0..100).map(|i| node("F", "f", &["a"], &[&format!("b{i}")])).collect();
        assert_eq!(inlined(vec![function("F", &["x"], &["y"], vec![large])], calls), Err(InlineError::TooLarge));
    }
}
