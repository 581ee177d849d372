//! Models as TensorRT's parser takes them: nodes of ours as plugins, without bodies.
//!
//! A parser of TensorRT looks a plugin up by operator type, `plugin_version` and `plugin_namespace`; up to 10.6 it
//! takes a body of the same name first, so bodies go. It hands an input that is absent before a present one to the
//! plugin as a null pointer, and asks for the number of outputs before it shows the node: both become attributes. The
//! plugin computes in the types that it is given, so that the accuracy level of a node says nothing to it, and goes. A
//! head, for which there is no plugin, becomes `MatMul`.

use std::collections::BTreeSet;

use moa_schema::{
    ACCURACY_LEVEL, DOMAIN, LM_HEAD, OPSET_VERSION, OUTPUT_COUNT, Operator, PLUGIN_NAMESPACE, PLUGIN_VERSION,
    PRESENT_INPUTS, RoutingPart,
};

use super::bf16::{Casts, activations, bf16_weights, cast_edges, cast_to_bf16, declared_narrow, has_bf16_matrices};
use super::head;
use crate::onnx::proto::{AttributeProto, GraphProto, ModelProto, NodeProto};
use crate::onnx::read::{self, for_each_node};

/// A model for TensorRT.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// The model.
    pub model: ModelProto,
    /// Nodes that became plugins.
    pub plugins: usize,
}

/// Why a model cannot be prepared.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The model has none of our nodes.
    #[error("the model has no operators of {DOMAIN}: TensorRT takes it as it is")]
    NothingToDo,
    /// The model was prepared before.
    #[error("node `{node}`: it is prepared already")]
    Done {
        /// Name of the node.
        node: String,
    },
    /// A node of ours is not as the contract says.
    #[error("node `{node}`: {why}")]
    Node {
        /// Name of the node.
        node: String,
        /// What is wrong.
        why: String,
    },
    /// Matrices are bf16, and activations are a type of two bytes.
    #[error("node `{node}` has matrices of bf16 and activations of another type of two bytes, which no export has")]
    MixedTypes {
        /// Name of the node.
        node: String,
    },
}

impl PrepareError {
    /// What the user can do.
    pub const fn help(&self) -> &'static str {
        match self {
            Self::NothingToDo => "give the file itself to trtexec, or to `moa-export build`",
            Self::MixedTypes { .. } => "export with --dtype bf16, --dtype fp16 or --dtype fp32",
            Self::Done { .. } => "give the file itself to trtexec, or to `moa-export build`",
            Self::Node { .. } => "give a file that moa-export has written",
        }
    }
}

/// Rewrites `model`, which must have passed the checks of [`read_model`](crate::onnx::read_model), for every release.
///
/// # Errors
///
/// Where the model has none of our nodes, or one that a plugin cannot stand for.
pub fn prepare(model: &ModelProto) -> Result<Prepared, PrepareError> {
    let mut model = model.clone();
    if count_ours(model.graph.as_ref()) == 0 {
        return Err(PrepareError::NothingToDo);
    }
    model.functions.retain(|function| function.domain != DOMAIN);
    if let Some(graph) = &mut model.graph {
        replace_heads(graph)?;
    }
    let all = count_ours(model.graph.as_ref());
    let mut plugins = 0;
    if let Some(graph) = &mut model.graph {
        plugins = prepare_graph(graph)?;
    }
    if plugins != all {
        let why = "it stands in a branch or loop, where TensorRT takes no plugin";
        return Err(PrepareError::Node { node: "of a nested graph".into(), why: why.into() });
    }
    Ok(Prepared { model, plugins })
}

/// Nodes of ours, nested ones included.
fn count_ours(graph: Option<&GraphProto>) -> usize {
    let mut count = 0;
    for_each_node(graph.map_or(&[][..], |graph| &graph.node), &mut |node| count += usize::from(is_ours(node)));
    count
}

/// Writes heads as standard operators.
fn replace_heads(graph: &mut GraphProto) -> Result<(), PrepareError> {
    let mut nodes = Vec::with_capacity(graph.node.len());
    for node in std::mem::take(&mut graph.node) {
        if !is_ours(&node) || node.op_type != LM_HEAD.name {
            nodes.push(node);
        } else if head::is_of_floats(&node) {
            nodes.extend(head::as_matmul(node));
        } else {
            return Err(wrong(&node, "its matrix is of integers, which no plugin takes"));
        }
    }
    graph.node = nodes;
    Ok(())
}

