//! Routing comparison: the same experts, or a margin that explains why not.

use moa_schema::RoutingPart;

use super::compare::{ROUNDINGS, distance};
use crate::{
    reference::{Choices, ModuleChoices, ModuleRouting, Routing},
    tensor::{NamedTensors, Tensor},
};

/// Largest score margin between the k-th and the next expert that f32 rounding may overturn: a difference of two
/// probabilities, or of two logits where the gate takes the top-k before the softmax. Where activations, or what
/// operators multiply, have fewer bytes, what rounding does to the reference's own scores counts too, as often as for
/// outputs.
pub const MARGIN: f64 = 1e-5;

/// Largest difference of a chosen expert's weight that f32 rounding explains; more where numbers have fewer bytes, as
/// for [`MARGIN`].
const WEIGHT_TOLERANCE: f64 = 1e-5;

/// Outcome of comparing chosen experts with those of the reference.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct RoutingComparison {
    /// Routed tokens, summed over modules.
    pub decisions: usize,
    /// Tokens with the same set of experts.
    pub equal: usize,
    /// Tokens with another set, whose scores are no further apart than `margin`.
    pub ties: usize,
    /// Largest margin that was granted to any module: [`MARGIN`], or what rounding explains beyond it.
    pub margin: f64,
    /// The first token with another set and no such excuse.
    pub unexplained: Option<Disagreement>,
    /// Tokens with another set and no such excuse.
    pub unexplained_count: usize,
    /// First module, in the order of the graph, whose weights differ from the reference.
    pub first_divergent: Option<String>,
    /// Last module before that one.
    pub last_agreeing: Option<String>,
    /// Modules in the order of the graph: how far their weights are from the reference's, and what is granted, each the
    /// most of any case. A case by itself may be few numbers, whose roundings cancel by chance.
    #[serde(skip)]
    weights: Vec<(String, [f64; 2])>,
}

/// One token whose experts differ.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Disagreement {
    /// Case.
    pub case: String,
    /// Module.
    pub module: String,
    /// Row of the batch.
    pub batch: usize,
    /// Token of the row.
    pub token: usize,
    /// Experts that the backend chose.
    pub found: Vec<i64>,
    /// Experts that the reference chose.
    pub expected: Vec<i64>,
    /// Score of the k-th expert less that of the next one, in the reference.
    pub margin: f64,
}

/// Chosen experts as a backend returned them.
pub(super) struct BackendRouting {
    /// What the reference replays.
    pub(super) choices: Choices,
    /// Modules in the order of the graph.
    pub(super) order: Vec<String>,
}

/// Reads the routing of `modules` out of a backend's outputs.
///
/// # Errors
///
/// The name of an output that is missing or is no routing.
pub(super) fn backend_routing(outputs: &NamedTensors, modules: &[String]) -> Result<BackendRouting, String> {
    let mut choices = Choices::new();
    for module in modules {
        let [indices_name, weights_name] = RoutingPart::ALL.map(|part| part.name(module));
        let indices = outputs.get(&indices_name).ok_or_else(|| indices_name.clone())?;
        let weights = outputs.get(&weights_name).ok_or_else(|| weights_name.clone())?;
        let [batch, tokens, top_k] = *indices.shape() else { return Err(indices_name) };
        let Some(values) = indices.as_i64() else { return Err(indices_name) };
        if weights.shape() != indices.shape() {
            return Err(weights_name);
        }
        let weights = weights.to_f64();
        choices.insert(module.clone(), ModuleChoices { batch, tokens, top_k, indices: values.to_vec(), weights });
    }
    Ok(BackendRouting { choices, order: modules.to_vec() })
}

impl RoutingComparison {
    /// Whether every disagreement is explained.
    pub const fn passed(&self) -> bool {
        self.unexplained.is_none()
    }

