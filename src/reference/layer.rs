//! One layer by itself.

use moa_graphs::{WeightError, model};
use moa_schema::interface::{ATTENTION_MASK, MEMORY, OUTPUT, QUERY, QUERY_ATTENTION_MASK};

use super::{
    ReferenceError,
    attention::Attention,
    inputs::{Dim, Inputs},
    router::Tape,
    stored::Stored,
};
use crate::tensor::NamedTensors;

/// Weights of a [`model::MoaLayer`].
#[derive(Debug)]
pub(super) struct MoaLayer {
    attention: Attention,
    cross_attention: bool,
    source_width: usize,
}

impl MoaLayer {
    pub(super) fn new(model: &model::MoaLayer, stored: Stored) -> Result<Self, WeightError> {
        let attention = match model.cross_attention {
            true => Attention::to_memory(&model.attention, stored)?,
            false => Attention::new(&model.attention, stored)?,
        };
        Ok(Self { attention, cross_attention: model.cross_attention, source_width: model.attention.source_width })
    }

    /// `output`, `[B, T, C]`.
    pub(super) fn run(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        let query = inputs.sequence(QUERY, Dim::Any("batch"), self.attention.width())?;
        let output = if self.cross_attention {
            let memory = inputs.sequence(MEMORY, Dim::Is(query.batch), self.source_width)?;
            let keys = inputs.mask(ATTENTION_MASK, query.batch, Dim::Is(memory.tokens))?;
            let queries = inputs.mask(QUERY_ATTENTION_MASK, query.batch, Dim::Is(query.tokens))?;
            self.attention.run(&query, &queries, &self.attention.keys_values(&memory), &keys, tape)?
        } else {
            let mask = inputs.mask(ATTENTION_MASK, query.batch, Dim::Is(query.tokens))?;
            self.attention.run(&query, &mask, &self.attention.keys_values(&query), &mask, tape)?
        };
        Ok(NamedTensors::from([(OUTPUT.into(), output.into_tensor()?)]))
    }
}
