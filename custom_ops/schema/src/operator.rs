//! Parameter and attribute tables of the operators.

use std::fmt;

use crate::{DOMAIN, NodeTypes, RoutingPart, attribute, parameter};

/// One operator of the domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operator {
    /// ONNX `op_type`; unique even without its domain.
    pub name: &'static str,
    /// Inputs in order.
    pub inputs: &'static [Parameter],
    /// Outputs in order.
    pub outputs: &'static [Parameter],
    /// Attributes, in the order in which they are written.
    pub attributes: &'static [Attribute],
    /// Whether it stands for `MatMul` where ONNX Runtime has none on processors: its matrices are of integers or bf16,
    /// its activations f32, and no GPU has it.
    pub is_for_processors: bool,
}

impl Operator {
    /// The operator that nodes of this domain and `op_type` call, where it is one of ours.
    pub fn called(domain: &str, op_type: &str) -> Option<&'static Self> {
        OPERATORS.iter().find(|operator| domain == DOMAIN && op_type == operator.name)
    }

    /// The operator as it is where matrices are floats: its inputs end before the scales.
    #[must_use]
    pub fn of_floats(&self) -> Self {
        let scales = self.inputs.iter().position(|input| input.element == ElementType::Scale);
        Self { inputs: &self.inputs[..scales.unwrap_or(self.inputs.len())], ..*self }
    }

    /// Position of the input `name`, which there is.
    const fn input(&self, name: &str) -> usize {
        position(self.inputs, name)
    }

    /// Position of the output `name`, which there is.
    const fn output(&self, name: &str) -> usize {
        position(self.outputs, name)
    }

    /// What its nodes may hold.
    pub fn types(&self) -> impl Iterator<Item = NodeTypes> + use<> {
        let all = !self.is_for_processors;
        NodeTypes::ALL.into_iter().filter(move |types| all || types.have_no_matmul())
    }

    /// Whether its tokens are routed; the routing of each is then what it returns last.
    pub fn is_routed(&self) -> bool {
        self.outputs.iter().any(|output| RoutingPart::of_output(output.name).is_some())
    }

    /// Its matrices: positions of the inputs that hold a matrix, and its scales where that is of integers.
    pub fn matrices(&self) -> impl Iterator<Item = [usize; 2]> {
        self.inputs_of(ElementType::Weight).zip(self.inputs_of(ElementType::Scale)).map(<[usize; 2]>::from)
    }

    fn inputs_of(&self, element: ElementType) -> impl Iterator<Item = usize> {
        self.inputs.iter().enumerate().filter(move |(_, input)| input.element == element).map(|(index, _)| index)
    }
}

/// One input or output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Formal name.
    pub name: &'static str,
    /// Element type.
    pub element: ElementType,
    /// Dimensions, outermost first, in the symbols of the crate documentation.
    pub dims: &'static [&'static str],
    /// What else there is to say of the shape or the values; empty where there is nothing.
    pub note: &'static str,
    /// Whether the parameter may be absent.
    pub optional: bool,
}

/// Element type of a parameter; those of one node are a [`NodeTypes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ElementType {
    /// The type of activations: one for all such parameters of a node.
    Activation,
    /// The type of trained matrices: one for all such parameters of a node.
    Weight,
    /// f32 whatever the activation type is.
    Float32,
    /// Factors of a matrix of integers, in the type [`IntegerType::scales`](crate::IntegerType::scales); absent beside
    /// matrices of floats.
    Scale,
    /// 32-bit integer.
    Int32,
    /// 64-bit integer.
    Int64,
}

/// One attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attribute {
    /// Name in the node.
    pub name: &'static str,
    /// ONNX attribute type.
    pub kind: AttributeKind,
}

/// ONNX attribute type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttributeKind {
    /// `INT`.
    Int,
    /// `FLOAT`.
    Float,
    /// `STRING`.
    String,
}

impl fmt::Display for AttributeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int => "INT",
            Self::Float => "FLOAT",
            Self::String => "STRING",
        })
    }
}

