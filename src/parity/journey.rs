//! Which runs prove a model of each family.

use moa_graphs::model::{EncoderDecoder, MaskedLm, MoaLayer};

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
        decode_in_steps(model, check, &target, prefix, &memory)?;
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
    let columns = |values: &[i64], start: usize, end: usize| -> Result<Tensor, TensorShapeError> {
        let rows = values.chunks(target.length).flat_map(|row| row[start..end].to_vec()).collect();
        ints([target.batch, end - start], rows)
    };
    let mut inputs = memory.clone();
    inputs.insert("input_ids".into(), columns(&target.ids, range.start, range.end)?);
    inputs.insert("attention_mask".into(), columns(&target.mask, 0, range.end)?);
    for (index, layer) in model.decoder.layers.iter().enumerate() {
        let attention = &layer.self_attention;
        for part in ["key", "value"] {
            let name = format!("present.{index}.decoder.{part}");
            let cache = match past {
                Some(past) => past.get(&name).cloned().ok_or_else(|| JourneyError::Contract(name.clone()))?,
                None => Tensor::new(
                    [target.batch, attention.kv_num_heads, 0, attention.head_size],
                    TensorData::F32(Vec::new()),
                )?,
            };
            inputs.insert(format!("past_key_values.{index}.decoder.{part}"), cache);
        }
    }
    Ok(inputs)
}

fn decode_in_steps(
    model: &EncoderDecoder,
    check: &mut GraphCheck<'_>,
    target: &Tokens,
    prefix: usize,
    memory: &NamedTensors,
) -> Result<(), JourneyError> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    while start < target.length {
        let end = if start == 0 { prefix } else { start + 1 };
        let inputs = decoder_inputs(model, target, start..end, memory, runs.last().map(|run| &run.outputs))?;
        runs.push(check.check(&format!("{}, token {start}", target.name), &inputs)?);
        start = end;
    }
    let logits = join_logits(&runs, target)?;
    let routing = join_routing(&runs);
    let inputs = decoder_inputs(model, target, 0..target.length, memory, None)?;
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
