//! Decoder-only language models.

use moa_graphs::{WeightError, model};
use moa_schema::interface::{ATTENTION_MASK, Cache, INPUT_IDS, LOGITS, POSITION_IDS};

use super::{
    ReferenceError,
    attention::{Attention, Positions},
    blocks::{ExpertFeedForward, Norm},
    encoder_decoder::{insert_key_values, key_values},
    inputs::{Dim, Inputs},
    matrix::{Matrices, Outputs},
    router::Tape,
    sequence::Sequence,
    stored::Stored,
};
use crate::tensor::NamedTensors;

/// Weights of a [`model::CausalLm`].
#[derive(Debug)]
pub(super) struct CausalLm {
    /// `[V, C]`.
    tokens: Matrices,
    /// `[C, V]`.
    output: Matrices,
    width: usize,
    max_positions: Option<usize>,
    layers: Vec<CausalLayer>,
    norm: Norm,
}

/// `x + attention(norm(x))`, then `x + feed_forward(norm(x))`.
#[derive(Debug)]
struct CausalLayer {
    attention_norm: Norm,
    attention: Attention,
    feed_forward_norm: Norm,
    feed_forward: ExpertFeedForward,
}

impl CausalLayer {
    fn new(model: &model::CausalLayer, stored: Stored) -> Result<Self, WeightError> {
        Ok(Self {
            attention_norm: Norm::new(&model.attention_norm)?,
            attention: Attention::new(&model.attention, stored)?,
            feed_forward_norm: Norm::new(&model.feed_forward_norm)?,
            feed_forward: ExpertFeedForward::new(&model.feed_forward, stored)?,
        })
    }
}

impl CausalLm {
    pub(super) fn new(model: &model::CausalLm, stored: Stored) -> Result<Self, WeightError> {
        let width = model.output.shape()[1];
        Ok(Self {
            tokens: Matrices::read(stored, &model.tokens, 0, [1, model.tokens.shape()[0], width], Outputs::Columns)?,
            output: Matrices::of_head(stored, &model.output)?,
            width,
            max_positions: model.max_positions(),
            layers: model.layers.iter().map(|layer| CausalLayer::new(layer, stored)).collect::<Result<_, _>>()?,
            norm: Norm::new(&model.norm)?,
        })
    }

    /// `logits`, `[B, T, V]`, and the keys and values of every layer, past included.
    pub(super) fn run(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        let ids = inputs.token_ids(INPUT_IDS)?;
        let all = inputs.mask(ATTENTION_MASK, ids.batch, Dim::AtLeast(ids.tokens))?;
        let new = all.last(ids.tokens);
        let positions = self.max_positions.map(|rows| positions(inputs, [ids.batch, ids.tokens], rows)).transpose()?;
        let positions = positions.as_ref();
        let mut values = Vec::with_capacity(ids.ids.len() * self.width);
        for (index, id) in ids.ids.iter().enumerate() {
            let Some(row) = usize::try_from(*id).ok().filter(|id| *id < self.tokens.rows()) else {
                let (input, vocabulary) = (ids.input.into(), self.tokens.rows());
                return Err(ReferenceError::TokenId { input, index, id: *id, vocabulary });
            };
            values.extend(self.tokens.row(row));
        }
        let mut x =
            Sequence { precision: ids.precision, batch: ids.batch, tokens: ids.tokens, width: self.width, values };
        let mut outputs = NamedTensors::new();
        for (index, layer) in self.layers.iter().enumerate() {
            let shape = layer.attention.cache_shape(ids.batch, all.tokens - ids.tokens);
            let past = key_values(inputs, &Cache::of_layer(index), shape)?;
            let normed = layer.attention_norm.run(&x);
            let present = past.followed_by(&layer.attention.keys_values_at(&normed, positions));
            let attended = layer.attention.run_at(&normed, &new, positions, &present, &all, tape)?;
            x = x.plus(&attended);
            let added = layer.feed_forward.run(&layer.feed_forward_norm.run(&x), tape)?;
            x = x.plus(&added);
            insert_key_values(&mut outputs, &Cache::of_layer(index), present)?;
        }
        let logits = self.output.map_head(&self.norm.run(&x));
        outputs.insert(LOGITS.into(), logits.into_tensor()?);
        Ok(outputs)
    }
}

/// Positions `[B, T]`, each below `rows`.
fn positions(inputs: Inputs<'_>, shape: [usize; 2], rows: usize) -> Result<Positions, ReferenceError> {
    let ids = inputs.integer_matrix(POSITION_IDS, shape)?;
    let mut positions = Vec::with_capacity(ids.len());
    for (index, id) in ids.iter().enumerate() {
        let position = usize::try_from(*id).unwrap_or(usize::MAX);
        if position >= rows {
            return Err(ReferenceError::Position { row: index / shape[1].max(1), position, rows });
        }
        positions.push(position);
    }
    Ok(Positions(positions))
}
