//! Weights stored in fewer bytes, and activations in f16.

use half::{bf16, f16};
use moa_kernels::{
    CrossAttentionInputs, CrossAttentionOutputs, FeedForwardInputs, FeedForwardOutputs, Instructions, Int4, Prepared,
    Scalar, SelfAttentionInputs, SelfAttentionOutputs, Sequential, WeightData,
};
use moa_schema::{
    Activation, CrossAttentionAttributes, CrossAttentionDims, FeedForwardAttributes, FeedForwardDims, GateMode,
    SelfAttentionDims,
};

use crate::prepared::pack_matrices;
use crate::self_attention::{Case, Computed, random_dims};
use crate::support::{self, Random, Threads, bits};
use crate::tiles::large_dims;

/// A weight in fewer bytes, and the same values in four.
pub(crate) enum Narrow {
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    I8 { values: Vec<i8>, scales: Vec<f32> },
    I4 { values: Vec<u8>, scales: Vec<bf16> },
}

impl Narrow {
    /// Rounds `values` in place and keeps what is left of them.
    pub(crate) fn round(values: &mut [f32], brain: bool) -> Self {
        if brain {
            let halves: Vec<_> = values.iter().copied().map(bf16::from_f32).collect();
            values.iter_mut().zip(&halves).for_each(|(value, half)| *value = half.to_f32());
            return Self::Bf16(halves);
        }
        let halves: Vec<_> = values.iter().copied().map(f16::from_f32).collect();
        values.iter_mut().zip(&halves).for_each(|(value, half)| *value = half.to_f32());
        Self::F16(halves)
    }

