//! `MoEFeedForward`.

use moa_cuda::ACTIVATIONS;
use moa_cuda::plan::{self, Plan, Regime};
use moa_cuda::{Device, Element, Options};
use moa_schema::{Activation, FeedForwardAttributes, FeedForwardDims, GateMode};

use crate::devices::device;
use crate::emulator::{Results, Tensors, run};
use crate::routing_reference::Gate;
use crate::support::{Random, assert_rows_close, decode, encode, matmul, more, tolerance, widen};

pub(crate) struct Case {
    pub(crate) dims: FeedForwardDims,
    pub(crate) attributes: FeedForwardAttributes,
    pub(crate) element: Element,
    pub(crate) device: Device,
    pub(crate) options: Options,
    pub(crate) hidden_states: Vec<f32>,
    router_weight: Vec<f32>,
    /// What the router reads in place of the hidden states.
    router_input: Option<Vec<f32>>,
    input_weight: Vec<f32>,
    output_weight: Vec<f32>,
    output_bias: Option<Vec<f32>>,
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Relu => x.max(0.0),
        // The error function, by its Taylor series; the arguments are small.
        Activation::Gelu => {
            let z = x / std::f64::consts::SQRT_2;
            let (mut term, mut sum) = (z, z);
            for n in 1..200 {
                term *= -z * z / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            0.5 * x * (1.0 + 2.0 / std::f64::consts::PI.sqrt() * sum)
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
    }
}

impl Case {
    pub(crate) fn random(random: &mut Random, dims: FeedForwardDims, element: Element) -> Self {
        let FeedForwardDims { batch, tokens, width, experts, top_k, hidden } = dims;
        let attributes = FeedForwardAttributes {
            top_k,
            gate_mode: random.pick(&GateMode::ALL),
            activation: random.pick(&ACTIVATIONS),
            gated: random.chance(50),
        };
        let columns = if attributes.gated { 2 * hidden } else { hidden };
        Self {
            dims,
            attributes,
            element,
            device: device(random),
            options: Options::default(),
            hidden_states: random.hidden_states(element, batch * tokens, width),
            router_weight: random.router(width, experts),
            router_input: None,
            input_weight: random.values(element, experts * width * columns, 2.0 * (width as f32).powf(-0.5)),
            output_weight: random.values(element, experts * hidden * width, (hidden as f32).powf(-0.5)),
            output_bias: random.chance(50).then(|| random.values(element, width, 1.0)),
        }
    }

    pub(crate) fn plan(&self) -> Plan {
        let router_width = self.router_input.as_ref().map(|_| self.router_width());
        plan::feed_forward(&self.dims, &self.attributes, router_width, self.element, &self.device, self.options)
            .unwrap()
    }

    /// Gives the router `width` columns of its own.
    pub(crate) fn route_by(&mut self, random: &mut Random, width: usize) {
        let tokens = self.dims.batch * self.dims.tokens;
        self.router_input = Some(random.hidden_states(Element::F32, tokens, width));
        self.router_weight = random.router(width, self.dims.experts);
    }

    fn read_by_router(&self) -> &[f32] {
        self.router_input.as_deref().unwrap_or(&self.hidden_states)
    }

    fn router_width(&self) -> usize {
        self.read_by_router().len() / (self.dims.batch * self.dims.tokens)
    }

