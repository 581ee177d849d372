//! `MoASelfAttention`.

use moa_kernels::{Prepared, SelfAttentionInputs, SelfAttentionOutputs, Sequential, ThreadPool, self_attention};
use moa_schema::{AttentionMode, GateMode, SelfAttentionAttributes, SelfAttentionDims};

use crate::attention_reference::{Attend, RotaryReference};
use crate::routing_reference::Gate;
use crate::support::{Random, Threads, assert_close, bits, matmul, widen};

#[derive(Clone)]
pub(crate) struct Rotation {
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    pub(crate) position_ids: Vec<i64>,
}

#[derive(Clone)]
pub(crate) struct Computed {
    pub(crate) output: Vec<f32>,
    pub(crate) present_key: Vec<f32>,
    pub(crate) present_value: Vec<f32>,
    pub(crate) topk_indices: Vec<i64>,
    pub(crate) topk_weights: Vec<f32>,
}

impl Computed {
    pub(crate) fn bits(&self) -> Vec<Vec<u32>> {
        [&self.output, &self.present_key, &self.present_value, &self.topk_weights].map(|values| bits(values)).to_vec()
    }
}

#[derive(Clone)]
pub(crate) struct Case {
    pub(crate) dims: SelfAttentionDims,
    pub(crate) attributes: SelfAttentionAttributes,
    pub(crate) hidden_states: Vec<f32>,
    pub(crate) attention_mask: Vec<i32>,
    pub(crate) router_weight: Vec<f32>,
    pub(crate) query_weight: Vec<f32>,
    pub(crate) kv_weight: Vec<f32>,
    pub(crate) output_weight: Vec<f32>,
    pub(crate) output_bias: Option<Vec<f32>>,
    pub(crate) past_key: Vec<f32>,
    pub(crate) past_value: Vec<f32>,
    pub(crate) rotation: Option<Rotation>,
    pub(crate) router_input: Option<Vec<f32>>,
    /// Keys and values are the hidden states, and `kv_weight` is not given.
    pub(crate) takes_hidden_states: bool,
}

impl Case {
    pub(crate) fn random(random: &mut Random, dims: SelfAttentionDims) -> Self {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = dims;
        let fan_in = (width as f32).powf(-0.5);
        let rotation = (head % 2 == 0 && random.chance(60)).then(|| {
            let positions = past + tokens + random.between(0, 3);
            let angles: Vec<f32> = random.values(positions * head / 2, 3.0);
            Rotation {
                cos: angles.iter().map(|angle| angle.cos()).collect(),
                sin: angles.iter().map(|angle| angle.sin()).collect(),
                position_ids: (0..batch * tokens).map(|_| random.between(0, positions - 1) as i64).collect(),
            }
        });
        Self {
            dims,
            attributes: SelfAttentionAttributes {
                top_k,
                kv_num_heads: kv_heads,
                causal: random.chance(60),
                scale: (head as f32).powf(-0.5),
                gate_mode: random.pick(&GateMode::ALL),
                skip_padded_queries: random.chance(60),
                attention_mode: AttentionMode::Softmax,
            },
            hidden_states: random.hidden_states(batch * tokens, width),
            attention_mask: (0..batch).flat_map(|_| random.mask(past + tokens)).collect(),
            router_weight: random.router(width, experts),
            query_weight: random.values(experts * width * kv_heads * head, 3.0 * fan_in),
            kv_weight: random.values(width * 2 * kv_heads * head, 3.0 * fan_in),
            output_weight: random.values(experts * kv_heads * head * width, 1.0),
            output_bias: random.chance(50).then(|| random.values(width, 1.0)),
            past_key: random.values(batch * kv_heads * past * head, 1.5),
            past_value: random.values(batch * kv_heads * past * head, 1.5),
            rotation,
            router_input: None,
            takes_hidden_states: false,
        }
    }

