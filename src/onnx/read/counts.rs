//! How many inputs a node may have.

use std::collections::HashMap;

use super::error::{Fault, shown};
use super::structure::{canonical_domain, for_each_node, function_key};
use crate::onnx::proto::{ModelProto, NodeProto};

/// Checks the inputs of a node of a standard operator.
pub(super) fn check(node: &NodeProto) -> Result<(), Fault> {
    if !canonical_domain(&node.domain).is_empty() {
        return Ok(());
    }
    check_variadic(node)?;
    check_most(node)
}

/// Standard operators that exports have, by the most inputs that any version of them takes.
const MOST: [(usize, &[&str]); 5] = [
    (0, &["Constant"]),
    (
        1,
        &[
            "Cast",
            "Erf",
            "Exp",
            "Identity",
            "Neg",
            "Relu",
            "Shape",
            "Sigmoid",
            "Softmax",
            "Softplus",
            "Sqrt",
            "Transpose",
        ],
    ),
    (
        2,
        &[
            "Add",
            "And",
            "CumSum",
            "Div",
            "Expand",
            "Gather",
            "GatherElements",
            "Less",
            "LessOrEqual",
            "MatMul",
            "Mul",
            "Pow",
            "ReduceMean",
            "ReduceSum",
            "Reshape",
            "Split",
            "Squeeze",
            "Sub",
            "TopK",
            "Unsqueeze",
        ],
    ),
    (3, &["DequantizeLinear", "LayerNormalization", "Range", "ScatterElements", "Where"]),
    (5, &["Slice"]),
];

/// Refuses more inputs than an operator takes, absent ones included: runtimes refuse them, and would not see those that
/// are cut here.
fn check_most(node: &NodeProto) -> Result<(), Fault> {
    let (found, operator) = (node.input.len(), node.op_type.as_str());
    let Some((most, _)) = MOST.iter().find(|(_, operators)| operators.contains(&operator)) else { return Ok(()) };
    if found <= *most {
        return Ok(());
    }
    let text = format!("it has {found} inputs, absent ones included, and its operator takes at most {most}");
    Err(Fault::malformed(text).help("remove the last inputs of this node"))
}

/// Refuses calls of functions with more inputs than these have, as runtimes do that put a body in the place of a call.
pub(super) fn check_inputs_of_calls(model: &ModelProto) -> Result<(), Fault> {
    let most: HashMap<_, _> = model.functions.iter().map(|body| (function_key(body), body.input.len())).collect();
    let mut fault = None;
    let mut visit = |node: &NodeProto| {
        let found = node.input.len();
        let function = (canonical_domain(&node.domain), node.op_type.as_str(), node.overload.as_str());
        if let Some(most) = most.get(&function).filter(|most| found > **most) {
            let output = node.output.first().map_or("", String::as_str);
            let call = format!("the call of function {} that gives {}", shown(&node.op_type), shown(output));
            let text = format!("{call} has {found} inputs, absent ones included, and the function has {most}");
            fault.get_or_insert_with(|| Fault::malformed(text).help("remove the last inputs of this node"));
        }
    };
    for nodes in model.graph.iter().map(|graph| &graph.node).chain(model.functions.iter().map(|body| &body.node)) {
        for_each_node(nodes, &mut visit);
    }
    fault.map_or(Ok(()), Err)
}

/// Standard operators of any number of inputs, and the first of these.
const VARIADIC: [(&str, usize); 9] = [
    ("Concat", 0),
    ("Einsum", 0),
    ("Loop", 2),
    ("Max", 0),
    ("Mean", 0),
    ("Min", 0),
    ("Scan", 1),
    ("SequenceConstruct", 0),
    ("Sum", 0),
];

/// Refuses an input without a name among any number of them: ONNX lets those alone be absent that are optional, and
/// runtimes may read what is not there.
fn check_variadic(node: &NodeProto) -> Result<(), Fault> {
    let operator = VARIADIC.iter().find(|(name, _)| node.op_type == *name);
    let absent = operator.and_then(|(_, first)| {
        let mut inputs = node.input.iter().enumerate().skip(*first);
        inputs.find(|(_, input)| input.is_empty())
    });
    let Some((place, _)) = absent else { return Ok(()) };
    let text = format!("input {place} has no name, and none of this operator's inputs may be absent");
    Err(Fault::malformed(text).help("name the value, or remove the input"))
}
