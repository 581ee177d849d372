//! The contract of our operators, as far as a node alone tells: inputs, outputs, attributes.

use moa_schema::{
    ACCURACY_LEVEL, AccuracyLevel, AttributeSource, Attributes, DOMAIN, FloatType, IntegerType, MatrixType,
    OPSET_VERSION, Operator, PRESENT_INPUTS, accuracy_level, other_version,
};

use super::error::{Fault, shown};
use super::operator_node::{input, operator_of, present_inputs};
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
    let present = present_inputs(node);
    check_parameters(node, operator, present).map_err(malformed)?;
    check_scales(node, operator, present, type_of).map_err(malformed)?;
    if node.find_attribute(ACCURACY_LEVEL).is_some_and(|attribute| attribute.i.is_none()) {
        return Err(malformed(format!("attribute `{ACCURACY_LEVEL}` must be of type INT")));
    }
    let attributes = Attributes::read(operator, &source).and_then(|_| accuracy_level(&source));
    attributes.map(drop).map_err(|error| malformed(error.to_string()))
}

/// The accuracy level of a node of ours that was checked; that of others, and where there is none, is the default.
pub(crate) fn accuracy_of(node: &NodeProto) -> AccuracyLevel {
    let ours = operator_of(node).map(|_| NodeAttributes(node));
    ours.and_then(|source| accuracy_level(&source).ok()).unwrap_or_default()
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

/// Refuses integers without scales, scales beside floats, and scales or matrices of another type than they go with.
fn check_scales(
    node: &NodeProto,
    operator: &Operator,
    mask: Option<i64>,
    type_of: &dyn Fn(&str) -> Option<DataType>,
) -> Result<(), String> {
    let mut scaled: Option<(&str, bool)> = None;
    let mut stored: Option<(&str, IntegerType)> = None;
    for pair in operator.matrices() {
        let [name, scale] = pair.map(|index| operator.inputs[index].name);
        let [matrix, scales] = pair.map(|index| input(node, mask, index));
        if matrix.is_none() && scales.is_none() {
            continue;
        }
        let kind = matrix.and_then(type_of);
        check_matrix([name, scale], kind, scales.map(type_of))?;
        if let Some(floats) = kind.and_then(floats_of).filter(|floats| !takes(operator, *floats)) {
            return Err(format!("`{name}` is {floats}, for which ONNX has MatMul"));
        }
        let (first, first_has) = *scaled.get_or_insert((name, scales.is_some()));
        if first_has != scales.is_some() {
            let [with, without] = if first_has { [first, name] } else { [name, first] };
            return Err(format!("`{with}` has scales, and `{without}` has none"));
        }
        if let Some(integers) = kind.and_then(integers_of) {
            let (first, of_first) = *stored.get_or_insert((name, integers));
            if of_first != integers {
                return Err(format!("`{first}` is {of_first}, and `{name}` is {integers}"));
            }
        }
    }
    Ok(())
}

fn takes(operator: &Operator, floats: FloatType) -> bool {
    operator.types().any(|types| types.weights == MatrixType::Float(floats))
}

/// Checks a matrix of the type `kind` beside scales of the type `scales`, as far as they are there and known.
fn check_matrix(
    [name, scale]: [&str; 2],
    kind: Option<DataType>,
    scales: Option<Option<DataType>>,
) -> Result<(), String> {
    let Some(kind) = kind else { return Ok(()) };
    let shown = kind.type_name();
    match (integers_of(kind), scales) {
        (Some(_), None) => Err(format!("`{name}` is {shown}, and the input `{scale}` is missing")),
        (None, Some(_)) => Err(format!("the input `{scale}` is for weights in integers, and `{name}` is {shown}")),
        (Some(integers), Some(Some(found))) if floats_of(found) != Some(integers.scales()) => Err(format!(
            "the input `{scale}` is {}, and scales of {shown} weights are {}",
            found.type_name(),
            integers.scales()
        )),
        _ => Ok(()),
    }
}

/// The floats of the contract that a type is.
const fn floats_of(kind: DataType) -> Option<FloatType> {
    match kind {
        DataType::Float => Some(FloatType::F32),
        DataType::Float16 => Some(FloatType::F16),
        DataType::Bfloat16 => Some(FloatType::Bf16),
        _ => None,
    }
}

/// The integers of the contract that a type is.
const fn integers_of(kind: DataType) -> Option<IntegerType> {
    match kind {
        DataType::Int8 => Some(IntegerType::Int8),
        DataType::Int4 => Some(IntegerType::Int4),
        _ => None,
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
