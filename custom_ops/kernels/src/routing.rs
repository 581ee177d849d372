//! From router logits to the rows that each expert computes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_schema::GateMode;

use crate::{KernelError, ThreadPool, pool};

/// Tokens that one task routes.
const TOKENS_PER_TASK: usize = 32;

/// Rows of one expert that one task projects.
const ROWS_PER_TILE: usize = 128;

/// Router columns whose sums are kept in registers together.
const LANES: usize = 16;

/// `router_weight [C, E]` cut into panels `[ceil(E / LANES), C, LANES]`, the last one padded with zeros.
struct RouterPanels {
    data: Vec<[f32; LANES]>,
    width: usize,
}

impl RouterPanels {
    fn pack(router_weight: &[f32], width: usize, experts: usize) -> Self {
        let mut data = vec![[0.0; LANES]; experts.div_ceil(LANES) * width];
        for (panel, first) in data.chunks_mut(width).zip((0..experts).step_by(LANES)) {
            let count = LANES.min(experts - first);
            for (packed, row) in panel.iter_mut().zip(router_weight.chunks_exact(experts)) {
                packed[..count].copy_from_slice(&row[first..first + count]);
            }
        }
        Self { data, width }
    }

    /// `logits [E] = x [C] · router_weight`, each sum in rising order of the column of `x`.
    fn logits(&self, x: &[f32], logits: &mut [f32]) {
        for (index, out) in logits.chunks_mut(LANES).enumerate() {
            let panel = &self.data[index * self.width..][..self.width];
            let mut sums = [0.0; LANES];
            for (value, weights) in x.iter().zip(panel) {
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum += value * weight;
                }
            }
            out.copy_from_slice(&sums[..out.len()]);
        }
    }
}

/// Replaces logits by their softmax.
fn softmax(logits: &mut [f32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for value in logits.iter_mut() {
        *value = (*value - max).exp();
        sum += *value;
    }
    for value in logits.iter_mut() {
        *value /= sum;
    }
}

/// Writes the `k` largest scores, falling, and their experts; of equal scores the lower expert comes first.
fn top_k(scores: &[f32], indices: &mut [i64], weights: &mut [f32]) {
    let mut len = 0;
    for (expert, &score) in scores.iter().enumerate() {
        let at = weights[..len].iter().position(|&kept| score > kept).unwrap_or(len);
        if at == weights.len() {
            continue;
        }
        len = (len + 1).min(weights.len());
        weights.copy_within(at..len - 1, at + 1);
        indices.copy_within(at..len - 1, at + 1);
        weights[at] = score;
        indices[at] = expert as i64;
    }
}

/// Turns the logits of one token into its experts and weights.
fn gate(mode: GateMode, logits: &mut [f32], indices: &mut [i64], weights: &mut [f32]) {
    match mode {
        GateMode::SoftmaxTopk => {
            softmax(logits);
            top_k(logits, indices, weights);
        }
        GateMode::SoftmaxTopkRenorm => {
            softmax(logits);
            top_k(logits, indices, weights);
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        GateMode::TopkSoftmax => {
            top_k(logits, indices, weights);
            softmax(weights);
        }
    }
}

/// What the router of one call reads.
pub(crate) struct RouterInputs<'a> {
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    /// `[C, E]`.
    pub(crate) router_weight: &'a [f32],
    pub(crate) tokens_per_row: usize,
    pub(crate) width: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) gate_mode: GateMode,
}

/// The experts of every token, and the (token, slot) pairs in expert order.
///
/// A pair has the number `token * k + slot`, a token the number `b * T + t`. A row is the place of a pair in expert
/// order: expert by expert, and inside one expert by rising pair. Tokens that are not routed have no rows.
pub(crate) struct Routing {
    pub(crate) top_k: usize,
    /// `[B * T, k]`, falling score; `0 .. k` for a token that is not routed.
    pub(crate) topk_indices: Vec<i64>,
    /// `[B * T, k]`; 0 for a token that is not routed.
    pub(crate) topk_weights: Vec<f32>,
    /// `[E + 1]`: expert `e` owns the rows `expert_offsets[e] .. expert_offsets[e + 1]`.
    expert_offsets: Vec<usize>,
    pairs_by_row: Vec<usize>,
    rows_by_pair: Vec<usize>,
    routed: Vec<bool>,
}

