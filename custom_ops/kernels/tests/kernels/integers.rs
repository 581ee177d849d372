//! Weights in 8-bit integers with a scale for each column.

use moa_kernels::{
    CrossAttentionInputs, CrossAttentionOutputs, FeedForwardInputs, Prepared, SelfAttentionInputs, Sequential,
    WeightData,
};
use moa_schema::{CrossAttentionAttributes, CrossAttentionDims, FeedForwardDims, GateMode, SelfAttentionDims};

use crate::prepared::pack_matrices;
use crate::self_attention::Case;
use crate::stored::{LEVELS, assert_same, compute, feed_forward, self_case};
use crate::support::{Random, bits};

/// Integers, and the scales of their columns.
struct Integers {
    values: Vec<i8>,
    scales: Vec<f32>,
}

impl Integers {
    /// Makes `values`, matrices `[inner, columns]`, integers times powers of 2, which change no rounding.
    fn round(values: &mut [f32], [inner, columns]: [usize; 2]) -> Self {
        Self::scaled(values, [inner, columns], |column| 2f32.powi(-6 - (column % 5) as i32))
    }

    fn scaled(values: &mut [f32], [inner, columns]: [usize; 2], scale: impl Fn(usize) -> f32) -> Self {
        let count = values.len() / inner;
        let scales: Vec<f32> = (0..count).map(scale).collect();
        let mut integers = Vec::with_capacity(values.len());
        for (row, values) in values.chunks_exact_mut(columns).enumerate() {
            for (value, scale) in values.iter_mut().zip(&scales[row / inner * columns..]) {
                let integer = (*value / scale).round().clamp(-127.0, 127.0);
                integers.push(integer as i8);
                *value = integer * scale;
            }
        }
        Self { values: integers, scales }
    }

    fn data(&self) -> WeightData<'_> {
        WeightData::I8 { values: &self.values, scales: &self.scales }
    }
}

/// Integers whose scales are powers of 2 give the bits that f32 of the same values gives, packed before or not, on
/// every level, in less memory than the two bytes that hold these values.
#[test]
fn self_attention_has_the_bits_of_scaled_weights() {
    for seed in 0..24 {
        let mut case = self_case(seed);
        let [query, kv, output] = integers(&mut case, Integers::round);
        let wide = case.inputs();
        let narrow = SelfAttentionInputs {
            query_weight: query.data(),
            kv_weight: kv.data(),
            output_weight: output.data(),
            ..wide
        };
        for limit in LEVELS {
            let expected = compute(&case, &wide, &Prepared::new(limit));
            assert_same(&compute(&case, &narrow, &Prepared::new(limit)), &expected);
            let packed = pack_matrices(&case.dims, limit, [query.data(), kv.data(), output.data()]);
            assert_same(&compute(&case, &narrow, &packed), &expected);
            let exact = pack_matrices(&case.dims, limit, [wide.query_weight, wide.kv_weight, wide.output_weight]);
            assert!(packed.weight_bytes() < exact.weight_bytes(), "{} {}", packed.weight_bytes(), exact.weight_bytes());
        }
    }
}

/// The matrices of a case as integers.
fn integers(case: &mut Case, round: impl Fn(&mut [f32], [usize; 2]) -> Integers) -> [Integers; 3] {
    let SelfAttentionDims { width, kv_heads, head, .. } = case.dims;
    let columns = kv_heads * head;
    let query = round(&mut case.query_weight, [width, columns]);
    let kv = round(&mut case.kv_weight, [width, 2 * columns]);
    [query, kv, round(&mut case.output_weight, [columns, width])]
}

/// Other scales round each weight of f32 once more than sums of integers.
#[test]
fn scales_of_any_size_are_within_the_rounding_of_weights() {
    for seed in 0..12 {
        let mut case = self_case(seed);
        let scale = |column: usize| 0.011 * (1.0 + (column % 7) as f32);
        let [query, kv, output] = integers(&mut case, |values, sizes| Integers::scaled(values, sizes, scale));
        let wide = case.inputs();
        let narrow = SelfAttentionInputs {
            query_weight: query.data(),
            kv_weight: kv.data(),
            output_weight: output.data(),
            ..wide
        };
        for limit in LEVELS {
            let expected = compute(&case, &wide, &Prepared::new(limit));
            let found = compute(&case, &narrow, &Prepared::new(limit));
            assert_eq!(found.topk_indices, expected.topk_indices);
            for (found, expected) in found.output.iter().zip(&expected.output) {
                assert!((found - expected).abs() <= 2e-5 * (1.0 + expected.abs()), "{seed}: {found} {expected}");
            }
        }
    }
}

