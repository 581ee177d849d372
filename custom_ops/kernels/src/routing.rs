//! From router logits to the rows that each expert computes.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use moa_schema::GateMode;

use crate::KernelError;
use crate::buffer::{Buffer, emptied};
use crate::grid::{Claims, Distinct, Grid, Layout, Tile, cut};
use crate::hidden_states::HiddenStates;
use crate::packed::Packed;
use crate::pool::Stage;
use crate::rows::even;
use crate::rows::{IN_ORDER, RowProduct};
use crate::simd::{Isa, LANES};

/// Tokens that one task routes, side by side.
const TOKENS_PER_TASK: usize = LANES;

/// Most experts: up to here f32, in which they are counted, has every whole number.
const MOST_EXPERTS: usize = 1 << f32::MANTISSA_DIGITS;

/// Turns the logits of up to 16 tokens, `[E][token]`, into their `k` largest scores, falling, and the experts of these,
/// `[k][token]` each; of equal scores the lower expert comes first. Experts are counted in f32. Overwrites the logits.
fn gate(
    isa: Isa,
    mode: GateMode,
    logits: &mut [[f32; LANES]],
    weights: &mut [[f32; LANES]],
    experts: &mut [[f32; LANES]],
) {
    let softmax = |scores: &mut [[f32; LANES]]| {
        let (mut max, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        isa.softmax_lanes(scores, &mut max, &mut sum);
        isa.divide_lanes(scores.as_flattened_mut(), &sum);
    };
    match mode {
        GateMode::SoftmaxTopk => {
            softmax(logits);
            isa.top_lanes(logits, weights, experts);
        }
        GateMode::SoftmaxTopkRenorm => {
            softmax(logits);
            isa.top_lanes(logits, weights, experts);
            let mut sum = [0.0; LANES];
            weights.iter().for_each(|slot| sum.iter_mut().zip(slot).for_each(|(sum, weight)| *sum += weight));
            isa.divide_lanes(weights.as_flattened_mut(), &sum);
        }
        GateMode::TopkSoftmax => {
            isa.top_lanes(logits, weights, experts);
            softmax(weights);
        }
    }
}

/// What the router of a layer has chosen, and the (token, slot) pairs in expert order.
///
/// A pair has the number `token * k + slot`, a token the number `b * T + t`. A row is the place of a pair in expert
/// order: expert by expert, and inside one expert by rising pair. Tokens that are not routed have no rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Routing<'a> {
    pub(crate) top_k: usize,
    /// `[B * T]`.
    pub(crate) routed: &'a [bool],
    /// `[B * T, k]`, falling; 0 for a token that is not routed.
    pub(crate) topk_weights: &'a [f32],
    by_expert: &'a ByExpert,
}

/// The pairs in expert order.
#[derive(Debug, Default)]
pub(crate) struct ByExpert {
    /// `[E + 1]`: expert `e` owns the rows `offsets[e] .. offsets[e + 1]`.
    offsets: Vec<usize>,
    next: Vec<usize>,
    pairs_by_row: Distinct,
}

/// Memory that routing keeps between calls.
#[derive(Debug, Default)]
pub(crate) struct RoutingScratch {
    routed: Vec<bool>,
    topk_indices: Vec<i64>,
    topk_weights: Vec<f32>,
    by_expert: ByExpert,
    scratch: Buffer,
    bounds: [Vec<usize>; 2],
    claims: [Claims; 3],
}

/// What the router of one call reads.
pub(crate) struct RouterInputs<'a> {
    /// `[B * T, R]`: the hidden states, or what the router reads instead.
    pub(crate) read: HiddenStates<'a>,
    /// `[R, E]`.
    pub(crate) router_weight: &'a Packed,
    pub(crate) tokens_per_row: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) gate_mode: GateMode,
}

/// The stage that chooses experts and their weights, `[B * T, k]` each, by falling score; `0 .. k` and 0 for a token
/// that is not routed.
pub(crate) struct Router<'a> {
    isa: Isa,
    inputs: RouterInputs<'a>,
    routed: &'a [bool],
    /// For each task: logits by token, then by expert, then what is chosen.
    scratch: Grid<'a, f32>,
    indices: Grid<'a, i64>,
    weights: Grid<'a, f32>,
    first_bad: AtomicUsize,
}

