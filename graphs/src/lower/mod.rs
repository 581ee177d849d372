//! Lowering: from typed models to graphs.
//!
//! `operator` writes our operators in the form asked for, `attributes` what their nodes hold, `block` what all kinds of
//! models share; one file a kind does the rest and fixes the names of graph inputs and outputs.
//!
//! In every [`Precision`], routers, norms and rotary angles are computed in f32; a graph casts to f32 before them and
//! back after them where activations are f16. A trained matrix is cast where a standard node reads it, an embedding
//! after its rows are gathered; our operators take it as it is stored.

mod attributes;
mod block;
mod causal_lm;
mod dense;
mod encoder_decoder;
mod layer;
mod masked_lm;
mod operator;

use std::collections::BTreeMap;

use moa_schema::{
    AccuracyLevel, RoutingPart,
    interface::{
        LOGITS,
        axis::{BATCH, PAST, SEQUENCE, SOURCE},
    },
};

use crate::{
    graph::{Builder, DType, Dim, Graph, Value},
    model::{AttentionLayer, Model},
    part::Part,
    precision::Precision,
};
use operator::SelfAttentionOutput;

/// How the `ai.moa` operators are written.
///
/// The attention of the standard Transformer has the forms [`Self::Standard`] and [`Self::Fused`]: the second is one
/// node of ONNX Runtime's own `com.microsoft::MultiHeadAttention`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Form {
    /// A node of ours, and a model-local function with the same meaning in standard operators.
    #[default]
    Function,
    /// Nodes of ours only.
    Fused,
    /// Standard operators only.
    Standard,
}

impl Form {
    /// Every form, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Function, Self::Fused, Self::Standard];

    /// Name on the command line and in metadata.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Fused => "fused",
            Self::Standard => "standard",
        }
    }

    /// The form that `text` names, if any.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|form| form.as_str() == text)
    }
}

/// What the user may say about the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Options {
    /// How our operators are written.
    pub form: Form,
    /// In which floats weights are stored and activations computed.
    pub precision: Precision,
    /// Whether `router.{module}.indices` and `router.{module}.weights` are graph outputs.
    pub router_outputs: bool,
    /// Whether a causal language model computes `logits` of the last position only, `[B, 1, V]`.
    pub last_logits: bool,
}

/// A graph, and which one of its model it is.
#[derive(Debug, Clone)]
pub struct NamedGraph {
    /// Which one it is.
    pub part: Part,
    /// The graph.
    pub graph: Graph,
}

/// Why a model has no graph.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LowerError {
    /// One graph would need two bodies for one operator.
    #[error(
        "layer \"{module}\" uses {operator} with other settings than the layers before it, and one file holds one body per operator"
    )]
    SecondBody {
        /// Operator.
        operator: &'static str,
        /// Module that differs.
        module: String,
    },
    /// The standard Transformer has no operator of ours that a function could define.
    #[error("a standard Transformer has no form \"function\"")]
    NoFunction,
    /// The operators have no input for these.
    #[error("module \"{module}\" has expert biases, for which the operators have no input")]
    ExpertBias {
        /// The module.
        module: String,
    },
    /// Attention to a memory has no such input or mode.
    #[error("module \"{module}\" attends to a memory by a router with an input, or by other weights than a softmax's")]
    CrossAttention {
        /// The module.
        module: String,
    },
    /// Only the graphs of causal language models have an input of positions.
    #[error(
        "module \"{module}\" rotates queries and keys by position, and this model is no causal language model, whose positions are an input"
    )]
    NoPositions {
        /// The module.
        module: String,
    },
    /// Only causal language models predict the next token.
    #[error("logits of the last position alone are for causal language models, and this is none")]
    LastLogits,
    /// No node says how accurate its products must be where none is ours.
    #[error("dtype \"{}\" is for products of our operators, and {place} has none", .precision.as_str())]
    NoProducts {
        /// The precision.
        precision: Precision,
        /// What has no operators of ours.
        place: &'static str,
    },
}

/// Writes a model as one graph, or as one per file where the family has several.
///
/// # Errors
///
/// [`LowerError::SecondBody`] and [`LowerError::NoFunction`] in the form [`Form::Function`], [`LowerError::ExpertBias`]
/// and [`LowerError::CrossAttention`]; for another model than a causal language model [`LowerError::NoPositions`]
/// where a layer has rotary positions, and [`LowerError::LastLogits`] where the option is set;
/// [`LowerError::NoProducts`] where a precision with an accuracy level meets a graph without operators of ours.
pub fn lower(model: &Model, options: Options) -> Result<Vec<NamedGraph>, LowerError> {
    if options.last_logits && !matches!(model, Model::CausalLm(_)) {
        return Err(LowerError::LastLogits);
    }
    check_products(model, options)?;
    match model {
        Model::EncoderDecoder(model) => encoder_decoder::lower(model, options),
        Model::MaskedLm(model) => masked_lm::lower(model, options),
        Model::CausalLm(model) => causal_lm::lower(model, options),
        Model::Layer(layer) => layer::lower(layer, options),
        Model::Transformer(model) => encoder_decoder::lower(model, options),
        Model::TransformerMaskedLm(model) => masked_lm::lower(model, options),
    }
}

