//! The rules of a model: versions, names, order of nodes, attributes, functions.

use std::collections::{HashMap, HashSet};

use moa_schema::{DOMAIN, OPSET_VERSION};

use super::contract::{self, Bodies, Declared};
use super::counts;
use super::error::{Fault, shown};
use super::tensor::{self, External};
use super::{MAX_IR_VERSION, MAX_OPSET_VERSION};
use crate::onnx::proto::attribute_proto::AttributeType;
use crate::onnx::proto::tensor_proto::DataType;
use crate::onnx::proto::tensor_shape_proto::dimension;
use crate::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto, type_proto,
};

const MIN_IR_VERSION: i64 = 3;
const MAX_GRAPH_DEPTH: usize = 16;
const MAX_CALL_DEPTH: usize = 64;
const NEWER: &str =
    "write the model for an older version: `model.ir_version` and `opset_import` of the onnx package say which";

/// Domain, name and overload of a function.
pub(super) type FunctionKey<'a> = (&'a str, &'a str, &'a str);

type Functions<'a> = HashMap<FunctionKey<'a>, &'a FunctionProto>;

/// Checks everything that does not need the file system.
pub(super) fn check(model: &ModelProto) -> Result<(), Fault> {
    check_ir_version(model.ir_version)?;
    let Some(graph) = &model.graph else { return Err(Fault::malformed("the model has no graph".into())) };
    let mut keys = HashSet::new();
    if let Some(entry) = model.metadata_props.iter().find(|entry| !keys.insert(entry.key.as_str())) {
        return Err(Fault::malformed(format!("metadata key {} is repeated", shown(&entry.key))));
    }
    let domains = imported_domains(&model.opset_import)?;
    check_functions(&model.functions)?;
    counts::check_inputs_of_calls(model)?;
    let bodies = Bodies::of(&model.functions);
    Scope { domains, bodies, function: None, names: Vec::new() }.graph(graph)
}

fn check_ir_version(version: i64) -> Result<(), Fault> {
    if version <= 0 {
        return Err(Fault::malformed("the model has no IR version".into()));
    }
    if version > MAX_IR_VERSION {
        let text = format!("IR version {version}; versions up to {MAX_IR_VERSION} are read");
        return Err(Fault::unsupported(text).help(NEWER));
    }
    if version < MIN_IR_VERSION {
        return Err(Fault::unsupported(format!("IR version {version}; versions from {MIN_IR_VERSION} are read")));
    }
    Ok(())
}

/// The spelling of `domain` under which it is compared: the standard domain has two.
pub(in crate::onnx) fn canonical_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// The versions of the domains that are imported. That of our operators matters where a node is one of them: runtimes
/// import every domain that they know.
fn imported_domains(imports: &[OperatorSetIdProto]) -> Result<HashMap<&str, i64>, Fault> {
    let mut domains = HashMap::new();
    for import in imports {
        let domain = canonical_domain(&import.domain);
        if domains.insert(domain, import.version).is_some_and(|before| before != import.version) {
            let text = format!("operator set {} is imported twice, in two versions", shown(&import.domain));
            return Err(Fault::malformed(text));
        }
        if import.version < 1 {
            let text = format!("operator set {} has the version {}", shown(&import.domain), import.version);
            return Err(Fault::malformed(text));
        }
        if domain.is_empty() && import.version > MAX_OPSET_VERSION {
            let text = format!("opset {}; opsets up to {MAX_OPSET_VERSION} are read", import.version);
            return Err(Fault::unsupported(text).help(NEWER));
        }
    }
    if domains.is_empty() {
        return Err(Fault::malformed("no operator set is imported".into()));
    }
    Ok(domains)
}

fn check_functions(functions: &[FunctionProto]) -> Result<(), Fault> {
    let mut by_key = HashMap::new();
    for function in functions {
        if function.name.is_empty() {
            return Err(Fault::malformed("a function has no name".into()));
        }
        if by_key.insert(function_key(function), function).is_some() {
            return Err(Fault::malformed(format!("function {} is defined twice", shown(&function.name))));
        }
    }
    for function in functions {
        check_function(function)?;
    }
    check_calls(&by_key, functions)
}

pub(super) fn function_key(function: &FunctionProto) -> FunctionKey<'_> {
    (canonical_domain(&function.domain), &function.name, &function.overload)
}

