//! Which experts a token goes to, and with what weight.

use moa_graphs::{Weight, WeightError, model};
use moa_schema::{Activation, GateMode};

use super::{
    Choices, ModuleChoices, ModuleRouting, ReferenceError, Routing,
    math::{Sums, activate, add_scaled, softmax, top_k, transpose, vector_matrix},
    sequence::Sequence,
};

/// Collects the routing of an evaluation, and holds the one to be replayed.
#[derive(Debug)]
pub(super) struct Tape<'a> {
    replay: Option<&'a Choices>,
    routing: Routing,
}

impl<'a> Tape<'a> {
    pub(super) fn new(replay: Option<&'a Choices>) -> Self {
        Self { replay, routing: Routing::new() }
    }

    pub(super) fn into_routing(self) -> Routing {
        self.routing
    }
}

/// Weights of a [`model::RouterInput`].
#[derive(Debug)]
struct RouterInput {
    /// `[C, R]`.
    weight: Vec<f64>,
    /// `[R]`.
    bias: Vec<f64>,
}

impl RouterInput {
    fn new(model::RouterInput(linear): &model::RouterInput) -> Result<Self, WeightError> {
        let columns = linear.weight.shape().last().copied().unwrap_or_default();
        Ok(Self { weight: transpose(&linear.weight.to_f64()?, columns), bias: linear.bias.to_f64()? })
    }

    /// `[C]` to `[R]`.
    fn apply(&self, sums: Sums, x: &[f64]) -> Vec<f64> {
        let mut read = vector_matrix(sums, x, &self.weight, self.bias.len());
        add_scaled(sums, &mut read, 1.0, &self.bias);
        read.iter_mut().for_each(|value| *value = activate(Activation::Gelu, *value));
        read
    }
}

/// The matrix of a router, inputs before outputs.
fn router_matrix(weight: &Weight, layout: model::ExpertLayout) -> Result<Vec<f64>, WeightError> {
    let values = weight.to_f64()?;
    Ok(match layout {
        model::ExpertLayout::InOut => values,
        model::ExpertLayout::OutIn => transpose(&values, weight.shape().last().copied().unwrap_or_default()),
    })
}

/// A router with its gate.
#[derive(Debug)]
pub(super) struct Router {
    module: String,
    input: Option<RouterInput>,
    /// `[R, E]`; `R` is `C` where there is no `input`.
    weight: Vec<f64>,
    num_experts: usize,
    top_k: usize,
    gate_mode: GateMode,
}

impl Router {
    /// The router of an attention layer.
    pub(super) fn of_attention(model: &model::Attention) -> Result<Self, WeightError> {
        let model::Attention { module, router, num_experts, top_k, gate_mode, .. } = model;
        Self::read(module, router, [*num_experts, *top_k], *gate_mode)
    }

    /// The router of a feed-forward block.
    pub(super) fn of_feed_forward(model: &model::ExpertFeedForward) -> Result<Self, WeightError> {
        let model::ExpertFeedForward { module, router, num_experts, top_k, gate_mode, .. } = model;
        Self::read(module, router, [*num_experts, *top_k], *gate_mode)
    }

    fn read(
        module: &str,
        router: &model::Router,
        [num_experts, top_k]: [usize; 2],
        gate_mode: GateMode,
    ) -> Result<Self, WeightError> {
        let input = router.input.as_deref().map(RouterInput::new).transpose()?;
        let weight = router_matrix(&router.weight, router.layout)?;
        Ok(Self { input, ..Self::new(module, weight, num_experts, top_k, gate_mode) })
    }

    /// A router with the matrix `weight`, `[C, E]`.
    fn new(module: &str, weight: Vec<f64>, num_experts: usize, top_k: usize, gate_mode: GateMode) -> Self {
        Self { module: module.into(), input: None, weight, num_experts, top_k, gate_mode }
    }

