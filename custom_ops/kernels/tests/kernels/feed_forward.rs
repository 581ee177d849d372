//! `MoEFeedForward`.

use moa_kernels::{FeedForwardInputs, FeedForwardOutputs, Sequential, ThreadPool, feed_forward};
use moa_schema::{Activation, FeedForwardAttributes, FeedForwardDims, GateMode};

use crate::routing_reference::Gate;
use crate::support::{Random, Threads, assert_close, bits, matmul, widen};

pub(crate) struct Case {
    dims: FeedForwardDims,
    attributes: FeedForwardAttributes,
    hidden_states: Vec<f32>,
    router_weight: Vec<f32>,
    input_weight: Vec<f32>,
    output_weight: Vec<f32>,
    output_bias: Option<Vec<f32>>,
    router_input: Option<Vec<f32>>,
}

pub(crate) type Computed = (Vec<f32>, Vec<i64>, Vec<f32>);

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Gelu => 0.5 * x * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

impl Case {
    pub(crate) fn random(random: &mut Random, dims: FeedForwardDims) -> Self {
        let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = dims;
        let attributes = FeedForwardAttributes {
            top_k,
            gate_mode: random.pick(&GateMode::ALL),
            activation: random.pick(&Activation::ALL),
            gated: random.chance(50),
        };
        let columns = if attributes.gated { 2 * hidden } else { hidden };
        Self {
            dims,
            attributes,
            hidden_states: random.hidden_states(batch * tokens, width),
            router_weight: random.router(width, experts),
            input_weight: random.values(experts * width * columns, 3.0 * (width as f32).powf(-0.5)),
            output_weight: random.values(experts * hidden * width, (hidden as f32).powf(-0.5)),
            output_bias: random.chance(50).then(|| random.values(width, 1.0)),
            router_input: None,
        }
    }

    pub(crate) fn compute(&self, pool: &dyn ThreadPool) -> Computed {
        let FeedForwardDims { batch, tokens, width, top_k, .. } = self.dims;
        let mut output = vec![f32::NAN; batch * tokens * width];
        let mut topk_indices = vec![-1; batch * tokens * top_k];
        let mut topk_weights = vec![f32::NAN; batch * tokens * top_k];
        let inputs = FeedForwardInputs {
            hidden_states: &self.hidden_states,
            router_weight: &self.router_weight,
            input_weight: (&self.input_weight).into(),
            output_weight: (&self.output_weight).into(),
            output_bias: self.output_bias.as_deref(),
            router_input: self.router_input.as_deref(),
        };
        let mut outputs = FeedForwardOutputs {
            output: &mut output,
            topk_indices: Some(&mut topk_indices),
            topk_weights: Some(&mut topk_weights),
        };
        feed_forward(&self.dims, &self.attributes, &inputs, &mut outputs, pool).unwrap();
        (output, topk_indices, topk_weights)
    }

    /// One expert's `[C]` for one token, before its weight.
    fn expert(&self, x: &[f64], expert: usize) -> Vec<f64> {
        let FeedForwardDims { width, hidden, .. } = self.dims;
        let columns = if self.attributes.gated { 2 * hidden } else { hidden };
        let input_weight = widen(&self.input_weight[expert * width * columns..][..width * columns]);
        let inner = matmul(x, &input_weight, 1, width, columns);
        let activated: Vec<f64> = (0..hidden)
            .map(|i| {
                let factor = if self.attributes.gated { inner[hidden + i] } else { 1.0 };
                activate(self.attributes.activation, inner[i]) * factor
            })
            .collect();
        matmul(&activated, &widen(&self.output_weight[expert * hidden * width..][..hidden * width]), 1, hidden, width)
    }

    pub(crate) fn check(&self) {
        let FeedForwardDims { batch, tokens, width, top_k, .. } = self.dims;
        let read = self.router_input.as_ref().unwrap_or(&self.hidden_states);
        let (output, indices, weights) = self.compute(&Sequential);
        let gate = Gate {
            router_weight: &self.router_weight,
            width: read.len() / (batch * tokens),
            experts: self.dims.experts,
            top_k,
            mode: self.attributes.gate_mode,
        };
        let mut expected = Vec::new();
        for (token, x) in self.hidden_states.chunks(width).enumerate() {
            let indices = &indices[token * top_k..][..top_k];
            let weights =
                gate.check(&read[token * gate.width..][..gate.width], indices, &weights[token * top_k..][..top_k]);
            let mut row = self.output_bias.as_ref().map_or_else(|| vec![0.0; width], |bias| widen(bias));
            for (&expert, weight) in indices.iter().zip(weights) {
                let part = self.expert(&widen(x), expert as usize);
                row.iter_mut().zip(part).for_each(|(sum, part)| *sum += weight * part);
            }
            expected.extend(row);
        }
        assert_close("output", &output, &expected, 3e-5);
    }
}

fn random_dims(random: &mut Random) -> FeedForwardDims {
    let experts = random.between(1, 9);
    FeedForwardDims {
        batch: random.between(1, 3),
        tokens: random.between(1, 14),
        width: random.between(1, 24),
        experts,
        top_k: random.between(1, experts),
        hidden: random.between(1, 30),
    }
}

