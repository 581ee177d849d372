//! From router logits to the rows that each expert computes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_schema::GateMode;

use crate::KernelError;
use crate::buffer::Buffer;
use crate::grid::{Claims, Distinct, Grid, Layout, cut};
use crate::packed::Packed;
use crate::pool::Stage;
use crate::rows::RowProduct;
use crate::simd::{Isa, Left};

/// Tokens that one task routes.
const TOKENS_PER_TASK: usize = 16;

/// Replaces logits by their softmax.
fn softmax(isa: Isa, logits: &mut [f32]) {
    let (_, sum) = isa.softmax(logits, f32::NEG_INFINITY);
    isa.divide(logits, sum);
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
fn gate(isa: Isa, mode: GateMode, logits: &mut [f32], indices: &mut [i64], weights: &mut [f32]) {
    match mode {
        GateMode::SoftmaxTopk => {
            softmax(isa, logits);
            top_k(logits, indices, weights);
        }
        GateMode::SoftmaxTopkRenorm => {
            softmax(isa, logits);
            top_k(logits, indices, weights);
            let sum: f32 = weights.iter().sum();
            weights.iter_mut().for_each(|weight| *weight /= sum);
        }
        GateMode::TopkSoftmax => {
            top_k(logits, indices, weights);
            softmax(isa, weights);
        }
    }
}

/// The experts of every token, and the (token, slot) pairs in expert order.
///
/// A pair has the number `token * k + slot`, a token the number `b * T + t`. A row is the place of a pair in expert
/// order: expert by expert, and inside one expert by rising pair. Tokens that are not routed have no rows.
#[derive(Debug, Default)]
pub(crate) struct Routing {
    pub(crate) top_k: usize,
    /// `[B * T]`: set by the caller before the gate runs.
    pub(crate) routed: Vec<bool>,
    /// `[B * T, k]`, falling score; `0 .. k` for a token that is not routed.
    pub(crate) topk_indices: Vec<i64>,
    /// `[B * T, k]`; 0 for a token that is not routed.
    pub(crate) topk_weights: Vec<f32>,
    /// `[E + 1]`: expert `e` owns the rows `expert_offsets[e] .. expert_offsets[e + 1]`.
    expert_offsets: Vec<usize>,
    next: Vec<usize>,
    pairs_by_row: Distinct,
    logits: Buffer,
    bounds: Vec<usize>,
    claims: [Claims; 3],
}

/// What the router of one call reads.
pub(crate) struct RouterInputs<'a> {
    /// `[B * T, C]`.
    pub(crate) hidden_states: &'a [f32],
    /// `[C, E]`.
    pub(crate) router_weight: &'a Packed,
    pub(crate) tokens_per_row: usize,
    pub(crate) width: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) gate_mode: GateMode,
}

/// The stage that fills `topk_indices` and `topk_weights`.
pub(crate) struct Router<'a> {
    isa: Isa,
    inputs: &'a RouterInputs<'a>,
    routed: &'a [bool],
    logits: Grid<'a, f32>,
    indices: Grid<'a, i64>,
    weights: Grid<'a, f32>,
    first_bad: AtomicUsize,
}

impl Stage for Router<'_> {
    fn tasks(&self) -> usize {
        self.logits.len()
    }

    fn run(&self, index: usize) {
        let tiles = (self.logits.tile(index), self.indices.tile(index), self.weights.tile(index));
        let (Some(mut logits), Some(mut indices), Some(mut weights)) = tiles else { return };
        let (first, count, width) = (logits.first_row(), logits.rows(), self.inputs.width);
        let starts: [usize; TOKENS_PER_TASK] = std::array::from_fn(|row| (first + row) * width);
        let rows: [usize; TOKENS_PER_TASK] = std::array::from_fn(|row| row);
        RowProduct {
            left: Left { data: self.inputs.hidden_states, starts: &starts[..count], inner: width },
            weights: self.inputs.router_weight,
            matrix: 0,
            block: 0,
            first_column: 0,
            columns: self.inputs.experts,
            rows: &rows,
            factors: None,
        }
        .compute(self.isa, &mut logits);
        for row in 0..count {
            if !self.routed[first + row] {
                continue;
            }
            let logits = logits.row(row);
            if logits.iter().all(|logit| logit.is_finite()) {
                gate(self.isa, self.inputs.gate_mode, logits, indices.row(row), weights.row(row));
            } else {
                self.first_bad.fetch_min(first + row, Ordering::Relaxed);
            }
        }
    }
}

impl Router<'_> {
    /// Names the first routed token with a logit that is not finite.
    pub(crate) fn finish(self) -> Result<(), KernelError> {
        match self.first_bad.into_inner() {
            usize::MAX => Ok(()),
            bad => Err(KernelError::RouterLogits {
                batch: bad / self.inputs.tokens_per_row,
                token: bad % self.inputs.tokens_per_row,
            }),
        }
    }
}

