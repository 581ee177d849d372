//! Hidden states for which a layer's own router makes a wanted choice.
//!
//! Router logits are linear in the hidden state, `l = Wᵀx`. For a random `x` and wanted logits `l'` the nearest
//! state that has them is `x + W (WᵀW)⁻¹ (l' − Wᵀx)`: the least-norm solution by the normal equations (Golub and
//! Van Loan, *Matrix Computations*, 5.6). Only the logits of the wanted experts are changed, to above all others.

use std::collections::BTreeMap;

use moa_schema::RoutingPart;

use super::LatencyError;
use crate::{random::Random, tensor::NamedTensors};

/// What decides which experts a token goes to.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// The graph's own inputs.
    Data,
    /// Every expert is equally likely.
    Uniform,
    /// The expert of rank `r`, counted from 1 in the order of their numbers, is as likely as `r` to the power of
    /// minus this.
    Zipf(f64),
    /// Every token goes to the first k experts.
    Single,
    /// Token after token as recorded, by module; from the start again where the record ends.
    Trace(BTreeMap<String, Vec<Vec<usize>>>),
}

impl Choice {
    /// As on the command line.
    pub fn name(&self) -> String {
        match self {
            Self::Data => "data".into(),
            Self::Uniform => "uniform".into(),
            Self::Zipf(exponent) => format!("zipf:{exponent}"),
            Self::Single => "single".into(),
            Self::Trace(_) => "trace".into(),
        }
    }

    /// The trace in `tensors`: `router.{module}.indices`, integers `[…, k]`, as a graph that was exported with its
    /// router outputs gives them.
    ///
    /// # Errors
    ///
    /// Where no tensor is such a record.
    pub fn trace(tensors: &NamedTensors) -> Result<Self, LatencyError> {
        let mut modules = BTreeMap::new();
        for (name, tensor) in tensors {
            let Some(module) = RoutingPart::Indices.module(name).map(str::to_owned) else { continue };
            let bad = |why: &str| LatencyError::Trace { module: module.clone(), why: why.to_owned() };
            let values = tensor.as_i64().ok_or_else(|| bad("its indices are not int64"))?;
            let slots = tensor.shape().last().copied().filter(|slots| *slots > 0 && !values.is_empty());
            let slots = slots.ok_or_else(|| bad("it holds no token"))?;
            let experts: Result<Vec<usize>, _> = values.iter().map(|value| usize::try_from(*value)).collect();
            let experts = experts.map_err(|_| bad("an expert has a negative number"))?;
            modules.insert(module.clone(), experts.chunks(slots).map(<[usize]>::to_vec).collect());
        }
        if modules.is_empty() {
            let why = "the file has no tensor router.{module}.indices".to_owned();
            return Err(LatencyError::Trace { module: "every module".into(), why });
        }
        Ok(Self::Trace(modules))
    }

    /// The experts of each of `tokens` tokens, `top_k` different ones of `experts`; `None` for [`Self::Data`].
    ///
    /// # Errors
    ///
    /// Where a trace has no such module, or other experts than it.
    pub fn experts(
        &self,
        module: &str,
        tokens: usize,
        [experts, top_k]: [usize; 2],
        random: &mut Random,
    ) -> Result<Option<Vec<Vec<usize>>>, LatencyError> {
        let drawn = |exponent: f64, random: &mut Random| {
            (0..tokens).map(|_| draw(exponent, [experts, top_k], random)).collect::<Vec<_>>()
        };
        Ok(match self {
            Self::Data => None,
            Self::Uniform => Some(drawn(0.0, random)),
            Self::Zipf(exponent) => Some(drawn(*exponent, random)),
            Self::Single => Some(vec![(0..top_k).collect(); tokens]),
            Self::Trace(modules) => {
                let bad = |why: String| LatencyError::Trace { module: module.to_owned(), why };
                let recorded = modules.get(module).ok_or_else(|| bad("it is not in the file".into()))?;
                let misfit = recorded.iter().find(|chosen| {
                    let mut different = chosen.to_vec();
                    different.sort_unstable();
                    different.dedup();
                    different.len() != top_k || chosen.len() != top_k || chosen.iter().any(|expert| *expert >= experts)
                });
                if let Some(chosen) = misfit {
                    let why = format!("{chosen:?} are not {top_k} different ones of {experts} experts");
                    return Err(bad(why));
                }
                Some((0..tokens).map(|token| recorded[token % recorded.len()].clone()).collect())
            }
        })
    }
}