    pub(crate) fn data(&self) -> WeightData<'_> {
        match self {
            Self::Bf16(values) => WeightData::Bf16(values),
            Self::F16(values) => WeightData::F16(values),
            Self::I8 { values, scales } => WeightData::I8 { values, scales },
            Self::I4 { values, scales } => WeightData::I4(Int4 { values, scales }),
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) const LEVELS: [Instructions; 2] = [Instructions::Portable, Instructions::Neon];

#[cfg(not(target_arch = "aarch64"))]
pub(crate) const LEVELS: [Instructions; 5] =
    [Instructions::Portable, Instructions::Avx2, Instructions::AvxVnni, Instructions::Avx512, Instructions::Amx];

pub(crate) fn self_case(seed: u64) -> Case {
    let mut random = Random(seed);
    let dims = match seed % 3 {
        0 => SelfAttentionDims { tokens: 1, head: 32, past: 40, ..random_dims(&mut random) },
        1 => SelfAttentionDims { tokens: 70, head: 40, width: 50, ..random_dims(&mut random) },
        _ if seed % 6 == 2 => large_dims(&mut random),
        _ => random_dims(&mut random),
    };
    Case::random(&mut random, dims)
}

pub(crate) fn compute<T: Scalar>(case: &Case, inputs: &SelfAttentionInputs<'_, T>, prepared: &Prepared) -> Computed {
    compute_on(case, inputs, prepared, &Threads(2))
}

pub(crate) fn compute_on<T: Scalar>(
    case: &Case,
    inputs: &SelfAttentionInputs<'_, T>,
    prepared: &Prepared,
    pool: &Threads,
) -> Computed {
    let SelfAttentionDims { batch, tokens, past, width, top_k, kv_heads, head, .. } = case.dims;
    let cache = batch * kv_heads * (past + tokens) * head;
    let (mut output, mut key, mut value) =
        (vec![T::default(); batch * tokens * width], vec![T::default(); cache], vec![T::default(); cache]);
    let mut topk_indices = vec![-1; batch * tokens * top_k];
    let mut topk_weights = vec![f32::NAN; batch * tokens * top_k];
    let mut outputs = SelfAttentionOutputs {
        output: &mut output,
        present_key: Some(&mut key),
        present_value: Some(&mut value),
        topk_indices: Some(&mut topk_indices),
        topk_weights: Some(&mut topk_weights),
    };
    prepared.self_attention(&case.dims, &case.attributes, inputs, &mut outputs, pool).unwrap();
    let wide = |values: &[T]| {
        let mut wide = vec![0.0; values.len()];
        T::widen(values, &mut wide);
        wide
    };
    let [output, present_key, present_value] = [&output, &key, &value].map(|values| wide(values));
    Computed { output, present_key, present_value, topk_indices, topk_weights }
}

pub(crate) fn assert_same(found: &Computed, expected: &Computed) {
    for (found, expected) in [
        (&found.output, &expected.output),
        (&found.present_key, &expected.present_key),
        (&found.present_value, &expected.present_value),
        (&found.topk_weights, &expected.topk_weights),
    ] {
        assert_eq!(bits(found), bits(expected));
    }
    assert_eq!(found.topk_indices, expected.topk_indices);
}

/// Rounds matrices `[inner, columns]` in place, and keeps what is left of them.
pub(crate) trait Round: Fn(&mut [f32], [usize; 2]) -> Narrow {}

impl<F: Fn(&mut [f32], [usize; 2]) -> Narrow> Round for F {}

/// The matrices of a case, rounded: those of queries, of keys and values, and of the output.
pub(crate) fn rounded_matrices(case: &mut Case, round: impl Round) -> [Narrow; 3] {
    let SelfAttentionDims { width, kv_heads, head, .. } = case.dims;
    let columns = kv_heads * head;
    let query = round(&mut case.query_weight, [width, columns]);
    let kv = round(&mut case.kv_weight, [width, 2 * columns]);
    [query, kv, round(&mut case.output_weight, [columns, width])]
}

/// The inputs of a case with narrow matrices.
pub(crate) fn narrow_inputs<'a>(case: &'a Case, [query, kv, output]: &'a [Narrow; 3]) -> SelfAttentionInputs<'a> {
    let (query_weight, kv_weight, output_weight) = (query.data(), Some(kv.data()), output.data());
    SelfAttentionInputs { query_weight, kv_weight, output_weight, ..case.inputs() }
}

/// Narrow weights give the bits that f32 of the same values gives, packed before or not, on every level; `judge` gets
/// the bytes of the packed weights, and of f32 that was packed.
pub(crate) fn self_attention_has_the_bits_of_f32(
    seed: u64,
    round: impl Round,
    judge: impl Fn(Instructions, [usize; 2]),
) {
    let mut case = self_case(seed);
    let matrices = rounded_matrices(&mut case, round);
    let (wide, narrow) = (case.inputs(), narrow_inputs(&case, &matrices));
    for limit in LEVELS {
        let expected = compute(&case, &wide, &Prepared::new(limit));
        assert_same(&compute(&case, &narrow, &Prepared::new(limit)), &expected);
        let [packed, exact] = [narrow, wide].map(|inputs| {
            pack_matrices(&case.dims, limit, [inputs.query_weight, inputs.kv_weight.unwrap(), inputs.output_weight])
        });
        assert_same(&compute(&case, &narrow, &packed), &expected);
        assert_same(&compute(&case, &wide, &exact), &expected);
        judge(limit, [packed.weight_bytes(), exact.weight_bytes()]);
    }
}

/// Two bytes a weight have the bits of four; and four are packed in two where these hold them.
#[test]
fn self_attention_has_the_bits_of_widened_weights() {
    for seed in 0..24 {
        let brain = seed % 2 == 0;
        let round = |values: &mut [f32], _: [usize; 2]| Narrow::round(values, brain);
        self_attention_has_the_bits_of_f32(seed, round, |limit, [packed, exact]| {
            assert!(packed == exact || !brain && limit >= Instructions::Amx, "{packed} {exact}");
        });
    }
}

pub(crate) fn feed_forward<T: Scalar>(
    dims: &FeedForwardDims,
    gated: bool,
    inputs: &FeedForwardInputs<'_, T>,
    prepared: &Prepared,
) -> Vec<T> {
    let attributes = FeedForwardAttributes {
        top_k: dims.top_k,
        gate_mode: GateMode::TopkSoftmax,
        activation: Activation::Silu,
        gated,
    };
    let mut output = vec![T::default(); dims.batch * dims.tokens * dims.width];
    let mut outputs = FeedForwardOutputs { output: &mut output, topk_indices: None, topk_weights: None };
    prepared.feed_forward(dims, &attributes, inputs, &mut outputs, &Sequential).unwrap();
    output
}

/// As [`self_attention_has_the_bits_of_f32`], for layers of some sizes.
pub(crate) fn feed_forward_has_the_bits_of_f32(round: impl Round) {
    for (seed, tokens) in [(1, 1), (2, 7), (3, 190), (4, 1), (6, 190)] {
        let mut random = Random(seed);
        let gated = seed % 2 == 0;
        let dims = FeedForwardDims { batch: 1, tokens, width: 67, experts: 5, top_k: 2, hidden: 73 };
        let columns = if gated { 146 } else { 73 };
        let hidden_states = random.values(tokens * 67, 1.0);
        let router = random.values(67 * 5, 1.0);
        let (mut input, mut output) = (random.values(5 * 67 * columns, 0.3), random.values(5 * 73 * 67, 0.3));
        let (narrow_input, narrow_output) = (round(&mut input, [67, columns]), round(&mut output, [73, 67]));
        let wide = FeedForwardInputs {
            hidden_states: &hidden_states,
            router_weight: &router,
            input_weight: (&input).into(),
            output_weight: (&output).into(),
            output_bias: None,
            router_input: None,
        };
        let narrow =
            FeedForwardInputs { input_weight: narrow_input.data(), output_weight: narrow_output.data(), ..wide };
        for limit in LEVELS {
            let [found, expected] =
                [&narrow, &wide].map(|inputs| feed_forward(&dims, gated, inputs, &Prepared::new(limit)));
            assert_eq!(bits(&found), bits(&expected));
        }
    }
}

#[test]
fn feed_forward_has_the_bits_of_widened_weights() {
    for brain in [true, false] {
        feed_forward_has_the_bits_of_f32(|values: &mut [f32], _: [usize; 2]| Narrow::round(values, brain));
    }
}

pub(crate) fn halves(values: &[f32]) -> Vec<f16> {
    values.iter().copied().map(f16::from_f32).collect()
}

pub(crate) fn rounded(values: &mut [f32]) -> Vec<f16> {
    let halves = halves(values);
    f16::widen(&halves, values);
    halves
}

/// With f16 activations the inputs are widened exactly, the new keys and values are what the cache keeps, and the
/// output is rounded once.
pub(crate) fn half_activations_round_once(mut case: Case, seed: u64) {
    let hidden = rounded(&mut case.hidden_states);
    let (past_key, past_value) = (rounded(&mut case.past_key), rounded(&mut case.past_value));
    let bias = case.output_bias.as_mut().map(|bias| rounded(bias));
    let wide = case.inputs();
    let SelfAttentionInputs { attention_mask, router_weight, query_weight, kv_weight, output_weight, .. } = wide;
    let SelfAttentionInputs { cos_cache, sin_cache, position_ids, router_input, .. } = wide;
    let has_past = case.dims.past > 0;
    let narrow = SelfAttentionInputs {
        hidden_states: &hidden,
        attention_mask,
        router_weight,
        query_weight,
        kv_weight,
        output_weight,
        output_bias: bias.as_deref(),
        capacity: None,
        past_key: has_past.then_some(past_key.as_slice()),
        past_value: has_past.then_some(past_value.as_slice()),
        cos_cache,
        sin_cache,
        position_ids,
        router_input,
    };
    let found = compute(&case, &narrow, &Prepared::default());
    let expected = compute(&case, &wide, &Prepared::default());
    assert_eq!(found.topk_indices, expected.topk_indices);
    assert_eq!(bits(&found.topk_weights), bits(&expected.topk_weights));
    let [mut key, mut value] = [expected.present_key, expected.present_value];
    rounded(&mut key);
    rounded(&mut value);
    assert_eq!(bits(&found.present_key), bits(&key), "seed {seed}");
    assert_eq!(bits(&found.present_value), bits(&value), "seed {seed}");
    let wanted = case.attended([&support::widen(&key), &support::widen(&value)], &found);
    for (found, wanted) in found.output.iter().zip(&wanted) {
        // Half a unit of f16, and what f32 differs by.
        let most = wanted.abs() / 2048.0 + 3e-5 * (1.0 + wanted.abs());
        assert!((f64::from(*found) - wanted).abs() <= most, "seed {seed}: {found} {wanted}");
    }
    // A bias that takes the first token's output away leaves the last bits of the sums.
    let before = bias.clone().unwrap_or_else(|| vec![f16::ZERO; case.dims.width]);
    let rest = before.iter().zip(&found.output).map(|(bias, output)| f16::from_f32(bias.to_f32() - output));
    let rest: Vec<_> = rest.collect();
    let narrow = SelfAttentionInputs { output_bias: Some(&rest), ..narrow };
    let expected = output_of(&case, &narrow, [true; 2]);
    for [key, value] in [[true, false], [false, true], [false; 2]] {
        let output = output_of(&case, &narrow, [key, value]);
        assert_eq!(bits(&output), bits(&expected), "seed {seed}: present_key {key}, present_value {value}");
    }
}

/// The output of f16 activations where only these of `present_key` and `present_value` are asked for.
fn output_of(case: &Case, inputs: &SelfAttentionInputs<'_, f16>, [with_key, with_value]: [bool; 2]) -> Vec<f32> {
    let SelfAttentionDims { batch, tokens, past, width, kv_heads, head, .. } = case.dims;
    let cache = batch * kv_heads * (past + tokens) * head;
    let mut output = vec![f16::ZERO; batch * tokens * width];
    let (mut key, mut value) = (vec![f16::ZERO; cache], vec![f16::ZERO; cache]);
    let mut outputs = SelfAttentionOutputs {
        output: output.as_mut_slice(),
        present_key: with_key.then_some(key.as_mut_slice()),
        present_value: with_value.then_some(value.as_mut_slice()),
        topk_indices: None,
        topk_weights: None,
    };
    let prepared = Prepared::default();
    prepared.self_attention(&case.dims, &case.attributes, inputs, &mut outputs, &Threads(2)).unwrap();
    output.into_iter().map(f16::to_f32).collect()
}

#[test]
fn half_activations_are_rounded_once() {
    for seed in 0..24 {
        half_activations_round_once(self_case(seed), seed);
    }
    // One token whose keys are read as they are stored: few are seen, or there are many slots.
    let sizes = SelfAttentionDims { tokens: 1, width: 64, experts: 17, ..random_dims(&mut Random(0)) };
    for (seed, (batch, kv_heads, head, top_k, past)) in
        [(4, 1, 64, 2, 39), (3, 2, 32, 9, 199), (1, 1, 128, 16, 60), (2, 1, 16, 9, 199)].into_iter().enumerate()
    {
        let dims = SelfAttentionDims { batch, kv_heads, head, top_k, past, ..sizes };
        for seen in [past + 1, 20] {
            let mut case = Case::random(&mut Random(seed as u64), dims);
            for row in case.attention_mask.chunks_mut(past + 1) {
                row.fill(1);
                row[..past + 1 - seen].fill(0);
            }
            half_activations_round_once(case, seed as u64);
        }
    }
}

/// Where no cache is kept, an f16 result is the f32 result rounded.
#[test]
fn half_results_of_cross_attention_are_those_of_f32_rounded() {
    let dims =
        CrossAttentionDims { batch: 2, tokens: 3, keys: 11, width: 24, experts: 6, top_k: 3, kv_heads: 2, head: 16 };
    let only = CrossAttentionDims { batch: 1, width: 256, top_k: 4, kv_heads: 1, head: 128, ..dims };
    half_cross_attention(dims);
    half_cross_attention(CrossAttentionDims { tokens: 1, keys: 40, ..dims });
    half_cross_attention(CrossAttentionDims { tokens: 1, keys: 140, top_k: 6, ..dims });
    half_cross_attention(CrossAttentionDims { tokens: 1, keys: 40, ..only });
    half_cross_attention(only);
}

fn half_cross_attention(dims: CrossAttentionDims) {
    let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = dims;
    let (mut random, columns, fan_in) = (Random(9), kv_heads * head, (width as f32).powf(-0.5));
    let attributes = CrossAttentionAttributes {
        top_k,
        kv_num_heads: kv_heads,
        scale: 0.25,
        gate_mode: GateMode::SoftmaxTopk,
        skip_padded_queries: true,
    };
    let (mut hidden, cache_len) = (random.values(batch * tokens * width, 1.0), batch * keys * columns);
    let (mut key, mut value) = (random.values(cache_len, 1.0), random.values(cache_len, 1.0));
    let (router, query) = (random.values(width * experts, 1.0), random.values(experts * width * columns, fan_in));
    let output = random.values(experts * columns * width, 0.1);
    let (narrow_hidden, narrow_key, narrow_value) = (rounded(&mut hidden), rounded(&mut key), rounded(&mut value));
    let mut bias = random.values(width, 1.0);
    let narrow_bias = rounded(&mut bias);
    let (key_mask, mut query_mask) = (vec![1; batch * keys], vec![1; batch * tokens]);
    query_mask[batch * tokens / 3] = i32::from(tokens == 1);
    let wide = CrossAttentionInputs {
        hidden_states: hidden.as_slice(),
        key: &key,
        value: &value,
        key_mask: &key_mask,
        query_mask: &query_mask,
        router_weight: &router,
        query_weight: (&query).into(),
        output_weight: (&output).into(),
        output_bias: Some(&bias),
    };
    let narrow = CrossAttentionInputs {
        hidden_states: narrow_hidden.as_slice(),
        key: &narrow_key,
        value: &narrow_value,
        key_mask: &key_mask,
        query_mask: &query_mask,
        router_weight: &router,
        query_weight: (&query).into(),
        output_weight: (&output).into(),
        output_bias: Some(&narrow_bias),
    };
    let (mut expected, mut found) = (vec![0.0f32; hidden.len()], vec![f16::ZERO; hidden.len()]);
    let prepared = Prepared::default();
    let mut outputs = CrossAttentionOutputs { output: &mut expected, topk_indices: None, topk_weights: None };
    prepared.cross_attention(&dims, &attributes, &wide, &mut outputs, &Sequential).unwrap();
    let mut outputs = CrossAttentionOutputs { output: &mut found, topk_indices: None, topk_weights: None };
    prepared.cross_attention(&dims, &attributes, &narrow, &mut outputs, &Sequential).unwrap();
    assert_eq!(found, halves(&expected));
}

#[test]
fn half_results_of_feed_forward_are_those_of_f32_rounded() {
    let mut random = Random(10);
    let mut hidden = random.values(2 * 3 * 24, 1.0);
    let narrow_hidden = rounded(&mut hidden);
    let mut bias = random.values(24, 1.0);
    let narrow_bias = rounded(&mut bias);
    let (router, query, output) =
        (random.values(24 * 6, 1.0), random.values(6 * 24 * 32, 0.3), random.values(6 * 32 * 24, 0.3));
    let feed_forward_dims = FeedForwardDims { batch: 2, tokens: 3, width: 24, experts: 6, top_k: 3, hidden: 32 };
    let wide = FeedForwardInputs {
        hidden_states: hidden.as_slice(),
        router_weight: &router,
        input_weight: (&query).into(),
        output_weight: (&output).into(),
        output_bias: Some(&bias),
        router_input: None,
    };
    let narrow = FeedForwardInputs {
        hidden_states: narrow_hidden.as_slice(),
        router_weight: &router,
        input_weight: (&query).into(),
        output_weight: (&output).into(),
        output_bias: Some(&narrow_bias),
        router_input: None,
    };
    let expected = feed_forward(&feed_forward_dims, false, &wide, &Prepared::default());
    assert_eq!(feed_forward(&feed_forward_dims, false, &narrow, &Prepared::default()), halves(&expected));
}
