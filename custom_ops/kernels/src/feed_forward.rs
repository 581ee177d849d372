//! `MoEFeedForward`.

use moa_schema::{FeedForwardAttributes, FeedForwardDims};

use crate::activation;
use crate::check::{at_least_one, length, optional_length};
use crate::combine::combine;
use crate::gemm::{Matrix, Write, multiply};
use crate::grouped_gemm::{ExpertWeights, gather_rows};
use crate::routing::{RouterInputs, Routing};
use crate::{KernelError, ThreadPool, pool};

/// Inputs of [`feed_forward`], row-major.
#[derive(Debug, Clone, Copy)]
pub struct FeedForwardInputs<'a> {
    /// `[B, T, C]`.
    pub hidden_states: &'a [f32],
    /// `[C, E]`.
    pub router_weight: &'a [f32],
    /// `[E, C, F]`, or `[E, C, 2 * F]` where gated.
    pub input_weight: &'a [f32],
    /// `[E, F, C]`.
    pub output_weight: &'a [f32],
    /// `[C]`.
    pub output_bias: Option<&'a [f32]>,
}

/// Outputs of [`feed_forward`], row-major; `None` where nobody asks for the value.
#[derive(Debug)]
pub struct FeedForwardOutputs<'a> {
    /// `[B, T, C]`.
    pub output: &'a mut [f32],
    /// `[B, T, k]`, falling score, ties by lower expert.
    pub topk_indices: Option<&'a mut [i64]>,
    /// `[B, T, k]`, in the order of `topk_indices`.
    pub topk_weights: Option<&'a mut [f32]>,
}

/// Routed feed-forward layer; every token is routed.
///
/// # Errors
///
/// [`KernelError::Length`], [`KernelError::Empty`] or [`KernelError::TopK`] where a slice or `top_k` does not fit `dims`;
/// [`KernelError::RouterLogits`] where a logit is NaN or infinite.
pub fn feed_forward(
    dims: &FeedForwardDims,
    attributes: &FeedForwardAttributes,
    inputs: &FeedForwardInputs<'_>,
    outputs: &mut FeedForwardOutputs<'_>,
    pool: &dyn ThreadPool,
) -> Result<(), KernelError> {
    let columns = if attributes.gated { 2 * dims.hidden } else { dims.hidden };
    check(dims, columns, inputs, outputs)?;
    let router = RouterInputs {
        hidden_states: inputs.hidden_states,
        router_weight: inputs.router_weight,
        tokens_per_row: dims.tokens,
        width: dims.width,
        experts: dims.experts,
        top_k: dims.top_k,
        gate_mode: attributes.gate_mode,
    };
    let routing = Routing::new(pool, &router, vec![true; dims.batch * dims.tokens])?;
    let input_weight = ExpertWeights { data: inputs.input_weight, rows: dims.width, columns };
    let output_weight = ExpertWeights { data: inputs.output_weight, rows: dims.hidden, columns: dims.width };
    let function = activation::function(attributes.activation);
    let mut expert_rows = vec![0.0; routing.rows() * dims.width];
    pool::for_each(pool, routing.split(&mut expert_rows, dims.width), |(tile, out)| {
        let rows = tile.rows.len();
        let x = gather_rows(tile.rows, dims.width, &|row, x| {
            let token = routing.pair(row) / dims.top_k;
            x.copy_from_slice(&inputs.hidden_states[token * dims.width..][..dims.width]);
        });
        let mut hidden = vec![0.0; rows * columns];
        let x = Matrix::dense(&x, rows, dims.width);
        multiply(&mut hidden, x, input_weight.expert(tile.expert), Write::Replace);
        for hidden in hidden.chunks_mut(columns) {
            let (first, second) = hidden.split_at_mut(dims.hidden);
            first.iter_mut().for_each(|value| *value = function(*value));
            first.iter_mut().zip(second).for_each(|(value, factor)| *value *= *factor);
        }
        let activated = Matrix::new(&hidden, rows, dims.hidden, columns);
        multiply(out, activated, output_weight.expert(tile.expert), Write::Replace);
    });
    combine(pool, &routing, &expert_rows, inputs.output_bias, outputs.output);
    routing.export(outputs.topk_indices.as_deref_mut(), outputs.topk_weights.as_deref_mut());
    Ok(())
}

fn check(
    dims: &FeedForwardDims,
    columns: usize,
    inputs: &FeedForwardInputs<'_>,
    outputs: &FeedForwardOutputs<'_>,
) -> Result<(), KernelError> {
    let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = *dims;
    at_least_one(&[("B", batch), ("T", tokens), ("C", width), ("F", hidden)])?;
    length("hidden_states", inputs.hidden_states.len(), &[batch, tokens, width])?;
    length("router_weight", inputs.router_weight.len(), &[width, experts])?;
    length("input_weight", inputs.input_weight.len(), &[experts, width, columns])?;
    length("output_weight", inputs.output_weight.len(), &[experts, hidden, width])?;
    optional_length("output_bias", inputs.output_bias.map(<[_]>::len), &[width])?;
    length("output", outputs.output.len(), &[batch, tokens, width])?;
    optional_length("topk_indices", outputs.topk_indices.as_ref().map(|o| o.len()), &[batch, tokens, top_k])?;
    optional_length("topk_weights", outputs.topk_weights.as_ref().map(|o| o.len()), &[batch, tokens, top_k])
}