    /// Adds one case: what a backend chose beside the scores of a reference that replayed those choices; `rounded` is
    /// the same with what rounding beyond f32 does.
    pub(super) fn add(&mut self, case: &str, backend: &BackendRouting, reference: &Routing, rounded: &Routing) {
        for module in &backend.order {
            let (Some(found), Some(expected)) = (backend.choices.get(module), reference.get(module)) else { continue };
            let moved = |of: fn(&ModuleRouting) -> &[f64], least: f64| {
                let rounded = rounded.get(module).map_or(&[][..], of);
                let distances = of(expected).iter().zip(rounded).map(|(a, b)| (a - b).abs());
                // Where rounding makes a score infinite or none, it explains nothing.
                least.max(ROUNDINGS * distances.filter(|distance| distance.is_finite()).fold(0.0, f64::max))
            };
            let margin = moved(|routing| &routing.scores, MARGIN);
            self.margin = self.margin.max(margin);
            self.add_module(case, module, found, expected, margin);
            let granted = moved(|routing| &routing.choices.weights, WEIGHT_TOLERANCE);
            self.add_weights(module, [weights_distance(found, expected), granted]);
        }
    }

    fn add_weights(&mut self, module: &str, found: [f64; 2]) {
        match self.weights.iter_mut().find(|(name, _)| name == module) {
            Some((_, most)) => *most = [most[0].max(found[0]), most[1].max(found[1])],
            None => self.weights.push((module.to_owned(), found)),
        }
    }

    /// Finds the first module whose weights differ, once all cases were added.
    pub(super) fn finish(&mut self) {
        let first = self.weights.iter().position(|(_, [distance, granted])| distance > granted);
        let name = |place: usize| self.weights.get(place).map(|(name, _)| name.clone());
        self.last_agreeing = first.and_then(|place| place.checked_sub(1)).and_then(name);
        self.first_divergent = first.and_then(name);
    }

    fn add_module(
        &mut self,
        case: &str,
        module: &str,
        found: &ModuleChoices,
        expected: &ModuleRouting,
        largest_margin: f64,
    ) {
        let (top_k, experts) = (expected.choices.top_k, expected.num_experts);
        for token in routed_tokens(expected) {
            self.decisions += 1;
            let scores = &expected.scores[token * experts..(token + 1) * experts];
            let ranked = ranked(scores);
            let chosen = found.experts(token);
            let mut best = ranked[..top_k].to_vec();
            best.sort_unstable();
            if chosen == best {
                self.equal += 1;
                continue;
            }
            let margin = overturned_margin(scores, &chosen, &best);
            if margin <= largest_margin {
                self.ties += 1;
                continue;
            }
            self.unexplained_count += 1;
            self.unexplained.get_or_insert_with(|| Disagreement {
                case: case.into(),
                module: module.into(),
                batch: token / expected.choices.tokens,
                token: token % expected.choices.tokens,
                found: chosen,
                expected: best,
                margin,
            });
        }
    }
}

/// The tokens that `routing` sends anywhere.
fn routed_tokens(routing: &ModuleRouting) -> impl Iterator<Item = usize> + '_ {
    (0..routing.choices.batch * routing.choices.tokens).filter(|token| routing.routed[*token])
}

/// Experts by falling score, lower index first among equals.
#[allow(clippy::cast_possible_wrap)]
fn ranked(scores: &[f64]) -> Vec<i64> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
    order.into_iter().map(|expert| expert as i64).collect()
}

/// Largest amount by which a chosen expert is worse than one that was passed over; infinite for a repeated
/// or impossible index.
fn overturned_margin(scores: &[f64], chosen: &[i64], best: &[i64]) -> f64 {
    let score = |expert: &i64| usize::try_from(*expert).ok().and_then(|expert| scores.get(expert)).copied();
    let distinct = chosen.windows(2).all(|pair| pair[0] != pair[1]);
    let worst_chosen =
        chosen.iter().map(|expert| score(expert).unwrap_or(f64::NEG_INFINITY)).fold(f64::INFINITY, f64::min);
    let best_missed =
        best.iter().filter(|expert| !chosen.contains(expert)).filter_map(score).fold(f64::NEG_INFINITY, f64::max);
    if distinct { best_missed - worst_chosen } else { f64::INFINITY }
}