impl Stage for Router<'_> {
    fn tasks(&self) -> usize {
        self.scratch.len()
    }

    fn run(&self, index: usize) {
        let tiles = (self.scratch.tile(index), self.indices.tile(index), self.weights.tile(index));
        let (Some(mut scratch), Some(mut indices), Some(mut weights)) = tiles else { return };
        let RouterInputs { experts, top_k, .. } = self.inputs;
        let (first, count) = (indices.first_row(), indices.rows());
        let (logits, lanes) = scratch.row(0).split_at_mut(TOKENS_PER_TASK * experts);
        self.logits(first, &mut logits[..count * experts]);
        let side_by_side = &mut lanes[..experts * LANES];
        if count < LANES {
            side_by_side.fill(0.0);
        }
        self.isa.interleave(logits, experts, count, side_by_side);
        let (lanes, _) = lanes.as_chunks_mut::<LANES>();
        let (by_expert, chosen) = lanes.split_at_mut(experts);
        let (chosen_weights, chosen_experts) = chosen.split_at_mut(top_k);
        gate(self.isa, self.inputs.gate_mode, by_expert, chosen_weights, chosen_experts);
        for row in (0..count).filter(|row| self.routed[first + row]) {
            if logits[row * experts..][..experts].iter().any(|logit| !logit.is_finite()) {
                self.first_bad.fetch_min(first + row, Ordering::Relaxed);
                continue;
            }
            weights.row(row).iter_mut().zip(&*chosen_weights).for_each(|(out, slot)| *out = slot[row]);
            indices.row(row).iter_mut().zip(&*chosen_experts).for_each(|(out, slot)| *out = slot[row] as i64);
        }
    }
}

impl<'a> Router<'a> {
    /// Computes the logits of the tokens from `first` on, `[token, E]`.
    fn logits(&self, first: usize, logits: &mut [f32]) {
        let RouterInputs { read, experts, .. } = self.inputs;
        let starts: [usize; TOKENS_PER_TASK] = std::array::from_fn(|row| read.start(first + row));
        RowProduct::new(read.rows(&starts[..logits.len() / experts]), self.inputs.router_weight, &IN_ORDER, experts)
            .compute(self.isa.without_tiles().keeping_rows(), &mut Tile::dense(logits, experts));
    }

    /// The experts `[k]` of a token, once all tasks have ended; `None` before, and where the token is not routed.
    pub(crate) fn experts_of(&self, token: usize) -> Option<&[i64]> {
        let top_k = self.inputs.top_k;
        let chosen = self.indices.finished()?;
        self.routed[token].then(|| &chosen[token * top_k..][..top_k])
    }

    /// Names the first routed token with a logit that is not finite.
    pub(crate) fn check(&self) -> Result<(), KernelError> {
        match self.first_bad.load(Ordering::Relaxed) {
            usize::MAX => Ok(()),
            bad => Err(KernelError::RouterLogits {
                batch: bad / self.inputs.tokens_per_row,
                token: bad % self.inputs.tokens_per_row,
            }),
        }
    }

    /// What was chosen, in expert order, once all tasks have ended; `None` where one was left out.
    pub(crate) fn routing<'b>(&self, by_expert: &'b mut ByExpert) -> Option<Routing<'b>>
    where
        'a: 'b,
    {
        let RouterInputs { experts, top_k, .. } = self.inputs;
        let (indices, topk_weights) = (self.indices.finished()?, self.weights.finished()?);
        by_expert.sort(experts, top_k, self.routed, indices);
        Some(Routing { top_k, routed: self.routed, topk_weights, by_expert })
    }

    /// Copies the choice into the optional outputs, each `[B, T, k]`, once all tasks have ended.
    pub(crate) fn export(&self, topk_indices: Option<&mut [i64]>, topk_weights: Option<&mut [f32]>) {
        if let Some((out, indices)) = topk_indices.zip(self.indices.finished()) {
            out.copy_from_slice(indices);
        }
        if let Some((out, weights)) = topk_weights.zip(self.weights.finished()) {
            out.copy_from_slice(weights);
        }
    }
}

impl ByExpert {
    /// Counting sort of the pairs of routed tokens.
    fn sort(&mut self, experts: usize, top_k: usize, routed: &[bool], indices: &[i64]) {
        let Self { offsets, next, pairs_by_row } = self;
        emptied(offsets, experts + 1).resize(experts + 1, 0);
        for (experts, _) in indices.chunks_exact(top_k).zip(routed).filter(|(_, routed)| **routed) {
            experts.iter().for_each(|&expert| offsets[expert as usize + 1] += 1);
        }
        for expert in 0..experts {
            offsets[expert + 1] += offsets[expert];
        }
        emptied(next, offsets.len()).extend_from_slice(offsets);
        let pairs = indices.chunks_exact(top_k).zip(routed).enumerate().filter(|(_, (_, routed))| **routed);
        let pairs = pairs.flat_map(|(token, _)| token * top_k..(token + 1) * top_k);
        pairs_by_row.fill(offsets[experts], pairs, |pair| {
            let next = &mut next[indices[pair] as usize];
            *next += 1;
            *next - 1
        });
    }
}