/// Rewrites our nodes of `graph`, and counts them.
fn prepare_graph(graph: &mut GraphProto) -> Result<usize, PrepareError> {
    let used = used_values(graph);
    let (bf16, cast, narrow) = (bf16_weights(graph), cast_to_bf16(graph), declared_narrow(graph));
    let (mut cut, mut casts, mut plugins) = (BTreeSet::new(), Casts::new(), 0);
    let mut nodes = Vec::with_capacity(graph.node.len());
    for (place, mut node) in std::mem::take(&mut graph.node).into_iter().enumerate() {
        if !is_ours(&node) {
            nodes.push(node);
            continue;
        }
        let operator = operator_of(&node)?;
        if is_done(&node, operator, [&bf16, &cast]) {
            return Err(PrepareError::Done { node: node.name });
        }
        let count = prepare_outputs(&mut node, place, operator, &used, &mut cut);
        let mut edges = [Vec::new(), Vec::new()];
        if has_bf16_matrices(&node, operator, &bf16) {
            if activations(&node, operator).any(|name| narrow.contains(name)) {
                return Err(PrepareError::MixedTypes { node: node.name });
            }
            edges = cast_edges(&mut node, operator, &mut casts);
        }
        name_plugin(&mut node, operator, count);
        let [before, after] = edges;
        nodes.extend(before.into_iter().chain([node]).chain(after));
        plugins += 1;
    }
    graph.node = nodes;
    graph.value_info.retain(|value| !cut.contains(&value.name));
    Ok(plugins)
}

/// Whether [`prepare`] wrote a node of ours in `model`.
pub fn is_prepared(model: &ModelProto) -> bool {
    let Some(graph) = &model.graph else { return false };
    let known = [&bf16_weights(graph), &cast_to_bf16(graph)];
    let mut ours = graph.node.iter().filter(|node| is_ours(node));
    ours.any(|node| read::operator_of(node).is_some_and(|operator| is_done(node, operator, known)))
}

/// Whether absent inputs of a node are left out, or what it reads beside matrices of `bf16` is among `cast`.
fn is_done(node: &NodeProto, operator: &Operator, [bf16, cast]: [&BTreeSet<String>; 2]) -> bool {
    node.find_attribute(PRESENT_INPUTS).is_some()
        || has_bf16_matrices(node, operator, bf16) && activations(node, operator).any(|name| cast.contains(name))
}

fn is_ours(node: &NodeProto) -> bool {
    node.domain == DOMAIN
}

/// Names of values that a node reads, nested ones included, or that the graph returns.
fn used_values(graph: &GraphProto) -> BTreeSet<String> {
    let mut used: BTreeSet<String> = graph.output.iter().map(|output| output.name.clone()).collect();
    for_each_node(&graph.node, &mut |node| {
        used.extend(node.input.iter().cloned());
        let nested = node.attribute.iter().flat_map(|attribute| attribute.g.iter().chain(&attribute.graphs));
        used.extend(nested.flat_map(|graph| graph.output.iter().map(|output| output.name.clone())));
    });
    used
}

fn wrong(node: &NodeProto, why: impl Into<String>) -> PrepareError {
    PrepareError::Node { node: node.name.clone(), why: why.into() }
}

/// The operator of a node.
fn operator_of(node: &NodeProto) -> Result<&'static Operator, PrepareError> {
    read::operator_of(node).ok_or_else(|| wrong(node, format!("{DOMAIN} has no operator {}", node.op_type)))
}

/// Closes the gaps of the inputs, and writes what the plugin is told.
fn name_plugin(node: &mut NodeProto, operator: &Operator, outputs: Option<usize>) {
    if let Some(mask) = close_gaps(node, operator) {
        node.attribute.push(AttributeProto::int(PRESENT_INPUTS, saturated(mask)));
    }
    if let Some(count) = outputs {
        node.attribute.push(AttributeProto::int(OUTPUT_COUNT, saturated(count)));
    }
    node.attribute.push(AttributeProto::text(PLUGIN_NAMESPACE, DOMAIN));
    node.attribute.push(AttributeProto::text(PLUGIN_VERSION, &OPSET_VERSION.to_string()));
}