fn check_products(model: &Model, Options { form, precision, .. }: Options) -> Result<(), LowerError> {
    let place = match model {
        Model::Transformer(_) | Model::TransformerMaskedLm(_) => "a standard Transformer",
        _ if form == Form::Standard => "the form \"standard\"",
        _ => return Ok(()),
    };
    match precision.accuracy_level() {
        AccuracyLevel::Activations => Ok(()),
        AccuracyLevel::Bf16 | AccuracyLevel::Int8 => Err(LowerError::NoProducts { precision, place }),
    }
}

/// A graph under construction.
struct Lowering {
    b: Builder,
    options: Options,
    /// Name of the sequence axis of the tokens that are routed.
    tokens: &'static str,
    /// Modules whose routing is declared when the graph is complete, with their top-k.
    routers: Vec<(String, usize)>,
    /// What is added to the scores of standard attention, by mask and whether it is causal.
    biases: BTreeMap<(String, bool), Value>,
}

/// How one kind of attention is written.
trait LowerAttention: AttentionLayer {
    /// Whether operators of ours stand for it, so that a graph with it may have others of ours too.
    const HAS_OPERATORS: bool;

    /// Prefix of the layer's tensors.
    fn prefix(&self) -> &str;

    /// Over `hidden` `[B, T, C]` with `mask` int32 `[B, P + T]`.
    fn self_attention(
        &self,
        l: &mut Lowering,
        hidden: &Value,
        mask: &Value,
        past: Option<[Value; 2]>,
    ) -> Result<SelfAttentionOutput, LowerError>;

    /// Over `hidden` `[B, T, C]`, keys and values, and int32 masks of keys and queries.
    fn cross_attention(
        &self,
        l: &mut Lowering,
        hidden: &Value,
        keys_and_values: [&Value; 2],
        masks: [&Value; 2],
    ) -> Result<Value, LowerError>;

    /// Keys and values of `memory` `[B, S, source width]`, `[B, heads, S, head size]` each.
    fn keys_and_values(&self, l: &mut Lowering, memory: &Value) -> [Value; 2];
}

/// Keys or values of `length` tokens, as they are kept.
fn cache_shape(attention: &impl AttentionLayer, length: Dim) -> [Dim; 4] {
    let [heads, size] = attention.cache_heads();
    [BATCH.into(), heads.into(), length, size.into()]
}

impl Lowering {
    fn new(options: Options, tokens: &'static str) -> Self {
        Self { b: Builder::graph(options.precision), options, tokens, routers: Vec::new(), biases: BTreeMap::new() }
    }

    /// A mask, 1 for a real token and 0 for padding, as int64 and as the operators take it.
    fn mask_input(&mut self, name: &str, shape: &[Dim]) -> [Value; 2] {
        let mask = self.b.input(name, DType::Int64, shape);
        let narrow = self.b.cast(&mask, DType::Int32);
        [mask, narrow]
    }

    /// Logits as the output `logits [.., V]`, f32 in every precision, as samplers take them.
    fn logits(&mut self, logits: &Value, shape: &[Dim]) {
        let logits = self.b.to_float32(logits);
        self.b.output(&logits, LOGITS, DType::Float32, shape);
    }

    fn finish(mut self, part: Part) -> NamedGraph {
        for (module, top_k) in std::mem::take(&mut self.routers) {
            let shape = [Dim::from(BATCH), Dim::from(self.tokens), Dim::from(top_k)];
            for (routing, dtype) in RoutingPart::ALL.into_iter().zip([DType::Int64, DType::Float32]) {
                let name = routing.name(&module);
                let value = self.b.named(&name);
                self.b.output(&value, &name, dtype, &shape);
            }
        }
        NamedGraph { part, graph: self.b.into_graph(part.as_str()) }
    }
}

#[cfg(test)]
mod test_models;

#[cfg(test)]
#[path = "quantized_tests.rs"]
mod quantized_tests;

#[cfg(test)]
#[path = "accuracy_tests.rs"]
mod accuracy_tests;
