//! `MoASelfAttention` and `MoACrossAttention`.

use moa_cuda::plan::{self, Plan, Regime, SelfAttentionSettings};
use moa_cuda::{Device, Element, Options, Parameters};
use moa_schema::{
    AttentionMode, CrossAttentionAttributes, CrossAttentionDims, GateMode, SelfAttentionAttributes, SelfAttentionDims,
};

use crate::attention_reference::{Attend, RotaryReference};
use crate::devices::{device, device_of};
use crate::emulator::{Results, Tensors, run};
use crate::routing_reference::Gate;
use crate::support::{Random, assert_rows_close, decode, encode, matmul, more, tolerance, widen};

pub(crate) struct Rotation {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) position_ids: Vec<i64>,
}

/// A call of either operator; in cross attention `past` is the length of the given keys and values.
pub(crate) struct Case {
    pub(crate) dims: SelfAttentionDims,
    pub(crate) attributes: SelfAttentionAttributes,
    pub(crate) element: Element,
    pub(crate) device: Device,
    pub(crate) options: Options,
    pub(crate) is_cross: bool,
    /// Whether optional outputs are asked for.
    pub(crate) all_outputs: bool,
    /// Rows of caches that are updated in place.
    pub(crate) capacity: Option<usize>,
    pub(crate) offset: usize,
    pub(crate) hidden_states: Vec<f32>,
    /// `[B, S]`.
    pub(crate) key_mask: Vec<i32>,
    /// `[B, T]`, in cross attention.
    pub(crate) query_mask: Vec<i32>,
    pub(crate) router_weight: Vec<f32>,
    pub(crate) query_weight: Vec<f32>,
    /// `None` where keys and values are the hidden states.
    pub(crate) kv_weight: Option<Vec<f32>>,
    /// What the router reads in place of the hidden states.
    pub(crate) router_input: Option<Vec<f32>>,
    pub(crate) output_weight: Vec<f32>,
    pub(crate) output_bias: Option<Vec<f32>>,
    pub(crate) past_key: Vec<f32>,
    pub(crate) past_value: Vec<f32>,
    pub(crate) rotation: Option<Rotation>,
}