impl Parameter {
    const fn noted(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    /// The shape, and what there is to say of it: `[B, S], 1 for a real token, 0 for padding`.
    pub fn shape(&self) -> String {
        let separator = if self.note.is_empty() { "" } else { ", " };
        format!("[{}]{separator}{}", self.dims.join(", "), self.note)
    }
}

const fn required(name: &'static str, element: ElementType, dims: &'static [&'static str]) -> Parameter {
    Parameter { name, element, dims, note: "", optional: false }
}

const fn optional(name: &'static str, element: ElementType, dims: &'static [&'static str]) -> Parameter {
    Parameter { optional: true, ..required(name, element, dims) }
}

/// Scales of int8, and what there is to say of those of int4.
const fn scale(name: &'static str, dims: &'static [&'static str], note: &'static str) -> Parameter {
    optional(name, ElementType::Scale, dims).noted(note)
}

const fn attribute(name: &'static str, kind: AttributeKind) -> Attribute {
    Attribute { name, kind }
}

const TOP_K: Attribute = attribute(attribute::TOP_K, AttributeKind::Int);
const KV_NUM_HEADS: Attribute = attribute(attribute::KV_NUM_HEADS, AttributeKind::Int);
const SCALE: Attribute = attribute(attribute::SCALE, AttributeKind::Float);
const GATE_MODE: Attribute = attribute(attribute::GATE_MODE, AttributeKind::String);
const SKIP_PADDED_QUERIES: Attribute = attribute(attribute::SKIP_PADDED_QUERIES, AttributeKind::Int);

const TOPK_INDICES: Parameter = optional(RoutingPart::Indices.output(), ElementType::Int64, &["B", "T", "k"]);
const TOPK_WEIGHTS: Parameter = optional(RoutingPart::Weights.output(), ElementType::Float32, &["B", "T", "k"]);
/// The router of an operator that takes a [`ROUTER_INPUT`].
const ROUTER_WEIGHT: Parameter = required(parameter::ROUTER_WEIGHT, ElementType::Float32, &["C", "E"])
    .noted("or [R, E] where router_input is given");
const ROUTER_INPUT: Parameter = optional(parameter::ROUTER_INPUT, ElementType::Float32, &["B", "T", "R"]);
const OUTPUT_BIAS: Parameter = optional(parameter::OUTPUT_BIAS, ElementType::Activation, &["C"]);
const QUERY_SCALE: Parameter =
    scale(parameter::QUERY_SCALE, &["E", "G * D"], "of int8; [E, ceil(C / 32), G * D] of int4");
const OUTPUT_SCALE: Parameter =
    scale(parameter::OUTPUT_SCALE, &["E", "C"], "of int8; [E, ceil(G * D / 32), C] of int4");

/// Self-attention layer: route, project queries, keys and values, attend, project back, weight and sum.
pub const SELF_ATTENTION: Operator = Operator {
    name: "MoASelfAttention",
    inputs: &[
        required(parameter::HIDDEN_STATES, ElementType::Activation, &["B", "T", "C"]),
        required(parameter::ATTENTION_MASK, ElementType::Int32, &["B", "P + T"])
            .noted("1 for a real token, 0 for padding"),
        ROUTER_WEIGHT,
        required(parameter::QUERY_WEIGHT, ElementType::Weight, &["E", "C", "G * D"]),
        optional(parameter::KV_WEIGHT, ElementType::Weight, &["C", "2 * G * D"]).noted("keys first"),
        required(parameter::OUTPUT_WEIGHT, ElementType::Weight, &["E", "G * D", "C"]),
        OUTPUT_BIAS,
        optional(parameter::PAST_KEY, ElementType::Activation, &["B", "G", "P", "D"]),
        optional(parameter::PAST_VALUE, ElementType::Activation, &["B", "G", "P", "D"]),
        optional(parameter::COS_CACHE, ElementType::Float32, &["positions", "D / 2"]),
        optional(parameter::SIN_CACHE, ElementType::Float32, &["positions", "D / 2"]),
        optional(parameter::POSITION_IDS, ElementType::Int64, &["B", "T"]),
        ROUTER_INPUT,
        QUERY_SCALE,
        scale(parameter::KV_SCALE, &["2 * G * D"], "of int8; [ceil(C / 32), 2 * G * D] of int4"),
        OUTPUT_SCALE,
    ],
    outputs: &[
        required(parameter::OUTPUT, ElementType::Activation, &["B", "T", "C"]),
        optional(parameter::PRESENT_KEY, ElementType::Activation, &["B", "G", "P + T", "D"]),
        optional(parameter::PRESENT_VALUE, ElementType::Activation, &["B", "G", "P + T", "D"]),
        TOPK_INDICES,
        TOPK_WEIGHTS,
    ],
    attributes: &[
        TOP_K,
        KV_NUM_HEADS,
        attribute(attribute::CAUSAL, AttributeKind::Int),
        SCALE,
        GATE_MODE,
        SKIP_PADDED_QUERIES,
        attribute(attribute::ATTENTION_MODE, AttributeKind::String),
    ],
    is_for_processors: false,
};

/// Cross-attention layer over keys and values that were projected once per source.
pub const CROSS_ATTENTION: Operator = Operator {
    name: "MoACrossAttention",
    inputs: &[
        required(parameter::HIDDEN_STATES, ElementType::Activation, &["B", "T", "C"]),
        required(parameter::KEY, ElementType::Activation, &["B", "G", "S", "D"]),
        required(parameter::VALUE, ElementType::Activation, &["B", "G", "S", "D"]),
        required(parameter::KEY_MASK, ElementType::Int32, &["B", "S"]).noted("1 for a real token, 0 for padding"),
        required(parameter::QUERY_MASK, ElementType::Int32, &["B", "T"]).noted("1 for a real token, 0 for padding"),
        required(parameter::ROUTER_WEIGHT, ElementType::Float32, &["C", "E"]),
        required(parameter::QUERY_WEIGHT, ElementType::Weight, &["E", "C", "G * D"]),
        required(parameter::OUTPUT_WEIGHT, ElementType::Weight, &["E", "G * D", "C"]),
        OUTPUT_BIAS,
        QUERY_SCALE,
        OUTPUT_SCALE,
    ],
    outputs: &[required(parameter::OUTPUT, ElementType::Activation, &["B", "T", "C"]), TOPK_INDICES, TOPK_WEIGHTS],
    attributes: &[TOP_K, KV_NUM_HEADS, SCALE, GATE_MODE, SKIP_PADDED_QUERIES],
    is_for_processors: false,
};

/// Routed feed-forward layer; every token is routed, padding too.
pub const FEED_FORWARD: Operator = Operator {
    name: "MoEFeedForward",
    inputs: &[
        required(parameter::HIDDEN_STATES, ElementType::Activation, &["B", "T", "C"]),
        ROUTER_WEIGHT,
        required(parameter::INPUT_WEIGHT, ElementType::Weight, &["E", "C", "F"]).noted("or [E, C, 2 * F] where gated"),
        required(parameter::OUTPUT_WEIGHT, ElementType::Weight, &["E", "F", "C"]),
        OUTPUT_BIAS,
        ROUTER_INPUT,
        scale(parameter::INPUT_SCALE, &["E", "F"], "of int8; [E, ceil(C / 32), F] of int4; 2 * F where gated"),
        scale(parameter::OUTPUT_SCALE, &["E", "C"], "of int8; [E, ceil(F / 32), C] of int4"),
    ],
    outputs: &[required(parameter::OUTPUT, ElementType::Activation, &["B", "T", "C"]), TOPK_INDICES, TOPK_WEIGHTS],
    attributes: &[
        TOP_K,
        GATE_MODE,
        attribute(attribute::ACTIVATION, AttributeKind::String),
        attribute(attribute::GATED, AttributeKind::Int),
    ],
    is_for_processors: false,
};

/// The last product of a language model, with a matrix of integers or bf16.
pub const LM_HEAD: Operator = Operator {
    name: "LMHead",
    inputs: &[
        required(parameter::HIDDEN_STATES, ElementType::Activation, &["B", "T", "C"]),
        required(parameter::OUTPUT_WEIGHT, ElementType::Weight, &["C", "V"]),
        scale(parameter::OUTPUT_SCALE, &["V"], "of int8; [ceil(C / 32), V] of int4"),
    ],
    outputs: &[required(parameter::LOGITS, ElementType::Activation, &["B", "T", "V"])],
    attributes: &[],
    is_for_processors: true,
};

/// Position of the parameter `name`. A constant of a name that there is not does not compile.
const fn position(parameters: &[Parameter], name: &str) -> usize {
    let mut at = 0;
    while !is_same(parameters[at].name.as_bytes(), name.as_bytes()) {
        at += 1;
    }
    at
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

/// Every operator of the domain.
pub const OPERATORS: [Operator; 4] = [SELF_ATTENTION, CROSS_ATTENTION, FEED_FORWARD, LM_HEAD];

/// Positions of the parameters of [`SELF_ATTENTION`].
#[allow(missing_docs)]
pub mod self_attention {
    use super::{SELF_ATTENTION, parameter};

    pub const HIDDEN_STATES: usize = SELF_ATTENTION.input(parameter::HIDDEN_STATES);
    pub const ATTENTION_MASK: usize = SELF_ATTENTION.input(parameter::ATTENTION_MASK);
    pub const ROUTER_WEIGHT: usize = SELF_ATTENTION.input(parameter::ROUTER_WEIGHT);
    pub const QUERY_WEIGHT: usize = SELF_ATTENTION.input(parameter::QUERY_WEIGHT);
    pub const KV_WEIGHT: usize = SELF_ATTENTION.input(parameter::KV_WEIGHT);
    pub const OUTPUT_WEIGHT: usize = SELF_ATTENTION.input(parameter::OUTPUT_WEIGHT);
    pub const OUTPUT_BIAS: usize = SELF_ATTENTION.input(parameter::OUTPUT_BIAS);
    pub const PAST_KEY: usize = SELF_ATTENTION.input(parameter::PAST_KEY);
    pub const PAST_VALUE: usize = SELF_ATTENTION.input(parameter::PAST_VALUE);
    pub const COS_CACHE: usize = SELF_ATTENTION.input(parameter::COS_CACHE);
    pub const SIN_CACHE: usize = SELF_ATTENTION.input(parameter::SIN_CACHE);
    pub const POSITION_IDS: usize = SELF_ATTENTION.input(parameter::POSITION_IDS);
    pub const ROUTER_INPUT: usize = SELF_ATTENTION.input(parameter::ROUTER_INPUT);
    pub const QUERY_SCALE: usize = SELF_ATTENTION.input(parameter::QUERY_SCALE);
    pub const KV_SCALE: usize = SELF_ATTENTION.input(parameter::KV_SCALE);
    pub const OUTPUT_SCALE: usize = SELF_ATTENTION.input(parameter::OUTPUT_SCALE);

    pub const OUTPUT: usize = SELF_ATTENTION.output(parameter::OUTPUT);
    pub const PRESENT_KEY: usize = SELF_ATTENTION.output(parameter::PRESENT_KEY);
    pub const PRESENT_VALUE: usize = SELF_ATTENTION.output(parameter::PRESENT_VALUE);
    pub const TOPK_INDICES: usize = SELF_ATTENTION.output(parameter::TOPK_INDICES);
    pub const TOPK_WEIGHTS: usize = SELF_ATTENTION.output(parameter::TOPK_WEIGHTS);

    /// The pasts, and the outputs that are the same memory where caches are shared.
    pub const SHARED_CACHES: [(usize, usize); 2] = [(PAST_KEY, PRESENT_KEY), (PAST_VALUE, PRESENT_VALUE)];
}

/// Positions of the parameters of [`CROSS_ATTENTION`].
#[allow(missing_docs)]
pub mod cross_attention {
    use super::{CROSS_ATTENTION, parameter};

    pub const HIDDEN_STATES: usize = CROSS_ATTENTION.input(parameter::HIDDEN_STATES);
    pub const KEY: usize = CROSS_ATTENTION.input(parameter::KEY);
    pub const VALUE: usize = CROSS_ATTENTION.input(parameter::VALUE);
    pub const KEY_MASK: usize = CROSS_ATTENTION.input(parameter::KEY_MASK);
    pub const QUERY_MASK: usize = CROSS_ATTENTION.input(parameter::QUERY_MASK);
    pub const ROUTER_WEIGHT: usize = CROSS_ATTENTION.input(parameter::ROUTER_WEIGHT);
    pub const QUERY_WEIGHT: usize = CROSS_ATTENTION.input(parameter::QUERY_WEIGHT);
    pub const OUTPUT_WEIGHT: usize = CROSS_ATTENTION.input(parameter::OUTPUT_WEIGHT);
    pub const OUTPUT_BIAS: usize = CROSS_ATTENTION.input(parameter::OUTPUT_BIAS);
    pub const QUERY_SCALE: usize = CROSS_ATTENTION.input(parameter::QUERY_SCALE);
    pub const OUTPUT_SCALE: usize = CROSS_ATTENTION.input(parameter::OUTPUT_SCALE);

    pub const OUTPUT: usize = CROSS_ATTENTION.output(parameter::OUTPUT);
    pub const TOPK_INDICES: usize = CROSS_ATTENTION.output(parameter::TOPK_INDICES);
    pub const TOPK_WEIGHTS: usize = CROSS_ATTENTION.output(parameter::TOPK_WEIGHTS);
}

/// Positions of the parameters of [`FEED_FORWARD`].
#[allow(missing_docs)]
pub mod feed_forward {
    use super::{FEED_FORWARD, parameter};

    pub const HIDDEN_STATES: usize = FEED_FORWARD.input(parameter::HIDDEN_STATES);
    pub const ROUTER_WEIGHT: usize = FEED_FORWARD.input(parameter::ROUTER_WEIGHT);
    pub const INPUT_WEIGHT: usize = FEED_FORWARD.input(parameter::INPUT_WEIGHT);
    pub const OUTPUT_WEIGHT: usize = FEED_FORWARD.input(parameter::OUTPUT_WEIGHT);
    pub const OUTPUT_BIAS: usize = FEED_FORWARD.input(parameter::OUTPUT_BIAS);
    pub const ROUTER_INPUT: usize = FEED_FORWARD.input(parameter::ROUTER_INPUT);
    pub const INPUT_SCALE: usize = FEED_FORWARD.input(parameter::INPUT_SCALE);
    pub const OUTPUT_SCALE: usize = FEED_FORWARD.input(parameter::OUTPUT_SCALE);

    pub const OUTPUT: usize = FEED_FORWARD.output(parameter::OUTPUT);
    pub const TOPK_INDICES: usize = FEED_FORWARD.output(parameter::TOPK_INDICES);
    pub const TOPK_WEIGHTS: usize = FEED_FORWARD.output(parameter::TOPK_WEIGHTS);
}

/// Positions of the parameters of [`LM_HEAD`].
#[allow(missing_docs)]
pub mod lm_head {
    use super::{LM_HEAD, parameter};

    pub const HIDDEN_STATES: usize = LM_HEAD.input(parameter::HIDDEN_STATES);
    pub const OUTPUT_WEIGHT: usize = LM_HEAD.input(parameter::OUTPUT_WEIGHT);
    pub const OUTPUT_SCALE: usize = LM_HEAD.input(parameter::OUTPUT_SCALE);

    pub const LOGITS: usize = LM_HEAD.output(parameter::LOGITS);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, IntegerType};

    const FLOATS: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

    #[test]
    fn scales_are_the_last_inputs() {
        for operator in OPERATORS {
            let (rest, scales) = operator.inputs.split_at(operator.of_floats().inputs.len());
            assert!(scales.iter().all(|scale| scale.element == ElementType::Scale), "{}", operator.name);
            let matrices = rest.iter().filter(|input| input.element == ElementType::Weight);
            assert_eq!(operator.matrices().count(), matrices.count());
            for [matrix, scale] in operator.matrices().map(|pair| pair.map(|index| operator.inputs[index])) {
                assert_eq!(matrix.name.replace("_weight", "_scale"), scale.name);
                let mut dims = matrix.dims.to_vec();
                dims.remove(dims.len() - 2);
                assert_eq!(dims, scale.dims, "{}", scale.name);
            }
        }
    }

    #[test]
    fn operators_for_processors_take_what_has_no_matmul_there() {
        for operator in OPERATORS {
            let all_floats = FLOATS.into_iter().flat_map(|a| FLOATS.map(|w| NodeTypes::floats(a, w)));
            let taken: Vec<_> = all_floats.filter(|types| operator.types().any(|known| known == *types)).collect();
            match operator.is_for_processors {
                true => assert_eq!(taken, [NodeTypes::floats(FloatType::F32, FloatType::Bf16)], "{}", operator.name),
                false => assert_eq!(taken.len(), 6, "{}", operator.name),
            }
            let integers = IntegerType::ALL.map(NodeTypes::integers);
            assert!(integers.into_iter().all(|types| operator.types().any(|known| known == types)));
        }
    }

    #[test]
    fn optional_inputs_follow_required_ones_but_for_kv_weight() {
        for operator in OPERATORS {
            let kv_weight = |input: &&Parameter| input.name == "kv_weight";
            let inputs: Vec<_> = operator.inputs.iter().filter(|input| !kv_weight(input)).copied().collect();
            for parameters in [&*inputs, operator.outputs] {
                let first_optional = parameters.iter().position(|p| p.optional).unwrap_or(parameters.len());
                assert!(parameters[first_optional..].iter().all(|p| p.optional), "{}", operator.name);
            }
        }
    }
}