    pub(crate) fn inputs(&self) -> SelfAttentionInputs<'_> {
        let has_past = self.dims.past > 0;
        SelfAttentionInputs {
            hidden_states: &self.hidden_states,
            attention_mask: &self.attention_mask,
            router_weight: &self.router_weight,
            query_weight: (&self.query_weight).into(),
            kv_weight: (!self.takes_hidden_states).then(|| (&self.kv_weight).into()),
            output_weight: (&self.output_weight).into(),
            output_bias: self.output_bias.as_deref(),
            capacity: None,
            past_key: has_past.then_some(&self.past_key),
            past_value: has_past.then_some(&self.past_value),
            cos_cache: self.rotation.as_ref().map(|rotation| rotation.cos.as_slice()),
            sin_cache: self.rotation.as_ref().map(|rotation| rotation.sin.as_slice()),
            position_ids: self.rotation.as_ref().map(|rotation| rotation.position_ids.as_slice()),
            router_input: self.router_input.as_deref(),
        }
    }

    pub(crate) fn compute(&self, pool: &dyn ThreadPool) -> Computed {
        self.compute_with(&Prepared::default(), pool)
    }

    pub(crate) fn compute_with(&self, prepared: &Prepared, pool: &dyn ThreadPool) -> Computed {
        let SelfAttentionDims { batch, tokens, past, width, top_k, kv_heads, head, .. } = self.dims;
        let cache = batch * kv_heads * (past + tokens) * head;
        let mut computed = Computed {
            output: vec![f32::NAN; batch * tokens * width],
            present_key: vec![f32::NAN; cache],
            present_value: vec![f32::NAN; cache],
            topk_indices: vec![-1; batch * tokens * top_k],
            topk_weights: vec![f32::NAN; batch * tokens * top_k],
        };
        let mut outputs = SelfAttentionOutputs {
            output: &mut computed.output,
            present_key: Some(&mut computed.present_key),
            present_value: Some(&mut computed.present_value),
            topk_indices: Some(&mut computed.topk_indices),
            topk_weights: Some(&mut computed.topk_weights),
        };
        prepared.self_attention(&self.dims, &self.attributes, &self.inputs(), &mut outputs, pool).unwrap();
        computed
    }

    /// `[B, G, P + T, D]` in f64, `part` 0 for keys and 1 for values.
    fn cache(&self, part: usize, past_rows: &[f32]) -> Vec<f64> {
        let SelfAttentionDims { batch, tokens, past, width, kv_heads, head, .. } = self.dims;
        let columns = 2 * kv_heads * head;
        let hidden_states = widen(&self.hidden_states);
        let projected = match self.takes_hidden_states {
            true => hidden_states.chunks(width).flat_map(|row| [row, row].concat()).collect(),
            false => matmul(&hidden_states, &widen(&self.kv_weight), batch * tokens, width, columns),
        };
        let mut cache = Vec::new();
        for batch in 0..batch {
            for group in 0..kv_heads {
                let start = (batch * kv_heads + group) * past * head;
                cache.extend(widen(&past_rows[start..start + past * head]));
                for token in batch * tokens..(batch + 1) * tokens {
                    let row = &projected[token * columns + (part * kv_heads + group) * head..][..head];
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

    /// Whether each token is routed.
    fn routed(&self) -> Vec<bool> {
        let SelfAttentionDims { batch, tokens, past, .. } = self.dims;
        let is_routed = |token| {
            let place = token / tokens * (past + tokens) + past + token % tokens;
            self.attention_mask[place] != 0 || !self.attributes.skip_padded_queries
        };
        (0..batch * tokens).map(is_routed).collect()
    }

    /// The output `[B * T, C]` in f64 of these keys and values, given the kernel's choice of experts.
    pub(crate) fn attended(&self, [key, value]: [&[f64]; 2], computed: &Computed) -> Vec<f64> {
        let SelfAttentionDims { batch, tokens, past, width, experts, top_k, kv_heads, head } = self.dims;
        let read = self.router_input.as_ref().unwrap_or(&self.hidden_states);
        let reference = Attend {
            gate: Gate {
                router_weight: &self.router_weight,
                width: read.len() / (batch * tokens),
                experts,
                top_k,
                mode: self.attributes.gate_mode,
            },
            read,
            width,
            hidden_states: &self.hidden_states,
            query_weight: &self.query_weight,
            output_weight: &self.output_weight,
            output_bias: self.output_bias.as_deref(),
            key,
            value,
            key_mask: &self.attention_mask,
            routed: &self.routed(),
            mode: self.attributes.attention_mode,
            causal_past: self.attributes.causal.then_some(past),
            rotary: self.rotation_reference(),
            scale: self.attributes.scale,
            batch,
            tokens,
            keys: past + tokens,
            kv_heads,
            head,
        };
        reference.output(&computed.topk_indices, &computed.topk_weights)
    }

    pub(crate) fn check(&self) {
        let (width, routed, computed) = (self.dims.width, self.routed(), self.compute(&Sequential));
        let (key, value) = (self.cache(0, &self.past_key), self.cache(1, &self.past_value));
        assert_close("present_key", &computed.present_key, &key, 1e-5);
        assert_close("present_value", &computed.present_value, &value, 1e-5);
        assert_close("output", &computed.output, &self.attended([&key, &value], &computed), 3e-5);
        for (token, row) in computed.output.chunks(width).enumerate().filter(|(token, _)| !routed[*token]) {
            assert_eq!(bits(row), vec![0; width], "skipped token {token}");
        }
    }
}

/// The output and nothing else.
pub(crate) fn output_alone(output: &mut [f32]) -> SelfAttentionOutputs<'_> {
    SelfAttentionOutputs { output, present_key: None, present_value: None, topk_indices: None, topk_weights: None }
}

pub(crate) fn random_dims(random: &mut Random) -> SelfAttentionDims {
    let experts = random.between(1, 9);
    SelfAttentionDims {
        batch: random.between(1, 3),
        tokens: random.between(1, 12),
        past: if random.chance(50) { random.between(1, 9) } else { 0 },
        width: random.between(1, 24),
        experts,
        top_k: random.between(1, experts),
        kv_heads: random.between(1, 3),
        head: random.between(1, 12),
    }
}

#[test]
fn random_cases_match_the_reference() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let dims = random_dims(&mut random);
        Case::random(&mut random, dims).check();
    }
}