fn int_bytes(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

impl Case {
    pub(crate) fn random(random: &mut Random, dims: SelfAttentionDims, element: Element, is_cross: bool) -> Self {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = dims;
        let keys = if is_cross { past } else { past + tokens };
        let rotation = (!is_cross && head % 2 == 0 && random.chance(60)).then(|| {
            let positions = past + tokens + random.between(0, 3);
            let angles: Vec<f32> = random.values(Element::F32, positions * head / 2, 3.0);
            Rotation {
                cos: angles.iter().map(|angle| angle.cos()).collect(),
                sin: angles.iter().map(|angle| angle.sin()).collect(),
                position_ids: (0..batch * tokens).map(|_| random.between(0, positions - 1) as i64).collect(),
            }
        });
        let fan_in = (width as f32).powf(-0.5);
        let cache = if past == 0 { 0 } else { batch * kv_heads * past * head };
        Self {
            dims,
            attributes: SelfAttentionAttributes {
                top_k,
                kv_num_heads: kv_heads,
                causal: !is_cross && random.chance(60),
                scale: (head as f32).powf(-0.5),
                gate_mode: random.pick(&GateMode::ALL),
                skip_padded_queries: random.chance(60),
                attention_mode: AttentionMode::Softmax,
            },
            element,
            device: device(random),
            options: Options::default(),
            is_cross,
            all_outputs: random.chance(60),
            capacity: None,
            offset: 0,
            hidden_states: random.hidden_states(element, batch * tokens, width),
            key_mask: (0..batch).flat_map(|_| random.mask(keys)).collect(),
            query_mask: (0..batch).flat_map(|_| random.mask(tokens)).collect(),
            router_weight: random.router(width, experts),
            query_weight: random.values(element, experts * width * kv_heads * head, 2.0 * fan_in),
            kv_weight: Some(random.values(element, width * 2 * kv_heads * head, 2.0 * fan_in)),
            router_input: None,
            output_weight: random.values(
                element,
                experts * width * kv_heads * head,
                2.0 * ((kv_heads * head) as f32).powf(-0.5),
            ),
            output_bias: random.chance(50).then(|| random.values(element, width, 1.0)),
            past_key: random.values(element, cache, 1.0),
            past_value: random.values(element, cache, 1.0),
            rotation,
        }
    }

    /// Not with every set of optional outputs.
    fn returns_keys(&self) -> bool {
        self.all_outputs && (self.capacity.is_some() || !self.dims.past.is_multiple_of(3))
    }

    fn cross_dims(&self) -> CrossAttentionDims {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = self.dims;
        CrossAttentionDims { batch, tokens, keys: past, width, experts, top_k, kv_heads, head }
    }

    pub(crate) fn plan(&self) -> Plan {
        let SelfAttentionAttributes { top_k, kv_num_heads, scale, gate_mode, skip_padded_queries, .. } =
            self.attributes;
        if self.is_cross {
            let attributes = CrossAttentionAttributes { top_k, kv_num_heads, scale, gate_mode, skip_padded_queries };
            return plan::cross_attention(&self.cross_dims(), &attributes, self.element, &self.device, self.options)
                .unwrap();
        }
        let settings = SelfAttentionSettings {
            rotary_positions: self.rotation.as_ref().map(|rotation| rotation.cos.len() / (self.dims.head / 2)),
            router_width: self.router_input.as_ref().map(|_| self.router_width()),
            keeps_hidden: self.kv_weight.is_none(),
            capacity: self.capacity,
            returns_keys: self.returns_keys(),
            returns_values: self.all_outputs,
        };
        plan::self_attention(&self.dims, &self.attributes, &settings, self.element, &self.device, self.options).unwrap()
    }

    pub(crate) fn tensors(&self) -> Tensors {
        let SelfAttentionDims { batch, tokens, past, width, top_k, kv_heads, head, .. } = self.dims;
        let float = |values: &[f32]| Some(encode(self.element, values));
        let single = |values: &[f32]| Some(encode(Element::F32, values));
        let bias = self.output_bias.as_ref().and_then(|bias| float(bias));
        let chosen = batch * tokens * top_k;
        let optional = |bytes: usize| self.all_outputs.then_some(bytes);
        let output = Some(batch * tokens * width * self.element.bytes());
        let cache = batch * kv_heads * self.capacity.unwrap_or(past + tokens) * head * self.element.bytes();
        let offset = self.offset;
        if self.is_cross {
            let inputs = vec![
                float(&self.hidden_states),
                float(&self.past_key),
                float(&self.past_value),
                Some(int_bytes(&self.key_mask)),
                Some(int_bytes(&self.query_mask)),
                single(&self.router_weight),
                float(&self.query_weight),
                float(&self.output_weight),
                bias,
            ];
            let outputs = vec![output, optional(chosen * 8), optional(chosen * 4)];
            return Tensors { inputs, outputs, offset, ..Tensors::default() };
        }
        let past_of = |values: &[f32]| match self.capacity {
            Some(rows) => float(&self.with_room(values, rows)),
            None if past > 0 => float(values),
            None => None,
        };
        let rotary = |part: fn(&Rotation) -> Vec<u8>| self.rotation.as_ref().map(part);
        let inputs = vec![
            float(&self.hidden_states),
            Some(int_bytes(&self.key_mask)),
            single(&self.router_weight),
            float(&self.query_weight),
            self.kv_weight.as_ref().and_then(|weight| float(weight)),
            float(&self.output_weight),
            bias,
            past_of(&self.past_key),
            past_of(&self.past_value),
            rotary(|rotation| encode(Element::F32, &rotation.cos)),
            rotary(|rotation| encode(Element::F32, &rotation.sin)),
            rotary(|rotation| rotation.position_ids.iter().flat_map(|id| id.to_le_bytes()).collect()),
            self.router_input.as_ref().and_then(|read| single(read)),
        ];
        let keys = self.returns_keys().then_some(cache);
        let outputs = vec![output, keys, optional(cache), optional(chosen * 8), optional(chosen * 4)];
        let in_place = if self.capacity.is_some() { vec![(7, 1), (8, 2)] } else { Vec::new() };
        Tensors { inputs, outputs, in_place, offset }
    }

    /// `[B, G, S, D]` in f64, `part` 0 for keys and 1 for values.
    fn cache(&self, part: usize, past_rows: &[f32]) -> Vec<f64> {
        if self.is_cross {
            return widen(past_rows);
        }
        let SelfAttentionDims { batch, tokens, past, width, kv_heads, head, .. } = self.dims;
        let hidden = widen(&self.hidden_states);
        let (columns, part_start, rows) = match &self.kv_weight {
            Some(weight) => {
                let columns = 2 * kv_heads * head;
                (columns, part * kv_heads * head, matmul(&hidden, &widen(weight), batch * tokens, width, columns))
            }
            None => (width, 0, hidden),
        };
        let mut cache = Vec::new();
        for batch in 0..batch {
            for group in 0..kv_heads {
                let start = (batch * kv_heads + group) * past * head;
                cache.extend(widen(&past_rows[start..start + past * head]));
                for token in batch * tokens..(batch + 1) * tokens {
                    let row = &rows[token * columns + part_start + group * head..][..head];
                    match self.rotation_reference().filter(|_| part == 0) {
                        Some(rotary) => cache.extend(rotary.rotate(token, row)),
                        None => cache.extend(row),
                    }
                }
            }
        }
        cache
    }

    fn rotation_reference(&self) -> Option<RotaryReference<'_>> {
        self.rotation.as_ref().map(|rotation| RotaryReference {
            cos: &rotation.cos,
            sin: &rotation.sin,
            position_ids: &rotation.position_ids,
        })
    }

    pub(crate) fn routed(&self) -> Vec<bool> {
        let SelfAttentionDims { batch, tokens, past, .. } = self.dims;
        let is_real = |token: usize| {
            let (row, place) = (token / tokens, token % tokens);
            if self.is_cross { self.query_mask[token] } else { self.key_mask[row * (past + tokens) + past + place] }
        };
        (0..batch * tokens).map(|token| is_real(token) != 0 || !self.attributes.skip_padded_queries).collect()
    }

    /// The choice of experts in f64, where the kernel does not return its own.
    fn own_choice(&self, gate: &Gate<'_>) -> (Vec<i64>, Vec<f32>) {
        let SelfAttentionDims { experts, top_k, .. } = self.dims;
        let (mut indices, mut weights) = (Vec::new(), Vec::new());
        for (token, routed) in self.routed().iter().enumerate() {
            let (width, read) = (gate.width, self.read_by_router());
            let x = widen(&read[token * width..][..width]);
            let logits = matmul(&x, &widen(gate.router_weight), 1, width, experts);
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
            let largest = logits[order[0]];
            let power = |expert: &usize| (logits[*expert] - largest).exp();
            let all: f64 = order.iter().map(power).sum();
            let chosen: f64 = order[..top_k].iter().map(power).sum();
            let sum = if gate.mode == GateMode::SoftmaxTopk { all } else { chosen };
            for (slot, expert) in order[..top_k].iter().enumerate() {
                indices.push(if *routed { *expert as i64 } else { slot as i64 });
                weights.push(if *routed { (power(expert) / sum) as f32 } else { 0.0 });
            }
        }
        (indices, weights)
    }

    /// Runs the case, compares every output with f64, and returns the plan's regime.
    pub(crate) fn check(&self) -> Regime {
        let plan = self.plan();
        let results = run(&plan, &self.tensors());
        self.compare(&results);
        plan.regime
    }

    fn choice_of(&self, results: &Results, gate: &Gate<'_>) -> (Vec<i64>, Vec<f32>) {
        if !self.all_outputs {
            return self.own_choice(gate);
        }
        let first = if self.is_cross { 1 } else { 3 };
        let [indices, weights] = [first, first + 1].map(|index| results.outputs[index].as_ref().unwrap());
        let indices = indices.chunks(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap())).collect();
        (indices, decode(Element::F32, weights))
    }

    pub(crate) fn compare(&self, results: &Results) {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = self.dims;
        let keys = if self.is_cross { past } else { past + tokens };
        let tolerance = tolerance(self.element, self.options.tf32);
        let (key, value) = (self.cache(0, &self.past_key), self.cache(1, &self.past_value));
        if self.all_outputs && !self.is_cross {
            for (index, expected) in [(1, &key), (2, &value)] {
                let Some(found) = results.outputs[index].as_ref() else { continue };
                let found = self.rows_of_cache(&decode(self.element, found));
                assert_rows_close("cache", &found, expected, head, tolerance);
            }
        }
        let routed = self.routed();
        let reference = Attend {
            gate: Gate {
                router_weight: &self.router_weight,
                width: self.router_width(),
                experts,
                top_k,
                mode: self.attributes.gate_mode,
            },
            read: self.read_by_router(),
            hidden_states: &self.hidden_states,
            width,
            mode: self.attributes.attention_mode,
            query_weight: &self.query_weight,
            output_weight: &self.output_weight,
            output_bias: self.output_bias.as_deref(),
            key: &key,
            value: &value,
            key_mask: &self.key_mask,
            routed: &routed,
            causal_past: self.attributes.causal.then_some(past),
            rotary: self.rotation_reference(),
            scale: self.attributes.scale,
            batch,
            tokens,
            keys,
            kv_heads,
            head,
        };
        let (indices, weights) = self.choice_of(results, &reference.gate);
        let expected = reference.output(&indices, &weights);
        let output = decode(self.element, results.outputs[0].as_ref().unwrap());
        assert_rows_close("output", &output, &expected, width, tolerance);
        for (token, row) in output.chunks(width).enumerate().filter(|(token, _)| !routed[*token]) {
            assert!(row.iter().all(|value| value.to_bits() == 0), "skipped token {token}: {row:?}");
        }
        assert_eq!(results.status, 0, "the status word");
    }
}