#[test]
fn feed_forward_has_the_bits_of_scaled_weights() {
    for (seed, tokens) in [(1, 1), (2, 7), (3, 190), (4, 1), (6, 190)] {
        let mut random = Random(seed);
        let gated = seed % 2 == 0;
        let dims = FeedForwardDims { batch: 1, tokens, width: 67, experts: 5, top_k: 2, hidden: 73 };
        let columns = if gated { 146 } else { 73 };
        let (hidden_states, router) = (random.values(tokens * 67, 1.0), random.values(67 * 5, 1.0));
        let (mut input, mut output) = (random.values(5 * 67 * columns, 0.3), random.values(5 * 73 * 67, 0.3));
        let (narrow_input, narrow_output) =
            (Integers::round(&mut input, [67, columns]), Integers::round(&mut output, [73, 67]));
        let wide = FeedForwardInputs {
            hidden_states: &hidden_states,
            router_weight: &router,
            input_weight: (&input).into(),
            output_weight: (&output).into(),
            output_bias: None,
        };
        let narrow =
            FeedForwardInputs { input_weight: narrow_input.data(), output_weight: narrow_output.data(), ..wide };
        for limit in LEVELS {
            let found = feed_forward(&dims, gated, &narrow, limit);
            assert_eq!(bits(&found), bits(&feed_forward(&dims, gated, &wide, limit)));
        }
    }
}

#[test]
fn cross_attention_has_the_bits_of_scaled_weights() {
    let dims =
        CrossAttentionDims { batch: 2, tokens: 3, keys: 11, width: 24, experts: 6, top_k: 3, kv_heads: 2, head: 16 };
    let only = CrossAttentionDims { batch: 1, width: 256, top_k: 4, kv_heads: 1, head: 128, ..dims };
    for dims in [dims, only, CrossAttentionDims { tokens: 1, keys: 40, ..only }] {
        let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = dims;
        let (mut random, columns) = (Random(9), kv_heads * head);
        let attributes = CrossAttentionAttributes {
            top_k,
            kv_num_heads: kv_heads,
            scale: 0.25,
            gate_mode: GateMode::SoftmaxTopk,
            skip_padded_queries: true,
        };
        let hidden = random.values(batch * tokens * width, 1.0);
        let [key, value] = [(); 2].map(|()| random.values(batch * keys * columns, 1.0));
        let router = random.values(width * experts, 1.0);
        let [mut query, mut output] = [(); 2].map(|()| random.values(experts * width * columns, 0.2));
        let narrow = [Integers::round(&mut query, [width, columns]), Integers::round(&mut output, [columns, width])];
        let (key_mask, query_mask) = (vec![1; batch * keys], vec![1; batch * tokens]);
        let wide = CrossAttentionInputs {
            hidden_states: hidden.as_slice(),
            key: &key,
            value: &value,
            key_mask: &key_mask,
            query_mask: &query_mask,
            router_weight: &router,
            query_weight: (&query).into(),
            output_weight: (&output).into(),
            output_bias: None,
        };
        let scaled = CrossAttentionInputs { query_weight: narrow[0].data(), output_weight: narrow[1].data(), ..wide };
        let results = [wide, scaled].map(|inputs| {
            let mut result = vec![0.0f32; hidden.len()];
            let mut outputs = CrossAttentionOutputs { output: &mut result, topk_indices: None, topk_weights: None };
            let prepared = Prepared::default();
            prepared.cross_attention(&dims, &attributes, &inputs, &mut outputs, &Sequential).unwrap();
            bits(&result)
        });
        assert_eq!(results[0], results[1], "{dims:?}");
    }
}
