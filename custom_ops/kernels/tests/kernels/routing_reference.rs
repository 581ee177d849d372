//! The gate in f64, and the proof that a kernel's choice is a legal top-k.

use moa_schema::GateMode;

use crate::support::{assert_close, matmul, widen};

/// Router of one call.
pub(crate) struct Gate<'a> {
    pub(crate) router_weight: &'a [f32],
    /// Of what it reads.
    pub(crate) width: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) mode: GateMode,
}

fn softmax(values: &[f64]) -> Vec<f64> {
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = values.iter().map(|value| (value - max).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.iter().map(|power| power / sum).collect()
}

impl Gate<'_> {
    /// Checks the experts that a kernel chose for one token against the f64 scores, then returns the f64 weights.
    pub(crate) fn check(&self, x: &[f32], indices: &[i64], weights: &[f32]) -> Vec<f64> {
        let logits = matmul(&widen(x), &widen(self.router_weight), 1, self.width, self.experts);
        let scores = if self.mode == GateMode::TopkSoftmax { logits.clone() } else { softmax(&logits) };
        let chosen: Vec<usize> = indices.iter().map(|&index| usize::try_from(index).unwrap()).collect();
        let slack = 1e-4 * (1.0 + scores.iter().fold(0.0, |max: f64, score| max.max(score.abs())));
        for (slot, &expert) in chosen.iter().enumerate() {
            assert!(!chosen[..slot].contains(&expert), "expert {expert} chosen twice");
            for (other, score) in scores.iter().enumerate() {
                let better = chosen[..slot].contains(&other);
                assert!(better || *score <= scores[expert] + slack, "slot {slot} took {expert} before {other}");
            }
        }
        for (slot, pair) in weights.windows(2).enumerate() {
            assert!(pair[0] >= pair[1], "weights rise at slot {slot}: {weights:?}");
        }
        let picked: Vec<f64> = chosen.iter().map(|&expert| scores[expert]).collect();
        let expected = match self.mode {
            GateMode::SoftmaxTopk => picked,
            GateMode::SoftmaxTopkRenorm => picked.iter().map(|score| score / picked.iter().sum::<f64>()).collect(),
            GateMode::TopkSoftmax => softmax(&picked),
        };
        assert_eq!(weights.len(), self.top_k);
        assert_close("topk_weights", weights, &expected, 1e-5);
        expected
    }

    /// What a skipped token must hold.
    pub(crate) fn check_skipped(&self, indices: &[i64], weights: &[f32]) {
        assert_eq!(indices, (0..self.top_k as i64).collect::<Vec<_>>());
        assert_eq!(weights, vec![0.0; self.top_k]);
    }
}