pub(crate) fn random_dims(random: &mut Random) -> SelfAttentionDims {
    let experts = random.between(1, 9);
    let odd = random.chance(40);
    SelfAttentionDims {
        batch: random.between(1, 3),
        tokens: random.between(1, 12),
        past: if random.chance(50) { random.between(1, 9) } else { 0 },
        width: if odd { random.between(1, 40) } else { 8 * random.between(1, 6) },
        experts,
        top_k: random.between(1, experts),
        kv_heads: random.between(1, 3),
        head: if odd { random.between(1, 20) } else { 16 * random.between(1, 2) },
    }
}

fn check_random(element: Element, tf32: bool, is_cross: bool, seeds: std::ops::Range<u64>) {
    for seed in more(seeds) {
        let mut random = Random(seed);
        let mut dims = random_dims(&mut random);
        if is_cross {
            dims.past = random.between(1, 90);
        }
        let mut case = Case::random(&mut random, dims, element, is_cross);
        case.options.tf32 = tf32;
        if random.chance(20) {
            case.offset = if element == Element::F32 { 8 } else { 2 * random.between(1, 7) };
            case.offset = case.offset.next_multiple_of(8);
        }
        println!("seed {seed}: {dims:?} {:?} {:?}", case.attributes, case.device);
        case.check();
    }
}

