//! Backends beside each other, where there is no checkpoint to be the reference.
//!
//! The yardstick is the same graph on one backend, with its operators' bodies where it has them. What rounding
//! explains is measured on the graph itself: a copy whose weights are each moved by one unit in the last place, up
//! or down at random, computes the same inputs, and the difference is the effect of rounding the weights. Where nodes
//! let kernels round factors of products, weights of these products are moved by what that may do to a factor.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    compare::{Comparison, Difference, ROUNDINGS, Tolerance, ToleranceOptions, effect_of_rounding, largest},
    moved::moved,
    routing::{MARGIN, backend_routing, without_routing},
};
use crate::{
    backend::{Backend, BackendError, Runner},
    onnx::{OnnxFile, expose_routing},
    reference::{Choices, ModuleChoices},
    tensor::NamedTensors,
};

/// A graph on one backend, as what others are compared with.
pub struct Yardstick {
    graph: Box<dyn Runner>,
    moved: Box<dyn Runner>,
    modules: Vec<String>,
}

/// What a [`Yardstick`] computed.
#[derive(Debug)]
pub struct Expected {
    outputs: NamedTensors,
    choices: Choices,
    /// Those of the copy with moved weights.
    moved_choices: Choices,
    modules: Vec<String>,
    /// Effect of rounding the weights, by output.
    rounding: BTreeMap<String, f64>,
    /// Largest difference of two experts' weights that rounding explains.
    margin: f64,
    /// Whether that effect changed the choice of an expert, so that it cannot be told from a fault.
    undecided: bool,
}

/// Outcome of comparing one backend with the yardstick on one input.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Agreement {
    /// Values compared; 0 where a near-tie sent a token elsewhere, which changes what follows.
    pub values: usize,
    /// Values out of tolerance.
    pub mismatches: usize,
    /// Difference of the value where it is the largest share of its tolerance; `None` where it is NaN or infinite.
    pub max_abs: Option<f64>,
    /// Tolerance of that value; the largest that was applied where nothing differs.
    pub tolerance: f64,
    /// Routed tokens, summed over modules.
    pub decisions: usize,
    /// Tokens of the first module that differs where two experts were as good as each other: by their weights, or,
    /// where a gate gives its only expert a weight of 1, since rounding the model's weights changes the choice too.
    pub ties: usize,
    /// The first thing that is wrong, if something is; an output that is none counts more than its values.
    pub fault: Option<String>,
}

impl Agreement {
    /// Whether nothing is wrong.
    pub const fn passed(&self) -> bool {
        self.fault.is_none()
    }

    /// The worst difference as a share of its tolerance.
    pub fn largest_share(&self) -> f64 {
        let share = self.max_abs.unwrap_or(f64::INFINITY) / self.tolerance;
        if share.is_nan() { 0.0 } else { share }
    }
}

impl Yardstick {
    /// Loads `file` on `backend`, and a copy with moved weights.
    ///
    /// # Errors
    ///
    /// Where the backend does not take the graph, or its weights cannot be read.
    pub fn load(backend: &dyn Backend, file: &OnnxFile) -> Result<Self, BackendError> {
        let mut model = file.model().clone();
        let modules = expose_routing(&mut model);
        let routed = file.with_model(model)?;
        Ok(Self { graph: backend.load(&routed)?, moved: backend.load(&moved(&routed)?)?, modules })
    }

    /// Computes `inputs`.
    ///
    /// # Errors
    ///
    /// Where the runtime fails or the graph does not return its routing.
    pub fn expect(&mut self, inputs: &NamedTensors) -> Result<Expected, BackendError> {
        let outputs = self.graph.run(inputs)?;
        let moved = self.moved.run(inputs)?;
        let choices = choices_of(&outputs, &self.modules)?;
        let moved_choices = choices_of(&moved, &self.modules)?;
        let undecided = !same_choices(&choices, &moved_choices);
        let margin = MARGIN.max(ROUNDINGS * effect_on_weights(&choices, &moved_choices, &self.modules));
        let outputs: NamedTensors = without_routing(outputs).collect();
        let effect = |(name, output): (&String, _)| Some((name.clone(), effect_of_rounding(moved.get(name)?, output)?));
        let rounding = outputs.iter().filter_map(effect).collect();
        Ok(Expected { outputs, choices, moved_choices, modules: self.modules.clone(), rounding, margin, undecided })
    }
}

impl Expected {
    /// Whether another input would say more: rounding alone changes the choice of an expert.
    pub const fn is_undecided(&self) -> bool {
        self.undecided
    }