/// `top_k` different experts, each drawn among those left with its weight.
#[allow(clippy::cast_precision_loss)]
fn draw(exponent: f64, [experts, top_k]: [usize; 2], random: &mut Random) -> Vec<usize> {
    let weight = |expert: usize| ((expert + 1) as f64).powf(-exponent);
    let mut left: Vec<usize> = (0..experts).collect();
    let mut chosen = Vec::with_capacity(top_k);
    for _ in 0..top_k.min(experts) {
        let total: f64 = left.iter().map(|expert| weight(*expert)).sum();
        let mut point = total * random.fraction();
        let hit = left.iter().position(|expert| {
            point -= weight(*expert);
            point < 0.0
        });
        chosen.push(left.remove(hit.unwrap_or(left.len() - 1)));
    }
    chosen
}

/// A router's matrix.
#[derive(Debug, Clone)]
pub(super) struct Router {
    /// Width of what it reads, the hidden states or an input of its own.
    pub width: usize,
    /// Experts.
    pub experts: usize,
    /// `[width, experts]`, row-major.
    pub weight: Vec<f64>,
}

impl Router {
    /// `Wᵀx`.
    fn logits(&self, state: &[f64]) -> Vec<f64> {
        let mut logits = vec![0.0; self.experts];
        for (value, row) in state.iter().zip(self.weight.chunks(self.experts)) {
            logits.iter_mut().zip(row).for_each(|(logit, weight)| *logit += value * weight);
        }
        logits
    }

    /// Hidden states, one a token, for which this router chooses `wanted`: random ones, moved as little as that
    /// takes. The last wanted expert stands above the best other one by the spread of the logits.
    ///
    /// # Errors
    ///
    /// Where the columns of the matrix depend on each other, so that some choices are impossible; the text says so.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation)]
    pub(super) fn steer(&self, wanted: &[Vec<usize>], random: &mut Random) -> Result<Vec<f32>, String> {
        let factor = self.factor().ok_or("the columns of its matrix depend on each other")?;
        let mut states = Vec::with_capacity(wanted.len() * self.width);
        for chosen in wanted {
            let mut state: Vec<f64> = (0..self.width).map(|_| f64::from(random.normalised())).collect();
            let logits = self.logits(&state);
            let others = logits.iter().enumerate().filter(|(expert, _)| !chosen.contains(expert));
            let best = others.map(|(_, logit)| *logit).fold(f64::NEG_INFINITY, f64::max);
            let best = if best.is_finite() { best } else { 0.0 };
            let spread = spread(&logits);
            let mut change = vec![0.0; self.experts];
            for (slot, expert) in chosen.iter().enumerate() {
                let above = 1.0 + 0.25 * (chosen.len() - 1 - slot) as f64;
                change[*expert] = best + spread * above - logits[*expert];
            }
            let weights = solve(&factor, self.experts, change);
            for (value, row) in state.iter_mut().zip(self.weight.chunks(self.experts)) {
                *value += row.iter().zip(&weights).map(|(a, b)| a * b).sum::<f64>();
            }
            states.extend(state.into_iter().map(|value| value as f32));
        }
        Ok(states)
    }

    /// Lower Cholesky factor of `WᵀW`, `[experts, experts]`; `None` where it is singular, or so close to it that
    /// rounding a state to f32 (2⁻²⁴ of its length, which is that of the change over the least singular value) may undo
    /// a choice.
    fn factor(&self) -> Option<Vec<f64>> {
        let n = self.experts;
        let mut gram = vec![0.0; n * n];
        for row in self.weight.chunks(n) {
            for i in 0..n {
                for j in 0..=i {
                    gram[i * n + j] += row[i] * row[j];
                }
            }
        }
        let least = 1e-8 * (0..n).map(|i| gram[i * n + i]).fold(0.0, f64::max);
        for i in 0..n {
            for j in 0..=i {
                let known: f64 = (0..j).map(|k| gram[i * n + k] * gram[j * n + k]).sum();
                let rest = gram[i * n + j] - known;
                gram[i * n + j] = match i == j {
                    true if rest.is_nan() || rest <= least => return None,
                    true => rest.sqrt(),
                    false => rest / gram[j * n + j],
                };
            }
        }
        Some(gram)
    }
}

/// Standard deviation of a router's logits, or 1 where they are all equal.
#[allow(clippy::cast_precision_loss)]
fn spread(logits: &[f64]) -> f64 {
    let count = logits.len().max(1) as f64;
    let mean = logits.iter().sum::<f64>() / count;
    let deviation = (logits.iter().map(|logit| (logit - mean).powi(2)).sum::<f64>() / count).sqrt();
    if deviation > 1e-6 { deviation } else { 1.0 }
}

