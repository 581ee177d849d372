//! Where the time goes, node by node, folded by the layers that the nodes' names give.

use moa_schema::Operator;

use super::{LatencyError, median, result::NodeTime};
use crate::{
    backend::{BackendError, NodeRun, OrtOperators, OrtOptions, OrtSession, OrtTrace},
    onnx::{OnnxFile, inline::inline_functions, read::operator_of},
    tensor::NamedTensors,
};

/// Calls that are recorded, where they are fast.
const CALLS: usize = 10;

/// Calls before those.
const WARM_UP_CALLS: usize = 3;

/// About how long the recorded calls may take.
const NANOSECONDS: u64 = 2_000_000_000;

/// Records every node of `file` on ONNX Runtime. Bodies are put in the place of their operators before, where the
/// runtime would do so itself, because its names for their nodes do not say which layer they belong to.
///
/// # Errors
///
/// Where the runtime fails.
pub(super) fn record(
    file: &OnnxFile,
    operators: OrtOperators,
    options: &OrtOptions,
    inputs: &NamedTensors,
    call: u64,
) -> Result<(usize, Vec<NodeTime>), LatencyError> {
    let routed = routed_modules(file);
    let inlined = match operators {
        OrtOperators::Library => None,
        OrtOperators::Functions => {
            let model = inline_functions(file.model()).map_err(BackendError::from)?;
            Some(file.with_model(model)?)
        }
    };
    let file = inlined.as_ref().unwrap_or(file);
    let outputs: Vec<String> = file.outputs().into_iter().map(|output| output.name).collect();
    let trace = OrtTrace::begin()?;
    let mut session = OrtSession::load(file, outputs, operators, options.clone(), Some(&trace.place()))?;
    let mut values = Vec::with_capacity(inputs.len());
    for (name, tensor) in inputs {
        let value = session.tensor(tensor)?;
        session.bind(name, &value)?;
        values.push(value);
    }
    let calls = usize::try_from(NANOSECONDS / call.max(1)).unwrap_or(CALLS).clamp(1, CALLS);
    for _ in 0..WARM_UP_CALLS + calls {
        session.run()?;
    }
    let runs = trace.nodes(&session.end_profiling()?)?;
    let nodes = file.graph().into_iter().flat_map(|graph| &graph.node).filter(|node| node.domain.is_empty());
    let alone: Vec<&str> = nodes.map(|node| node.name.as_str()).filter(|name| !name.contains('/')).collect();
    Ok((calls, fold_calls(&runs, WARM_UP_CALLS + calls, &alone, &routed)))
}

/// Names of the operators that route, which those of the nodes of their bodies begin with.
fn routed_modules(file: &OnnxFile) -> Vec<&str> {
    let nodes = file.graph().into_iter().flat_map(|graph| &graph.node);
    let operators = nodes.filter(|node| operator_of(node).is_some_and(Operator::is_routed));
    operators.map(|node| node.name.as_str()).filter(|name| !name.is_empty()).collect()
}

/// Folds the nodes of `calls` equal calls: of every node the median over the calls after the warm-up, so that one
/// interruption weighs nothing.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn fold_calls(runs: &[NodeRun], calls: usize, alone: &[&str], routed: &[&str]) -> Vec<NodeTime> {
    let nodes = runs.len() / calls.max(1);
    let measured = &runs[nodes * WARM_UP_CALLS.min(calls)..nodes * calls];
    let times = (0..nodes).map(|node| {
        let times: Vec<f64> = measured.iter().skip(node).step_by(nodes).map(|run| run.time.as_nanos() as f64).collect();
        let time = median(&times).unwrap_or_default().round() as u64;
        (measured[node].node.as_str(), measured[node].operator.as_str(), time)
    });
    fold(times, alone, routed)
}

/// Sums up nodes by module and operator, in the order in which they come first. `alone` names the nodes of the graph
/// that belong to no module, to whose names the runtime adds a slash and more where it fuses them with others; `routed`
/// names the operators that route.
#[allow(clippy::cast_precision_loss)]
fn fold<'a>(runs: impl Iterator<Item = (&'a str, &'a str, u64)>, alone: &[&str], routed: &[&str]) -> Vec<NodeTime> {
    let mut folded: Vec<NodeTime> = Vec::new();
    for (node, operator, time) in runs {
        let module = module_of(node, operator, alone);
        let known = folded.iter_mut().find(|known| known.module == module && known.operator == operator);
        let entry = match known {
            Some(entry) => entry,
            None => {
                let layer = layer_of(&module).to_owned();
                let routed = routed.contains(&module.as_str());
                let operator = operator.to_owned();
                folded.push(NodeTime { layer, module, operator, routed, nodes: 0.0, time: 0.0 });
                let last = folded.len() - 1;
                &mut folded[last]
            }
        };
        entry.nodes += 1.0;
        entry.time += time as f64;
    }
    folded
}

/// What ONNX Runtime puts before the name of a node that it moves to another precision.
const MOVED: &str = "InsertedPrecisionFreeCast_";

