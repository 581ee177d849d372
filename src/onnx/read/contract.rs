//! The contract of our operators, as far as a node alone tells: inputs, outputs, attributes.

use moa_schema::{AttributeSource, Attributes, DOMAIN, OPSET_VERSION, Operator, PRESENT_INPUTS, other_version};

use super::error::{Fault, shown};
use super::operator_node::operator_of;
use crate::onnx::proto::{FunctionProto, NodeProto, tensor_proto::DataType};

const FROM_AN_EXPORT: &str = "give a file that moa-export has written";
const OTHER_OPERATORS: &str =
    "export again with this version of moa-export, or use program and library of the version that wrote the model";

/// Checks a node of a graph, if it is one of ours; an operator that one of the model's `functions` defines may have any
/// name. `type_of` tells the types of values, as far as they are declared.
pub(super) fn check(
    node: &NodeProto,
    functions: &[FunctionProto],
    type_of: &dyn Fn(&str) -> Option<DataType>,
) -> Result<(), Fault> {
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
    let present = source.int(PRESENT_INPUTS).filter(|mask| *mask != 0);
    check_parameters(node, operator, present).map_err(malformed)?;
    check_scales(node, operator, present, type_of).map_err(malformed)?;
    Attributes::read(operator, &source).map(drop).map_err(|error| malformed(error.to_string()))
}

/// A refusal of operators of the version `found`.
pub(super) fn refused_version(found: &str) -> Fault {
    let text =
        format!("version {found} of the operators {DOMAIN}; this program and its library have version {OPSET_VERSION}");
    Fault::unsupported(text).help(OTHER_OPERATORS)
}

/// Refuses inputs and outputs that the schema does not have, and required ones that are not there; the bits of `mask`
/// tell where inputs stand that were moved together.
fn check_parameters(node: &NodeProto, operator: &Operator, mask: Option<i64>) -> Result<(), String> {
    for (what, found, known) in
        [("inputs", node.input.len(), operator.inputs.len()), ("outputs", node.output.len(), operator.outputs.len())]
    {
        if found > known {
            return Err(format!("it has {found} {what}, and its operator at most {known}"));
        }
    }
    if mask.is_some_and(|mask| mask.count_ones() as usize != node.input.len() || mask >> operator.inputs.len() != 0) {
        return Err(format!("attribute `{PRESENT_INPUTS}` tells of other inputs than it has"));
    }
    let mut required = operator.inputs.iter().enumerate().filter(|(_, input)| !input.optional);
    match required.find(|(index, _)| input(node, mask, *index).is_none()) {
        Some((_, input)) => Err(format!("the input `{}` is missing", input.name)),
        None => Ok(()),
    }
}

/// What `node` reads as its input `index`, where it reads one.
fn input(node: &NodeProto, mask: Option<i64>, index: usize) -> Option<&str> {
    let place = match mask {
        Some(mask) if mask >> index & 1 == 0 => return None,
        Some(mask) => (mask & ((1 << index) - 1)).count_ones() as usize,
        None => index,
    };
    node.input.get(place).map(String::as_str).filter(|name| !name.is_empty())
}

/// Refuses matrices of int8 without scales, and scales beside floats.
fn check_scales(
    node: &NodeProto,
    operator: &Operator,
    mask: Option<i64>,
    type_of: &dyn Fn(&str) -> Option<DataType>,
) -> Result<(), String> {
    let mut scaled: Option<(&str, bool)> = None;
    for pair in operator.matrices() {
        let [name, scale] = pair.map(|index| operator.inputs[index].name);
        let [matrix, scales] = pair.map(|index| input(node, mask, index));
        let (kind, has_scale) = (matrix.and_then(type_of), scales.is_some());
        if kind == Some(DataType::Int8) && !has_scale {
            return Err(format!("`{name}` is int8, and the input `{scale}` is missing"));
        }
        if let Some(kind) = kind.filter(|kind| has_scale && *kind != DataType::Int8) {
            return Err(format!("the input `{scale}` is of int8 weights, and `{name}` is {}", kind.type_name()));
        }
        let (first, first_has) = *scaled.get_or_insert((name, has_scale));
        if first_has != has_scale {
            let [with, without] = if has_scale { [name, first] } else { [first, name] };
            return Err(format!("`{with}` has scales, and `{without}` has none"));
        }
    }
    Ok(())
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