/// More rows, keys and experts than one tile of each holds, with and without a causal mask.
#[test]
fn tile_borders_match_the_reference() {
    let shapes = [(140, 0, 1, 1), (2, 600, 5, 5), (1, 255, 64, 64), (70, 251, 33, 2), (300, 0, 6, 3), (65, 1, 64, 1)];
    for (seed, (tokens, past, experts, top_k)) in shapes.into_iter().enumerate() {
        for causal in [false, true] {
            let mut random = Random(seed as u64);
            let dims = SelfAttentionDims { batch: 2, tokens, past, width: 12, experts, top_k, kv_heads: 2, head: 6 };
            let mut case = Case::random(&mut random, dims);
            case.attributes.causal = causal;
            case.check();
        }
    }
}

/// One token a row against a cache, which is read where it stands where the head is a multiple of 16.
#[test]
fn single_tokens_match_the_reference() {
    for seed in 0..120 {
        let mut random = Random(seed);
        let experts = random.between(1, 18);
        let dims = SelfAttentionDims {
            batch: random.between(1, 3),
            tokens: 1,
            past: random.pick(&[0, 1, 15, 127, 128, 300]),
            width: random.between(1, 40),
            experts,
            top_k: random.between(1, experts),
            kv_heads: random.between(1, 3),
            head: random.pick(&[8, 16, 32, 48, 80]),
        };
        Case::random(&mut random, dims).check();
    }
}

/// A layer just large enough for tasks of the only token's slots, where `size` is 0, or larger, or too small.
pub(crate) fn only_token(random: &mut Random, batch: usize, top_k: usize, size: isize) -> Case {
    let head = random.pick(&[32, 48, 80, 128]);
    let dims = SelfAttentionDims {
        batch,
        tokens: 1,
        past: random.pick(&[0, 1, 15, 40, 127, 128, 300, 700]),
        width: (1usize << 18).div_ceil(2 * top_k * head).strict_add_signed(size),
        experts: top_k + random.between(0, 3),
        top_k,
        kv_heads: 1,
        head,
    };
    let mut case = Case::random(random, dims);
    case.output_weight.iter_mut().for_each(|weight| *weight *= (head as f32).powf(-0.5));
    case
}

