//! The masked language model.

use moa_graphs::{WeightError, model};
use moa_schema::{
    Activation,
    interface::{ATTENTION_MASK, INPUT_IDS, LOGITS},
};

use super::{
    ReferenceError,
    blocks::{LayerNorm, Linear},
    encoder_decoder::Encoder,
    inputs::{Dim, Inputs},
    math::{activate, add_scaled},
    matrix::Matrices,
    router::Tape,
    stored::Stored,
};
use crate::tensor::NamedTensors;

/// Weights of a [`model::MaskedLm`]: `logits = norm(activation(dense(encoder(ids)))) · weightᵀ + bias`.
#[derive(Debug)]
pub(super) struct MaskedLm {
    encoder: Encoder,
    dense: Linear,
    activation: Activation,
    norm: LayerNorm,
    /// `[C, V]`.
    output: Matrices,
    /// `[V]`.
    bias: Vec<f64>,
}

impl MaskedLm {
    pub(super) fn new(model: &model::MaskedLm, stored: Stored) -> Result<Self, WeightError> {
        let head = &model.head;
        Ok(Self {
            encoder: Encoder::new(&model.encoder, stored)?,
            dense: Linear::new(&head.dense, stored)?,
            activation: head.activation,
            norm: LayerNorm::new(&head.norm)?,
            output: Matrices::of_head(stored, &head.weight)?,
            bias: stored.bias(&head.bias)?,
        })
    }

    /// `logits`, `[B, T, V]`.
    pub(super) fn run(&self, inputs: Inputs<'_>, tape: &mut Tape<'_>) -> Result<NamedTensors, ReferenceError> {
        let ids = inputs.token_ids(INPUT_IDS)?;
        let mask = inputs.mask(ATTENTION_MASK, ids.batch, Dim::Is(ids.tokens))?;
        let x = self.encoder.run(ids, &mask, tape)?;
        let mut dense = self.dense.apply(x.sums(), &x.rows());
        dense.iter_mut().flatten().for_each(|h| *h = activate(self.activation, *h));
        let x = x.with(x.width, dense.iter().map(|row| self.norm.apply(x.sums(), row)).collect());
        let product = self.output.map_head(&x);
        let logits = product.map(product.width, |row| {
            let mut logits = row.to_vec();
            add_scaled(x.sums(), &mut logits, 1.0, &self.bias);
            logits
        });
        Ok(NamedTensors::from([(LOGITS.into(), logits.into_tensor()?)]))
    }
}
