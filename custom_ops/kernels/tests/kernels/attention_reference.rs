//! Both attention operators in f64, one query at a time, straight from the contract.

use moa_schema::AttentionMode;

use crate::routing_reference::Gate;
use crate::support::{matmul, widen};

/// Everything after keys and values are known.
pub(crate) struct Attend<'a> {
    pub(crate) gate: Gate<'a>,
    /// What the router reads.
    pub(crate) read: &'a [f32],
    pub(crate) hidden_states: &'a [f32],
    pub(crate) width: usize,
    pub(crate) query_weight: &'a [f32],
    pub(crate) output_weight: &'a [f32],
    pub(crate) output_bias: Option<&'a [f32]>,
    /// `[B, G, S, D]`.
    pub(crate) key: &'a [f64],
    pub(crate) value: &'a [f64],
    /// `[B, S]`.
    pub(crate) key_mask: &'a [i32],
    /// Whether token `b * T + t` is routed.
    pub(crate) routed: &'a [bool],
    pub(crate) mode: AttentionMode,
    pub(crate) causal_past: Option<usize>,
    pub(crate) rotary: Option<RotaryReference<'a>>,
    pub(crate) scale: f32,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) keys: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head: usize,
}

/// Rotary caches in f32 as the kernel gets them.
#[derive(Clone, Copy)]
pub(crate) struct RotaryReference<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) position_ids: &'a [i64],
}

impl RotaryReference<'_> {
    pub(crate) fn rotate(&self, token: usize, row: &[f64]) -> Vec<f64> {
        let half = row.len() / 2;
        let angles = self.position_ids[token] as usize * half;
        (0..row.len())
            .map(|i| {
                let (cos, sin) = (self.cos[angles + i % half], self.sin[angles + i % half]);
                let turned = if i < half { -row[i + half] } else { row[i - half] };
                row[i] * f64::from(cos) + turned * f64::from(sin)
            })
            .collect()
    }
}

impl Attend<'_> {
    /// The output `[B * T, C]`, given the kernel's choice of experts, which is checked on the way.
    pub(crate) fn output(&self, topk_indices: &[i64], topk_weights: &[f32]) -> Vec<f64> {
        let (k, width) = (self.gate.top_k, self.width);
        let mut output = Vec::new();
        for token in 0..self.batch * self.tokens {
            let (indices, weights) = (&topk_indices[token * k..][..k], &topk_weights[token * k..][..k]);
            let mut row = vec![0.0; width];
            if self.routed[token] {
                let x = &self.read[token * self.gate.width..][..self.gate.width];
                let weights = self.gate.check(x, indices, weights);
                if let Some(bias) = self.output_bias {
                    row = widen(bias);
                }
                for (&expert, weight) in indices.iter().zip(weights) {
                    let part = self.expert(token, expert as usize);
                    row.iter_mut().zip(part).for_each(|(sum, part)| *sum += weight * part);
                }
            } else {
                self.gate.check_skipped(indices, weights);
            }
            output.extend(row);
        }
        output
    }

    /// One expert's contribution `[C]` to one token, before its weight.
    fn expert(&self, token: usize, expert: usize) -> Vec<f64> {
        let (width, columns) = (self.width, self.kv_heads * self.head);
        let x = widen(&self.hidden_states[token * width..][..width]);
        let query_weight = widen(&self.query_weight[expert * width * columns..][..width * columns]);
        let queries = matmul(&x, &query_weight, 1, width, columns);
        let attended: Vec<f64> =
            queries.chunks(self.head).enumerate().flat_map(|(group, query)| self.head(token, group, query)).collect();
        let output_weight = widen(&self.output_weight[expert * width * columns..][..width * columns]);
        matmul(&attended, &output_weight, 1, columns, width)
    }

    fn head(&self, token: usize, group: usize, query: &[f64]) -> Vec<f64> {
        let (batch, place) = (token / self.tokens, token % self.tokens);
        let query = self.rotary.map_or_else(|| query.to_vec(), |rotary| rotary.rotate(token, query));
        let row = |cache: &[f64], key: usize| {
            let start = ((batch * self.kv_heads + group) * self.keys + key) * self.head;
            cache[start..start + self.head].to_vec()
        };
        let last = self.causal_past.map_or(usize::MAX, |past| past + place);
        let seen: Vec<usize> =
            (0..self.keys).filter(|&key| self.key_mask[batch * self.keys + key] != 0 && key <= last).collect();
        let scores: Vec<f64> = seen
            .iter()
            .map(|&key| {
                let dot: f64 = query.iter().zip(row(self.key, key)).map(|(a, b)| a * b).sum();
                dot * f64::from(self.scale)
            })
            .collect();
        let weights = match self.mode {
            AttentionMode::Softmax => softmax(&scores),
            AttentionMode::StickBreaking => broken_stick(&scores),
        };
        let mut mixed = vec![0.0; self.head];
        for (&key, weight) in seen.iter().zip(weights) {
            mixed.iter_mut().zip(row(self.value, key)).for_each(|(out, value)| *out += weight * value);
        }
        mixed
    }
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
    scores.iter().map(|score| (score - max).exp() / sum).collect()
}

/// `z_j · prod (1 - z_m)` over the keys `m` after `j`, with `z = sigmoid(score)`.
fn broken_stick(scores: &[f64]) -> Vec<f64> {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut weights = vec![1.0; scores.len()];
    for key in (1..scores.len()).rev() {
        weights[key - 1] = weights[key] * sigmoid(-scores[key]);
    }
    weights.iter().zip(scores).map(|(left, score)| left * sigmoid(*score)).collect()
}