fn check_function(function: &FunctionProto) -> Result<(), Fault> {
    let within = |fault: Fault| fault.within(&format!("function {}", shown(&function.name)));
    let mut attributes = HashSet::new();
    let defaults = function.attribute_proto.iter().map(|attribute| attribute.name.as_str());
    for name in function.attribute.iter().map(String::as_str).chain(defaults) {
        if name.is_empty() || !attributes.insert(name) {
            return Err(within(Fault::malformed(format!("attribute {} is repeated or unnamed", shown(name)))));
        }
    }
    let domains = imported_domains(&function.opset_import).map_err(within)?;
    let mut scope =
        Scope { domains, bodies: Bodies::default(), function: Some(attributes), names: vec![HashMap::new()] };
    scope.function_body(function).map_err(within)
}

/// A function whose callees are being looked at.
struct Visit<'a> {
    key: FunctionKey<'a>,
    pending: Vec<FunctionKey<'a>>,
    /// Functions on the longest chain of calls that begins here, as far as it is known.
    depth: usize,
}

impl<'a> Visit<'a> {
    fn of(key: FunctionKey<'a>, functions: &Functions<'a>) -> Self {
        let pending = functions.get(&key).map_or_else(Vec::new, |function| callees(functions, function));
        Self { key, pending, depth: 1 }
    }
}