/// Largest distance of a chosen expert's weight; infinite where other experts were chosen, or a weight is NaN.
fn weights_distance(found: &ModuleChoices, expected: &ModuleRouting) -> f64 {
    let (top_k, chosen) = (expected.choices.top_k, &expected.choices);
    let of_token = |token: usize| {
        let slots = token * top_k..(token + 1) * top_k;
        let mut found: Vec<_> = found.indices[slots.clone()].iter().zip(&found.weights[slots.clone()]).collect();
        let mut expected: Vec<_> = chosen.indices[slots.clone()].iter().zip(&chosen.weights[slots]).collect();
        found.sort_by_key(|(expert, _)| **expert);
        expected.sort_by_key(|(expert, _)| **expert);
        let pairs = found.iter().zip(&expected);
        pairs.map(|((a, x), (b, y))| if a == b { distance(**x, **y) } else { f64::INFINITY }).fold(0.0, f64::max)
    };
    routed_tokens(expected).map(of_token).fold(0.0, f64::max)
}

/// Whether a graph output holds a part of a routing.
pub fn is_routing_output(name: &str) -> bool {
    RoutingPart::ALL.iter().any(|part| part.module(name).is_some())
}

/// The outputs that are no routing.
pub(super) fn without_routing(outputs: NamedTensors) -> impl Iterator<Item = (String, Tensor)> {
    outputs.into_iter().filter(|(name, _)| !is_routing_output(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(scores: &[f64], indices: &[i64]) -> Routing {
        let weights = indices.iter().map(|expert| scores[usize::try_from(*expert).unwrap()]).collect();
        let tokens = scores.len() / 3;
        let choices = ModuleChoices { batch: 1, tokens, top_k: 2, indices: indices.to_vec(), weights };
        let routing = ModuleRouting { choices, num_experts: 3, scores: scores.to_vec(), routed: vec![true; tokens] };
        [("m".to_owned(), routing)].into()
    }

    /// Compares where the reference's scores are moved to `rounded` by rounding.
    fn compare_rounded(found: &[i64], scores: &[f64], rounded: &[f64]) -> RoutingComparison {
        let reference = module(scores, found);
        let choices = reference.iter().map(|(name, module)| (name.clone(), module.choices.clone())).collect();
        let backend = BackendRouting { choices, order: vec!["m".into()] };
        let mut comparison = RoutingComparison::default();
        comparison.add("case", &backend, &reference, &module(rounded, found));
        comparison
    }

    fn compare(found: &[i64], scores: &[f64]) -> RoutingComparison {
        compare_rounded(found, scores, scores)
    }

    #[test]
    fn order_within_the_set_does_not_matter() {
        assert_eq!(compare(&[1, 0], &[0.5, 0.3, 0.2]).equal, 1);
    }

    #[test]
    fn weights_belong_to_experts_and_not_to_places() {
        let chosen = |indices: &[i64]| module(&[0.7, 0.0, 0.3], indices)["m"].clone();
        for [found, expected] in [[[2, 0], [0, 2]], [[0, 2], [2, 0]]] {
            let distance = weights_distance(&chosen(&found).choices, &chosen(&expected));
            assert_eq!(distance.to_bits(), 0.0_f64.to_bits(), "{found:?} beside {expected:?}");
        }
    }

    #[test]
    fn a_near_tie_is_explained_and_counted() {
        let comparison = compare(&[0, 2], &[0.5, 0.250_001, 0.249_999]);
        assert_eq!((comparison.equal, comparison.ties), (0, 1));
        assert!(comparison.passed());
    }

    #[test]
    fn the_margin_is_what_rounding_explains_and_is_told() {
        let scores = [0.5, 0.26, 0.24];
        assert_eq!(compare(&[0, 1], &scores).margin, MARGIN);
        let moved = compare_rounded(&[0, 2], &scores, &[0.5, 0.255, 0.245]);
        assert!((moved.margin - ROUNDINGS * 0.005).abs() < 1e-12, "{moved:?}");
        assert_eq!((moved.ties, moved.passed()), (1, true));
    }

    #[test]
    fn rounding_that_leaves_the_range_explains_nothing() {
        for moved in [f64::INFINITY, f64::NAN] {
            let comparison = compare_rounded(&[0, 2], &[0.5, 0.3, 0.2], &[moved, 0.3, 0.2]);
            assert_eq!((comparison.margin, comparison.passed()), (MARGIN, false));
        }
    }

    /// A margin of 0.9e-5 is a tie, one of 2e-5 is none.
    #[test]
    fn the_margin_of_f32_is_one_in_a_hundred_thousand() {
        for (margin, is_tie) in [(0.9e-5, true), (2e-5, false)] {
            assert_eq!(compare(&[0, 2], &[0.5, 0.25 + margin, 0.25]).passed(), is_tie, "{margin}");
        }
    }

    /// The first module with weights that are off by `added` in the cases that say so; rounding moves those of the
    /// second case by `moved`.
    fn first_divergent(added: [f64; 2], moved: f64) -> Option<String> {
        let reference = module(&[0.5, 0.3, 0.2], &[0, 1]);
        let mut rounded = reference.clone();
        rounded.get_mut("m").unwrap().choices.weights[0] += moved;
        let mut comparison = RoutingComparison::default();
        for (added, rounded) in added.into_iter().zip([&reference, &rounded]) {
            let mut found = reference["m"].choices.clone();
            found.weights[0] += added;
            let backend = BackendRouting { choices: [("m".to_owned(), found)].into(), order: vec!["m".into()] };
            comparison.add("case", &backend, &reference, rounded);
        }
        comparison.finish();
        comparison.first_divergent
    }

    #[test]
    fn weights_are_granted_what_rounding_does_in_any_case() {
        assert_eq!(first_divergent([0.0, 0.9e-5], 0.0), None);
        assert_eq!(first_divergent([0.0, 1.1e-5], 0.0).as_deref(), Some("m"));
        assert_eq!(first_divergent([7e-4, 0.0], 1e-4), None);
        assert_eq!(first_divergent([9e-4, 0.0], 1e-4).as_deref(), Some("m"));
        assert_eq!(first_divergent([f64::NAN, 0.0], 1e-4).as_deref(), Some("m"));
    }

    #[test]
    fn another_expert_without_a_tie_fails() {
        let comparison = compare(&[0, 2], &[0.5, 0.3, 0.2]);
        let disagreement = comparison.unexplained.unwrap();
        assert_eq!(disagreement.expected, [0, 1]);
        assert!((disagreement.margin - 0.1).abs() < 1e-12);
    }

    #[test]
    fn a_repeated_expert_fails_even_in_a_tie() {
        assert!(!compare(&[0, 0], &[0.5, 0.25, 0.25]).passed());
    }

    #[test]
    fn an_expert_that_is_not_there_fails_even_in_a_tie() {
        for expert in [-1, 3] {
            assert_eq!(overturned_margin(&[0.5, 0.25, 0.25], &[0, expert], &[0, 1]), f64::INFINITY);
        }
    }

    #[test]
    fn the_place_of_a_fault_is_between_two_modules() {
        let right = module(&[0.5, 0.3, 0.2], &[0, 1]);
        let mut reference = Routing::new();
        let mut choices = Choices::new();
        for (name, added) in [("a", 0.0), ("b", 1e-7), ("c", 0.1), ("d", 0.2)] {
            reference.insert(name.into(), right["m"].clone());
            let mut found = right["m"].choices.clone();
            found.weights.iter_mut().for_each(|weight| *weight += added);
            choices.insert(name.into(), found);
        }
        let backend = BackendRouting { choices, order: ["a", "b", "c", "d"].map(str::to_owned).into() };
        let mut comparison = RoutingComparison::default();
        comparison.add("case", &backend, &reference, &reference);
        comparison.finish();
        let places = (comparison.last_agreeing.as_deref(), comparison.first_divergent.as_deref());
        assert_eq!((places, comparison.decisions, comparison.equal), ((Some("b"), Some("c")), 4, 4));
    }
}