#[test]
fn random_cases_match_the_reference() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let dims = random_dims(&mut random);
        Case::random(&mut random, dims).check();
    }
}

/// A router may read rows of its own, of another width.
#[test]
fn routers_may_have_an_input() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let dims = FeedForwardDims { tokens: 33, ..random_dims(&mut random) };
        let mut case = Case::random(&mut random, dims);
        let (read, FeedForwardDims { batch, tokens, experts, .. }) = (random.pick(&[1, 5, 40, 1024]), case.dims);
        case.router_input = Some(random.hidden_states(batch * tokens, read));
        case.router_weight = random.values(read * experts, 4.0 * (read as f32).powf(-0.5));
        case.check();
        let alone = case.compute(&Sequential);
        let (output, indices, weights) = case.compute(&Threads(3));
        assert_eq!((bits(&output), indices, bits(&weights)), (bits(&alone.0), alone.1, bits(&alone.2)));
    }
}

#[test]
fn tile_borders_match_the_reference() {
    for (seed, (tokens, experts, top_k)) in
        [(300, 1, 1), (129, 64, 64), (1, 64, 1), (64, 17, 3)].into_iter().enumerate()
    {
        let dims = FeedForwardDims { batch: 1, tokens, width: 20, experts, top_k, hidden: 33 };
        Case::random(&mut Random(seed as u64), dims).check();
    }
}

/// Experts of many rows, whose tasks are wide where the processor has AMX tiles.
fn large_case(seed: u64) -> Case {
    let mut random = Random(seed);
    let tokens = random.between(100, 180);
    let dims = FeedForwardDims { batch: 1, tokens, width: 66, experts: 8, top_k: 4, hidden: 300 };
    Case::random(&mut random, dims)
}

#[test]
fn large_cases_match_the_reference() {
    for seed in 0..4 {
        large_case(seed).check();
    }
}

/// Two experts with one router column tie for every token, wherever the columns lie.
#[test]
fn equal_columns_take_the_lower_expert() {
    for (experts, first, second) in [(2, 0, 1), (5, 1, 4), (17, 0, 16), (40, 15, 33)] {
        let mut random = Random(experts as u64);
        let dims = FeedForwardDims { batch: 1, tokens: 37, width: 19, experts, top_k: 1, hidden: 4 };
        let mut case = Case::random(&mut random, dims);
        case.router_weight = random.values(19 * experts, 1.0);
        for row in case.router_weight.chunks_mut(experts) {
            row[second] = row[first];
        }
        for row in case.hidden_states.chunks_mut(19) {
            row[0] = 1.0;
        }
        case.router_weight[first] = 50.0;
        case.router_weight[second] = 50.0;
        assert_eq!(case.compute(&Sequential).1, vec![first as i64; 37]);
    }
}

/// An untrained router: all logits are 0, so every token takes the experts `0 .. k` with equal weights.
#[test]
fn zero_router_takes_the_first_experts() {
    let mut random = Random(9);
    let dims = FeedForwardDims { batch: 2, tokens: 5, width: 6, experts: 8, top_k: 3, hidden: 7 };
    let mut case = Case::random(&mut random, dims);
    case.router_weight.fill(0.0);
    for mode in GateMode::ALL {
        case.attributes.gate_mode = mode;
        let (_, indices, weights) = case.compute(&Sequential);
        assert_eq!(indices, [0, 1, 2].repeat(10));
        let weight = if mode == GateMode::SoftmaxTopk { 0.125 } else { 1.0 / 3.0 };
        assert!(weights.iter().all(|w| (w - weight).abs() < 1e-7), "{mode:?}: {weights:?}");
    }
}

/// A token takes the same experts with the same weights alone and in a batch.
#[test]
fn routing_of_a_token_does_not_depend_on_its_batch() {
    let mut random = Random(4);
    let dims = FeedForwardDims { batch: 1, tokens: 45, width: 23, experts: 21, top_k: 4, hidden: 3 };
    let mut case = Case::random(&mut random, dims);
    let (_, indices, weights) = case.compute(&Sequential);
    let hidden_states = case.hidden_states.clone();
    case.dims.tokens = 1;
    for (token, x) in hidden_states.chunks(23).enumerate() {
        case.hidden_states = x.to_vec();
        let (_, alone_indices, alone_weights) = case.compute(&Sequential);
        assert_eq!(alone_indices, indices[token * 4..][..4]);
        assert_eq!(bits(&alone_weights), bits(&weights[token * 4..][..4]));
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let small = (0..12).map(|seed| {
        let mut random = Random(seed);
        let dims = FeedForwardDims { tokens: 90, ..random_dims(&mut random) };
        Case::random(&mut random, dims)
    });
    for case in small.chain([large_case(0)]) {
        let alone = case.compute(&Sequential);
        for threads in 1..=4 {
            let (output, indices, weights) = case.compute(&Threads(threads));
            assert_eq!(bits(&output), bits(&alone.0));
            assert_eq!((indices, bits(&weights)), (alone.1.clone(), bits(&alone.2)));
        }
    }
}