/// Refuses functions that call themselves, directly or through others, and long chains of calls.
fn check_calls<'a>(functions: &Functions<'a>, all: &'a [FunctionProto]) -> Result<(), Fault> {
    let mut finished: HashMap<FunctionKey<'_>, usize> = HashMap::new();
    for root in all {
        let mut active = HashSet::from([function_key(root)]);
        let mut stack = vec![Visit::of(function_key(root), functions)];
        while let Some(visit) = stack.last_mut() {
            match visit.pending.pop() {
                Some(next) if active.contains(&next) => {
                    return Err(Fault::malformed(format!("function {} calls itself", shown(next.1))));
                }
                Some(next) => match finished.get(&next) {
                    Some(depth) => visit.depth = visit.depth.max(depth + 1),
                    None => {
                        active.insert(next);
                        stack.push(Visit::of(next, functions));
                    }
                },
                None => {
                    let Visit { key, depth, .. } = *visit;
                    if depth > MAX_CALL_DEPTH {
                        let text = format!("function {} begins a chain of {depth} calls", shown(key.1));
                        return Err(Fault::limit(text));
                    }
                    active.remove(&key);
                    finished.insert(key, depth);
                    stack.pop();
                    if let Some(caller) = stack.last_mut() {
                        caller.depth = caller.depth.max(depth + 1);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Functions that `function` calls.
fn callees<'a>(functions: &Functions<'a>, function: &'a FunctionProto) -> Vec<FunctionKey<'a>> {
    let mut called = Vec::new();
    for_each_node(&function.node, &mut |node| {
        let key = (canonical_domain(&node.domain), node.op_type.as_str(), node.overload.as_str());
        if functions.contains_key(&key) {
            called.push(key);
        }
    });
    called
}

/// Calls `visit` for every node, those of nested graphs included.
pub fn for_each_node<'a>(nodes: &'a [NodeProto], visit: &mut impl FnMut(&'a NodeProto)) {
    let mut pending = vec![nodes];
    while let Some(nodes) = pending.pop() {
        for node in nodes {
            visit(node);
            let graphs = node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
            pending.extend(graphs.map(|graph| graph.node.as_slice()));
        }
    }
}

/// What a node may refer to.
struct Scope<'a> {
    domains: HashMap<&'a str, i64>,
    /// Bodies of our operators; none in a function, whose nodes have attributes that only a call tells.
    bodies: Bodies<'a>,
    /// Attribute names of the function whose body this is.
    function: Option<HashSet<&'a str>>,
    /// Values defined so far, one map for each graph from the outermost to the current.
    names: Vec<HashMap<&'a str, Declared<'a>>>,
}

impl<'a> Scope<'a> {
    fn is_defined(&self, name: &str) -> bool {
        self.names.iter().any(|names| names.contains_key(name))
    }

    fn declared(&self, name: &str) -> Declared<'a> {
        self.names.iter().find_map(|names| names.get(name)).copied().unwrap_or_default()
    }

    fn define(&mut self, name: &'a str, declared: Declared<'a>) -> Result<(), Fault> {
        if name.is_empty() {
            return Err(Fault::malformed("a value has no name".into()));
        }
        if self.is_defined(name) {
            return Err(Fault::malformed(format!("value {} is defined twice", shown(name))));
        }
        if let Some(names) = self.names.last_mut() {
            names.insert(name, declared);
        }
        Ok(())
    }

    fn graph(&mut self, graph: &'a GraphProto) -> Result<(), Fault> {
        let is_outermost = self.names.is_empty() && self.function.is_none();
        if self.names.len() >= MAX_GRAPH_DEPTH {
            return Err(Fault::limit(format!("more than {MAX_GRAPH_DEPTH} graphs are nested")));
        }
        if !graph.sparse_initializer.is_empty() {
            return Err(Fault::unsupported("sparse weights".into()));
        }
        self.names.push(HashMap::new());
        for input in &graph.input {
            self.define(&input.name, Declared { kind: element_type(input), weight: None })?;
            check_type(input, is_outermost)?;
        }
        let external = if is_outermost { External::Allowed } else { External::Refused };
        let inputs: HashSet<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
        let mut initializers = HashSet::new();
        for tensor in &graph.initializer {
            if !initializers.insert(tensor.name.as_str()) {
                return Err(Fault::malformed(format!("weight {} is defined twice", shown(&tensor.name))));
            }
            if !inputs.contains(tensor.name.as_str()) {
                let kind = tensor::data_type(tensor.data_type).ok();
                self.define(&tensor.name, Declared { kind, weight: Some(&tensor.dims) })?;
            }
            tensor::check(tensor, external)?;
        }
        self.nodes(&graph.node)?;
        if is_outermost && graph.output.is_empty() {
            return Err(
                Fault::malformed("the graph has no output".into()).help("declare what it computes as an output")
            );
        }
        let mut outputs = HashSet::new();
        for output in &graph.output {
            if !self.is_defined(&output.name) || !outputs.insert(output.name.as_str()) {
                return Err(Fault::malformed(format!("output {} is repeated or never computed", shown(&output.name))));
            }
            check_type(output, is_outermost)?;
        }
        graph.value_info.iter().try_for_each(|value| check_type(value, false))?;
        self.names.pop();
        Ok(())
    }

    fn function_body(&mut self, function: &'a FunctionProto) -> Result<(), Fault> {
        for input in &function.input {
            self.define(input, Declared::default())?;
        }
        for default in &function.attribute_proto {
            self.attribute(default)?;
        }
        self.nodes(&function.node)?;
        let mut outputs = HashSet::new();
        for output in &function.output {
            if !self.is_defined(output) || !outputs.insert(output) {
                return Err(Fault::malformed(format!("output {} is repeated or never computed", shown(output))));
            }
        }
        function.value_info.iter().try_for_each(|value| check_type(value, false))
    }

    fn nodes(&mut self, nodes: &'a [NodeProto]) -> Result<(), Fault> {
        for (index, node) in nodes.iter().enumerate() {
            self.node(node, nodes).map_err(|fault| {
                fault.within(&format!("node {index} {} ({})", shown(&node.name), shown(&node.op_type)))
            })?;
        }
        Ok(())
    }

    fn node(&mut self, node: &'a NodeProto, siblings: &[NodeProto]) -> Result<(), Fault> {
        if node.op_type.is_empty() {
            return Err(Fault::malformed("no operator is named".into()));
        }
        match self.domains.get(canonical_domain(&node.domain)) {
            None => return Err(Fault::malformed(format!("operator set {} is not imported", shown(&node.domain)))),
            Some(version) if node.domain == DOMAIN && *version != OPSET_VERSION => {
                return Err(contract::refused_version(&version.to_string()));
            }
            Some(_) => {}
        }
        if let Some(input) = node.input.iter().find(|input| !input.is_empty() && !self.is_defined(input)) {
            let later = siblings.iter().any(|sibling| sibling.output.contains(input));
            let why = if later { "is computed by a later node: nodes are not sorted" } else { "is never defined" };
            return Err(Fault::malformed(format!("input {} {why}", shown(input))));
        }
        counts::check(node)?;
        let mut names = HashSet::new();
        for attribute in &node.attribute {
            if attribute.name.is_empty() || !names.insert(attribute.name.as_str()) {
                let text = format!("attribute {} is repeated or unnamed", shown(&attribute.name));
                return Err(Fault::malformed(text));
            }
            self.attribute(attribute)?;
        }
        check_permutation(node)?;
        if self.function.is_none() {
            contract::check(node, &self.bodies, &|name| self.declared(name))?;
        }
        node.output
            .iter()
            .filter(|output| !output.is_empty())
            .try_for_each(|output| self.define(output, Declared::default()))
    }

    fn attribute(&mut self, attribute: &'a AttributeProto) -> Result<(), Fault> {
        let name = || shown(&attribute.name);
        let kind = AttributeType::try_from(attribute.r#type)
            .map_err(|_| Fault::malformed(format!("attribute {} has an unknown type", name())))?;
        let found = payloads(attribute);
        if !attribute.ref_attr_name.is_empty() {
            let known = self.function.as_ref().is_some_and(|names| names.contains(attribute.ref_attr_name.as_str()));
            if known && found.is_empty() {
                return Ok(());
            }
            let text =
                format!("attribute {} refers to {}, which is none here", name(), shown(&attribute.ref_attr_name));
            return Err(Fault::malformed(text));
        }
        match kind {
            AttributeType::Undefined => return Err(Fault::malformed(format!("attribute {} has no type", name()))),
            AttributeType::SparseTensor
            | AttributeType::SparseTensors
            | AttributeType::TypeProto
            | AttributeType::TypeProtos => {
                return Err(Fault::unsupported(format!("attribute {} of type {kind:?}", name())));
            }
            _ => {}
        }
        let may_be_empty = matches!(
            kind,
            AttributeType::Floats
                | AttributeType::Ints
                | AttributeType::Strings
                | AttributeType::Tensors
                | AttributeType::Graphs
        );
        if found != [kind] && !(found.is_empty() && may_be_empty) {
            return Err(Fault::malformed(format!("attribute {}: its value does not fit its type", name())));
        }
        let tensors = attribute.t.iter().chain(&attribute.tensors);
        tensors.into_iter().try_for_each(|tensor| tensor::check(tensor, External::Refused))?;
        attribute.g.iter().chain(&attribute.graphs).try_for_each(|graph| self.graph(graph))
    }
}

/// Types of the values that an attribute holds.
fn payloads(attribute: &AttributeProto) -> Vec<AttributeType> {
    let fields = [
        (AttributeType::Float, attribute.f.is_some()),
        (AttributeType::Int, attribute.i.is_some()),
        (AttributeType::String, attribute.s.is_some()),
        (AttributeType::Tensor, attribute.t.is_some()),
        (AttributeType::Graph, attribute.g.is_some()),
        (AttributeType::Floats, !attribute.floats.is_empty()),
        (AttributeType::Ints, !attribute.ints.is_empty()),
        (AttributeType::Strings, !attribute.strings.is_empty()),
        (AttributeType::Tensors, !attribute.tensors.is_empty()),
        (AttributeType::Graphs, !attribute.graphs.is_empty()),
        (AttributeType::SparseTensor, attribute.sparse_tensor.is_some()),
        (AttributeType::SparseTensors, !attribute.sparse_tensors.is_empty()),
        (AttributeType::TypeProto, attribute.tp.is_some()),
        (AttributeType::TypeProtos, !attribute.type_protos.is_empty()),
    ];
    fields.into_iter().filter(|(_, set)| *set).map(|(kind, _)| kind).collect()
}

/// Refuses a `Transpose` by what is no permutation: a runtime may take the product of too many dimensions for a size.
fn check_permutation(node: &NodeProto) -> Result<(), Fault> {
    if node.op_type != "Transpose" || !canonical_domain(&node.domain).is_empty() {
        return Ok(());
    }
    let Some(perm) = node.find_attribute("perm") else { return Ok(()) };
    let mut sorted = perm.ints.clone();
    sorted.sort_unstable();
    let counts_up = sorted.iter().zip(0..).all(|(axis, place)| *axis == place);
    if counts_up { Ok(()) } else { Err(Fault::malformed(format!("perm {:?} is no permutation", perm.ints))) }
}

/// The declared element type of a value.
pub(super) fn element_type(value: &ValueInfoProto) -> Option<DataType> {
    let Some(type_proto::Value::TensorType(tensor)) = value.r#type.as_ref()?.value.as_ref() else { return None };
    tensor::data_type(tensor.elem_type).ok()
}

/// Checks element type and dimensions of a value; `required` where the value must be a tensor.
fn check_type(value: &ValueInfoProto, required: bool) -> Result<(), Fault> {
    let name = || shown(&value.name);
    let tensor = value.r#type.as_ref().and_then(|kind| kind.value.as_ref());
    let Some(type_proto::Value::TensorType(tensor)) = tensor else {
        if required {
            return Err(Fault::unsupported(format!("{} is no tensor, or has no type", name())));
        }
        return Ok(());
    };
    tensor::data_type(tensor.elem_type).map_err(|fault| fault.within(&name()))?;
    let dims = tensor.shape.iter().flat_map(|shape| &shape.dim).filter_map(|dim| dim.value.as_ref());
    for dim in dims {
        if let dimension::Value::DimValue(size) = dim
            && *size < 0
        {
            return Err(Fault::malformed(format!("{} has the dimension {size}", name())));
        }
    }
    Ok(())
}