/// What stands before the first slash; a node of ours is named as its module.
fn module_of(node: &str, operator: &str, alone: &[&str]) -> String {
    let node = node.strip_prefix(MOVED).unwrap_or(node);
    match node.split_once('/') {
        Some((module, _)) if !alone.contains(&module) => module.to_owned(),
        Some(_) => String::new(),
        None if moa_schema::OPERATORS.iter().any(|ours| ours.name == operator) => node.to_owned(),
        None => String::new(),
    }
}

/// The module up to its first number: `decoder.layers.3` of `decoder.layers.3.self_attn.q_proj`.
fn layer_of(module: &str) -> &str {
    let mut end = 0;
    for part in module.split('.') {
        end += part.len();
        if !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()) {
            return &module[..end];
        }
        end += 1;
    }
    module
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::onnx::{
        proto::{
            AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
            tensor_proto::DataType,
        },
        read_model,
    };

    /// `y = LMHead(MoEFeedForward(x, r, i, o), w, s)`, read from a file.
    fn routed_and_head() -> OnnxFile {
        let node = |operator: &str, name: &str, inputs: &[&str], output: &str| NodeProto {
            domain: moa_schema::DOMAIN.into(),
            op_type: operator.into(),
            name: name.into(),
            input: inputs.iter().map(|input| (*input).to_owned()).collect(),
            output: vec![output.into()],
            ..NodeProto::default()
        };
        let mut block = node("MoEFeedForward", "layers.0.mlp", &["x", "r", "i", "o"], "h");
        block.attribute = [("gate_mode", "topk_softmax"), ("activation", "silu")]
            .map(|(name, text)| AttributeProto::text(name, text))
            .into();
        block.attribute.extend(["top_k", "gated"].map(|name| AttributeProto::int(name, 1)));
        let value = |(name, kind)| ValueInfoProto::tensor(name, kind, None);
        let floats = ["x", "r", "i", "o", "s"].map(|name| (name, DataType::Float));
        let graph = GraphProto {
            node: vec![block, node("LMHead", "lm_head.output", &["h", "w", "s"], "y")],
            input: floats.into_iter().chain([("w", DataType::Int8)]).map(value).collect(),
            output: vec![value(("y", DataType::Float))],
            ..GraphProto::default()
        };
        let import = |(domain, version): (&str, i64)| OperatorSetIdProto { domain: domain.into(), version };
        let opset_import = [("", 18), (moa_schema::DOMAIN, 1)].map(import).into();
        let model = ModelProto { ir_version: 9, graph: Some(graph), opset_import, ..ModelProto::default() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.onnx");
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        read_model(&path).unwrap()
    }

    #[test]
    fn a_head_is_not_routed() {
        let file = routed_and_head();
        assert_eq!(routed_modules(&file), ["layers.0.mlp"]);
        let runs = [("layers.0.mlp", "MoEFeedForward", 5), ("lm_head.output", "LMHead", 7)];
        let folded = fold(runs.into_iter(), &[], &routed_modules(&file));
        let parts: Vec<_> = folded.iter().map(|node| (node.module.as_str(), node.routed)).collect();
        assert_eq!(parts, [("layers.0.mlp", true), ("lm_head.output", false)]);
    }

    #[test]
    fn layers_end_at_the_first_number() {
        for (module, layer) in [
            ("decoder.layers.3.self_attn.q_proj", "decoder.layers.3"),
            ("encoder.layers.0", "encoder.layers.0"),
            ("encoder", "encoder"),
            ("", ""),
        ] {
            assert_eq!(layer_of(module), layer);
        }
    }

    #[test]
    fn nodes_are_summed_by_module_and_operator() {
        let runs = [
            ("e.layers.0.attn", "MoASelfAttention", 100),
            ("e.layers.0/MatMul", "MatMul", 10),
            ("d.layers.0.cross/MatMul", "MatMul", 5),
            ("d.layers.0.cross.q/Mul", "Mul", 7),
            ("InsertedPrecisionFreeCast_e.layers.0/MatMul_1/Fused/", "MatMul", 20),
            ("Cast", "Cast", 4),
            ("Mul_1/SimplifiedLayerNormFusion/", "SimplifiedLayerNormalization", 6),
        ];
        let folded = fold(runs.into_iter(), &["Cast", "Mul_1"], &["e.layers.0.attn", "d.layers.0.cross.q"]);
        let texts: Vec<_> = folded
            .iter()
            .map(|node| {
                let names = [&node.layer, &node.module, &node.operator].map(String::as_str);
                (names, node.routed, node.nodes, node.time)
            })
            .collect();
        assert_eq!(
            texts,
            [
                (["e.layers.0", "e.layers.0.attn", "MoASelfAttention"], true, 1.0, 100.0),
                (["e.layers.0", "e.layers.0", "MatMul"], false, 2.0, 30.0),
                (["d.layers.0", "d.layers.0.cross", "MatMul"], false, 1.0, 5.0),
                (["d.layers.0", "d.layers.0.cross.q", "Mul"], true, 1.0, 7.0),
                (["", "", "Cast"], false, 1.0, 4.0),
                (["", "", "SimplifiedLayerNormalization"], false, 1.0, 6.0),
            ]
        );
    }
}