#[test]
fn the_only_token_matches_the_reference() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let (top_k, size) = (random.between(3, 18), random.pick(&[-1, 0, 1, 30]));
        let case = only_token(&mut random, 1, top_k, size);
        case.check();
        let alone = case.compute(&Sequential).bits();
        for threads in [2, 3, 9] {
            assert_eq!(case.compute(&Threads(threads)).bits(), alone, "{threads} threads");
        }
    }
}

/// Nothing of an earlier call is left in what it gets.
#[test]
fn the_only_token_gets_the_bias_where_it_sees_no_key() {
    let mut case = only_token(&mut Random(5), 1, 4, 0);
    let prepared = Prepared::default();
    (case.attributes.skip_padded_queries, case.output_bias) = (false, Some(vec![0.5; case.dims.width]));
    case.attention_mask.fill(1);
    assert_ne!(case.compute_with(&prepared, &Sequential).output, vec![0.5; case.dims.width]);
    case.attention_mask.fill(0);
    assert_eq!(case.compute_with(&prepared, &Sequential).output, vec![0.5; case.dims.width]);
}

/// Where no more slots meet than attention takes at once, it does not matter who shares a call.
#[test]
fn the_only_token_has_the_bits_that_it_has_beside_another() {
    for seed in 0..30 {
        let both = only_token(&mut Random(seed), 2, 4, 0);
        let together = both.compute(&Sequential);
        for row in 0..2 {
            let mut alone = only_token(&mut Random(seed), 2, 4, 0);
            alone.dims.batch = 1;
            for values in [&mut alone.hidden_states, &mut alone.past_key, &mut alone.past_value] {
                *values = values[values.len() / 2 * row..][..values.len() / 2].to_vec();
            }
            alone.attention_mask = alone.attention_mask[row * (both.dims.past + 1)..][..both.dims.past + 1].to_vec();
            if let Some(rotation) = &mut alone.rotation {
                rotation.position_ids = vec![rotation.position_ids[row]];
            }
            let output = alone.compute(&Sequential).output;
            assert_eq!(
                bits(&output),
                bits(&together.output[row * both.dims.width..][..both.dims.width]),
                "{seed} {row}"
            );
        }
    }
}

/// Heads and widths of several panels, with more keys and rows than a tile holds.
#[test]
fn wide_layers_match_the_reference() {
    let shapes = [(40, 0, 128, 70, 8, 8), (3, 290, 64, 150, 5, 3), (90, 20, 33, 129, 16, 9), (1, 0, 130, 300, 20, 20)];
    for (seed, (tokens, past, head, width, experts, top_k)) in shapes.into_iter().enumerate() {
        let mut random = Random(seed as u64);
        let dims = SelfAttentionDims { batch: 2, tokens, past, width, experts, top_k, kv_heads: 2, head };
        let mut case = Case::random(&mut random, dims);
        case.output_weight.iter_mut().for_each(|weight| *weight *= (2.0 * head as f32).powf(-0.5));
        case.check();
    }
}

/// Left padding with a causal mask: the padded queries see no key.
#[test]
fn left_padding_with_a_causal_mask_stays_finite() {
    for skip_padded_queries in [true, false] {
        let mut random = Random(11);
        let dims = SelfAttentionDims { batch: 2, tokens: 9, past: 0, ..random_dims(&mut random) };
        let mut case = Case::random(&mut random, dims);
        case.attributes.causal = true;
        case.attributes.skip_padded_queries = skip_padded_queries;
        case.output_bias = None;
        case.attention_mask = [[0, 0, 0, 0, 1, 1, 1, 1, 1], [0; 9]].concat();
        case.check();
        let output = case.compute(&Sequential).output;
        assert!(output[..4 * dims.width].iter().all(|value| *value == 0.0));
        assert!(output[9 * dims.width..].iter().all(|value| *value == 0.0));
    }
}

