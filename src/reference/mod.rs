//! The project's truth: a typed model evaluated in f64 with plain loops.
//!
//! Nothing here knows graphs, ONNX or kernels; the equations are those of the released MoA code in evaluation
//! mode. Inputs and outputs have the names and shapes of the exported graphs:
//!
//! * masked language model: `input_ids [B, T]`, `attention_mask [B, T]` → `logits [B, T, V]`
//! * encoder: `input_ids [B, S]`, `attention_mask [B, S]` → `last_hidden_state [B, S, C]` and, for every decoder
//!   layer `i`, `present.{i}.encoder.key` and `.value [B, G, S, D]`
//! * decoder: `input_ids [B, T]`, `attention_mask [B, P + T]`, `encoder_attention_mask [B, S]` and, for every
//!   layer `i`, `past_key_values.{i}.decoder.key` and `.value [B, G, P, D]`, `past_key_values.{i}.encoder.key` and
//!   `.value [B, G, S, D]` → `logits [B, T, V]`, `present.{i}.decoder.key` and `.value [B, G, P + T, D]`
//! * causal language model: `input_ids [B, T]`, `attention_mask [B, P + T]`, `position_ids [B, T]` and, for every
//!   layer `i`, `past_key_values.{i}.key` and `.value [B, G, P, D]` → `logits [B, T, V]`, `present.{i}.key` and
//!   `.value [B, G, P + T, D]`
//! * layer, self-attention: `query [B, T, C]`, `attention_mask [B, T]` → `output [B, T, C]`
//! * layer, cross-attention: `query [B, T, C]`, `memory [B, S, source width]`, `attention_mask [B, S]`,
//!   `query_attention_mask [B, T]` → `output [B, T, C]`
//!
//! Ids and masks are int64, masks 1 at real tokens and 0 at padding; other inputs are float16, float32 or float64.

mod attention;
mod blocks;
mod causal_lm;
mod columns;
mod encoder_decoder;
mod error;
mod inputs;
mod kept;
mod layer;
mod masked_lm;
mod math;
mod matrix;
mod router;
mod scaled;
mod sequence;
mod stored;

use std::{collections::BTreeMap, fmt, ops::Range, sync::Arc};

use moa_graphs::{FloatType, Part, Precision as Floats, WeightError, model::Model};
use moa_schema::{AccuracyLevel, IntegerType};

pub use error::ReferenceError;

use self::{
    causal_lm::CausalLm,
    encoder_decoder::EncoderDecoder,
    inputs::Inputs,
    layer::MoaLayer,
    masked_lm::MaskedLm,
    router::Tape,
    sequence::{Draw, Precision, Rounding, TOGETHER},
    stored::Stored,
};
use crate::tensor::NamedTensors;

/// The routing of an evaluation, by name of the module; a layer by itself may have an empty name.
pub type Routing = BTreeMap<String, ModuleRouting>;

/// The chosen experts of every module, by name as in [`Routing`].
pub type Choices = BTreeMap<String, ModuleChoices>;

/// The experts that one module's tokens go to: all that a runtime tells, and all that is replayed.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleChoices {
    /// `B`.
    pub batch: usize,
    /// `T`.
    pub tokens: usize,
    /// `k`.
    pub top_k: usize,
    /// The chosen experts, `[B, T, k]`, by falling weight; in the given order where they were replayed.
    pub indices: Vec<i64>,
    /// Their weights, `[B, T, k]`; 0 at tokens that are not routed.
    pub weights: Vec<f64>,
}

impl ModuleChoices {
    /// The experts of one token, counted over all rows, by rising number.
    pub fn experts(&self, token: usize) -> Vec<i64> {
        let mut experts = self.indices.chunks(self.top_k.max(1)).nth(token).unwrap_or_default().to_vec();
        experts.sort_unstable();
        experts
    }
}

/// Where one routed module sent its tokens, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleRouting {
    /// Where.
    pub choices: ModuleChoices,
    /// `E`.
    pub num_experts: usize,
    /// What ranks the experts, `[B, T, E]`, also at tokens that are not routed: probabilities of a softmax over all
    /// experts, or logits where the module's gate takes the top-k before the softmax.
    pub scores: Vec<f64>,
    /// Whether the token is routed, `[B, T]`; false at padded queries that the module skips.
    pub routed: Vec<bool>,
}

