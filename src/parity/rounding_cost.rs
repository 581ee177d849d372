//! What weights of few bits change: the model that an export holds beside the one that was trained.
//!
//! It judges nothing. A graph may compute its rounded weights to the last digit and be another model.

use moa_schema::interface::{ATTENTION_MASK, LOGITS, is_own_past, past_of};

use crate::{
    reference::{Evaluation, ModuleRouting},
    tensor::{NamedTensors, Tensor},
};

use super::compare::distance;

/// A model of rounded weights beside the same model of the checkpoint's own, both evaluated in f64, in runs without
/// cached tokens, on the inputs of a verification, which are random. Padding does not count where the inputs have a
/// mask of tokens.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct RoundingCost {
    /// File name of the graph.
    pub graph: String,
    /// Runs compared.
    pub runs: usize,
    /// Choices of experts: routed tokens, summed over modules.
    pub decisions: usize,
    /// Choices of the same set of experts.
    pub same_experts: usize,
    /// Positions of logits.
    pub positions: usize,
    /// Positions with the same largest logit.
    pub same_best: usize,
    /// Root mean square of the differences of outputs, caches aside, as a part of that of the outputs; infinite where a
    /// value is not finite.
    pub relative_difference: f64,
    /// Largest difference of such an output; infinite where one is not a number.
    pub largest_difference: f64,
    /// Sums of the squares of differences and of outputs.
    #[serde(skip)]
    squares: [f64; 2],
}

/// Whether a case begins without cached tokens.
pub(super) fn is_fresh(inputs: &NamedTensors) -> bool {
    inputs.iter().all(|(name, tensor)| !is_own_past(name) || tensor.shape().contains(&0))
}

impl RoundingCost {
    pub(super) fn of(graph: &str) -> Self {
        Self { graph: graph.into(), ..Self::default() }
    }

    /// Adds a run on `inputs`.
    pub(super) fn add(&mut self, inputs: &NamedTensors, rounded: &Evaluation, trained: &Evaluation) {
        self.runs += 1;
        for (module, trained) in &trained.routing {
            if let Some(rounded) = rounded.routing.get(module) {
                self.add_module(inputs, rounded, trained);
            }
        }
        for (name, trained) in trained.outputs.iter().filter(|(name, _)| past_of(name).is_none()) {
            if let Some(rounded) = rounded.outputs.get(name) {
                self.add_output(inputs, rounded, trained, name == LOGITS);
            }
        }
        let [differences, outputs] = self.squares;
        let relative = (differences / outputs).sqrt();
        self.relative_difference = match differences {
            0.0 => 0.0,
            _ if relative.is_nan() => f64::INFINITY,
            _ => relative,
        };
    }

    fn add_output(&mut self, inputs: &NamedTensors, rounded: &Tensor, trained: &Tensor, logits: bool) {
        let width = trained.shape().last().copied().unwrap_or(0).max(1);
        let tokens = trained.shape().split_last().map_or(&[][..], |(_, tokens)| tokens);
        let (rounded, trained) = (rounded.to_f64(), trained.to_f64());
        let rows = rounded.chunks_exact(width).zip(trained.chunks_exact(width)).enumerate();
        for (_, (rounded, trained)) in rows.filter(|(place, _)| is_real(inputs, tokens, *place)) {
            for (a, b) in rounded.iter().zip(trained) {
                let difference = distance(*a, *b);
                self.largest_difference = self.largest_difference.max(difference);
                self.squares[0] += difference.powi(2);
                self.squares[1] += b.powi(2);
            }
            self.positions += usize::from(logits);
            self.same_best += usize::from(logits && best(rounded) == best(trained));
        }
    }

    fn add_module(&mut self, inputs: &NamedTensors, rounded: &ModuleRouting, trained: &ModuleRouting) {
        let tokens = [trained.choices.batch, trained.choices.tokens];
        let routed =
            trained.routed.iter().enumerate().filter(|(token, routed)| **routed && is_real(inputs, &tokens, *token));
        for (token, _) in routed {
            self.decisions += 1;
            self.same_experts += usize::from(rounded.choices.experts(token) == trained.choices.experts(token));
        }
    }
}