impl RoutingScratch {
    /// Says which tokens are routed, and prepares the stage that routes them.
    ///
    /// # Errors
    ///
    /// [`KernelError::TopK`] where `top_k` does not fit the experts, [`KernelError::Experts`] where they are too many.
    pub(crate) fn router<'a>(
        &'a mut self,
        isa: Isa,
        inputs: RouterInputs<'a>,
        routed: impl Iterator<Item = bool>,
    ) -> Result<(Router<'a>, &'a mut ByExpert), KernelError> {
        let (top_k, experts) = (inputs.top_k, inputs.experts);
        if !(1..=experts).contains(&top_k) {
            return Err(KernelError::TopK { top_k, experts });
        }
        if experts > MOST_EXPERTS {
            return Err(KernelError::Experts { experts, most: MOST_EXPERTS });
        }
        emptied(&mut self.routed, inputs.read.tokens()).extend(routed);
        let tokens = self.routed.len();
        emptied(&mut self.topk_indices, tokens * top_k).extend((0..tokens).flat_map(|_| 0..top_k as i64));
        emptied(&mut self.topk_weights, tokens * top_k).resize(tokens * top_k, 0.0);
        let [tasks, bounds] = &mut self.bounds;
        cut(tasks, tokens.div_ceil(TOKENS_PER_TASK), 1);
        cut(bounds, tokens, TOKENS_PER_TASK);
        let [a, b, c] = &mut self.claims;
        let scratch_len = TOKENS_PER_TASK * (2 * experts + 2 * top_k);
        let scratch = self.scratch.take(tokens.div_ceil(TOKENS_PER_TASK) * scratch_len);
        let router = Router {
            isa,
            inputs,
            routed: &self.routed,
            scratch: Grid::new(scratch, Layout::whole(scratch_len), tasks, a),
            indices: Grid::new(&mut self.topk_indices, Layout::whole(top_k), bounds, b),
            weights: Grid::new(&mut self.topk_weights, Layout::whole(top_k), bounds, c),
            first_bad: AtomicUsize::new(usize::MAX),
        };
        Ok((router, &mut self.by_expert))
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        let ([tasks, bounds], ByExpert { offsets, next, pairs_by_row }) = (&self.bounds, &self.by_expert);
        let words: usize = [offsets, next, tasks, bounds].iter().map(|v| v.capacity()).sum();
        let words = words + self.topk_indices.capacity();
        let lists = words * 8 + self.topk_weights.capacity() * 4 + self.routed.capacity() + pairs_by_row.bytes();
        lists + self.scratch.bytes() + Claims::bytes(&self.claims)
    }
}

impl<'a> Routing<'a> {
    /// Rows in all: `k` for each routed token.
    pub(crate) fn rows(self) -> usize {
        self.by_expert.pairs_by_row.numbers().len()
    }

    /// The pairs by row.
    pub(crate) fn order(self) -> &'a Distinct {
        &self.by_expert.pairs_by_row
    }

    /// Tokens, routed or not.
    pub(crate) fn tokens(self) -> usize {
        self.routed.len()
    }

    /// The pair `token * k + slot` of a row.
    pub(crate) fn pair(self, row: usize) -> usize {
        self.by_expert.pairs_by_row.numbers()[row]
    }

    /// The rows of each expert.
    pub(crate) fn experts(self) -> impl Iterator<Item = (usize, Range<usize>)> {
        self.by_expert.offsets.windows(2).map(|bounds| bounds[0]..bounds[1]).enumerate()
    }

    /// Those of `rows`, the rows of one expert, that belong to `tokens`.
    pub(crate) fn within(self, rows: Range<usize>, tokens: &Range<usize>) -> Range<usize> {
        let pairs = &self.by_expert.pairs_by_row.numbers()[rows.clone()];
        let before = |token: usize| rows.start + pairs.partition_point(|&pair| pair < token * self.top_k);
        before(tokens.start)..before(tokens.end)
    }

    /// Cuts the rows of each expert into the fewest tiles of at most `most` rows, as even as can be: where each begins,
    /// and whose it is.
    pub(crate) fn tiles(self, most: usize) -> impl Iterator<Item = (usize, usize)> {
        self.experts().flat_map(move |(expert, rows)| even(rows, most).map(move |tile| (tile.start, expert)))
    }
}

