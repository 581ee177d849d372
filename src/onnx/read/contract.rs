//! The contract of our operators, as far as a node alone tells: inputs, outputs, attributes.

use moa_schema::{AttributeSource, Attributes, DOMAIN, OPSET_VERSION, Operator, PRESENT_INPUTS, other_version};

use super::error::{Fault, shown};
use super::operator_node::operator_of;
use crate::onnx::proto::{FunctionProto, NodeProto};

const FROM_AN_EXPORT: &str = "give a file that moa-export has written";
const OTHER_OPERATORS: &str =
    "export again with this version of moa-export, or use program and library of the version that wrote the model";

/// Checks a node of a graph, if it is one of ours; an operator that one of the model's `functions` defines may have any
/// name.
pub(super) fn check(node: &NodeProto, functions: &[FunctionProto]) -> Result<(), Fault> {
    if node.domain != DOMAIN {
        return Ok(());
    }
    let Some(operator) = operator_of(node) else {
        let has_body = functions.iter().any(|function| function.domain == DOMAIN && function.name == node.op_type);
        let unknown = || Fault::unsupported(format!("{DOMAIN} has no such operator")).help(OTHER_OPERATORS);
        return if has_body { Ok(()) } else { Err(unknown()) };
    };
    let source = NodeAttributes(node);
    if let Some(written) = other_version(&source) {
        return Err(refused_version(&shown(&written)));
    }
    let malformed = |text: String| Fault::malformed(text).help(FROM_AN_EXPORT);
    check_parameters(node, operator, source.int(PRESENT_INPUTS)).map_err(malformed)?;
    Attributes::read(operator, &source).map(drop).map_err(|error| malformed(error.to_string()))
}

/// A refusal of operators of the version `found`.
pub(super) fn refused_version(found: &str) -> Fault {
    let text =
        format!("version {found} of the operators {DOMAIN}; this program and its library have version {OPSET_VERSION}");
    Fault::unsupported(text).help(OTHER_OPERATORS)
}

/// Refuses inputs and outputs that the schema does not have, and required ones that are not there; the bits of
/// `present` tell where inputs stand that were moved together.
fn check_parameters(node: &NodeProto, operator: &Operator, present: Option<i64>) -> Result<(), String> {
    for (what, found, known) in
        [("inputs", node.input.len(), operator.inputs.len()), ("outputs", node.output.len(), operator.outputs.len())]
    {
        if found > known {
            return Err(format!("it has {found} {what}, and its operator at most {known}"));
        }
    }
    let mask = present.filter(|mask| *mask != 0);
    if mask.is_some_and(|mask| mask.count_ones() as usize != node.input.len() || mask >> operator.inputs.len() != 0) {
        return Err(format!("attribute `{PRESENT_INPUTS}` tells of other inputs than it has"));
    }
    let is_there = |index: usize| match mask {
        Some(mask) => mask >> index & 1 == 1,
        None => node.input.get(index).is_some_and(|name| !name.is_empty()),
    };
    let mut required = operator.inputs.iter().enumerate().filter(|(_, input)| !input.optional);
    match required.find(|(index, _)| !is_there(*index)) {
        Some((_, input)) => Err(format!("the input `{}` is missing", input.name)),
        None => Ok(()),
    }
}

/// The attributes of a node.
struct NodeAttributes<'a>(&'a NodeProto);

impl AttributeSource for NodeAttributes<'_> {
    fn int(&self, name: &str) -> Option<i64> {
        self.0.find_attribute(name)?.i
    }

    fn float(&self, name: &str) -> Option<f32> {
        self.0.find_attribute(name)?.f
    }

    fn string(&self, name: &str) -> Option<String> {
        self.0.find_attribute(name)?.s.as_deref().map(|text| String::from_utf8_lossy(text).into_owned())
    }
}