#[test]
fn random_self_attention_in_f32() {
    check_random(Element::F32, false, false, 0..30);
}

#[test]
fn random_self_attention_in_tf32() {
    check_random(Element::F32, true, false, 100..120);
}

#[test]
fn random_self_attention_in_f16() {
    check_random(Element::F16, false, false, 200..230);
}

#[test]
fn random_self_attention_in_bf16() {
    check_random(Element::Bf16, false, false, 300..330);
}

#[test]
fn random_cross_attention() {
    for (index, element) in Element::ALL.into_iter().enumerate() {
        check_random(element, false, true, 400 + 30 * index as u64..410 + 30 * index as u64);
    }
}

/// Every width of the attention kernels, and odd widths between them, tall and short, in one and in several parts.
#[test]
fn wide_heads() {
    let shapes =
        [(3, 70, 40, 24), (1, 300, 64, 16), (33, 0, 65, 17), (2, 200, 128, 32), (20, 5, 200, 24), (5, 130, 256, 16)];
    for (index, (tokens, past, head, width)) in shapes.into_iter().enumerate() {
        let halves = [(7, 0), (7, 5), (8, 0)].map(|capability| (Element::F16, capability));
        for (element, compute_capability) in halves.into_iter().chain([(Element::F32, (8, 0)), (Element::Bf16, (8, 0))])
        {
            for multiprocessors in [1, 132] {
                let mut random = Random(index as u64);
                let dims = SelfAttentionDims { batch: 1, tokens, past, width, experts: 5, top_k: 3, kv_heads: 2, head };
                let mut case = Case::random(&mut random, dims, element, false);
                case.device = device_of(compute_capability, multiprocessors);
                case.options.tf32 = index % 2 == 0;
                println!("{dims:?} {element:?} {:?}", case.device);
                case.check();
            }
        }
    }
}