/// The tiles of all experts, for a stage whose tasks compute them; kept between calls.
#[derive(Debug, Default)]
pub(crate) struct ExpertTiles {
    /// Whose each tile is.
    pub(crate) experts: Vec<usize>,
    /// Where each tile begins, and where the last one ends.
    pub(crate) bounds: Vec<usize>,
}

impl ExpertTiles {
    /// Lists the tiles of at most `most` rows.
    pub(crate) fn fill(&mut self, routing: Routing<'_>, most: usize) {
        let most_tiles = routing.rows() / most + routing.by_expert.offsets.len();
        emptied(&mut self.experts, most_tiles).extend(routing.tiles(most).map(|(_, expert)| expert));
        emptied(&mut self.bounds, most_tiles).extend(routing.tiles(most).map(|(start, _)| start));
        self.bounds.push(routing.rows());
    }

    /// Bytes held between calls.
    pub(crate) fn bytes(&self) -> usize {
        (self.experts.capacity() + self.bounds.capacity()) * size_of::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;
    use crate::simd::Instructions;
    use crate::{Sequential, pool};

    fn isa() -> Isa {
        Isa::at_most(Instructions::default())
    }

    fn select(mode: GateMode, logits: &[f32], k: usize) -> (Vec<i64>, Vec<f32>) {
        let mut lanes: Vec<_> = logits.iter().map(|logit| [*logit; LANES]).collect();
        let (mut experts, mut weights) = (vec![[f32::NAN; LANES]; k], vec![[f32::NAN; LANES]; k]);
        gate(isa(), mode, &mut lanes, &mut weights, &mut experts);
        assert!(weights.iter().chain(&experts).all(|slot| *slot == [slot[0]; LANES]));
        (experts.iter().map(|slot| slot[3] as i64).collect(), weights.iter().map(|slot| slot[3]).collect())
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
        let (mut by_expert, routed) = (ByExpert::default(), [true, false, true]);
        by_expert.sort(4, 2, &routed, &[2, 0, 0, 1, 2, 1]);
        assert_eq!(by_expert.offsets, [0, 1, 2, 4, 4]);
        let routing = Routing { top_k: 2, routed: &routed, topk_weights: &[0.5; 6], by_expert: &by_expert };
        assert_eq!(routing.order().numbers(), [1, 5, 0, 4]);
        assert_eq!(routing.tiles(1).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2), (3, 2)]);
        assert_eq!(routing.tiles(8).collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 2)]);
        assert_eq!(routing.within(2..4, &(0..1)), 2..3);
        assert_eq!(routing.within(2..4, &(1..3)), 3..4);
    }

    #[test]
    fn experts_that_f32_cannot_tell_apart_are_refused() {
        assert_eq!([MOST_EXPERTS - 1, MOST_EXPERTS].map(|expert| expert as f32 as usize), [16_777_215, 16_777_216]);
        let weight = Packed::new(Geometry { matrices: 1, blocks: 1, inner: 1, columns: 1 }, &[0.0f32]).unwrap();
        let refused = |experts| {
            let mut memory = Buffer::default();
            let inputs = RouterInputs {
                read: HiddenStates::new(isa(), &[0.0f32; 0], 1, &mut memory),
                router_weight: &weight,
                tokens_per_row: 1,
                experts,
                top_k: 1,
                gate_mode: GateMode::SoftmaxTopk,
            };
            RoutingScratch::default().router(isa(), inputs, std::iter::empty()).err()
        };
        assert_eq!(refused(MOST_EXPERTS), None);
        let (experts, most) = (MOST_EXPERTS + 1, MOST_EXPERTS);
        assert_eq!(refused(experts), Some(KernelError::Experts { experts, most }));
    }

    #[test]
    fn first_token_without_finite_logits_is_named() {
        let (mut hidden_states, mut memory) = (vec![1.0f32; 6 * 2], Buffer::default());
        for token in [1, 4, 5] {
            hidden_states[token * 2] = f32::NAN;
        }
        let weight = Packed::new(Geometry { matrices: 1, blocks: 1, inner: 2, columns: 3 }, &[0.0f32; 2 * 3]).unwrap();
        let inputs = RouterInputs {
            read: HiddenStates::new(isa(), &hidden_states, 2, &mut memory),
            router_weight: &weight,
            tokens_per_row: 3,
            experts: 3,
            top_k: 1,
            gate_mode: GateMode::SoftmaxTopk,
        };
        let mut scratch = RoutingScratch::default();
        let routed = [true, false, true, true, true, true];
        let (router, _) = scratch.router(isa(), inputs, routed.into_iter()).unwrap();
        pool::run(&Sequential, &[&router]);
        assert_eq!(router.check(), Err(KernelError::RouterLogits { batch: 1, token: 1 }));
    }
}