/// Whether token `place` of `tokens`, `[batch, tokens]`, is no padding, as far as a mask of that shape tells.
fn is_real(inputs: &NamedTensors, tokens: &[usize], place: usize) -> bool {
    let mask = inputs.get(ATTENTION_MASK).filter(|mask| mask.shape() == tokens);
    mask.and_then(Tensor::as_i64).and_then(|mask| mask.get(place)).is_none_or(|mask| *mask != 0)
}

/// The place of the largest value.
fn best(values: &[f64]) -> Option<usize> {
    (0..values.len()).reduce(|best, place| if values[place] > values[best] { place } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{reference::ModuleChoices, tensor::TensorData};

    fn tensor(shape: [usize; 3], values: &[f64]) -> Tensor {
        Tensor::new(shape, TensorData::F64(values.to_vec())).unwrap()
    }

    /// Two tokens of two experts each, and logits of three words at two positions.
    fn evaluation(indices: [i64; 4], logits: [f64; 6]) -> Evaluation {
        let choices = ModuleChoices { batch: 1, tokens: 2, top_k: 2, indices: indices.to_vec(), weights: vec![0.5; 4] };
        let routing = ModuleRouting { choices, num_experts: 3, scores: vec![0.0; 6], routed: vec![true; 2] };
        let cache = tensor([1, 1, 1], &[logits[0] * 100.0]);
        Evaluation {
            outputs: [(LOGITS.into(), tensor([1, 2, 3], &logits)), ("present.0.key".into(), cache)].into(),
            routing: [("layer".into(), routing)].into(),
        }
    }

    fn inputs(mask: [i64; 2], past: usize) -> NamedTensors {
        let mask = Tensor::new([1, 2], TensorData::I64(mask.to_vec())).unwrap();
        let cache = tensor([1, past, 1], &vec![0.0; past]);
        [("attention_mask".into(), mask), ("past_key_values.0.key".into(), cache)].into()
    }

    #[test]
    fn tokens_that_are_no_padding_count() {
        let trained = evaluation([0, 1, 0, 1], [0.0, 3.0, 4.0, 0.0, 0.0, 0.0]);
        let mut cost = RoundingCost::of("model.onnx");
        cost.add(&inputs([1, 0], 0), &evaluation([1, 0, 1, 2], [0.0, 3.0, 3.5, 9.0, 0.0, 0.0]), &trained);
        assert_eq!((cost.runs, cost.decisions, cost.same_experts), (1, 1, 1));
        assert_eq!((cost.positions, cost.same_best, cost.largest_difference), (1, 1, 0.5));
        cost.add(&inputs([1, 1], 0), &evaluation([1, 2, 0, 1], [1.0, 3.0, 2.0, 0.0, 0.0, 0.0]), &trained);
        assert_eq!((cost.runs, cost.decisions, cost.same_experts), (2, 3, 2));
        assert_eq!((cost.positions, cost.same_best, cost.largest_difference), (3, 2, 2.0));
        assert_eq!(cost.relative_difference, ((0.25 + 1.0 + 4.0) / 50.0f64).sqrt());
    }

    #[test]
    fn what_is_no_number_is_infinitely_far() {
        let mut cost = RoundingCost::of("model.onnx");
        let same = evaluation([0, 1, 0, 1], [0.0; 6]);
        cost.add(&inputs([1, 1], 0), &same, &same);
        assert_eq!((cost.relative_difference, cost.largest_difference), (0.0, 0.0));
        let nan = evaluation([0, 1, 0, 1], [f64::NAN, 0.0, 0.0, 0.0, 0.0, 0.0]);
        for [rounded, trained] in [[&nan, &same], [&same, &nan]] {
            let mut cost = cost.clone();
            cost.add(&inputs([1, 1], 0), rounded, trained);
            assert_eq!([cost.relative_difference, cost.largest_difference], [f64::INFINITY; 2]);
        }
    }

    #[test]
    fn cached_tokens_are_those_of_another_model() {
        assert!(is_fresh(&inputs([1, 1], 0)) && !is_fresh(&inputs([1, 1], 3)));
        let memory = [("past_key_values.0.encoder.key".into(), tensor([1, 1, 1], &[0.0]))].into();
        assert!(is_fresh(&memory));
    }
}
