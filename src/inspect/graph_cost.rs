//! Accounts of graphs: the rules of [`super::cost`], applied to nodes instead of a typed model.
//!
//! Initializers keep the names of the checkpoint's tensors; what is written transposed or reshaped has a suffix, so
//! one tensor counts once in however many files and layouts it stands.

use std::collections::{BTreeMap, HashMap, HashSet};

use moa_graphs::{Part, families::model_types};
use moa_schema::{
    CROSS_ATTENTION, DOMAIN, FEED_FORWARD, Operator, RUNTIME_DOMAIN, SELF_ATTENTION, attribute, interface::MEMORY,
    parameter,
};

use super::{
    component::Component,
    cost::{Cost, Lengths, RoutedAttention, RoutedFeedForward},
    graph::{operators_of, values},
    products::{Uncounted, integers, is_parameter, is_rounding, last_integer, operands, scaled_weights, stored_name},
    sizes::{AttentionSizes, ModelSizes},
};
use crate::{
    metadata,
    onnx::{
        OnnxFile,
        proto::{
            NodeProto, TensorProto, ValueInfoProto,
            tensor_shape_proto::{Dimension, dimension},
            type_proto,
        },
        read::{LONGEST_CHAIN, operator_input},
    },
};

/// What the graphs tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told {
    /// Products with weights, and how many parameters a token uses.
    pub(super) linear: bool,
    /// Attention products.
    pub(super) attention: bool,
}

/// Costs of all files of one model.
pub(super) struct Accounts {
    pub(super) told: Told,
    pub(super) parts: Vec<(&'static str, Cost)>,
    pub(super) sizes: ModelSizes,
    pub(super) not_told: Vec<String>,
}

pub(super) fn accounts(files: &[OnnxFile], family: Option<&str>, lengths: Lengths) -> Accounts {
    let (told, mut not_told) = told(files, family);
    let mut ledger = Ledger::default();
    for file in files {
        let walk = Walk::new(file, lengths);
        walk.parameters(&mut ledger);
        if told.linear {
            walk.products(&mut ledger);
        }
    }
    not_told.append(&mut ledger.uncounted.not_told());
    let complete = ledger.incomplete.is_empty() && not_told.is_empty();
    if !ledger.incomplete.is_empty() {
        not_told.push(format!("multiply-accumulates: {} cannot be read", ledger.incomplete.join(", ")));
    }
    let told = Told { linear: told.linear && complete, attention: told.attention && complete };
    let parts = ledger.costs.into_iter().map(|(component, cost)| (component.name(), cost)).collect();
    let sizes = ModelSizes { layers: layers(&ledger.layers), attention: ledger.attention, vocabulary: Vec::new() };
    Accounts { told, parts, sizes, not_told }
}

/// Layers, an encoder's before a decoder's; a single layer is none.
fn layers(by_part: &BTreeMap<Part, u64>) -> Vec<u64> {
    by_part.values().copied().collect()
}

/// What the operators of the files tell.
fn told(files: &[OnnxFile], family: Option<&str>) -> (Told, Vec<String>) {
    let operators = operators_of(files);
    let has_ours = operators.iter().any(|(domain, _)| *domain == DOMAIN);
    let has_runtime = operators.contains(&(RUNTIME_DOMAIN, "MultiHeadAttention"));
    let is_dense = matches!(family, Some(model_types::TRANSFORMER | model_types::ROBERTA));
    match family {
        None => {
            let why = "the file does not say that this program wrote it";
            let text = format!("family, sizes, parameters by part, active parameters and multiply-accumulates: {why}");
            (Told { linear: false, attention: false }, vec![text])
        }
        Some(_) if has_ours || has_runtime || is_dense => (Told { linear: true, attention: true }, Vec::new()),
        Some(_) => {
            let text = "sizes, active parameters and multiply-accumulates: the standard form computes every expert \
                        and has no operator that names top-k; inspect the checkpoint, or another form";
            (Told { linear: false, attention: false }, vec![text.into()])
        }
    }
}

/// What was counted so far.
#[derive(Default)]
struct Ledger {
    costs: BTreeMap<Component, Cost>,
    /// Tensors whose values were counted.
    seen: HashSet<String>,
    attention: Vec<AttentionSizes>,
    /// Layers of each file.
    layers: BTreeMap<Part, u64>,
    incomplete: Vec<String>,
    uncounted: Uncounted,
}

impl Ledger {
    fn add(&mut self, component: Component, cost: Cost) {
        let entry = self.costs.entry(component).or_default();
        *entry = *entry + cost;
    }
}

/// One file on the way.
struct Walk<'a> {
    file: &'a OnnxFile,
    nodes: &'a [NodeProto],
    /// Known dimensions of the graph's inputs.
    input_dims: HashMap<&'a str, Vec<Option<u64>>>,
    part: Part,
    /// Whether the logits are those of the last position alone.
    last_logits: bool,
    lengths: Lengths,
}