    /// Compares what a backend computed: the outputs of the graph as it is, and `routed`, those of the same graph
    /// with its routing as outputs.
    ///
    /// # Errors
    ///
    /// Where `routed` lacks a module's routing.
    pub fn compare(&self, outputs: &NamedTensors, routed: &NamedTensors) -> Result<Agreement, BackendError> {
        let mut agreement = Agreement::default();
        let choices = choices_of(routed, &self.modules)?;
        for module in &self.modules {
            let (Some(found), Some(expected)) = (choices.get(module), self.choices.get(module)) else { continue };
            agreement.add_routing(module, found, expected, (self.moved_choices.get(module), self.margin));
            if agreement.ties > 0 || agreement.fault.is_some() {
                return Ok(agreement);
            }
        }
        let mut comparison = Comparison::default();
        for (name, expected) in &self.outputs {
            match outputs.get(name) {
                Some(found) if found.shape() == expected.shape() => {
                    let rounding = self.rounding.get(name).copied().unwrap_or_default();
                    let tolerance = Tolerance::derive(ToleranceOptions::default(), largest(expected), rounding);
                    comparison.add(name, found, expected, tolerance);
                }
                found => {
                    let found = found.map_or("is missing".to_owned(), |found| format!("has shape {:?}", found.shape()));
                    agreement
                        .fault
                        .get_or_insert_with(|| format!("output \"{name}\" {found}, expected {:?}", expected.shape()));
                }
            }
        }
        agreement.add_outputs(&comparison);
        Ok(agreement)
    }
}

impl Agreement {
    fn add_routing(
        &mut self,
        module: &str,
        found: &ModuleChoices,
        expected: &ModuleChoices,
        (moved, margin): (Option<&ModuleChoices>, f64),
    ) {
        if (found.batch, found.tokens, found.top_k) != (expected.batch, expected.tokens, expected.top_k) {
            self.fault = Some(format!("module {module} routed another number of tokens"));
            return;
        }
        for token in 0..expected.batch * expected.tokens {
            let slots = token * expected.top_k..(token + 1) * expected.top_k;
            let is_padding =
                |routing: &ModuleChoices| routing.weights[slots.clone()].iter().all(|weight| *weight == 0.0);
            if is_padding(found) && is_padding(expected) {
                continue;
            }
            self.decisions += 1;
            let [chosen, wanted] = [found, expected].map(|routing| routing.experts(token));
            let weights = |routing: &ModuleChoices| sorted(&routing.weights[slots.clone()]);
            if chosen == wanted {
                continue;
            }
            let close = |(a, b): (f64, f64)| (a - b).abs() <= margin;
            let is_tie = match weights(expected)[..] {
                [1.0] => moved.is_some_and(|moved| moved.experts(token) != wanted),
                _ => weights(found).into_iter().zip(weights(expected)).all(close),
            };
            if is_tie {
                self.ties += 1;
            } else {
                self.fault.get_or_insert_with(|| {
                    format!("module {module}, token {token} went to experts {chosen:?} instead of {wanted:?}")
                });
            }
        }
    }

    fn add_outputs(&mut self, comparison: &Comparison) {
        self.values = comparison.values;
        self.mismatches = comparison.mismatches;
        let worst = comparison.worst.as_ref();
        self.max_abs = Some(worst.map_or(0.0, Difference::distance)).filter(|distance| distance.is_finite());
        self.tolerance = worst.map_or(comparison.atol, |worst| worst.tolerance);
        let Some(Difference { place, index, found, expected, tolerance }) = &comparison.first else { return };
        self.fault.get_or_insert_with(|| match expected.is_finite() {
            false => {
                format!("{place} at {index:?} is {expected} on what others are compared with, and so proves nothing")
            }
            true => format!(
                "{} of {} values are further apart than their tolerance; the first is {place} at {index:?}: {found} \
                 instead of {expected} (tolerance {tolerance:.1e})",
                comparison.mismatches, comparison.values
            ),
        });
    }
}

fn sorted(weights: &[f64]) -> Vec<f64> {
    let mut weights = weights.to_vec();
    weights.sort_by(f64::total_cmp);
    weights
}

fn same_choices(a: &Choices, b: &Choices) -> bool {
    a.iter().all(|(module, a)| {
        let Some(b) = b.get(module) else { return false };
        let tokens = a.batch * a.tokens;
        tokens == b.batch * b.tokens && (0..tokens).all(|token| a.experts(token) == b.experts(token))
    })
}