    pub(crate) fn tensors(&self) -> Tensors {
        let FeedForwardDims { batch, tokens, width, top_k, .. } = self.dims;
        let float = |values: &[f32]| Some(encode(self.element, values));
        let inputs = vec![
            float(&self.hidden_states),
            Some(encode(Element::F32, &self.router_weight)),
            float(&self.input_weight),
            float(&self.output_weight),
            self.output_bias.as_ref().and_then(|bias| float(bias)),
            self.router_input.as_ref().map(|read| encode(Element::F32, read)),
        ];
        let tokens = batch * tokens;
        let outputs = [tokens * width * self.element.bytes(), tokens * top_k * 8, tokens * top_k * 4];
        Tensors { inputs, outputs: outputs.map(Some).to_vec(), ..Tensors::default() }
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

    pub(crate) fn check(&self) -> Regime {
        let plan = self.plan();
        self.compare(&run(&plan, &self.tensors()));
        plan.regime
    }

    fn compare(&self, results: &Results) {
        let FeedForwardDims { width, top_k, experts, .. } = self.dims;
        let [output, indices, weights] = [0, 1, 2].map(|index| results.outputs[index].as_ref().unwrap());
        let indices: Vec<i64> = indices.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect();
        let weights = decode(Element::F32, weights);
        let (read, router_width) = (self.read_by_router(), self.router_width());
        let gate = Gate {
            router_weight: &self.router_weight,
            width: router_width,
            experts,
            top_k,
            mode: self.attributes.gate_mode,
        };
        let mut expected = Vec::new();
        for (token, x) in self.hidden_states.chunks(width).enumerate() {
            let indices = &indices[token * top_k..][..top_k];
            let read = &read[token * router_width..][..router_width];
            let weights = gate.check(read, indices, &weights[token * top_k..][..top_k]);
            let mut row = self.output_bias.as_ref().map_or_else(|| vec![0.0; width], |bias| widen(bias));
            for (&expert, weight) in indices.iter().zip(weights) {
                let part = self.expert(&widen(x), expert as usize);
                row.iter_mut().zip(part).for_each(|(sum, part)| *sum += weight * part);
            }
            expected.extend(row);
        }
        let output = decode(self.element, output);
        assert_rows_close("output", &output, &expected, width, tolerance(self.element, self.options.tf32));
        assert_eq!(results.status, 0, "the status word");
    }
}

fn random_dims(random: &mut Random) -> FeedForwardDims {
    let experts = random.between(1, 9);
    let odd = random.chance(40);
    FeedForwardDims {
        batch: random.between(1, 3),
        tokens: random.between(1, 14),
        width: if odd { random.between(1, 40) } else { 8 * random.between(1, 6) },
        experts,
        top_k: random.between(1, experts),
        hidden: if odd { random.between(1, 50) } else { 8 * random.between(1, 12) },
    }
}

#[test]
fn random_cases() {
    for (index, element) in Element::ALL.into_iter().enumerate() {
        for seed in more(0..12) {
            let mut random = Random(1000 * index as u64 + seed);
            let dims = random_dims(&mut random);
            let mut case = Case::random(&mut random, dims, element);
            case.options.tf32 = random.chance(40);
            println!("seed {seed}: {dims:?} {:?} {:?}", case.attributes, case.device);
            case.check();
        }
    }
}

#[test]
fn grouped_cases() {
    for (index, element) in Element::ALL.into_iter().enumerate() {
        for (top_k, experts, regime) in [(2, 4, Regime::Grouped), (2, 7, Regime::GroupedReduce)] {
            let mut random = Random(index as u64);
            let dims = FeedForwardDims { batch: 3, tokens: 90, width: 24, experts, top_k, hidden: 40 };
            assert_eq!(Case::random(&mut random, dims, element).check(), regime);
        }
    }
}

/// Hidden rows near the end of the range of binary16, with a gate of 1 among many experts, stay finite.
#[test]
fn large_hidden_rows() {
    let mut random = Random(7);
    let dims = FeedForwardDims { batch: 1, tokens: 9, width: 32, experts: 20, top_k: 1, hidden: 48 };
    let mut case = Case::random(&mut random, dims, Element::F16);
    case.attributes.gate_mode = GateMode::TopkSoftmax;
    (case.attributes.activation, case.attributes.gated) = (Activation::Relu, false);
    case.input_weight = random.values(Element::F16, 20 * 32 * 48, 2048.0);
    case.output_weight = random.values(Element::F16, 20 * 48 * 32, 2f32.powi(-12));
    let largest = |x: &[f32]| case.expert(&widen(x), 0).iter().fold(0.0f64, |largest, y| largest.max(y.abs()));
    assert!(case.hidden_states.chunks(32).map(largest).fold(0.0, f64::max) > 1.0, "the outputs are ordinary");
    case.check();
}
