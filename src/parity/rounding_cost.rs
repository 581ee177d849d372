//! What weights of few bits change: the model that an export holds beside the one that was trained.
//!
//! It judges nothing. A graph may compute its rounded weights to the last digit and be another model.

use crate::{
    reference::{Evaluation, ModuleRouting},
    tensor::{NamedTensors, Tensor},
};

use super::graph_check::LOGITS;

/// A model of rounded weights beside the same model of the checkpoint's own, in runs without cached tokens, on the
/// inputs of a verification, which are random. Each graph is given what the rounded ones before it have computed.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct RoundingCost {
    /// File name of the graph.
    pub graph: String,
    /// Runs compared.
    pub runs: usize,
    /// Routed tokens, summed over modules.
    pub decisions: usize,
    /// Tokens with the same set of experts.
    pub same_experts: usize,
    /// Positions of logits that are not padding.
    pub positions: usize,
    /// Positions with the same largest logit.
    pub same_best: usize,
    /// Root mean square of the differences of outputs, as a part of that of the outputs.
    pub relative_difference: f64,
    /// Largest difference of an output.
    pub largest_difference: f64,
    /// Sums of the squares of differences and of outputs.
    #[serde(skip)]
    squares: [f64; 2],
}

/// Whether a case begins without cached tokens.
pub(super) fn is_fresh(inputs: &NamedTensors) -> bool {
    let caches = |name: &str| name.starts_with("past_key_values.") && !name.contains(".encoder.");
    inputs.iter().all(|(name, tensor)| !caches(name) || tensor.shape().contains(&0))
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
                self.add_module(rounded, trained);
            }
        }
        for (name, trained) in &trained.outputs {
            let Some(rounded) = rounded.outputs.get(name) else { continue };
            let (rounded, values) = (rounded.to_f64(), trained.to_f64());
            for (a, b) in rounded.iter().zip(&values) {
                self.largest_difference = self.largest_difference.max((a - b).abs());
                self.squares[0] += (a - b).powi(2);
                self.squares[1] += b.powi(2);
            }
            if name == LOGITS {
                let width = trained.shape().last().copied().unwrap_or(0).max(1);
                let rows = rounded.chunks_exact(width).zip(values.chunks_exact(width));
                let real = |place: &usize| is_real(inputs, trained, *place);
                for (_, (rounded, trained)) in rows.enumerate().filter(|(place, _)| real(place)) {
                    self.positions += 1;
                    self.same_best += usize::from(best(rounded) == best(trained));
                }
            }
        }
        let [differences, outputs] = self.squares;
        self.relative_difference = if outputs > 0.0 { (differences / outputs).sqrt() } else { 0.0 };
    }

    fn add_module(&mut self, rounded: &ModuleRouting, trained: &ModuleRouting) {
        let top_k = trained.choices.top_k.max(1);
        let sets = |routing: &ModuleRouting| -> Vec<Vec<i64>> {
            let sorted = |experts: &[i64]| {
                let mut experts = experts.to_vec();
                experts.sort_unstable();
                experts
            };
            routing.choices.indices.chunks_exact(top_k).map(sorted).collect()
        };
        for ((rounded, trained), routed) in sets(rounded).iter().zip(sets(trained)).zip(&trained.routed) {
            self.decisions += usize::from(*routed);
            self.same_experts += usize::from(*routed && *rounded == trained);
        }
    }
}

/// Whether position `place` of logits `[batch, positions, width]` is no padding, as far as a mask of that shape tells.
fn is_real(inputs: &NamedTensors, logits: &Tensor, place: usize) -> bool {
    let mask = inputs.get("attention_mask").filter(|mask| logits.shape().starts_with(mask.shape()));
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

    /// Two tokens of two experts each, the second of them not routed, and logits of three words at two positions.
    fn evaluation(indices: [i64; 4], logits: [f64; 6]) -> Evaluation {
        let choices = ModuleChoices { batch: 1, tokens: 2, top_k: 2, indices: indices.to_vec(), weights: vec![0.5; 4] };
        let routing = ModuleRouting { choices, num_experts: 3, scores: vec![0.0; 6], routed: vec![true, false] };
        Evaluation {
            outputs: [(LOGITS.into(), tensor([1, 2, 3], &logits))].into(),
            routing: [("layer".into(), routing)].into(),
        }
    }

    fn inputs(mask: [i64; 2], past: usize) -> NamedTensors {
        let mask = Tensor::new([1, 2], TensorData::I64(mask.to_vec())).unwrap();
        let cache = tensor([1, past, 1], &vec![0.0; past]);
        [("attention_mask".into(), mask), ("past_key_values.0.key".into(), cache)].into()
    }

    #[test]
    fn routed_tokens_and_real_positions_count() {
        let trained = evaluation([0, 1, 0, 1], [0.0, 3.0, 4.0, 0.0, 0.0, 0.0]);
        let mut cost = RoundingCost::of("model.onnx");
        let rounded = evaluation([1, 0, 1, 2], [0.0, 3.0, 3.5, 9.0, 0.0, 0.0]);
        cost.add(&inputs([1, 0], 0), &rounded, &trained);
        assert_eq!((cost.runs, cost.decisions, cost.same_experts), (1, 1, 1));
        assert_eq!((cost.positions, cost.same_best, cost.largest_difference), (1, 1, 9.0));
        cost.add(&inputs([1, 1], 0), &evaluation([1, 2, 0, 1], [0.0, 3.0, 2.0, 0.0, 0.0, 0.0]), &trained);
        assert_eq!((cost.runs, cost.decisions, cost.same_experts), (2, 2, 1));
        assert_eq!((cost.positions, cost.same_best), (3, 2));
        let squares = 0.5f64.powi(2) + 9.0f64.powi(2) + 2.0f64.powi(2);
        assert_eq!(cost.relative_difference, (squares / 50.0).sqrt());
    }

    #[test]
    fn cached_tokens_are_those_of_another_model() {
        assert!(is_fresh(&inputs([1, 1], 0)) && !is_fresh(&inputs([1, 1], 3)));
        let memory = [("past_key_values.0.encoder.key".into(), tensor([1, 1, 1], &[0.0]))].into();
        assert!(is_fresh(&memory));
    }
}