/// Solves `L Lᵀ y = b`.
fn solve(factor: &[f64], n: usize, mut b: Vec<f64>) -> Vec<f64> {
    for i in 0..n {
        let known: f64 = (0..i).map(|j| factor[i * n + j] * b[j]).sum();
        b[i] = (b[i] - known) / factor[i * n + i];
    }
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| factor[j * n + i] * b[j]).sum();
        b[i] = (b[i] - known) / factor[i * n + i];
    }
    b
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tensor::{Tensor, TensorData};

    fn router(width: usize, experts: usize, random: &mut Random) -> Router {
        let weight = (0..width * experts).map(|_| f64::from(random.unit()) * 0.2).collect();
        Router { width, experts, weight }
    }

    /// The best `top_k` experts of a state, as a set.
    fn chosen(router: &Router, state: &[f32], top_k: usize) -> Vec<usize> {
        let state: Vec<f64> = state.iter().map(|value| f64::from(*value)).collect();
        let logits = router.logits(&state);
        let mut order: Vec<usize> = (0..router.experts).collect();
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        order.truncate(top_k);
        order.sort_unstable();
        order
    }

    proptest! {
        #[test]
        fn routers_make_every_choice_that_is_asked(seed: u64, experts in 2usize..20, extra in 0usize..30) {
            let mut random = Random::new(seed);
            let router = router(experts + extra, experts, &mut random);
            let top_k = 1 + random.below(experts);
            let wanted = Choice::Zipf(1.0).experts("m", 16, [experts, top_k], &mut random).unwrap().unwrap();
            if let Ok(states) = router.steer(&wanted, &mut random) {
                for (state, wanted) in states.chunks(router.width).zip(&wanted) {
                    let mut wanted = wanted.clone();
                    wanted.sort_unstable();
                    prop_assert_eq!(chosen(&router, state, top_k), wanted);
                }
            } else {
                prop_assert!(extra < 2, "only a nearly square random matrix may be nearly singular");
            }
        }
    }

    /// The logits are the state itself here, so that only those of wanted experts may move.
    #[test]
    fn random_states_are_moved_as_little_as_a_choice_takes() {
        let router = Router { width: 3, experts: 3, weight: vec![1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0] };
        let wanted: Vec<Vec<usize>> = (0..12).map(|token| vec![token % 3]).collect();
        let (states, mut random) = (router.steer(&wanted, &mut Random::new(7)).unwrap(), Random::new(7));
        for (state, wanted) in states.chunks(3).zip(&wanted) {
            let mut expected = [(); 3].map(|()| f64::from(random.normalised()));
            let (expert, spread) = (wanted[0], spread(&expected));
            expected[expert] = f64::NEG_INFINITY;
            expected[expert] = spread + expected.into_iter().fold(f64::NEG_INFINITY, f64::max);
            let fits = state.iter().zip(expected).all(|(found, expected)| (f64::from(*found) - expected).abs() < 1e-6);
            assert!(fits, "{state:?} instead of {expected:?}");
        }
    }

    #[test]
    fn columns_that_depend_on_each_other_are_refused() {
        let router = Router { width: 3, experts: 2, weight: vec![1.0, 2.0, 1.0, 2.0, 1.0, 2.0] };
        assert!(router.steer(&[vec![0]], &mut Random::new(0)).is_err());
    }

    #[test]
    fn shares_follow_the_distribution() {
        let mut random = Random::new(5);
        let mut counts = |choice: Choice| {
            let mut counts = [0usize; 4];
            let chosen = choice.experts("m", 30_000, [4, 1], &mut random).unwrap().unwrap();
            chosen.iter().for_each(|experts| counts[experts[0]] += 1);
            counts
        };
        assert_eq!(counts(Choice::Single), [30_000, 0, 0, 0]);
        assert!(counts(Choice::Uniform).iter().all(|count| count.abs_diff(7_500) < 300));
        // 1, 1/2, 1/3, 1/4 of 25/12.
        for (count, expected) in counts(Choice::Zipf(1.0)).into_iter().zip([14_400, 7_200, 4_800, 3_600]) {
            assert!(count.abs_diff(expected) < 350, "{count} instead of {expected}");
        }
    }

    #[test]
    fn traces_are_replayed_and_must_fit() {
        let record = Tensor::new([1, 2, 2], TensorData::I64(vec![3, 1, 0, 2])).unwrap();
        let trace = Choice::trace(&[("router.m.indices".to_owned(), record)].into()).unwrap();
        let mut random = Random::new(0);
        let mut experts = |module: &str, sizes| trace.experts(module, 3, sizes, &mut random);
        assert_eq!(experts("m", [4, 2]).unwrap().unwrap(), [vec![3, 1], vec![0, 2], vec![3, 1]]);
        for (module, sizes) in [("n", [4, 2]), ("m", [3, 2]), ("m", [4, 1])] {
            assert!(matches!(experts(module, sizes), Err(LatencyError::Trace { .. })), "{module} {sizes:?}");
        }
        assert!(Choice::trace(&NamedTensors::new()).is_err());
    }
}
