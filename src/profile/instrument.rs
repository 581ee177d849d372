//! The same graph, with choices and scores of every router as outputs.

use moa_schema::{DOMAIN, GateMode, RoutingPart, attribute, parameter};

use super::{ProfileError, Score};
use crate::onnx::{
    OnnxFile, expose_routing,
    proto::{AttributeProto, GraphProto, NodeProto, ValueInfoProto, tensor_proto::DataType},
    read::{operator_input, operator_of},
};

/// A router, and where its values come out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Router {
    pub(super) module: String,
    /// Output `[B, T, k]` int64.
    pub(super) indices: String,
    /// Output `[B, T, E]` float32, what `TopK` ranks.
    pub(super) scores: String,
    pub(super) score: Score,
}

/// `file` with the routing of its modules as outputs.
pub(super) fn instrument(file: &OnnxFile) -> Result<(OnnxFile, Vec<Router>), ProfileError> {
    let mut model = file.model().clone();
    let modules = expose_routing(&mut model);
    let no_routing = || ProfileError::NoRouting { path: file.path().into() };
    let graph = model.graph.as_mut().filter(|_| !modules.is_empty()).ok_or_else(no_routing)?;
    let mut routers = Vec::new();
    for module in modules {
        let indices = RoutingPart::Indices.name(&module);
        let fault = |what| ProfileError::Scores { path: file.path().into(), module: module.clone(), what };
        let node = graph.node.iter().find(|node| node.output.contains(&indices)).ok_or_else(no_routing)?.clone();
        let (scores, score) = match node.domain == DOMAIN {
            true => operator_scores(graph, &node, &module),
            false => ranked(graph, &node),
        }
        .map_err(fault)?;
        if graph.output.iter().all(|output| output.name != scores) {
            graph.output.push(ValueInfoProto::tensor(&scores, DataType::Float, None));
        }
        routers.push(Router { module, indices, scores, score });
    }
    Ok((file.with_model(model)?, routers))
}

/// The input of the `TopK` that chooses.
fn ranked(graph: &GraphProto, node: &NodeProto) -> Result<(String, Score), &'static str> {
    if node.op_type != "TopK" {
        return Err("its experts are not chosen by a `TopK`");
    }
    let scores = node.input.first().ok_or("its `TopK` has no input")?;
    let source = graph.node.iter().find(|node| node.output.contains(scores));
    let score = match source.map(|node| node.op_type.as_str()) {
        Some("Softmax") => Score::Probability,
        Some("MatMul") => Score::Logit,
        _ => return Err("its `TopK` ranks neither a `Softmax` nor a `MatMul`"),
    };
    Ok((scores.clone(), score))
}

/// Adds nodes that compute the scores of an operator once more, in f32.
fn operator_scores(graph: &mut GraphProto, node: &NodeProto, module: &str) -> Result<(String, Score), &'static str> {
    operator_of(node).ok_or("an unknown operator")?;
    let input = |name: &str| operator_input(node, name).map(str::to_owned);
    let read = parameter::READ_BY_ROUTERS.into_iter().find_map(input);
    let (read, weight) = read.zip(input(parameter::ROUTER_WEIGHT)).ok_or("it lacks a required input")?;
    let gate_mode = node.text_attribute(attribute::GATE_MODE).and_then(GateMode::parse);
    let name = |part: &str| match module {
        "" => format!("profile.{part}"),
        module => format!("profile.{module}.{part}"),
    };
    let to_float = AttributeProto::int("to", DataType::Float as i64);
    graph.node.push(standard("Cast", &[&read], &name("read"), Some(to_float)));
    graph.node.push(standard("MatMul", &[&name("read"), &weight], &name("logits"), None));
    match gate_mode.ok_or("its attribute `gate_mode` is missing or unknown")? {
        GateMode::TopkSoftmax => Ok((name("logits"), Score::Logit)),
        GateMode::SoftmaxTopk | GateMode::SoftmaxTopkRenorm => {
            graph.node.push(standard(
                "Softmax",
                &[&name("logits")],
                &name("scores"),
                Some(AttributeProto::int("axis", -1)),
            ));
            Ok((name("scores"), Score::Probability))
        }
    }
}

fn standard(op_type: &str, input: &[&str], output: &str, attribute: Option<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: op_type.into(),
        name: output.into(),
        input: input.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        attribute: attribute.into_iter().collect(),
        ..NodeProto::default()
    }
}
