//! Replacing calls of model-local functions by the functions' nodes.
//!
//! The result has no functions, computes the same values, and keeps the names of inputs, outputs, weights and of
//! every value of the main graph. Names from within a function get the name of the calling node as a prefix.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use prost::Message;

use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto};
use super::read::{MAX_DECODED, canonical_domain, for_each_node};

const MAX_NODES: usize = 1 << 20;
const MAX_BYTES: usize = i32::MAX as usize;

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
mod tests;