impl ModuleRouting {
    /// The slots of all tokens, [`TOGETHER`] tokens at a time.
    fn slots(&self) -> impl Iterator<Item = Slots> + '_ {
        let tokens = self.routed.len();
        (0..tokens).step_by(TOGETHER).map(move |first| self.slots_of(first..tokens.min(first + TOGETHER)))
    }

    fn slots_of(&self, range: Range<usize>) -> Slots {
        let ModuleChoices { top_k, indices, weights, .. } = &self.choices;
        let mut slots = Slots { range: range.clone(), tokens: Vec::new(), experts: Vec::new(), weights: Vec::new() };
        for token in range.filter(|token| self.routed[*token]) {
            for slot in token * top_k..(token + 1) * top_k {
                if let Ok(expert) = usize::try_from(indices[slot]) {
                    slots.tokens.push(token);
                    slots.experts.push(expert);
                    slots.weights.push(weights[slot]);
                }
            }
        }
        slots
    }
}

/// Tokens, counted over all rows, each as often as it is routed.
struct Slots {
    /// All tokens, routed or not.
    range: Range<usize>,
    /// The token of each slot, rising.
    tokens: Vec<usize>,
    experts: Vec<usize>,
    weights: Vec<f64>,
}

impl Slots {
    /// `Σ weight · outputs` over the slots of every token of the range, `[width]` each.
    fn sums(&self, sums: math::Sums, width: usize, outputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let mut all = vec![vec![0.0; width]; self.range.len()];
        for ((token, weight), output) in self.tokens.iter().zip(&self.weights).zip(outputs) {
            math::add_scaled(sums, &mut all[token - self.range.start], *weight, output);
        }
        all
    }
}

/// What an evaluation yields.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The outputs, all float64.
    pub outputs: NamedTensors,
    /// Where every routed module sent its tokens.
    pub routing: Routing,
}

impl Evaluation {
    /// The experts alone, as [`Reference::run`] replays them.
    pub fn choices(&self) -> Choices {
        self.routing.iter().map(|(module, routing)| (module.clone(), routing.choices.clone())).collect()
    }
}

/// What a runtime may round factors of products of our operators to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Factors {
    /// bf16: both of every product but those of the router.
    Bf16,
    /// int8: those of matrices of integers, with a scale for each [`moa_schema::BLOCK`] values; bf16: those of
    /// attention.
    Int8,
}

impl fmt::Display for Factors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => FloatType::Bf16.fmt(f),
            Self::Int8 => IntegerType::Int8.fmt(f),
        }
    }
}

/// A model with all weights as f64, rounded before where an export stores less.
#[derive(Debug, Clone)]
pub struct Reference {
    network: Arc<Network>,
    /// What a runtime rounds activations to.
    activations: FloatType,
    /// What a runtime may do to products of our operators, where activations are f32.
    products: AccuracyLevel,
}

#[derive(Debug)]
enum Network {
    EncoderDecoder(EncoderDecoder),
    MaskedLm(MaskedLm),
    CausalLm(CausalLm),
    Layer(MoaLayer),
    /// A standard Transformer, of which no checkpoint is read.
    Baseline,
}

impl Reference {
    /// Reads every weight of `model`.
    ///
    /// # Errors
    ///
    /// Where a weight cannot be read or is not finite.
    pub fn new(model: &Model) -> Result<Self, WeightError> {
        Self::stored_as(model, Floats::Fp32)
    }

    /// Reads every weight of `model`, rounded to the type in which an export of these floats stores it.
    ///
    /// # Errors
    ///
    /// As [`Self::new`].
    pub fn stored_as(model: &Model, floats: Floats) -> Result<Self, WeightError> {
        let stored = Stored::new(floats);
        let network = match model {
            Model::EncoderDecoder(model) => Network::EncoderDecoder(EncoderDecoder::new(model, stored)?),
            Model::MaskedLm(model) => Network::MaskedLm(MaskedLm::new(model, stored)?),
            Model::CausalLm(model) => Network::CausalLm(CausalLm::new(model, stored)?),
            Model::Layer(model) => Network::Layer(MoaLayer::new(model, stored)?),
            Model::Transformer(_) | Model::TransformerMaskedLm(_) => Network::Baseline,
        };
        Ok(Self { network: Arc::new(network), activations: floats.activations(), products: floats.accuracy_level() })
    }

    /// The same reference for a runtime that rounds activations to `to`.
    #[must_use]
    pub fn rounding_to(&self, to: FloatType) -> Self {
        Self { activations: to, ..self.clone() }
    }

