//! The contract of our operators: inputs, outputs, attributes, shapes of weights, and the body.

use std::collections::HashMap;

use moa_schema::{
    AccuracyLevel, AttributeSource, Attributes, DOMAIN, FURTHER_ATTRIBUTES, FloatType, Given, IntegerType, MatrixType,
    OPSET_VERSION, Operator, PRESENT_INPUTS, accuracy_level, attribute, check_constants, check_further_attributes,
    other_version,
};

use super::error::{Fault, shown};
use super::operator_node::{input, operator_of, present_inputs};
use super::tensor::inline_values;
use crate::onnx::proto::{FunctionProto, NodeProto, TensorProto, tensor_proto::DataType};

const FROM_AN_EXPORT: &str = "give a file that moa-export has written";
const OTHER_OPERATORS: &str =
    "export again with this version of moa-export, or use program and library of the version that wrote the model";

/// What is declared of a value.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Declared<'a> {
    /// Element type.
    pub(super) kind: Option<DataType>,
    /// Dimensions of a weight.
    pub(super) weight: Option<&'a [i64]>,
}

/// Bodies of our operators by name and overload, each as the numbers of experts that its nodes choose.
#[derive(Debug, Default)]
pub(super) struct Bodies<'a>(HashMap<(&'a str, &'a str), Vec<i64>>);

impl<'a> Bodies<'a> {
    pub(super) fn of(functions: &'a [FunctionProto]) -> Self {
        let ours = functions.iter().filter(|function| function.domain == DOMAIN);
        Self(ours.map(|body| ((body.name.as_str(), body.overload.as_str()), chosen_by(body))).collect())
    }

    fn defines(&self, operator: &str) -> bool {
        self.0.keys().any(|(name, _)| *name == operator)
    }

    /// Refuses a node whose body was written for another number of experts.
    fn check_top_k(&self, node: &NodeProto) -> Result<(), String> {
        let chosen = self.0.get(&(node.op_type.as_str(), node.overload.as_str()));
        let (Some(chosen), Some(top_k)) = (chosen, node.int_attribute(attribute::TOP_K)) else { return Ok(()) };
        match chosen.first() {
            Some(other) if !chosen.contains(&top_k) => {
                Err(format!("attribute `top_k` is {top_k}, and the body of its function chooses {other}"))
            }
            _ => Ok(()),
        }
    }
}

/// How many the nodes `TopK` of a body choose, where constants of the body say so.
fn chosen_by(body: &FunctionProto) -> Vec<i64> {
    let constants = body.node.iter().filter(|node| node.op_type == "Constant");
    let constants: HashMap<_, _> = constants.filter_map(|node| Some((node.output.first()?, node))).collect();
    let counts = body.node.iter().filter(|node| node.op_type == "TopK").filter_map(|node| node.input.get(1));
    counts.filter_map(|count| integer_of(constants.get(count)?)).collect()
}

/// The one integer that a node `Constant` holds.
fn integer_of(constant: &NodeProto) -> Option<i64> {
    let of_tensor = |tensor: &TensorProto| {
        let bytes = (tensor.data_type == DataType::Int64 as i32).then(|| inline_values(tensor).ok()).flatten()?;
        Some(i64::from_le_bytes(bytes.as_ref().try_into().ok()?))
    };
    constant.attribute.iter().find_map(|attribute| match attribute.name.as_str() {
        "value" => of_tensor(attribute.t.as_ref()?),
        "value_int" => attribute.i,
        "value_ints" => <[i64; 1]>::try_from(attribute.ints.as_slice()).ok().map(|[count]| count),
        _ => None,
    })
}

/// Checks a node of a graph, if it is one of ours; an operator that has a body may have any name. `declared` tells what
/// is declared of values.
pub(super) fn check<'a>(
    node: &NodeProto,
    bodies: &Bodies<'_>,
    declared: &dyn Fn(&str) -> Declared<'a>,
) -> Result<(), Fault> {
    if node.domain != DOMAIN {
        return Ok(());
    }
    let Some(operator) = operator_of(node) else {
        let unknown = || Fault::unsupported(format!("{DOMAIN} has no such operator")).help(OTHER_OPERATORS);
        return if bodies.defines(&node.op_type) { Ok(()) } else { Err(unknown()) };
    };
    if let Some(written) = other_version(&NodeAttributes(node)) {
        return Err(refused_version(&shown(&written)));
    }
    check_ours(node, operator, bodies, declared).map_err(|text| Fault::malformed(text).help(FROM_AN_EXPORT))
}

fn check_ours<'a>(
    node: &NodeProto,
    operator: &Operator,
    bodies: &Bodies<'_>,
    declared: &dyn Fn(&str) -> Declared<'a>,
) -> Result<(), String> {
    let (source, present) = (NodeAttributes(node), present_inputs(node));
    check_parameters(node, operator, present)?;
    check_scales(node, operator, present, &|name| declared(name).kind)?;
    let attributes = Attributes::read(operator, &source).map_err(|error| error.to_string())?;
    check_names(node, operator)?;
    check_further_attributes(&source).map_err(|error| error.to_string())?;
    accuracy_level(&source).map_err(|error| error.to_string())?;
    check_weights(node, operator, present, &attributes, declared)?;
    bodies.check_top_k(node)
}

/// Refuses attributes that no node of the operator has.
fn check_names(node: &NodeProto, operator: &Operator) -> Result<(), String> {
    let known = |name: &str| operator.attributes.iter().chain(&FURTHER_ATTRIBUTES).any(|known| known.name == name);
    match node.attribute.iter().map(|attribute| attribute.name.as_str()).find(|name| !known(name)) {
        Some(name) => Err(format!("its operator has no attribute {}", shown(name))),
        None => Ok(()),
    }
}

/// Refuses weights whose shapes contradict each other or the attributes.
fn check_weights<'a>(
    node: &NodeProto,
    operator: &Operator,
    present: Option<i64>,
    attributes: &Attributes,
    declared: &dyn Fn(&str) -> Declared<'a>,
) -> Result<(), String> {
    let given = |index| input(node, present, index).map(|name| declared(name).weight);
    let shape = |dims: &[i64]| dims.iter().map(|dim| usize::try_from(*dim).ok()).collect::<Option<Vec<_>>>();
    let shapes: Vec<_> =
        (0..operator.inputs.len()).map(|index| given(index).map(|dims| dims.and_then(shape))).collect();
    let given = shapes.iter().map(|shape| match shape {
        None => Given::Absent,
        Some(None) => Given::Computed,
        Some(Some(shape)) => Given::Constant(shape),
    });
    check_constants(attributes, &given.collect::<Vec<_>>()).map_err(|error| error.what().to_owned())
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

    fn has(&self, name: &str) -> bool {
        self.0.find_attribute(name).is_some()
    }
}