fn saturated(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Cuts the outputs that nobody reads; the number of the others, where the plugin must be told. A node may have no
/// name, and then its place in the graph names outputs that need one.
fn prepare_outputs(
    node: &mut NodeProto,
    place: usize,
    operator: &Operator,
    used: &BTreeSet<String>,
    cut: &mut BTreeSet<String>,
) -> Option<usize> {
    let unwanted = [ACCURACY_LEVEL, OUTPUT_COUNT, PLUGIN_VERSION, PLUGIN_NAMESPACE];
    node.attribute.retain(|attribute| !unwanted.contains(&attribute.name.as_str()));
    let needed = node.output.iter().rposition(|name| used.contains(name)).map_or(1, |last| last + 1);
    cut.extend(node.output.drain(needed.min(node.output.len())..));
    for (index, output) in node.output.iter_mut().enumerate().filter(|(_, output)| output.is_empty()) {
        *output = match node.name.as_str() {
            "" => format!("node.{place}.unused.{index}"),
            name => format!("{name}.unused.{index}"),
        };
    }
    let usual = operator.outputs.iter().take_while(|output| RoutingPart::of_output(output.name).is_none()).count();
    (needed != usual).then_some(needed)
}

/// Removes absent inputs; the mask of those that stay, where one was absent before a present one.
fn close_gaps(node: &mut NodeProto, operator: &Operator) -> Option<usize> {
    let present = |index: usize| node.input.get(index).is_some_and(|name| !name.is_empty());
    let mask = (0..operator.inputs.len()).filter(|index| present(*index)).fold(0, |mask, index| mask | 1 << index);
    node.input.retain(|name| !name.is_empty());
    let first_ones = (1_usize << node.input.len()) - 1;
    (mask != first_ones).then_some(mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::onnx::proto::{
        FunctionProto, TensorProto, TypeProto, ValueInfoProto, tensor_proto::DataType, type_proto,
    };

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn value(name: &str) -> ValueInfoProto {
        ValueInfoProto { name: name.into(), ..ValueInfoProto::default() }
    }

    /// One node of self-attention whose first output the graph returns.
    fn model(inputs: &[&str], outputs: &[&str]) -> ModelProto {
        let node = NodeProto {
            name: "layer".into(),
            op_type: "MoASelfAttention".into(),
            domain: DOMAIN.into(),
            input: names(inputs),
            output: names(outputs),
            attribute: vec![AttributeProto::int("top_k", 2), AttributeProto::text("plugin_version", "0")],
            ..NodeProto::default()
        };
        let value_info = outputs.iter().map(|name| value(name)).collect();
        let graph =
            GraphProto { node: vec![node], output: vec![value(outputs[0])], value_info, ..GraphProto::default() };
        let function =
            FunctionProto { name: "MoASelfAttention".into(), domain: DOMAIN.into(), ..FunctionProto::default() };
        ModelProto { graph: Some(graph), functions: vec![function], ..ModelProto::default() }
    }

    fn node(prepared: &Prepared) -> &NodeProto {
        &prepared.model.graph.as_ref().unwrap().node[0]
    }

    fn ints(node: &NodeProto) -> Vec<(&str, i64)> {
        node.attribute.iter().filter_map(|attribute| Some((attribute.name.as_str(), attribute.i?))).collect()
    }

    const REQUIRED: [&str; 6] = ["x", "mask", "router", "q", "kv", "o"];

    #[test]
    fn bodies_go_and_nodes_name_their_plugin() {
        let prepared = prepare(&model(&REQUIRED, &["y", "k", "v"])).unwrap();
        assert_eq!(prepared.plugins, 1);
        assert!(prepared.model.functions.is_empty());
        let text = |name: &str| {
            let found: Vec<_> = node(&prepared).attribute.iter().filter(|a| a.name == name).collect();
            assert_eq!(found.len(), 1, "{name}");
            String::from_utf8(found[0].s.clone().unwrap()).unwrap()
        };
        assert_eq!((text("plugin_version"), text("plugin_namespace")), ("1".to_owned(), "ai.moa".to_owned()));
    }

    #[test]
    fn the_accuracy_of_products_goes() {
        let mut exact = model(&REQUIRED, &["y", "k", "v"]);
        let expected = prepare(&exact).unwrap();
        exact.graph.as_mut().unwrap().node[0].attribute.push(AttributeProto::int("accuracy_level", 3));
        assert_eq!(prepare(&exact).unwrap(), expected);
    }

    #[test]
    fn outputs_that_nobody_reads_are_cut() {
        let prepared = prepare(&model(&REQUIRED, &["y", "k", "v"])).unwrap();
        assert_eq!(node(&prepared).output, ["y"]);
        assert_eq!(ints(node(&prepared)), [("top_k", 2), ("output_count", 1)]);
        let graph = prepared.model.graph.as_ref().unwrap();
        assert_eq!(graph.value_info.iter().map(|value| value.name.as_str()).collect::<Vec<_>>(), ["y"]);
        let mut whole = model(&REQUIRED, &["y", "", "v"]);
        whole.graph.as_mut().unwrap().output.push(value("v"));
        let prepared = prepare(&whole).unwrap();
        assert_eq!(node(&prepared).output, ["y", "layer.unused.1", "v"]);
        assert_eq!(ints(node(&prepared)), [("top_k", 2)]);
        let graph = whole.graph.as_mut().unwrap();
        graph.node[0].name.clear();
        let second = NodeProto { output: names(&["z", "", "w"]), ..graph.node[0].clone() };
        graph.node.push(second);
        graph.output.extend([value("z"), value("w")]);
        let prepared = prepare(&whole).unwrap();
        let outputs = prepared.model.graph.unwrap().node.into_iter().map(|node| node.output).collect::<Vec<_>>();
        assert_eq!(outputs, [["y", "node.0.unused.1", "v"], ["z", "node.1.unused.1", "w"]]);
    }

    #[test]
    fn absent_inputs_before_present_ones_become_a_mask() {
        let inputs = [&REQUIRED[..], &["", "pk", "pv", "", "", ""]].concat();
        let prepared = prepare(&model(&inputs, &["y"])).unwrap();
        assert_eq!(node(&prepared).input, [&REQUIRED[..], &["pk", "pv"]].concat());
        assert_eq!(ints(node(&prepared)), [("top_k", 2), ("present_inputs", 0x1BF), ("output_count", 1)]);
        let biased = prepare(&model(&[&REQUIRED[..], &["b", ""]].concat(), &["y"])).unwrap();
        assert_eq!(node(&biased).input.len(), 7);
        assert_eq!(ints(node(&biased)), [("top_k", 2), ("output_count", 1)]);
    }

    #[test]
    fn what_is_prepared_stays_as_it_is() {
        let once = prepare(&model(&REQUIRED, &["y", "k", "v"])).unwrap();
        assert_eq!(prepare(&once.model).unwrap(), once);
        let masked = prepare(&model(&[&REQUIRED[..], &["", "pk", "pv"]].concat(), &["y"])).unwrap();
        let error = prepare(&masked.model).unwrap_err();
        assert_eq!(error.to_string(), "node `layer`: it is prepared already");
        let cast = prepare(&bf16()).unwrap();
        assert_eq!(prepare(&cast.model).unwrap_err(), PrepareError::Done { node: "layer".into() });
    }

    #[test]
    fn routing_that_is_read_stays() {
        let outputs = ["y", "k", "v", "indices", "weights"];
        for (read, count) in [("indices", 4), ("weights", 5)] {
            let mut routed = model(&REQUIRED, &outputs);
            routed.graph.as_mut().unwrap().output.push(value(read));
            let prepared = prepare(&routed).unwrap();
            assert_eq!(node(&prepared).output, outputs[..count]);
            assert_eq!(ints(node(&prepared)), [("top_k", 2), ("output_count", count as i64)]);
        }
    }

    #[test]
    fn nodes_beyond_the_contract_are_refused() {
        let error = |model: &ModelProto| prepare(model).unwrap_err().to_string();
        let mut other = model(&REQUIRED, &["y"]);
        other.graph.as_mut().unwrap().node[0].op_type = "MoE".into();
        assert_eq!(error(&other), "node `layer`: ai.moa has no operator MoE");
        assert_eq!(prepare(&ModelProto::default()).unwrap_err(), PrepareError::NothingToDo);
    }

    /// A model whose node has matrices of bf16 and a bias, and returns its keys too.
    fn bf16() -> ModelProto {
        let mut model = model(&[&REQUIRED[..], &["bias", "pk", "pv"]].concat(), &["y", "k"]);
        let graph = model.graph.as_mut().unwrap();
        graph.output.push(value("k"));
        for name in ["q", "kv", "o"] {
            let data_type = DataType::Bfloat16 as i32;
            graph.initializer.push(TensorProto { name: name.into(), data_type, ..TensorProto::default() });
        }
        model
    }

    #[test]
    fn operators_with_matrices_of_bf16_compute_in_bf16_between_casts() {
        let prepared = prepare(&bf16()).unwrap();
        let nodes = &prepared.model.graph.as_ref().unwrap().node;
        let shown = |node: &NodeProto| {
            let to = node.int_attribute("to");
            (node.op_type.clone(), node.input.join(" "), node.output.join(" "), to)
        };
        let cast = |from: &str, to: &str, kind| ("Cast".to_owned(), from.to_owned(), to.to_owned(), Some(kind as i64));
        let (narrow, wide) = (DataType::Bfloat16, DataType::Float);
        let inner = "x.bf16 mask router q kv o bias.bf16 pk.bf16 pv.bf16".to_owned();
        let expected = [
            cast("x", "x.bf16", narrow),
            cast("bias", "bias.bf16", narrow),
            cast("pk", "pk.bf16", narrow),
            cast("pv", "pv.bf16", narrow),
            ("MoASelfAttention".into(), inner, "y.bf16 k.bf16".into(), None),
            cast("y.bf16", "y", wide),
            cast("k.bf16", "k", wide),
        ];
        assert_eq!(nodes.iter().map(shown).collect::<Vec<_>>(), expected);
    }

    /// The same with a head behind it, whose other inputs are `inputs`.
    fn with_head(inputs: &[&str]) -> ModelProto {
        let mut model = bf16();
        let graph = model.graph.as_mut().unwrap();
        let head = NodeProto {
            name: "head".into(),
            op_type: "LMHead".into(),
            domain: DOMAIN.into(),
            input: names(&[&["y"], inputs].concat()),
            output: names(&["logits"]),
            attribute: vec![AttributeProto::int("accuracy_level", 3)],
            ..NodeProto::default()
        };
        graph.node.push(head);
        graph.output.push(value("logits"));
        model
    }

    #[test]
    fn a_head_becomes_a_product_in_f32() {
        for inputs in [&["w"][..], &["w", ""]] {
            let prepared = prepare(&with_head(inputs)).unwrap();
            assert_eq!(prepared.plugins, 1);
            let nodes = prepared.model.graph.unwrap().node;
            let [.., cast, product] = nodes.as_slice() else { panic!("{} nodes", nodes.len()) };
            assert_eq!((cast.op_type.as_str(), cast.int_attribute("to")), ("Cast", Some(DataType::Float as i64)));
            assert_eq!((&cast.input, &cast.output), (&names(&["w"]), &names(&["w.f32"])));
            assert_eq!((product.name.as_str(), product.op_type.as_str()), ("head", "MatMul"));
            assert_eq!((&product.input, &product.output), (&names(&["y", "w.f32"]), &names(&["logits"])));
            assert!(product.domain.is_empty() && product.attribute.is_empty());
        }
        let error = prepare(&with_head(&["w", "s"])).unwrap_err().to_string();
        assert_eq!(error, "node `head`: its matrix is of integers, which no plugin takes");
    }

    #[test]
    fn a_value_is_cast_once() {
        let mut twice = bf16();
        let graph = twice.graph.as_mut().unwrap();
        let mut second = graph.node[0].clone();
        second.input[0] = "y".into();
        second.output = names(&["z"]);
        graph.node.push(second);
        graph.output.push(value("z"));
        let prepared = prepare(&twice).unwrap();
        let nodes = &prepared.model.graph.as_ref().unwrap().node;
        let second = nodes.iter().rfind(|node| is_ours(node)).unwrap();
        assert_eq!(
            second.input,
            names(&["y.bf16", "mask", "router", "q", "kv", "o", "bias.bf16", "pk.bf16", "pv.bf16"])
        );
        assert_eq!(nodes.iter().filter(|node| node.op_type == "Cast").count(), 7);
    }

    #[test]
    fn activations_of_two_bytes_beside_matrices_of_bf16_are_refused() {
        let mut mixed = bf16();
        let tensor = type_proto::Tensor { elem_type: DataType::Float16 as i32, shape: None };
        let half = TypeProto { value: Some(type_proto::Value::TensorType(tensor)) };
        mixed.graph.as_mut().unwrap().input.push(ValueInfoProto { r#type: Some(half), ..value("x") });
        assert_eq!(prepare(&mixed).unwrap_err(), PrepareError::MixedTypes { node: "layer".into() });
    }

    #[test]
    fn nested_nodes_are_refused() {
        let mut inner = model(&REQUIRED, &["y"]);
        let graph = inner.graph.take();
        let branch = AttributeProto { name: "then_branch".into(), g: graph, ..AttributeProto::default() };
        let node = NodeProto { op_type: "If".into(), attribute: vec![branch], ..NodeProto::default() };
        inner.graph = Some(GraphProto { node: vec![node], ..GraphProto::default() });
        assert!(prepare(&inner).unwrap_err().to_string().contains("stands in a branch or loop"));
    }
}
