//! Which runs prove a model of each family.

use moa_graphs::model::{Attention, CausalLm, EncoderDecoder, MaskedLm, MoaLayer};

use crate::{
    reference::Routing,
    tensor::{NamedTensors, Tensor, TensorData, TensorShapeError},
};

use super::{
    cases::{LayerCaseError, Random, Tokens, companion, ints, layer_cases, step_cases, token_cases},
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

pub(super) fn masked_lm(model: &MaskedLm, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    for tokens in token_cases(&model.encoder.embedding, &mut Random::new(seed)) {
        check.check(&tokens.name, &tokens.inputs()?)?;
    }
    Ok(())
}

pub(super) fn layer(layer: &MoaLayer, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    for (name, inputs) in layer_cases(layer, &mut Random::new(seed))? {
        check.check(&name, &inputs)?;
    }
    Ok(())
}

pub(super) fn encoder(model: &EncoderDecoder, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    for tokens in token_cases(&model.encoder.embedding, &mut Random::new(seed)) {
        check.check(&tokens.name, &tokens.inputs()?)?;
    }
    Ok(())
}

/// Whole rows, with positions that count real tokens and with positions that count all; then step by step.
pub(super) fn causal_lm(model: &CausalLm, check: &mut GraphCheck<'_>, seed: u64) -> Result<(), JourneyError> {
    let mut random = Random::new(seed);
    for tokens in token_cases(model, &mut random) {
        let range = 0..tokens.length;
        check.check(&tokens.name, &causal_inputs(model, &tokens, range, None)?)?;
        if tokens.mask.contains(&0) {
            let mut inputs = causal_inputs(model, &tokens, 0..tokens.length, None)?;
            let plain = (0..tokens.batch).flat_map(|_| counted(tokens.length)).collect();
            inputs.insert("position_ids".into(), ints([tokens.batch, tokens.length], plain)?);
            check.check(&format!("{}, positions counting padding", tokens.name), &inputs)?;
        }
    }
    for (tokens, prefix) in step_cases(model, &mut random) {
        decode_in_steps(check, &tokens, prefix, |range, past| causal_inputs(model, &tokens, range, past))?;
    }
    Ok(())
}

#[allow(clippy::cast_possible_wrap)]
fn counted(length: usize) -> impl Iterator<Item = i64> {
    0..length as i64
}

/// Inputs for the positions `range`; `past` holds the outputs of the step before. Position ids count the real
/// tokens before each token, as generation does.
fn causal_inputs(
    model: &CausalLm,
    tokens: &Tokens,
    range: std::ops::Range<usize>,
    past: Option<&NamedTensors>,
) -> Result<NamedTensors, JourneyError> {
    let (batch, end) = (tokens.batch, range.end);
    let mut positions = Vec::new();
    for row in tokens.mask.chunks(tokens.length) {
        let real_until = |column: usize| row[..=column].iter().sum::<i64>();
        positions.extend(range.clone().map(|column| (real_until(column) - 1).max(0)));
    }
    let mut inputs = NamedTensors::new();
    inputs.insert("input_ids".into(), columns(tokens, &tokens.ids, range.clone())?);
    inputs.insert("attention_mask".into(), columns(tokens, &tokens.mask, 0..end)?);
    inputs.insert("position_ids".into(), ints([batch, range.len()], positions)?);
    for (index, layer) in model.layers.iter().enumerate() {
        insert_past(&mut inputs, &layer.attention, batch, &format!("{index}."), past)?;
    }
    Ok(inputs)
}

/// The columns `range` of `values`, `[batch, length]`.
fn columns(tokens: &Tokens, values: &[i64], range: std::ops::Range<usize>) -> Result<Tensor, TensorShapeError> {
    let width = range.len();
    let rows = values.chunks(tokens.length).flat_map(|row| row[range.clone()].to_vec()).collect();
    ints([tokens.batch, width], rows)
}

/// Keys and values of one layer: the step before's `present.{infix}…`, or none.
fn insert_past(
    inputs: &mut NamedTensors,
    attention: &Attention,
    batch: usize,
    infix: &str,
    past: Option<&NamedTensors>,
) -> Result<(), JourneyError> {
    for part in ["key", "value"] {
        let name = format!("present.{infix}{part}");
        let cache = match past {
            Some(past) => past.get(&name).cloned().ok_or_else(|| JourneyError::Contract(name.clone()))?,
            None => Tensor::new([batch, attention.kv_num_heads, 0, attention.head_size], TensorData::F32(Vec::new()))?,
        };
        inputs.insert(format!("past_key_values.{infix}{part}"), cache);
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
    for target in token_cases(&model.decoder.embedding, &mut random) {
        let source = companion(&model.encoder.embedding, &mut random, target.batch);
        let memory = encode(encoder, &source)?;
        check.check(&target.name, &decoder_inputs(model, &target, 0..target.length, &memory, None)?)?;
    }
    for (target, prefix) in step_cases(&model.decoder.embedding, &mut random) {
        let source = companion(&model.encoder.embedding, &mut random, target.batch);
        let memory = encode(encoder, &source)?;
        decode_in_steps(check, &target, prefix, |range, past| decoder_inputs(model, &target, range, &memory, past))?;
    }
    Ok(())
}

/// What the decoder needs of a source: its mask, and keys and values under the decoder's input names.
fn encode(encoder: &mut GraphCheck<'_>, source: &Tokens) -> Result<NamedTensors, JourneyError> {
    let mut memory: NamedTensors = encoder
        .run(&source.inputs()?)?
        .into_iter()
        .filter_map(|(name, value)| Some((format!("past_key_values.{}", name.strip_prefix("present.")?), value)))
        .collect();
    memory.insert("encoder_attention_mask".into(), ints([source.batch, source.length], source.mask.clone())?);
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
    inputs.insert("input_ids".into(), columns(target, &target.ids, range.clone())?);
    inputs.insert("attention_mask".into(), columns(target, &target.mask, 0..range.end)?);
    for (index, layer) in model.decoder.layers.iter().enumerate() {
        insert_past(&mut inputs, &layer.self_attention, target.batch, &format!("{index}.decoder."), past)?;
    }
    Ok(inputs)
}

/// One step after another, each beside the reference; then all logits beside one full pass.
fn decode_in_steps(
    check: &mut GraphCheck<'_>,
    target: &Tokens,
    prefix: usize,
    inputs_for: impl Fn(std::ops::Range<usize>, Option<&NamedTensors>) -> Result<NamedTensors, JourneyError>,
) -> Result<(), JourneyError> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    while start < target.length {
        let end = if start == 0 { prefix } else { start + 1 };
        let inputs = inputs_for(start..end, runs.last().map(|run| &run.outputs))?;
        runs.push(check.check(&format!("{}, token {start}", target.name), &inputs)?);
        start = end;
    }
    let logits = join_logits(&runs, target)?;
    let routing = join_routing(&runs);
    let inputs = inputs_for(0..target.length, None)?;
    let place = format!("{}, beside one full pass: logits", target.name);
    check.check_output(&place, &inputs, &routing, "logits", &logits)?;
    Ok(())
}

/// The logits of all steps, `[batch, length, vocabulary]`.
fn join_logits(runs: &[Run], target: &Tokens) -> Result<Tensor, JourneyError> {
    let contract = || JourneyError::Contract("logits".into());
    let steps = runs
        .iter()
        .map(|run| run.outputs.get("logits").and_then(|logits| Some((logits.shape().to_vec(), logits.as_f32()?))))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(contract)?;
    let vocabulary = steps.first().and_then(|(shape, _)| shape.last()).copied().ok_or_else(contract)?;
    let mut joined = Vec::with_capacity(target.batch * target.length * vocabulary);
    for row in 0..target.batch {
        for (shape, values) in &steps {
            let width = shape[1] * vocabulary;
            joined.extend_from_slice(&values[row * width..(row + 1) * width]);
        }
    }
    Ok(Tensor::new([target.batch, target.length, vocabulary], TensorData::F32(joined))?)
}

/// The routing of all steps as that of one pass.
fn join_routing(runs: &[Run]) -> Routing {
    let Some(first) = runs.first() else { return Routing::new() };
    let mut joined = first.routing.routing.clone();
    for (module, routing) in &mut joined {
        let steps: Vec<_> = runs.iter().filter_map(|run| run.routing.routing.get(module)).collect();
        routing.tokens = steps.iter().map(|step| step.tokens).sum();
        routing.indices.clear();
        routing.weights.clear();
        for row in 0..routing.batch {
            for step in &steps {
                let slots = step.tokens * step.top_k;
                routing.indices.extend_from_slice(&step.indices[row * slots..(row + 1) * slots]);
                routing.weights.extend_from_slice(&step.weights[row * slots..(row + 1) * slots]);
            }
        }
    }
    joined
}
