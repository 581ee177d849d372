//! Layers as MoLM has them: sticks that are broken, keys and values that are the hidden states, and routers that read
//! something else than these.

use moa_cuda::Element;
use moa_cuda::plan::Regime;
use moa_schema::{AttentionMode, SelfAttentionDims};

use crate::attention::{Case, random_dims};
use crate::devices::device_of;
use crate::emulator::run;
use crate::feed_forward;
use crate::support::{Random, decode, more};

impl Case {
    /// What the router reads.
    pub(crate) fn read_by_router(&self) -> &[f32] {
        self.router_input.as_deref().unwrap_or(&self.hidden_states)
    }

    /// Columns of what the router reads.
    pub(crate) fn router_width(&self) -> usize {
        self.read_by_router().len() / (self.dims.batch * self.dims.tokens)
    }

    /// Gives the router `width` columns of its own.
    fn route_by(&mut self, random: &mut Random, width: usize) {
        let tokens = self.dims.batch * self.dims.tokens;
        self.router_input = Some(random.hidden_states(Element::F32, tokens, width));
        self.router_weight = random.router(width, self.dims.experts);
    }

    fn break_sticks(&mut self) {
        (self.attributes.causal, self.attributes.attention_mode) = (true, AttentionMode::StickBreaking);
    }

    /// Some of what makes a layer MoLM's, all of it every second time.
    fn make_modular(&mut self, random: &mut Random) {
        let all = random.chance(50);
        if all || random.chance(50) {
            self.break_sticks();
        }
        if all || random.chance(50) {
            let width = random.pick(&[1, 4, 24, 64]);
            self.route_by(random, width);
        }
        let SelfAttentionDims { width, kv_heads, head, .. } = self.dims;
        if width == kv_heads * head && (all || random.chance(50)) {
            self.kv_weight = None;
        }
        if all {
            self.rotation = None;
        }
    }
}

/// Random layers whose heads make up their width, with caches that are returned, kept or updated in place.
#[test]
fn random_layers() {
    for seed in more(0..90) {
        let mut random = Random(seed);
        let mut dims = random_dims(&mut random);
        if random.chance(40) {
            (dims.tokens, dims.past) = (random.pick(&[1, 2, 40, 70]), random.pick(&[0, 1, 63, 64, 150]));
        }
        dims.width = dims.kv_heads * dims.head;
        let mut case = Case::random(&mut random, dims, Element::ALL[seed as usize % 3], false);
        case.options.tf32 = random.chance(30);
        case.make_modular(&mut random);
        case.device.multiprocessors = random.pick(&[1, 16, 132]);
        if random.chance(30) {
            case.update_in_place(dims.past + dims.tokens + random.pick(&[0, 1, 40]));
        }
        if random.chance(20) {
            case.offset = 8;
        }
        println!("seed {seed}: {dims:?} {:?} {:?} {:?}", case.attributes, case.capacity, case.device);
        case.check();
    }
}

/// Sticks over many keys, in tall tiles and in parts, of every head width and kind of hardware. Scores are so small
/// that what is left of a stick matters to the end, or so large that little is.
#[test]
fn long_sticks() {
    for (index, (tokens, past, head)) in
        [(1, 700, 64), (40, 30, 128), (3, 260, 256), (70, 130, 40), (2, 300, 17)].into_iter().enumerate()
    {
        let halves = [(7, 0), (7, 5), (8, 0), (9, 0)].map(|capability| (Element::F16, capability));
        let others = [(Element::F32, (8, 0)), (Element::Bf16, (8, 0)), (Element::Bf16, (7, 0))];
        for (element, capability) in halves.into_iter().chain(others) {
            for (multiprocessors, scale) in [(1, 0.02), (132, 0.3)] {
                let mut random = Random(index as u64);
                let dims =
                    SelfAttentionDims { batch: 1, tokens, past, width: 24, experts: 5, top_k: 3, kv_heads: 2, head };
                let mut case = Case::random(&mut random, dims, element, false);
                case.break_sticks();
                case.attributes.scale = scale;
                case.options.tf32 = index % 2 == 0;
                case.device = device_of(capability, multiprocessors);
                let attends = case.plan().launches.iter().any(|launch| launch.kernel.contains("_sticks_"));
                assert!(attends, "{:?}", case.device);
                println!("{dims:?} {element:?} {:?}", case.device);
                case.check();
            }
        }
    }
}

/// Keys and values that are hidden states, of so many tokens that projections have blocks that stay.
#[test]
fn hidden_states_beside_blocks_that_stay() {
    let dims =
        SelfAttentionDims { batch: 1, tokens: 130, past: 3, width: 64, experts: 2, top_k: 2, kv_heads: 1, head: 64 };
    let device = device_of((9, 0), 1);
    for has_input in [false, true] {
        let mut random = Random(7);
        let mut case = Case::random(&mut random, dims, Element::F16, false);
        (case.kv_weight, case.rotation, case.device) = (None, None, device);
        case.options.wgmma = true;
        if has_input {
            case.route_by(&mut random, 24);
        }
        let plan = case.plan();
        assert!(plan.launches.iter().any(|launch| launch.kernel.contains("project_wgmma_128x256")), "{plan:?}");
        case.check();
    }
}

/// A router that reads an input of its own is as exact as that of f32 layers, in every regime.
#[test]
fn routers_with_an_input_of_their_own() {
    for (tokens, experts, top_k, regime) in [
        (1, 32, 4, Regime::Sparse),
        (3, 33, 2, Regime::Sparse),
        (20, 8, 8, Regime::Dense),
        (300, 6, 3, Regime::Grouped),
        (300, 9, 2, Regime::GroupedReduce),
    ] {
        for element in Element::ALL {
            let mut random = Random(tokens as u64);
            let dims =
                SelfAttentionDims { batch: 1, tokens, past: 4, width: 16, experts, top_k, kv_heads: 1, head: 16 };
            let mut case = Case::random(&mut random, dims, element, false);
            case.route_by(&mut random, 72);
            case.all_outputs = true;
            assert_eq!(case.check(), regime);
            let mut case = feed_forward::Case::random(
                &mut random,
                moa_schema::FeedForwardDims { batch: 1, tokens, width: 16, experts, top_k, hidden: 24 },
                element,
            );
            case.route_by(&mut random, 72);
            assert_eq!(case.check(), regime);
        }
    }
}

/// A router's logits that are not finite make rows of NaN, and say so, in whatever it reads.
#[test]
fn faults_of_routers_with_an_input() {
    let mut random = Random(3);
    let dims =
        SelfAttentionDims { batch: 1, tokens: 5, past: 0, width: 16, experts: 4, top_k: 2, kv_heads: 1, head: 16 };
    let mut case = Case::random(&mut random, dims, Element::F16, false);
    (case.attributes.causal, case.attributes.skip_padded_queries) = (false, false);
    case.route_by(&mut random, 8);
    case.router_input.as_mut().unwrap()[2 * 8 + 1] = f32::INFINITY;
    let results = run(&case.plan(), &case.tensors());
    assert_eq!(results.status, moa_cuda::Fault::RouterLogits as u32);
    let output = decode(Element::F16, results.outputs[0].as_ref().unwrap());
    for (token, row) in output.chunks(dims.width).enumerate() {
        assert_eq!(row.iter().all(|value| value.is_nan()), token == 2, "{token}: {row:?}");
    }
}