/// The largest difference between weights of tokens that both send to the same experts, in the modules up to the first
/// one that sends a token elsewhere.
fn effect_on_weights(a: &Choices, b: &Choices, modules: &[String]) -> f64 {
    let mut largest = 0.0_f64;
    for (a, b) in modules.iter().filter_map(|module| a.get(module).zip(b.get(module))) {
        let slots = a.top_k.max(1);
        let same: Vec<bool> = (0..a.batch * a.tokens).map(|token| a.experts(token) == b.experts(token)).collect();
        let tokens = a.weights.chunks(slots).zip(b.weights.chunks(slots)).zip(&same).filter(|(_, same)| **same);
        for ((a, b), _) in tokens {
            let weights = sorted(a).into_iter().zip(sorted(b));
            largest = weights.map(|(a, b)| (a - b).abs()).fold(largest, f64::max);
        }
        if same.contains(&false) {
            break;
        }
    }
    largest
}

/// The choices of `modules` among the outputs of a graph that [`expose_routing`] returned.
///
/// # Errors
///
/// Where an output is missing or is no routing.
pub fn choices_of(outputs: &NamedTensors, modules: &[String]) -> Result<Choices, BackendError> {
    let routing = backend_routing(outputs, modules).map_err(|name| BackendError::Unsupported {
        why: format!("output `{name}` is missing or is no routing"),
        help: Some("export again with this version of moa-export"),
    })?;
    Ok(routing.choices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{Tensor, TensorData};

    fn module(indices: &[i64], weights: &[f64]) -> ModuleChoices {
        let (indices, weights) = (indices.to_vec(), weights.to_vec());
        ModuleChoices { batch: 1, tokens: indices.len() / 2, top_k: 2, indices, weights }
    }

    fn routed(found: &ModuleChoices, expected: &ModuleChoices) -> Agreement {
        let mut agreement = Agreement::default();
        agreement.add_routing("m", found, expected, (None, 1e-3));
        agreement
    }

    #[test]
    fn another_expert_is_a_tie_where_its_weight_is_close_and_a_fault_elsewhere() {
        let expected = module(&[0, 1, 2, 3], &[0.6, 0.4, 0.7, 0.3]);
        let outcome = |indices: &[i64], weights: &[f64]| {
            let agreement = routed(&module(indices, weights), &expected);
            (agreement.decisions, agreement.ties, agreement.fault)
        };
        assert_eq!(outcome(&[1, 0, 3, 2], &[0.4, 0.6, 0.3, 0.7]), (2, 0, None), "an order is no choice");
        assert_eq!(outcome(&[0, 1, 2, 4], &[0.6, 0.4, 0.7005, 0.2995]), (2, 1, None));
        let fault = "module m, token 1 went to experts [2, 4] instead of [2, 3]".to_owned();
        assert_eq!(outcome(&[0, 1, 4, 2], &[0.6, 0.4, 0.702, 0.298]), (2, 0, Some(fault)));
        assert_eq!(outcome(&[0, 1, 9, 9], &[0.6, 0.4, 0.0, 0.0]).1, 0, "padding of one alone is no tie");
        let padding = module(&[0, 1], &[0.0; 2]);
        assert_eq!(routed(&module(&[2, 3], &[0.0; 2]), &padding), Agreement::default());
        assert!(routed(&padding, &expected).fault.is_some_and(|fault| fault.contains("another number of tokens")));
    }

    /// Every only expert has a weight of 1 there, whichever it is.
    #[test]
    fn a_weight_of_one_does_not_say_that_experts_tie() {
        let only =
            |expert: i64| ModuleChoices { batch: 1, tokens: 1, top_k: 1, indices: vec![expert], weights: vec![1.0] };
        let outcome = |found: i64, moved: i64| {
            let mut agreement = Agreement::default();
            agreement.add_routing("m", &only(found), &only(0), (Some(&only(moved)), 1e-3));
            (agreement.ties, agreement.fault.is_some())
        };
        assert_eq!([outcome(0, 0), outcome(0, 1)], [(0, false); 2]);
        assert_eq!(outcome(1, 0), (0, true));
        assert_eq!(outcome(1, 1), (1, false), "rounding alone changes the choice");
    }

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::new([values.len()], TensorData::F32(values.to_vec())).unwrap()
    }

    #[test]
    fn a_yardstick_that_is_not_finite_is_named_as_such() {
        let mut comparison = Comparison::default();
        let tolerance = Tolerance { atol: 1.0, rtol: 0.0 };
        comparison.add("y", &tensor(&[1.0, 2.0]), &tensor(&[1.0, f32::NAN]), tolerance);
        let mut agreement = Agreement::default();
        agreement.add_outputs(&comparison);
        let told = "y at [1] is NaN on what others are compared with, and so proves nothing";
        assert_eq!(agreement.fault.as_deref(), Some(told));
    }

    #[test]
    fn the_difference_that_is_told_stands_beside_its_own_tolerance() {
        let told = |a: f32, b: f32| {
            let mut comparison = Comparison::default();
            for (name, value, atol) in [("a", a, 1.0), ("b", b, 0.25)] {
                comparison.add(name, &tensor(&[value]), &tensor(&[1.0]), Tolerance { atol, rtol: 0.0 });
            }
            let mut agreement = Agreement::default();
            agreement.add_outputs(&comparison);
            (agreement.max_abs, agreement.tolerance, agreement.largest_share())
        };
        assert_eq!(told(1.5, 1.1875), (Some(0.1875), 0.25, 0.75), "0.5 is more, and less of its tolerance");
        assert_eq!(told(1.5, 1.0), (Some(0.5), 1.0, 0.5));
        assert_eq!(told(1.0, 1.0), (Some(0.0), 1.0, 0.0));
        assert_eq!(told(1.5, f32::NAN), (None, 0.25, f64::INFINITY));
    }

    #[test]
    fn each_output_is_held_to_its_own_rounding() {
        let expected = Expected {
            outputs: [("a", 1.0), ("b", 1.0)].map(|(name, value)| (name.to_owned(), tensor(&[value; 2]))).into(),
            choices: Choices::new(),
            moved_choices: Choices::new(),
            modules: Vec::new(),
            rounding: [("b".to_owned(), 1e-3)].into(),
            margin: MARGIN,
            undecided: false,
        };
        let compared = |a: &[f32], b: &[f32]| {
            let outputs = [("a".to_owned(), tensor(a)), ("b".to_owned(), tensor(b))].into();
            expected.compare(&outputs, &NamedTensors::new()).unwrap()
        };
        let same = compared(&[1.0; 2], &[1.0, 1.007]);
        assert!(same.passed() && same.values == 4 && (same.tolerance - 8e-3).abs() < 1e-12, "{same:?}");
        for (a, b, place) in [
            (&[1.0f32, 1.007][..], &[1.0f32; 2][..], "the first is a at [1]"),
            (&[1.0; 2], &[1.009, 1.0], "the first is b at [0]"),
            (&[1.0; 2], &[f32::NAN, 1.0], "the first is b at [0]"),
            (&[1.0; 3], &[1.0; 2], "output \"a\" has shape [3], expected [2]"),
            (&[1.0; 3], &[1.0; 1], "output \"a\" has shape [3], expected [2]"),
            (&[1.0; 3], &[2.0; 2], "output \"a\" has shape [3], expected [2]"),
        ] {
            let found = compared(a, b);
            assert!(found.fault.as_ref().is_some_and(|fault| fault.contains(place)), "{place}: {found:?}");
        }
        let missing = expected.compare(&[("a".to_owned(), tensor(&[1.0; 2]))].into(), &NamedTensors::new()).unwrap();
        assert_eq!(missing.fault.as_deref(), Some("output \"b\" is missing, expected [2]"));
    }

    #[test]
    fn weights_move_as_far_as_they_do_where_the_choice_stays() {
        let choices = |first: &ModuleChoices, second: &ModuleChoices| -> Choices {
            [("x".to_owned(), first.clone()), ("a".to_owned(), second.clone())].into()
        };
        let modules = ["x".to_owned(), "a".to_owned()];
        let plain = module(&[0, 1, 2, 3], &[0.6, 0.4, 0.7, 0.3]);
        let moved = module(&[1, 0, 2, 3], &[0.41, 0.59, 0.7, 0.3]);
        let elsewhere = module(&[0, 1, 2, 4], &[0.6, 0.4, 0.2, 0.1]);
        let effect = |a: &Choices, b: &Choices| effect_on_weights(a, b, &modules);
        let both = choices(&plain, &plain);
        assert!((effect(&both, &choices(&plain, &moved)) - 0.01).abs() < 1e-12);
        assert!(same_choices(&both, &choices(&moved, &moved)) && !same_choices(&both, &choices(&plain, &elsewhere)));
        assert_eq!(effect(&both, &choices(&elsewhere, &moved)), 0.0, "what follows a token that went elsewhere");
    }
}