impl Routing {
    /// Says which tokens are routed, and prepares the stage that routes them.
    ///
    /// # Errors
    ///
    /// [`KernelError::TopK`] where `top_k` does not fit the experts.
    pub(crate) fn router<'a>(
        &'a mut self,
        isa: Isa,
        inputs: &'a RouterInputs<'a>,
        routed: impl Iterator<Item = bool>,
    ) -> Result<Router<'a>, KernelError> {
        let (top_k, experts) = (inputs.top_k, inputs.experts);
        if !(1..=experts).contains(&top_k) {
            return Err(KernelError::TopK { top_k, experts });
        }
        self.top_k = top_k;
        self.routed.clear();
        self.routed.extend(routed);
        let tokens = self.routed.len();
        self.topk_indices.clear();
        self.topk_indices.extend((0..tokens).flat_map(|_| 0..top_k as i64));
        self.topk_weights.clear();
        self.topk_weights.resize(tokens * top_k, 0.0);
        cut(&mut self.bounds, tokens, TOKENS_PER_TASK);
        let (bounds, [a, b, c]) = (&self.bounds, &mut self.claims);
        Ok(Router {
            isa,
            inputs,
            routed: &self.routed,
            logits: Grid::new(self.logits.take(tokens * experts), Layout::whole(experts), bounds, a),
            indices: Grid::new(&mut self.topk_indices, Layout::whole(top_k), bounds, b),
            weights: Grid::new(&mut self.topk_weights, Layout::whole(top_k), bounds, c),
            first_bad: AtomicUsize::new(usize::MAX),
        })
    }

    /// Counting sort of the pairs by expert, after the router has run.
    pub(crate) fn count(&mut self, experts: usize) {
        let (top_k, routed, indices) = (self.top_k, &self.routed, &self.topk_indices);
        self.expert_offsets.clear();
        self.expert_offsets.resize(experts + 1, 0);
        for (experts, _) in indices.chunks_exact(top_k).zip(routed).filter(|(_, routed)| **routed) {
            experts.iter().for_each(|&expert| self.expert_offsets[expert as usize + 1] += 1);
        }
        for expert in 0..experts {
            self.expert_offsets[expert + 1] += self.expert_offsets[expert];
        }
        let next = &mut self.next;
        next.clone_from(&self.expert_offsets);
        let pairs = indices.chunks_exact(top_k).zip(routed).enumerate().filter(|(_, (_, routed))| **routed);
        let pairs = pairs.flat_map(|(token, _)| token * top_k..(token + 1) * top_k);
        self.pairs_by_row.fill(self.expert_offsets[experts], pairs, |pair| {
            let next = &mut next[indices[pair] as usize];
            *next += 1;
            *next - 1
        });
    }

    /// Rows in all: `k` for each routed token.
    pub(crate) fn rows(&self) -> usize {
        self.pairs_by_row.numbers().len()
    }

    /// The pairs by row.
    pub(crate) fn order(&self) -> &Distinct {
        &self.pairs_by_row
    }

    /// Tokens, routed or not.
    pub(crate) fn tokens(&self) -> usize {
        self.routed.len()
    }

    /// The pair `token * k + slot` of a row.
    pub(crate) fn pair(&self, row: usize) -> usize {
        self.pairs_by_row.numbers()[row]
    }

    /// The rows of each expert.
    pub(crate) fn experts(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.expert_offsets.windows(2).map(|bounds| bounds[0]..bounds[1]).enumerate()
    }

    /// Those of `rows`, the rows of one expert, that belong to `tokens`.
    pub(crate) fn within(&self, rows: Range<usize>, tokens: &Range<usize>) -> Range<usize> {
        let pairs = &self.pairs_by_row.numbers()[rows.clone()];
        let before = |token: usize| rows.start + pairs.partition_point(|&pair| pair < token * self.top_k);
        before(tokens.start)..before(tokens.end)
    }

    /// Cuts the rows into tiles of one expert and at most `step` rows: where each begins, and whose it is.
    pub(crate) fn tiles(&self, step: usize) -> impl Iterator<Item = (usize, usize)> {
        self.experts().flat_map(move |(expert, rows)| rows.step_by(step).map(move |start| (start, expert)))
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

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let words = [&self.expert_offsets, &self.next, &self.bounds];
        let words: usize =
            words.iter().map(|v| v.capacity()).sum::<usize>() + self.topk_indices.capacity() + self.rows();
        words * 8 + self.topk_weights.capacity() * 4 + self.routed.capacity() + self.logits.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::Geometry;
    use crate::simd::Instructions;
    use crate::{Sequential, pool};

    fn isa() -> Isa {
        Isa::at_most(Instructions::default())
    }

    fn select(mode: GateMode, logits: &[f32], k: usize) -> (Vec<i64>, Vec<f32>) {
        let (mut indices, mut weights) = (vec![0; k], vec![0.0; k]);
        gate(isa(), mode, &mut logits.to_vec(), &mut indices, &mut weights);
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
        let mut routing = Routing {
            top_k: 2,
            topk_indices: vec![2, 0, 0, 1, 2, 1],
            routed: vec![true, false, true],
            ..Routing::default()
        };
        routing.count(4);
        assert_eq!(routing.expert_offsets, [0, 1, 2, 4, 4]);
        assert_eq!(routing.order().numbers(), [1, 5, 0, 4]);
        assert_eq!(routing.tiles(1).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2), (3, 2)]);
        assert_eq!(routing.tiles(8).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(routing.within(2..4, &(0..1)), 2..3);
        assert_eq!(routing.within(2..4, &(1..3)), 3..4);
    }

    #[test]
    fn first_token_without_finite_logits_is_named() {
        let mut hidden_states = vec![1.0; 6 * 2];
        for token in [1, 4, 5] {
            hidden_states[token * 2] = f32::NAN;
        }
        let weight = Packed::new(Geometry { matrices: 1, blocks: 1, inner: 2, columns: 3 }, &[0.0f32; 2 * 3]).unwrap();
        let inputs = RouterInputs {
            hidden_states: &hidden_states,
            router_weight: &weight,
            tokens_per_row: 3,
            width: 2,
            experts: 3,
            top_k: 1,
            gate_mode: GateMode::SoftmaxTopk,
        };
        let mut routing = Routing::default();
        let routed = [true, false, true, true, true, true];
        let router = routing.router(isa(), &inputs, routed.into_iter()).unwrap();
        pool::run(&Sequential, &[&router]);
        assert_eq!(router.finish(), Err(KernelError::RouterLogits { batch: 1, token: 1 }));
    }
}