impl<'a> Walk<'a> {
    fn new(file: &'a OnnxFile, lengths: Lengths) -> Self {
        let graph = file.graph();
        Self {
            file,
            nodes: graph.map_or(&[][..], |graph| graph.node.as_slice()),
            input_dims: graph.iter().flat_map(|graph| &graph.input).map(input_dims).collect(),
            part: file.part(),
            last_logits: file.metadata(metadata::LOGITS) == Some(metadata::LAST),
            lengths,
        }
    }

    /// Tokens that the nodes of this file see.
    fn tokens(&self) -> u64 {
        let is_layer_with_memory = self.part == Part::Model && self.nodes.iter().any(|node| is(node, &CROSS_ATTENTION));
        if self.part == Part::Decoder || is_layer_with_memory { self.lengths.target } else { self.lengths.source }
    }

    /// The weight behind a value, where nothing but its type or its axes' order was changed since.
    fn weight(&self, mut value: &'a str) -> Option<&'a TensorProto> {
        for _ in 0..LONGEST_CHAIN {
            if let Some(tensor) = self.file.initializer(value) {
                return Some(tensor);
            }
            let node = self.file.producer(value)?;
            let passes = matches!(node.op_type.as_str(), "Cast" | "DequantizeLinear" | "Identity" | "Transpose");
            value = node.input.first().filter(|_| passes && node.domain.is_empty())?;
        }
        None
    }

    fn component_of(&self, tensor: &str, is_looked_up: bool) -> Component {
        let has = |text: &str| tensor.contains(text);
        let side = |encoder, decoder, only| match (tensor.starts_with("decoder."), self.part == Part::Model) {
            (true, _) => decoder,
            (false, true) => only,
            (false, false) => encoder,
        };
        if is_looked_up || has("embed_positions") || has("layernorm_embedding") {
            Component::Embeddings
        } else if has("norm") || has(".ln_") {
            Component::Norms
        } else if has("encoder_attn") {
            Component::CrossAttention
        } else if has("lm_head") || has("embed_tokens") || has("output_projection") {
            Component::Output
        } else if has(".fc") || has(".ffd") || has(".mlp") {
            side(Component::EncoderFeedForward, Component::DecoderFeedForward, Component::FeedForward)
        } else if has("_proj") || has("attention") {
            side(Component::EncoderAttention, Component::DecoderAttention, Component::Attention)
        } else {
            Component::Other
        }
    }

    /// Adds the trained values that were not counted before, all of them as active.
    fn parameters(&self, ledger: &mut Ledger) {
        let (mut looked_up, mut scales) = (HashSet::new(), HashSet::new());
        for node in self.nodes.iter().filter(|node| node.domain.is_empty()) {
            match node.op_type.as_str() {
                "Gather" => {
                    let table = node.input.first().and_then(|table| self.weight(table));
                    looked_up.extend(table.map(|table| table.name.as_str()));
                }
                "DequantizeLinear" | "QuantizeLinear" => scales.extend(node.input.iter().skip(1).map(String::as_str)),
                "MatMulInteger" => scales.extend(node.input.iter().skip(2).map(String::as_str)),
                _ => {}
            }
        }
        let mut tensors: Vec<_> = self.file.graph().iter().flat_map(|graph| &graph.initializer).collect();
        tensors.sort_by_key(|tensor| (!looked_up.contains(tensor.name.as_str()), tensor.name.as_str()));
        for tensor in tensors {
            let (name, written) = (stored_name(&tensor.name), tensor.name.as_str());
            let is_scale = scales.contains(written)
                || scaled_weights(written).iter().any(|weight| self.file.initializer(weight).is_some());
            if is_parameter(tensor) && !is_scale && ledger.seen.insert(name.into()) {
                let component = self.component_of(name, looked_up.contains(written));
                ledger.add(component, Cost::parameters(values(tensor), 1, 1));
            }
        }
    }

    /// Adds products, and takes off what the experts that are not chosen hold.
    fn products(&self, ledger: &mut Ledger) {
        for node in self.nodes {
            match (node.domain.as_str(), node.op_type.as_str()) {
                ("", "Reshape") => self.standard_attention(node, ledger),
                ("", "Add") => self.bias(node, ledger),
                (DOMAIN, _) if is(node, &SELF_ATTENTION) => self.routed_attention(node, &SELF_ATTENTION, ledger),
                (DOMAIN, _) if is(node, &CROSS_ATTENTION) => self.routed_attention(node, &CROSS_ATTENTION, ledger),
                (DOMAIN, _) if is(node, &FEED_FORWARD) => self.routed_feed_forward(node, ledger),
                (RUNTIME_DOMAIN, "MultiHeadAttention") => self.runtime_attention(node, ledger),
                _ if operands(node).is_some() => self.product(node, ledger),
                _ => ledger.uncounted.note_unknown(node),
            }
        }
    }

    fn product(&self, node: &'a NodeProto, ledger: &mut Ledger) {
        let Some(tensor) = self.matrix(node).filter(|tensor| tensor.dims.len() == 2) else {
            let has_weight = node.input.iter().any(|input| self.weight(input).is_some());
            // Products of two activations are those of attention, which is counted where it ends.
            if node.op_type != "MatMul" || has_weight {
                ledger.uncounted.note(node);
            }
            return;
        };
        let rows = operands(node).and_then(|operands| node.input.get(operands.rows));
        let is_memory = rows.is_some_and(|rows| self.unrounded(rows) == MEMORY);
        let component = self.component_of(stored_name(&tensor.name), false);
        let all = if is_memory { self.lengths.source } else { self.tokens() };
        let tokens = if component == Component::Output && self.last_logits { 1 } else { all };
        ledger.add(component, Cost::product(values(tensor), tokens));
        let bias = operands(node).and_then(|operands| self.weight(node.input.get(operands.bias?)?));
        self.add_bias(bias, ledger);
    }

    /// A vector that is added to a product with a weight.
    fn bias(&self, node: &'a NodeProto, ledger: &mut Ledger) {
        let [product, vector] = node.input.as_slice() else { return };
        if self.factor(product).is_some() {
            self.add_bias(self.weight(vector), ledger);
        }
    }

    fn add_bias(&self, vector: Option<&TensorProto>, ledger: &mut Ledger) {
        if let Some(tensor) = vector.filter(|tensor| tensor.dims.len() == 1) {
            ledger.add(self.component_of(stored_name(&tensor.name), false), Cost::bias(values(tensor)));
        }
    }

    /// The weight that a product multiplies by.
    fn matrix(&self, node: &'a NodeProto) -> Option<&'a TensorProto> {
        self.weight(node.input.get(operands(node)?.matrix)?)
    }

    /// The weight of the product that `value` is, where nothing but scales came between.
    fn factor(&self, value: &str) -> Option<&'a TensorProto> {
        let mut node = self.file.producer(value)?;
        let is_scaled = is_rounding(node) || node.op_type == "Mul";
        for _ in 0..LONGEST_CHAIN {
            if !is_rounding(node) && node.op_type != "Mul" {
                break;
            }
            node = self.file.producer(node.input.first()?.as_str())?;
        }
        self.matrix(node).filter(|_| !is_scaled || node.op_type.contains("Integer") || node.op_type.starts_with('Q'))
    }

    /// The value that `value` was before it was rounded.
    fn unrounded(&self, mut value: &'a str) -> &'a str {
        for _ in 0..LONGEST_CHAIN {
            let node = self.file.producer(value).filter(|node| is_rounding(node));
            let Some(before) = node.and_then(|node| node.input.first()) else { break };
            value = before;
        }
        value
    }

    /// Dimensions of the weight that a node of ours reads as `name`.
    fn dims(&self, node: &'a NodeProto, name: &str) -> Option<(&'a TensorProto, Vec<u64>)> {
        let tensor = self.weight(operator_input(node, name)?)?;
        let size = |dim: &i64| u64::try_from(*dim).ok().filter(|size| *size > 0);
        Some((tensor, tensor.dims.iter().map(size).collect::<Option<_>>()?))
    }

    /// Width of what the router of a node reads.
    fn router_width(&self, node: &'a NodeProto) -> Option<u64> {
        let (_, dims) = self.dims(node, parameter::ROUTER_WEIGHT)?;
        dims.first().copied()
    }

    fn routed_attention(&self, node: &'a NodeProto, operator: &Operator, ledger: &mut Ledger) {
        if self.try_routed_attention(node, operator, ledger).is_none() {
            ledger.incomplete.push(format!("{} {:?}", node.op_type, node.name));
        }
    }

    fn try_routed_attention(&self, node: &'a NodeProto, operator: &Operator, ledger: &mut Ledger) -> Option<()> {
        let (query, query_dims) = self.dims(node, parameter::QUERY_WEIGHT)?;
        let (output, _) = self.dims(node, parameter::OUTPUT_WEIGHT)?;
        let [experts, width, columns] = query_dims[..] else { return None };
        let top_k = int(node, attribute::TOP_K).filter(|top_k| *top_k <= experts)?;
        let kv_heads = int(node, attribute::KV_NUM_HEADS)?;
        let head = columns.checked_div(kv_heads)?;
        let read = self.router_width(node)?;
        let sizes = RoutedAttention { width, read, top_k, experts, kv_heads, head };
        let is_cross = operator.name == CROSS_ATTENTION.name;
        let component = self.component_of(stored_name(&query.name), false);
        let queries = self.tokens();
        let keys = if is_cross { self.lengths.source } else { queries };
        ledger.add(component, sizes.macs(queries, keys));
        if !is_cross && operator_input(node, parameter::KV_WEIGHT).is_some() {
            let (keys_and_values, _) = self.dims(node, parameter::KV_WEIGHT)?;
            ledger.add(component, Cost::product(values(keys_and_values), keys));
        }
        Self::deactivate(ledger, component, [query, output], top_k, experts);
        self.attention_size(component, |name| AttentionSizes::routed(name, &sizes), ledger);
        Some(())
    }

    fn routed_feed_forward(&self, node: &'a NodeProto, ledger: &mut Ledger) {
        if self.try_routed_feed_forward(node, ledger).is_none() {
            ledger.incomplete.push(format!("{} {:?}", node.op_type, node.name));
        }
    }

    fn try_routed_feed_forward(&self, node: &'a NodeProto, ledger: &mut Ledger) -> Option<()> {
        let (input, dims) = self.dims(node, parameter::INPUT_WEIGHT)?;
        let (output, _) = self.dims(node, parameter::OUTPUT_WEIGHT)?;
        let experts = *dims.first()?;
        let top_k = int(node, attribute::TOP_K).filter(|top_k| *top_k <= experts)?;
        let (read, matrices) = (self.router_width(node)?, values(input).saturating_add(values(output)));
        let sizes = RoutedFeedForward { read, top_k, experts, matrices };
        let component = self.component_of(stored_name(&input.name), false);
        ledger.add(component, sizes.macs(self.tokens()));
        Self::deactivate(ledger, component, [input, output], top_k, experts);
        Some(())
    }

    /// Of the matrices of experts a token uses `top_k` shares.
    fn deactivate(ledger: &mut Ledger, component: Component, matrices: [&TensorProto; 2], top_k: u64, experts: u64) {
        let Some(cost) = ledger.costs.get_mut(&component) else { return };
        let all = matrices.into_iter().map(values).fold(0, u64::saturating_add);
        let idle = all - (all / experts).saturating_mul(top_k);
        cost.active_parameters = cost.active_parameters.saturating_sub(idle);
    }

    fn runtime_attention(&self, node: &'a NodeProto, ledger: &mut Ledger) {
        let projected = |value: &'a str| -> Option<&'a TensorProto> {
            let add = self.file.producer(value).filter(|node| node.op_type == "Add")?;
            self.factor(add.input.first()?)
        };
        let query = node.input.first().and_then(|query| projected(query));
        let columns = query.and_then(|query| u64::try_from(*query.dims.last()?).ok());
        let (Some(query), Some(columns), Some(heads)) =
            (query, columns, int(node, "num_heads").filter(|heads| *heads > 0))
        else {
            ledger.incomplete.push(format!("{} {:?}", node.op_type, node.name));
            return;
        };
        let component = self.component_of(stored_name(&query.name), false);
        self.dense_attention(component, node.input.get(1), columns, heads, ledger);
    }

    /// Standard operators around `Reshape(Transpose(MatMul(Softmax(…), values)), [0, 0, columns])`.
    fn standard_attention(&self, node: &'a NodeProto, ledger: &mut Ledger) {
        let computed = |value: Option<&'a String>, op_type: &str| -> Option<&'a NodeProto> {
            self.file.producer(value?.as_str()).filter(|node| node.op_type == op_type)
        };
        let attended = computed(node.input.first(), "Transpose")
            .and_then(|transpose| computed(transpose.input.first(), "MatMul"))
            .filter(|product| computed(product.input.first(), "Softmax").is_some());
        let columns = node.input.get(1).and_then(|shape| last_integer(self.file.initializer(shape.as_str())?));
        let heads = attended.and_then(|product| self.heads_of(product.input.get(1)?));
        let (Some(attended), Some(columns), Some(heads)) = (attended, columns, heads) else { return };
        let reads = |next: &&NodeProto| {
            let rows = next.input.first().filter(|_| operands(next).is_some());
            rows.map(|rows| self.unrounded(rows)) == node.output.first().map(String::as_str)
        };
        let weight = self.nodes.iter().find(reads).and_then(|next| self.matrix(next));
        let component = weight.map_or(Component::Other, |weight| self.component_of(stored_name(&weight.name), false));
        self.dense_attention(component, attended.input.get(1), columns, heads, ledger);
    }

    /// Heads of values `[batch, heads, length, size]`: of an input, or of what is transposed or appended to a past.
    fn heads_of(&self, mut values: &'a str) -> Option<u64> {
        for _ in 0..LONGEST_CHAIN {
            if let Some(dims) = self.input_dims.get(values) {
                return dims.get(1).copied().flatten();
            }
            let node = self.file.producer(values)?;
            match node.op_type.as_str() {
                "Concat" | "Transpose" => values = node.input.first()?,
                "Reshape" => {
                    let shape = integers(self.file.initializer(node.input.get(1)?.as_str())?);
                    return shape.get(2).and_then(|heads| u64::try_from(*heads).ok());
                }
                _ => return None,
            }
        }
        None
    }

    fn dense_attention(
        &self,
        component: Component,
        keys: Option<&String>,
        columns: u64,
        heads: u64,
        ledger: &mut Ledger,
    ) {
        let is_cross = keys.is_some_and(|key| self.input_dims.contains_key(key.as_str()));
        let queries = self.tokens();
        let keys = if is_cross { self.lengths.source } else { queries };
        ledger.add(component, Cost::attention(queries, keys, columns));
        self.attention_size(component, |name| AttentionSizes::dense(name, heads, columns / heads.max(1)), ledger);
    }

    /// Sizes under the name that a typed model gives them.
    fn attention_size(
        &self,
        component: Component,
        sizes: impl FnOnce(&'static str) -> AttentionSizes,
        ledger: &mut Ledger,
    ) {
        if component != Component::CrossAttention || self.part == Part::Model {
            let name = component.of_sizes();
            if ledger.attention.iter().all(|known| known.name != name) {
                ledger.attention.push(sizes(name));
            }
            *ledger.layers.entry(self.part).or_default() += 1;
        }
    }
}

fn is(node: &NodeProto, operator: &Operator) -> bool {
    node.domain == DOMAIN && node.op_type == operator.name
}

/// Name and known dimensions.
fn input_dims(input: &ValueInfoProto) -> (&str, Vec<Option<u64>>) {
    let size = |dim: &Dimension| match dim.value {
        Some(dimension::Value::DimValue(size)) => u64::try_from(size).ok(),
        _ => None,
    };
    let dims = match input.r#type.as_ref().and_then(|kind| kind.value.as_ref()) {
        Some(type_proto::Value::TensorType(tensor)) => {
            tensor.shape.iter().flat_map(|shape| &shape.dim).map(size).collect()
        }
        None => Vec::new(),
    };
    (&input.name, dims)
}

fn int(node: &NodeProto, name: &str) -> Option<u64> {
    node.int_attribute(name).and_then(|value| u64::try_from(value).ok())
}
