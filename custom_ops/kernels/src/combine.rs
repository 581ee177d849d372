//! The weighted sum of the experts of each token.

use crate::routing::Routing;
use crate::{ThreadPool, pool};

/// Tokens that one task sums.
const TOKENS_PER_TASK: usize = 32;

/// `output [B * T, C] = bias + Σ over slots of weight · expert_rows`, slots in order; 0 for a token that is not routed.
///
/// `expert_rows` is `[rows of the routing, C]`, `bias` is `[C]`.
pub(crate) fn combine(
    pool: &dyn ThreadPool,
    routing: &Routing,
    expert_rows: &[f32],
    bias: Option<&[f32]>,
    output: &mut [f32],
) {
    let width = output.len() / routing.tokens();
    let items = output.chunks_mut(TOKENS_PER_TASK * width).enumerate().collect();
    pool::for_each(pool, items, |(task, chunk)| {
        for (token, out) in (task * TOKENS_PER_TASK..).zip(chunk.chunks_mut(width)) {
            out.fill(0.0);
            let Some(rows) = routing.rows_of(token) else { continue };
            if let Some(bias) = bias {
                out.copy_from_slice(bias);
            }
            let weights = &routing.topk_weights[token * routing.top_k..];
            for (&row, &weight) in rows.iter().zip(weights) {
                for (sum, &value) in out.iter_mut().zip(&expert_rows[row * width..][..width]) {
                    *sum += weight * value;
                }
            }
        }
    });
}