/// Single tokens against a cache: few rows, many parts of keys.
#[test]
fn decoding() {
    let (mut cut_keys, mut cut_sums, mut sparse) = (0, 0, 0);
    for seed in 0..32 {
        let mut random = Random(seed);
        let experts = random.pick(&[1, 2, 6, 8, 16, 33]);
        let dims = SelfAttentionDims {
            batch: random.between(1, 5),
            tokens: 1,
            past: random.pick(&[0, 1, 63, 64, 150, 400]),
            width: random.pick(&[16, 24, 64, 96]),
            experts,
            top_k: random.pick(&[1, 2.min(experts), experts.div_ceil(2), experts]),
            kv_heads: random.between(1, 5),
            head: random.pick(&[32, 64, 128]),
        };
        let element = random.pick(&Element::ALL);
        let mut case = Case::random(&mut random, dims, element, false);
        case.device.multiprocessors = random.pick(&[16, 132]);
        println!("seed {seed}: {dims:?} {:?}", case.device);
        let regime = case.check();
        let has =
            |parts: fn(&Parameters) -> i32| case.plan().launches.iter().any(|launch| parts(&launch.parameters) > 1);
        cut_keys += usize::from(has(|p| p.key_splits));
        cut_sums += usize::from(has(|p| p.output_splits));
        sparse += usize::from(regime == Regime::Sparse);
    }
    println!("{cut_keys} with cut keys, {cut_sums} with cut sums, {sparse} sparse");
    assert!(cut_keys >= 5 && cut_sums >= 5 && sparse >= 2);
}

/// A chosen expert, a masked key and a padded query each leave the others alone.
#[test]
fn padding_may_hold_nan() {
    for (seed, mask) in [(0, [0, 0, 1, 1, 1, 1]), (1, [1, 1, 1, 0, 0, 0]), (2, [1, 0, 1, 1, 0, 1])] {
        for element in Element::ALL {
            let mut random = Random(seed);
            let dims = SelfAttentionDims { batch: 1, tokens: 6, past: 0, ..random_dims(&mut random) };
            let mut case = Case::random(&mut random, dims, element, false);
            case.attributes.skip_padded_queries = true;
            case.key_mask = mask.to_vec();
            case.all_outputs = false;
            let clean = run(&case.plan(), &case.tensors());
            for (row, mask) in case.hidden_states.chunks_mut(dims.width).zip(mask) {
                if mask == 0 {
                    row.fill(f32::NAN);
                }
            }
            assert_eq!(run(&case.plan(), &case.tensors()).outputs, clean.outputs, "{element:?}");
        }
    }
}

/// Left padding with a causal mask: the padded queries see no key.
#[test]
fn rows_without_a_key_are_zero() {
    for skip_padded_queries in [true, false] {
        for element in Element::ALL {
            let mut random = Random(11);
            let dims = SelfAttentionDims { batch: 2, tokens: 9, past: 0, ..random_dims(&mut random) };
            let mut case = Case::random(&mut random, dims, element, false);
            case.attributes.causal = true;
            case.attributes.skip_padded_queries = skip_padded_queries;
            case.output_bias = None;
            case.key_mask = [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0; 9]].concat();
            let results = run(&case.plan(), &case.tensors());
            case.compare(&results);
            let output = decode(element, results.outputs[0].as_ref().unwrap());
            assert!(output[..4 * dims.width].iter().all(|value| *value == 0.0));
            assert!(output[9 * dims.width..].iter().all(|value| *value == 0.0));
        }
    }
}