    /// Routes the vectors `x`, `[B, T, C]`; weights are 0 where `routed`, `[B, T]`, is false.
    pub(super) fn route<'t>(
        &self,
        x: &Sequence,
        routed: Vec<bool>,
        tape: &'t mut Tape<'_>,
    ) -> Result<&'t ModuleRouting, ReferenceError> {
        let mut routing = self.empty_routing(x, routed);
        let replayed = tape.replay.map(|replay| self.replayed(replay, &routing.choices)).transpose()?;
        for token in 0..routing.routed.len() {
            let logits = self.logits(x.sums(), &x.values[token * x.width..(token + 1) * x.width]);
            let scores = self.scores(x.sums(), &logits);
            let given = replayed.filter(|_| routing.routed[token]);
            let chosen = match given {
                Some(indices) => self.replayed_choice(&indices[token * self.top_k..(token + 1) * self.top_k])?,
                None => top_k(&scores, self.top_k),
            };
            let weights = if routing.routed[token] {
                self.weights(x.sums(), &logits, &scores, &chosen)
            } else {
                vec![0.0; chosen.len()]
            };
            routing.scores.extend(scores);
            routing.choices.indices.extend(chosen.iter().map(|expert| *expert as i64));
            routing.choices.weights.extend(weights);
        }
        Ok(tape.routing.entry(self.module.clone()).insert_entry(routing).into_mut())
    }

    /// Of a token `[C]`.
    fn logits(&self, sums: Sums, x: &[f64]) -> Vec<f64> {
        match &self.input {
            None => vector_matrix(sums, x, &self.weight, self.num_experts),
            Some(input) => vector_matrix(sums, &input.apply(sums, x), &self.weight, self.num_experts),
        }
    }

    /// Room for the tokens of `x`.
    fn empty_routing(&self, x: &Sequence, routed: Vec<bool>) -> ModuleRouting {
        let slots = routed.len() * self.top_k;
        ModuleRouting {
            choices: ModuleChoices {
                batch: x.batch,
                tokens: x.tokens,
                top_k: self.top_k,
                indices: Vec::with_capacity(slots),
                weights: Vec::with_capacity(slots),
            },
            num_experts: self.num_experts,
            scores: Vec::with_capacity(routed.len() * self.num_experts),
            routed,
        }
    }

    /// What ranks the experts of a token.
    fn scores(&self, sums: Sums, logits: &[f64]) -> Vec<f64> {
        match self.gate_mode {
            GateMode::SoftmaxTopk | GateMode::SoftmaxTopkRenorm => softmax(sums, logits),
            GateMode::TopkSoftmax => logits.to_vec(),
        }
    }

    /// Weights of the `chosen` experts. `p[i] / Σ p[chosen]` is the softmax over the chosen logits, so that
    /// renormalisation and top-k before softmax differ in nothing but what ranks the experts.
    fn weights(&self, sums: Sums, logits: &[f64], scores: &[f64], chosen: &[usize]) -> Vec<f64> {
        match self.gate_mode {
            GateMode::SoftmaxTopk => chosen.iter().map(|expert| scores[*expert]).collect(),
            GateMode::SoftmaxTopkRenorm | GateMode::TopkSoftmax => {
                let chosen_logits: Vec<f64> = chosen.iter().map(|expert| logits[*expert]).collect();
                softmax(sums, &chosen_logits)
            }
        }
    }

    /// The indices to be replayed, `[B, T, k]`, where they have the shape of `own`.
    fn replayed<'r>(&self, replay: &'r Choices, own: &ModuleChoices) -> Result<&'r [i64], ReferenceError> {
        let given = replay.get(&self.module).ok_or_else(|| self.mismatch("is missing".into()))?;
        if given.top_k != own.top_k {
            let what = format!("{} experts a token were chosen, and the model has {}", given.top_k, own.top_k);
            return Err(self.mismatch(what));
        }
        let sizes = |of: &ModuleChoices| [of.batch, of.tokens, of.top_k];
        if sizes(given) != sizes(own) {
            let what = format!("[B, T, k] must be {:?}, found {:?}", sizes(own), sizes(given));
            return Err(self.mismatch(what));
        }
        let expected = own.batch * own.tokens * own.top_k;
        if given.indices.len() != expected {
            return Err(self.mismatch(format!("must hold {expected} indices, found {}", given.indices.len())));
        }
        Ok(&given.indices)
    }

    /// The experts that one token's replayed `indices` name.
    fn replayed_choice(&self, indices: &[i64]) -> Result<Vec<usize>, ReferenceError> {
        let mut chosen = Vec::with_capacity(indices.len());
        for index in indices {
            let expert = usize::try_from(*index).ok().filter(|expert| *expert < self.num_experts);
            match expert {
                Some(expert) if !chosen.contains(&expert) => chosen.push(expert),
                Some(expert) => return Err(self.mismatch(format!("a token names expert {expert} twice"))),
                None => return Err(self.mismatch(format!("index {index} names none of {} experts", self.num_experts))),
            }
        }
        Ok(chosen)
    }

    fn mismatch(&self, what: String) -> ReferenceError {
        ReferenceError::Replay { module: self.module.clone(), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::sequence::Precision;

    /// Routes the one token `x = 1`, so that the logits are ln 1, ln 2, ln 4, ln 1.
    fn route(gate_mode: GateMode, routed: bool, replay: Option<&Choices>) -> Result<ModuleRouting, ReferenceError> {
        let weight = [1.0_f64, 2.0, 4.0, 1.0].map(f64::ln).to_vec();
        let router = Router::new("m", weight, 4, 2, gate_mode);
        let x = Sequence { precision: Precision::DOUBLE, batch: 1, tokens: 1, width: 1, values: vec![1.0] };
        router.route(&x, vec![routed], &mut Tape::new(replay)).cloned()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-15, "{found} instead of {expected}");
        }
    }

    #[test]
    fn every_gate_mode_has_its_weights() {
        let ln = f64::ln;
        for (mode, scores, weights) in [
            (GateMode::SoftmaxTopk, [0.125, 0.25, 0.5, 0.125], [0.5, 0.25]),
            (GateMode::SoftmaxTopkRenorm, [0.125, 0.25, 0.5, 0.125], [2.0 / 3.0, 1.0 / 3.0]),
            (GateMode::TopkSoftmax, [0.0, ln(2.0), ln(4.0), 0.0], [2.0 / 3.0, 1.0 / 3.0]),
        ] {
            let routing = route(mode, true, None).unwrap();
            assert_eq!(routing.choices.indices, [2, 1]);
            assert_close(&routing.scores, &scores);
            assert_close(&routing.choices.weights, &weights);
        }
    }

    #[test]
    fn an_unrouted_token_has_weights_of_zero() {
        let routing = route(GateMode::SoftmaxTopk, false, None).unwrap();
        assert_eq!((routing.choices.weights, routing.routed), (vec![0.0, 0.0], vec![false]));
    }

    #[test]
    fn replayed_indices_get_weights_from_own_scores() {
        let mut given = route(GateMode::SoftmaxTopk, true, None).unwrap().choices;
        given.indices = vec![3, 1];
        let replay = Choices::from([("m".into(), given)]);
        assert_close(&route(GateMode::SoftmaxTopk, true, Some(&replay)).unwrap().choices.weights, &[0.125, 0.25]);
        let renormalised = route(GateMode::SoftmaxTopkRenorm, true, Some(&replay)).unwrap().choices;
        assert_close(&renormalised.weights, &[1.0 / 3.0, 2.0 / 3.0]);
        assert_eq!(renormalised.indices, [3, 1]);
    }

    #[test]
    fn a_replay_that_does_not_fit_is_refused() {
        let good = route(GateMode::SoftmaxTopk, true, None).unwrap().choices;
        let message = |change: &dyn Fn(&mut ModuleChoices)| {
            let mut given = good.clone();
            change(&mut given);
            let replay = Choices::from([("m".into(), given)]);
            route(GateMode::SoftmaxTopk, true, Some(&replay)).map_err(|error| error.to_string()).unwrap_err()
        };
        assert!(message(&|given| given.indices = vec![0, 4]).ends_with("index 4 names none of 4 experts"));
        assert!(message(&|given| given.indices = vec![-1, 0]).ends_with("index -1 names none of 4 experts"));
        assert!(message(&|given| given.indices = vec![1, 1]).ends_with("a token names expert 1 twice"));
        assert!(message(&|given| given.indices = vec![1]).ends_with("must hold 2 indices, found 1"));
        assert!(message(&|given| given.tokens = 2).contains("found [1, 2, 2]"));
        assert!(message(&|given| given.top_k = 1).ends_with("1 experts a token were chosen, and the model has 2"));
        let error = route(GateMode::SoftmaxTopk, true, Some(&Choices::new())).unwrap_err().to_string();
        assert_eq!(error, "routing of module \"m\": is missing");
    }

    #[test]
    fn replayed_indices_of_an_unrouted_token_are_ignored() {
        let mut given = route(GateMode::SoftmaxTopk, true, None).unwrap().choices;
        given.indices = vec![-1, -1];
        let replay = Choices::from([("m".into(), given)]);
        assert_eq!(route(GateMode::SoftmaxTopk, false, Some(&replay)).unwrap().choices.indices, [2, 1]);
    }
}
