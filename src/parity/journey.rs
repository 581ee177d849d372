//! Which runs prove a model of each family.

use moa_graphs::model::{Attention, CausalLm, Embedding, EncoderDecoder, MoaLayer};
use moa_schema::interface::{ATTENTION_MASK, Cache, ENCODER_ATTENTION_MASK, INPUT_IDS, LOGITS, POSITION_IDS, past_of};

use crate::{
    random::Random,
    reference::Choices,
    tensor::{NamedTensors, Tensor, TensorData, TensorShapeError},
};

use super::{
    cases::{
        LayerCaseError, Steps, Tokens, companion, ints, layer_cases, left_out, left_padded_steps, step_cases,
        token_cases,
    },
    graph_check::{CheckError, GraphCheck, Run},
};

/// Why a family's runs stopped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub(super) enum JourneyError {
    #[error(transparent)]
    Check(#[from] CheckError),
    #[error(transparent)]
    Shape(#[from] TensorShapeError),
    #[error(transparent)]
    Layer(#[from] LayerCaseError),
    #[error("output \"{0}\" does not have the shape of the contract")]
    Contract(String),
}

pub(super) fn layer(layer: &MoaLayer, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    for case in layer_cases(layer, &mut Random::new(seed))? {
        check.check_case((case.name, case.is_large), &case.inputs)?;
    }
    Ok(())
}

/// Whole rows of tokens: an encoder, or a masked language model.
pub(super) fn encoder(embedding: &Embedding, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    check.report.left_out = left_out(embedding);
    for tokens in token_cases(embedding, &mut Random::new(seed)) {
        check.check_case((&tokens.name, tokens.is_large), &tokens.inputs()?)?;
    }
    Ok(())
}

/// How the position of a token is numbered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Numbering {
    /// By the real tokens before it: derived from the mask, as generation does.
    RealTokens,
    /// By all tokens before it, padding too: what a caller that gives no positions gets.
    AllTokens,
    /// By the caller, who leaves a gap before the last third of the row: what depends on positions must follow.
    Gap,
}

impl Numbering {
    fn of_case(self, case: &str) -> String {
        match self {
            Self::RealTokens => case.to_owned(),
            Self::AllTokens => format!("{case}, positions counting padding"),
            Self::Gap => format!("{case}, positions with a gap"),
        }
    }

    /// The position of the token in `column` of a row with this mask.
    #[allow(clippy::cast_possible_wrap)]
    fn position(self, mask: &[i64], column: usize) -> i64 {
        let skipped = if column >= mask.len() - mask.len() / 3 { GAP } else { 0 };
        match self {
            Self::RealTokens => (mask[..=column].iter().sum::<i64>() - 1).max(0),
            Self::AllTokens => column as i64,
            Self::Gap => (column + skipped) as i64,
        }
    }
}

/// Positions that [`Numbering::Gap`] leaves out.
const GAP: usize = 5;

/// Whole rows and rows step by step, under every numbering of positions that tells something new.
pub(super) fn causal_lm(model: &CausalLm, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    let mut random = Random::new(seed);
    let limit = model.max_positions().unwrap_or(usize::MAX);
    let numberings = |tokens: &Tokens| {
        let mut numberings = vec![Numbering::RealTokens];
        if model.max_positions().is_none() || tokens.is_large {
            return numberings;
        }
        if tokens.mask.contains(&0) {
            numberings.push(Numbering::AllTokens);
        } else if tokens.length > 2 && tokens.length + GAP <= limit {
            numberings.push(Numbering::Gap);
        }
        numberings
    };
    check.report.left_out = left_out(model);
    for tokens in token_cases(model, &mut random) {
        for numbering in numberings(&tokens) {
            let inputs = causal_inputs(model, &tokens, numbering, 0..tokens.length, None)?;
            check.check_case((&numbering.of_case(&tokens.name), tokens.is_large), &inputs)?;
        }
    }
    for steps in step_cases(model, &mut random).into_iter().chain(left_padded_steps(model, &mut random)) {
        for numbering in numberings(&steps.tokens) {
            let name = numbering.of_case(&steps.tokens.name);
            let inputs = |range, past: Option<&_>| causal_inputs(model, &steps.tokens, numbering, range, past);
            decode_in_steps(check, &name, &steps, inputs)?;
        }
    }
    Ok(())
}

/// Inputs for the positions `range`; `past` holds the outputs of the step before.
fn causal_inputs(
    model: &CausalLm,
    tokens: &Tokens,
    numbering: Numbering,
    range: std::ops::Range<usize>,
    past: Option<&NamedTensors>,
) -> Result<NamedTensors, JourneyError> {
    let (batch, end) = (tokens.batch, range.end);
    let mut inputs = NamedTensors::new();
    inputs.insert(INPUT_IDS.into(), columns(tokens, &tokens.ids, range.clone())?);
    inputs.insert(ATTENTION_MASK.into(), columns(tokens, &tokens.mask, 0..end)?);
    if model.max_positions().is_some() {
        let rows = tokens.mask.chunks(tokens.length);
        let positions = rows.flat_map(|row| range.clone().map(move |column| numbering.position(row, column)));
        inputs.insert(POSITION_IDS.into(), ints([batch, range.len()], positions.collect())?);
    }
    for (index, layer) in model.layers.iter().enumerate() {
        insert_past(&mut inputs, &layer.attention, batch, &Cache::of_layer(index), past)?;
    }
    Ok(inputs)
}

/// The columns `range` of `values`, `[batch, length]`.
fn columns(tokens: &Tokens, values: &[i64], range: std::ops::Range<usize>) -> Result<Tensor, TensorShapeError> {
    let width = range.len();
    let rows = values.chunks(tokens.length).flat_map(|row| row[range.clone()].to_vec()).collect();
    ints([tokens.batch, width], rows)
}

/// Keys and values of one layer: what the step before gave, or none.
fn insert_past(
    inputs: &mut NamedTensors,
    attention: &Attention,
    batch: usize,
    cache: &Cache,
    past: Option<&NamedTensors>,
) -> Result<(), JourneyError> {
    for (present, name) in cache.present().into_iter().zip(cache.past()) {
        let values = match past {
            Some(past) => past.get(&present).cloned().ok_or(JourneyError::Contract(present))?,
            None => Tensor::new([batch, attention.kv_num_heads, 0, attention.head_size], TensorData::F32(Vec::new()))?,
        };
        inputs.insert(name, values);
    }
    Ok(())
}

/// Whole target rows, then the same rows step by step; sources are encoded by the backend itself.
pub(super) fn decoder(
    model: &EncoderDecoder,
    encoder: &mut GraphCheck<'_>,
    check: &mut GraphCheck<'_>,
    seed: u64,
) -> Result<(), JourneyError> {
    let mut random = Random::new(seed);
    check.report.left_out = left_out(&model.decoder.embedding);
    for (turn, target) in token_cases(&model.decoder.embedding, &mut random).into_iter().enumerate() {
        let source = companion(&model.encoder.embedding, &mut random, (target.batch, turn));
        let memory = encode(encoder, &source)?;
        let inputs = decoder_inputs(model, &target, 0..target.length, &memory, None)?;
        check.check_case((&target.name, target.is_large), &inputs)?;
    }
    for (turn, steps) in step_cases(&model.decoder.embedding, &mut random).into_iter().enumerate() {
        let target = &steps.tokens;
        let source = companion(&model.encoder.embedding, &mut random, (target.batch, turn));
        let memory = encode(encoder, &source)?;
        let inputs = |range, past: Option<&_>| decoder_inputs(model, target, range, &memory, past);
        decode_in_steps(check, &target.name, &steps, inputs)?;
    }
    Ok(())
}

/// What the decoder needs of a source: its mask, and keys and values under the decoder's input names.
fn encode(encoder: &mut GraphCheck<'_>, source: &Tokens) -> Result<NamedTensors, JourneyError> {
    let mut memory: NamedTensors = encoder
        .run(&source.inputs()?)?
        .into_iter()
        .filter_map(|(name, value)| Some((past_of(&name)?, value)))
        .collect();
    memory.insert(ENCODER_ATTENTION_MASK.into(), ints([source.batch, source.length], source.mask.clone())?);
    Ok(memory)
}

/// Inputs for the target positions `range`; `past` holds the decoder outputs of the step before.
fn decoder_inputs(
    model: &EncoderDecoder,
    target: &Tokens,
    range: std::ops::Range<usize>,
    memory: &NamedTensors,
    past: Option<&NamedTensors>,
) -> Result<NamedTensors, JourneyError> {
    let mut inputs = memory.clone();
    inputs.insert(INPUT_IDS.into(), columns(target, &target.ids, range.clone())?);
    inputs.insert(ATTENTION_MASK.into(), columns(target, &target.mask, 0..range.end)?);
    for (index, layer) in model.decoder.layers.iter().enumerate() {
        insert_past(&mut inputs, &layer.self_attention, target.batch, &Cache::of_decoder(index), past)?;
    }
    Ok(inputs)
}

/// One piece after another, each beside the reference; then all logits beside one full pass.
fn decode_in_steps(
    check: &mut GraphCheck<'_>,
    name: &str,
    Steps { tokens: target, ends }: &Steps,
    inputs_for: impl Fn(std::ops::Range<usize>, Option<&NamedTensors>) -> Result<NamedTensors, JourneyError>,
) -> Result<(), JourneyError> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    for end in ends {
        let inputs = inputs_for(start..*end, runs.last().map(|run| &run.outputs))?;
        runs.push(check.check_step(&format!("{name}, token {start}"), &inputs, *end)?);
        start = *end;
    }
    let logits = join_logits(&runs, target.batch)?;
    let choices = join_choices(&runs);
    let inputs = inputs_for(0..target.length, None)?;
    let place = format!("{name}, beside one full pass: logits");
    check.check_logits(&place, &inputs, &choices, (&logits, ends))?;
    Ok(())
}

