//! Weights in integers with scales.

use half::bf16;
use moa_kernels::{CrossAttentionInputs, CrossAttentionOutputs, Instructions, Prepared, Sequential, Weight};
use moa_schema::{BLOCK, CrossAttentionAttributes, CrossAttentionDims, GateMode};

use crate::stored::{
    LEVELS, Narrow, Round, compute, feed_forward_has_the_bits_of_f32, narrow_inputs, rounded_matrices,
    self_attention_has_the_bits_of_f32, self_case,
};
use crate::support::{Random, bits};

/// Makes `values`, matrices `[inner, columns]`, integers times powers of 2, which change no rounding.
pub(crate) fn integers(values: &mut [f32], sizes: [usize; 2]) -> Narrow {
    scaled(values, sizes, |column| 2f32.powi(-6 - (column % 5) as i32))
}

/// Makes `values`, matrices `[inner, columns]`, integers times scales whose products are rounded.
pub(crate) fn integers_of_any_scale(values: &mut [f32], sizes: [usize; 2]) -> Narrow {
    scaled(values, sizes, |column| 0.011 * (1.0 + (column % 7) as f32))
}

fn scaled(values: &mut [f32], [inner, columns]: [usize; 2], scale: impl Fn(usize) -> f32) -> Narrow {
    let scales: Vec<f32> = (0..values.len() / inner).map(scale).collect();
    let mut integers = Vec::with_capacity(values.len());
    for (row, values) in values.chunks_exact_mut(columns).enumerate() {
        for (value, scale) in values.iter_mut().zip(&scales[row / inner * columns..]) {
            let integer = (*value / scale).round().clamp(-127.0, 127.0);
            integers.push(integer as i8);
            *value = integer * scale;
        }
    }
    Narrow::I8 { values: integers, scales }
}

/// Makes `values`, matrices `[inner, columns]`, 4-bit integers times scales of every magnitude and either sign.
pub(crate) fn int4(values: &mut [f32], [inner, columns]: [usize; 2]) -> Narrow {
    let blocks = inner.div_ceil(BLOCK);
    let of_block = |block: usize| bf16::from_f32(0.003 * (1.0 + (block % 13) as f32) * (-1f32).powi(block as i32 % 2));
    let scales: Vec<bf16> = (0..values.len() / inner * blocks).map(of_block).collect();
    let mut integers = vec![0; values.len().div_ceil(2)];
    for (index, value) in values.iter_mut().enumerate() {
        let (row, column) = (index / columns, index % columns);
        let block = row / inner * blocks + row % inner / BLOCK;
        let scale = scales[block * columns + column].to_f32();
        let integer = (*value / scale).round().clamp(-8.0, 7.0);
        integers[index / 2] |= (integer as i8 as u8 & 15) << (index % 2 * 4);
        *value = integer * scale;
    }
    Narrow::I4 { values: integers, scales }
}

/// Threads keep as much for int4 with wide vectors as they keep with AVX2 for other types too.
#[test]
fn threads_keep_panels_of_int4() {
    let values = int4(&mut [0.25; 64 * 32], [64, 32]);
    let with_avx2 = Prepared::new(Instructions::Avx2).thread_bytes();
    for limit in [Instructions::Avx2, Instructions::Avx512] {
        let mut prepared = Prepared::new(limit);
        prepared.pack(Weight::Output, [1, 64, 32], 1, values.data()).unwrap();
        assert_eq!(prepared.thread_bytes(), with_avx2, "{limit:?}");
    }
}

/// They take less memory than the two bytes that hold these values.
#[test]
fn self_attention_has_the_bits_of_scaled_weights() {
    for seed in 0..24 {
        self_attention_has_the_bits_of_f32(seed, integers, |_, [packed, exact]| assert!(packed < exact));
        self_attention_has_the_bits_of_f32(seed, int4, |_, _| {});
    }
}

/// Other scales round each weight of f32 once more than sums of integers.
#[test]
fn scales_of_any_size_are_within_the_rounding_of_weights() {
    for seed in 0..12 {
        let mut case = self_case(seed);
        let matrices = rounded_matrices(&mut case, integers_of_any_scale);
        for limit in LEVELS {
            let expected = compute(&case, &case.inputs(), &Prepared::new(limit));
            let found = compute(&case, &narrow_inputs(&case, &matrices), &Prepared::new(limit));
            assert_eq!(found.topk_indices, expected.topk_indices);
            for (found, expected) in found.output.iter().zip(&expected.output) {
                assert!((found - expected).abs() <= 2e-5 * (1.0 + expected.abs()), "{seed}: {found} {expected}");
            }
        }
    }
}

#[test]
fn feed_forward_has_the_bits_of_scaled_weights() {
    feed_forward_has_the_bits_of_f32(integers);
    feed_forward_has_the_bits_of_f32(int4);
}

#[test]
fn cross_attention_has_the_bits_of_scaled_weights() {
    cross_attention_has_the_bits_of_f32(integers);
    cross_attention_has_the_bits_of_f32(int4);
}

fn cross_attention_has_the_bits_of_f32(round: impl Round) {
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
        let narrow = [round(&mut query, [width, columns]), round(&mut output, [columns, width])];
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