/// Some rows of one expert.
pub(crate) struct RowTile {
    pub(crate) expert: usize,
    pub(crate) rows: Range<usize>,
}

impl Routing {
    /// Routes every token for which `routed` is true; `routed` has one entry per token.
    ///
    /// # Errors
    ///
    /// Names the first routed token with a logit that is not finite.
    pub(crate) fn new(
        pool: &dyn ThreadPool,
        inputs: &RouterInputs<'_>,
        routed: Vec<bool>,
    ) -> Result<Self, KernelError> {
        let (top_k, experts) = (inputs.top_k, inputs.experts);
        if !(1..=experts).contains(&top_k) {
            return Err(KernelError::TopK { top_k, experts });
        }
        let panels = RouterPanels::pack(inputs.router_weight, inputs.width, experts);
        let mut topk_indices: Vec<i64> = (0..routed.len()).flat_map(|_| 0..top_k as i64).collect();
        let mut topk_weights = vec![0.0; routed.len() * top_k];
        let first_bad = AtomicUsize::new(usize::MAX);
        let chunk = TOKENS_PER_TASK * top_k;
        let items = topk_indices.chunks_mut(chunk).zip(topk_weights.chunks_mut(chunk)).enumerate().collect();
        pool::for_each(pool, items, |(task, (indices, weights))| {
            let mut logits = vec![0.0; experts];
            let slots = indices.chunks_mut(top_k).zip(weights.chunks_mut(top_k));
            for (token, (indices, weights)) in (task * TOKENS_PER_TASK..).zip(slots) {
                if !routed[token] {
                    continue;
                }
                panels.logits(&inputs.hidden_states[token * inputs.width..][..inputs.width], &mut logits);
                if logits.iter().all(|logit| logit.is_finite()) {
                    gate(inputs.gate_mode, &mut logits, indices, weights);
                } else {
                    first_bad.fetch_min(token, Ordering::Relaxed);
                }
            }
        });
        match first_bad.into_inner() {
            usize::MAX => Ok(Self::count(experts, top_k, topk_indices, topk_weights, routed)),
            bad => Err(KernelError::RouterLogits {
                batch: bad / inputs.tokens_per_row,
                token: bad % inputs.tokens_per_row,
            }),
        }
    }

    /// Counting sort of the pairs by expert.
    fn count(experts: usize, top_k: usize, topk_indices: Vec<i64>, topk_weights: Vec<f32>, routed: Vec<bool>) -> Self {
        let chosen = || topk_indices.iter().enumerate().filter(|(pair, _)| routed[pair / top_k]);
        let mut expert_offsets = vec![0; experts + 1];
        for (_, &expert) in chosen() {
            expert_offsets[expert as usize + 1] += 1;
        }
        for expert in 0..experts {
            expert_offsets[expert + 1] += expert_offsets[expert];
        }
        let mut next = expert_offsets.clone();
        let mut pairs_by_row = vec![0; expert_offsets[experts]];
        let mut rows_by_pair = vec![0; topk_indices.len()];
        for (pair, &expert) in chosen() {
            let row = &mut next[expert as usize];
            pairs_by_row[*row] = pair;
            rows_by_pair[pair] = *row;
            *row += 1;
        }
        Self { top_k, topk_indices, topk_weights, expert_offsets, pairs_by_row, rows_by_pair, routed }
    }

    /// Rows in all: `k` for each routed token.
    pub(crate) fn rows(&self) -> usize {
        self.pairs_by_row.len()
    }

    /// Tokens, routed or not.
    pub(crate) fn tokens(&self) -> usize {
        self.routed.len()
    }

    /// The pair `token * k + slot` of a row.
    pub(crate) fn pair(&self, row: usize) -> usize {
        self.pairs_by_row[row]
    }

    /// The rows of a token by slot, `None` where it is not routed.
    pub(crate) fn rows_of(&self, token: usize) -> Option<&[usize]> {
        self.routed[token].then(|| &self.rows_by_pair[token * self.top_k..][..self.top_k])
    }