/// The logits of all steps, `[batch, positions, vocabulary]`.
fn join_logits(runs: &[Run], batch: usize) -> Result<Tensor, JourneyError> {
    let contract = || JourneyError::Contract(LOGITS.into());
    let steps = runs
        .iter()
        .map(|run| run.outputs.get(LOGITS).and_then(|logits| Some((logits.shape().to_vec(), logits.as_f32()?))))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(contract)?;
    let vocabulary = steps.first().and_then(|(shape, _)| shape.last()).copied().ok_or_else(contract)?;
    let positions = steps.iter().map(|(shape, _)| shape[1]).sum();
    let mut joined = Vec::with_capacity(batch * positions * vocabulary);
    for row in 0..batch {
        for (shape, values) in &steps {
            let width = shape[1] * vocabulary;
            joined.extend_from_slice(&values[row * width..(row + 1) * width]);
        }
    }
    Ok(Tensor::new([batch, positions, vocabulary], TensorData::F32(joined))?)
}

/// The choices of all steps as those of one pass.
fn join_choices(runs: &[Run]) -> Choices {
    let Some(first) = runs.first() else { return Choices::new() };
    let mut joined = first.routing.choices.clone();
    for (module, choices) in &mut joined {
        let steps: Vec<_> = runs.iter().filter_map(|run| run.routing.choices.get(module)).collect();
        choices.tokens = steps.iter().map(|step| step.tokens).sum();
        choices.indices.clear();
        choices.weights.clear();
        for row in 0..choices.batch {
            for step in &steps {
                let slots = step.tokens * step.top_k;
                choices.indices.extend_from_slice(&step.indices[row * slots..(row + 1) * slots]);
                choices.weights.extend_from_slice(&step.weights[row * slots..(row + 1) * slots]);
            }
        }
    }
    joined
}
