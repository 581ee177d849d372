//! The contract of our operators, as far as a node alone tells: inputs, outputs, attributes.

use moa_schema::{AttributeSource, Attributes, DOMAIN, OPSET_VERSION, Operator, PLUGIN_VERSION, PRESENT_INPUTS};

use super::error::{Fault, shown};
use super::operator_node::operator_of;
use crate::onnx::proto::{AttributeProto, NodeProto};

const FROM_AN_EXPORT: &str = "give a file that moa-export has written";
pub(super) const OTHER_OPERATORS: &str =
    "export again with this version of moa-export, or use program and library of the version that wrote the model";

/// Checks a node of a graph, if it is one of ours; `has_body` where the model defines its operator itself.
pub(super) fn check(node: &NodeProto, has_body: bool) -> Result<(), Fault> {
    let Some(operator) = operator_of(node) else {
        return match node.domain == DOMAIN && !has_body {
            true => Err(Fault::unsupported(format!("{DOMAIN} has no such operator")).help(OTHER_OPERATORS)),
            false => Ok(()),
        };
    };
    let source = NodeAttributes(node);
    let written = source.string(PLUGIN_VERSION).filter(|written| *written != OPSET_VERSION.to_string());
    if let Some(written) = written {
        return Err(other_version(&shown(&written)));
    }
    let faults = check_parameters(node, operator, source.int(PRESENT_INPUTS));
    let read = || Attributes::read(operator, &source).map(|_| ()).map_err(|error| error.to_string());
    faults.and_then(|()| read()).map_err(|text| Fault::malformed(text).help(FROM_AN_EXPORT))
}

/// A refusal of operators of the version `found`.
pub(super) fn other_version(found: &str) -> Fault {
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

impl<'a> NodeAttributes<'a> {
    fn get(&self, name: &str) -> Option<&'a AttributeProto> {
        self.0.attribute.iter().find(|attribute| attribute.name == name)
    }
}

impl AttributeSource for NodeAttributes<'_> {
    fn int(&self, name: &str) -> Option<i64> {
        self.get(name)?.i
    }

    fn float(&self, name: &str) -> Option<f32> {
        self.get(name)?.f
    }

    fn string(&self, name: &str) -> Option<String> {
        self.get(name)?.s.as_deref().map(|text| String::from_utf8_lossy(text).into_owned())
    }
}