    /// Cuts `out [rows, width]` into tiles of one expert each; experts without rows have none.
    pub(crate) fn split<'a>(&self, mut out: &'a mut [f32], width: usize) -> Vec<(RowTile, &'a mut [f32])> {
        let mut tiles = Vec::new();
        for (expert, bounds) in self.expert_offsets.windows(2).enumerate() {
            for start in (bounds[0]..bounds[1]).step_by(ROWS_PER_TILE) {
                let rows = start..bounds[1].min(start + ROWS_PER_TILE);
                let (chunk, rest) = out.split_at_mut(rows.len() * width);
                out = rest;
                tiles.push((RowTile { expert, rows }, chunk));
            }
        }
        tiles
    }

    /// Copies the choice into the optional outputs, each `[B, T, k]`.
    pub(crate) fn export(&self, topk_indices: Option<&mut [i64]>, topk_weights: Option<&mut [f32]>) {
        if let Some(out) = topk_indices {
            out.copy_from_slice(&self.topk_indices);
        }
        if let Some(out) = topk_weights {
            out.copy_from_slice(&self.topk_weights);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sequential;

    fn select(mode: GateMode, logits: &[f32], k: usize) -> (Vec<i64>, Vec<f32>) {
        let (mut indices, mut weights) = (vec![0; k], vec![0.0; k]);
        gate(mode, &mut logits.to_vec(), &mut indices, &mut weights);
        (indices, weights)
    }

    #[test]
    fn equal_scores_take_the_lower_expert() {
        for mode in GateMode::ALL {
            assert_eq!(select(mode, &[0.0; 5], 3).0, [0, 1, 2]);
            assert_eq!(select(mode, &[1.0, 2.0, 1.0, 2.0, 1.0], 4).0, [1, 3, 0, 2]);
            assert_eq!(select(mode, &[-1.0, 3.0, 5.0, 3.0], 2).0, [2, 1]);
        }
    }

    #[test]
    fn weights_follow_the_mode() {
        let logits = [0.0, f32::ln(2.0), f32::ln(5.0)];
        for (mode, expected) in [
            (GateMode::SoftmaxTopk, [0.625, 0.25]),
            (GateMode::SoftmaxTopkRenorm, [5.0 / 7.0, 2.0 / 7.0]),
            (GateMode::TopkSoftmax, [5.0 / 7.0, 2.0 / 7.0]),
        ] {
            let (indices, weights) = select(mode, &logits, 2);
            assert_eq!(indices, [2, 1]);
            assert!(weights.iter().zip(expected).all(|(w, e)| (w - e).abs() < 1e-6), "{mode:?}: {weights:?}");
        }
    }

    #[test]
    fn rows_are_ordered_by_expert_then_pair() {
        let indices = vec![2, 0, 0, 1, 2, 1];
        let routing = Routing::count(4, 2, indices, vec![0.5; 6], vec![true, false, true]);
        assert_eq!(routing.expert_offsets, [0, 1, 2, 4, 4]);
        assert_eq!(routing.pairs_by_row, [1, 5, 0, 4]);
        assert_eq!(routing.rows_of(0), Some([2, 0].as_slice()));
        assert_eq!(routing.rows_of(1), None);
        let mut out = vec![0.0; 4 * 3];
        let tiles: Vec<_> = routing.split(&mut out, 3).into_iter().map(|(t, c)| (t.expert, t.rows, c.len())).collect();
        assert_eq!(tiles, [(0, 0..1, 3), (1, 1..2, 3), (2, 2..4, 6)]);
    }

    #[test]
    fn first_token_without_finite_logits_is_named() {
        let mut hidden_states = vec![1.0; 6 * 2];
        for token in [1, 4, 5] {
            hidden_states[token * 2] = f32::NAN;
        }
        let inputs = RouterInputs {
            hidden_states: &hidden_states,
            router_weight: &[0.0; 2 * 3],
            tokens_per_row: 3,
            width: 2,
            experts: 3,
            top_k: 1,
            gate_mode: GateMode::SoftmaxTopk,
        };
        let routed = vec![true, false, true, true, true, true];
        let error = Routing::new(&Sequential, &inputs, routed).err();
        assert_eq!(error, Some(KernelError::RouterLogits { batch: 1, token: 1 }));
    }
}