    /// The same reference for a runtime that rounds no factors of products.
    #[must_use]
    pub fn with_exact_products(&self) -> Self {
        Self { products: AccuracyLevel::Activations, ..self.clone() }
    }

    /// What [`Self::run_rounded`] rounds to.
    pub const fn activations(&self) -> FloatType {
        self.activations
    }

    /// What [`Self::run_rounded`] rounds to before products of our operators, where that is
    /// less than [`Self::activations`].
    pub const fn products(&self) -> Option<Factors> {
        match self.rounding() {
            Rounding::Products => Some(Factors::Bf16),
            Rounding::Integers => Some(Factors::Int8),
            Rounding::Double | Rounding::Single | Rounding::Half | Rounding::Brain => None,
        }
    }

    /// Evaluates one part of the model.
    ///
    /// With `replay`, every module sends each routed token to the experts that `replay` names, with weights
    /// from its own scores, not those of `replay`; modules of other parts may be present.
    ///
    /// # Errors
    ///
    /// Inputs that are missing or of a wrong type or shape, masks of other values than 0 and 1, token ids
    /// outside the vocabulary, more real tokens than positions, a `replay` that does not fit, and a part that
    /// the model does not have.
    pub fn run(
        &self,
        part: Part,
        inputs: &NamedTensors,
        replay: Option<&Choices>,
    ) -> Result<Evaluation, ReferenceError> {
        self.evaluate(part, Inputs { tensors: inputs, precision: Precision::DOUBLE }, replay)
    }

    /// The same evaluation with every vector between the equations rounded to the type of activations, those that
    /// an operator of ours multiplies to that of [`Self::products`], and every sum rounded to f32 after each term: how
    /// far its outputs are from those of [`Self::run`] tells what rounding alone does to this model and these inputs.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    pub fn run_rounded(
        &self,
        part: Part,
        inputs: &NamedTensors,
        replay: Option<&Choices>,
    ) -> Result<Evaluation, ReferenceError> {
        self.run_rounded_again(part, inputs, replay, 0)
    }

    /// [`Self::run_rounded`] where `draw`, unless it is 0, decides which values are rounded up and which down: what
    /// rounding does to one output may differ widely between two evaluations that round as often.
    ///
    /// # Errors
    ///
    /// As [`Self::run`].
    pub fn run_rounded_again(
        &self,
        part: Part,
        inputs: &NamedTensors,
        replay: Option<&Choices>,
        draw: u8,
    ) -> Result<Evaluation, ReferenceError> {
        let precision = Precision { to: self.rounding(), draw: Draw(draw) };
        self.evaluate(part, Inputs { tensors: inputs, precision }, replay)
    }

    const fn rounding(&self) -> Rounding {
        match (self.activations, self.products) {
            (FloatType::F16, _) => Rounding::Half,
            (FloatType::Bf16, _) => Rounding::Brain,
            (FloatType::F32, AccuracyLevel::Activations) => Rounding::Single,
            (FloatType::F32, AccuracyLevel::Bf16) => Rounding::Products,
            (FloatType::F32, AccuracyLevel::Int8) => Rounding::Integers,
        }
    }

    fn evaluate(&self, part: Part, inputs: Inputs<'_>, replay: Option<&Choices>) -> Result<Evaluation, ReferenceError> {
        let mut tape = Tape::new(replay);
        let outputs = match (self.network.as_ref(), part) {
            (Network::EncoderDecoder(model), Part::Encoder) => model.encode(inputs, &mut tape)?,
            (Network::EncoderDecoder(model), Part::Decoder) => model.decode(inputs, &mut tape)?,
            (Network::MaskedLm(model), Part::Model) => model.run(inputs, &mut tape)?,
            (Network::CausalLm(model), Part::Model) => model.run(inputs, &mut tape)?,
            (Network::Layer(model), Part::Model) => model.run(inputs, &mut tape)?,
            (network, part) => return Err(ReferenceError::NoSuchPart { family: network.family(), part }),
        };
        Ok(Evaluation { outputs, routing: tape.into_routing() })
    }
}

impl Network {
    const fn family(&self) -> &'static str {
        match self {
            Self::EncoderDecoder(_) => "encoder-decoder",
            Self::MaskedLm(_) => "masked language model",
            Self::CausalLm(_) => "causal language model",
            Self::Layer(_) => "MoA layer",
            Self::Baseline => "baseline",
        }
    }
}