/// NaN in a padded token reaches neither the other tokens nor its own output.
#[test]
fn padding_may_hold_nan() {
    for (seed, mask) in [(0, [0, 0, 1, 1, 1, 1]), (1, [1, 1, 1, 0, 0, 0]), (2, [1, 0, 1, 1, 0, 1])] {
        let mut random = Random(seed);
        let dims = SelfAttentionDims { batch: 1, tokens: 6, past: 0, ..random_dims(&mut random) };
        let mut case = Case::random(&mut random, dims);
        case.attributes.skip_padded_queries = true;
        case.attention_mask = mask.to_vec();
        let clean = case.compute(&Sequential);
        for (row, mask) in case.hidden_states.chunks_mut(dims.width).zip(mask) {
            if mask == 0 {
                row.fill(f32::NAN);
            }
        }
        assert_eq!(bits(&case.compute(&Sequential).output), bits(&clean.output));
    }
}

/// A future token whose value is infinite does not touch the past through a weight of 0.
#[test]
fn causal_queries_do_not_read_the_future() {
    let mut random = Random(8);
    let dims = SelfAttentionDims { batch: 1, tokens: 7, past: 2, width: 5, experts: 3, top_k: 2, kv_heads: 1, head: 4 };
    let mut case = Case::random(&mut random, dims);
    case.attributes.causal = true;
    case.attention_mask.fill(1);
    case.hidden_states[6 * 5..].fill(3e38);
    case.kv_weight.fill(1.0);
    case.router_weight.fill(0.0);
    let poisoned = case.compute(&Sequential);
    assert!(poisoned.present_value.iter().any(|value| value.is_infinite()));
    assert!(poisoned.output[..6 * 5].iter().all(|value| value.is_finite()));
}

/// Token by token with a cache gives what one pass gives.
#[test]
fn cached_steps_agree_with_one_pass() {
    let mut random = Random(21);
    let dims =
        SelfAttentionDims { batch: 1, tokens: 8, past: 0, width: 10, experts: 4, top_k: 2, kv_heads: 2, head: 6 };
    let mut whole = Case::random(&mut random, dims);
    whole.attributes.causal = true;
    whole.attention_mask.fill(1);
    whole.rotation = None;
    let expected = whole.compute(&Sequential);
    let hidden_states = whole.hidden_states.clone();
    let mut step = whole;
    for token in 0..8 {
        step.dims = SelfAttentionDims { tokens: 1, past: token, ..dims };
        step.hidden_states = hidden_states[token * 10..][..10].to_vec();
        step.attention_mask = vec![1; token + 1];
        let computed = step.compute(&Sequential);
        assert_close("output", &computed.output, &widen(&expected.output[token * 10..][..10]), 1e-5);
        (step.past_key, step.past_value) = (computed.present_key, computed.present_value);
    }
    assert_close("present_key", &step.past_key, &widen(&expected.present_key), 1e-6);
}

#[test]
fn outputs_that_nobody_wants_change_nothing() {
    let mut random = Random(5);
    let dims = random_dims(&mut random);
    let case = Case::random(&mut random, dims);
    let mut output = vec![f32::NAN; dims.batch * dims.tokens * dims.width];
    let mut outputs = output_alone(&mut output);
    self_attention(&case.dims, &case.attributes, &case.inputs(), &mut outputs, &Sequential).unwrap();
    assert_eq!(bits(&output), bits(&case.compute(&Sequential).output));
}

#[test]
fn threads_do_not_change_a_bit() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let dims = SelfAttentionDims { tokens: 70, ..random_dims(&mut random) };
        let case = Case::random(&mut random, dims);
        let alone = case.compute(&Sequential);
        for threads in 1..=4 {
            let together = case.compute(&Threads(threads));
            assert_eq!(together.bits(), alone.bits());
            assert_eq!(together.topk_indices, alone.topk_indices);
        }
    }
}
