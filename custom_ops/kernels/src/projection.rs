//! The two expert projections around an attention.

use crate::ThreadPool;
use crate::combine::combine;
use crate::grouped_gemm::{ExpertWeights, grouped_gemm};
use crate::routing::Routing;

/// Weights and sizes of both projections.
pub(crate) struct AttentionExperts<'a> {
    /// `[E, C, G * D]`.
    pub(crate) query_weight: &'a [f32],
    /// `[E, G * D, C]`.
    pub(crate) output_weight: &'a [f32],
    /// `[C]`.
    pub(crate) output_bias: Option<&'a [f32]>,
    pub(crate) tokens: usize,
    pub(crate) width: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

impl AttentionExperts<'_> {
    /// Queries `[G, rows of the routing, D]` from `hidden_states [B * T, C]`.
    pub(crate) fn project_queries(&self, pool: &dyn ThreadPool, routing: &Routing, hidden_states: &[f32]) -> Vec<f32> {
        let columns = self.kv_heads * self.head;
        let weights = ExpertWeights { data: self.query_weight, rows: self.width, columns };
        let gather = |row: usize, x: &mut [f32]| {
            let token = routing.pair(row) / routing.top_k;
            x.copy_from_slice(&hidden_states[token * self.width..][..self.width]);
        };
        let mut queries = vec![0.0; routing.rows() * columns];
        grouped_gemm(pool, routing, weights, self.head, &gather, &mut queries);
        queries
    }

    /// `output [B * T, C]` from `attended [B, G, T, k, D]`.
    pub(crate) fn project_back(&self, pool: &dyn ThreadPool, routing: &Routing, attended: &[f32], output: &mut [f32]) {
        let (heads, head, top_k) = (self.kv_heads, self.head, routing.top_k);
        let weights = ExpertWeights { data: self.output_weight, rows: heads * head, columns: self.width };
        let gather = |row: usize, x: &mut [f32]| {
            let (token, slot) = (routing.pair(row) / top_k, routing.pair(row) % top_k);
            let (batch, token) = (token / self.tokens, token % self.tokens);
            for (group, x) in x.chunks_mut(head).enumerate() {
                let source = ((batch * heads + group) * self.tokens + token) * top_k + slot;
                x.copy_from_slice(&attended[source * head..][..head]);
            }
        };
        let mut expert_rows = vec![0.0; routing.rows() * self.width];
        grouped_gemm(pool, routing, weights, self.width, &gather, &mut expert_rows);
        combine(pool, routing, &expert_rows, self.output_bias, output);
    }
}
