//! Packed weights, scratch memory and levels of instructions.

use moa_kernels::{Instructions, Prepared, Sequential, Weight, WeightData};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, Computed, random_dims};
use crate::support::{Random, Threads, assert_close, bits, widen};

/// All weights of a case.
pub(crate) fn pack(case: &Case, limit: Instructions) -> Prepared {
    let matrices = [&case.query_weight, &case.kv_weight, &case.output_weight].map(WeightData::from);
    let mut prepared = pack_matrices(&case.dims, limit, matrices);
    prepared.pack(Weight::Router, [1, case.dims.width, case.dims.experts], 1, &case.router_weight).unwrap();
    prepared
}

/// Weights of queries, of keys and values, and of the output.
pub(crate) fn pack_matrices(
    dims: &SelfAttentionDims,
    limit: Instructions,
    [query, kv, output]: [WeightData<'_>; 3],
) -> Prepared {
    let SelfAttentionDims { width, experts, kv_heads, head, .. } = *dims;
    let columns = kv_heads * head;
    let mut prepared = Prepared::new(limit);
    prepared.pack(Weight::Query, [experts, width, columns], kv_heads, query).unwrap();
    prepared.pack(Weight::KeyValue, [1, width, 2 * columns], 2 * kv_heads, kv).unwrap();
    prepared.pack(Weight::Output, [experts, columns, width], 1, output).unwrap();
    prepared
}

fn same(a: &Computed, b: &Computed) {
    assert_eq!(bits(&a.output), bits(&b.output));
    assert_eq!(bits(&a.present_key), bits(&b.present_key));
    assert_eq!(bits(&a.topk_weights), bits(&b.topk_weights));
    assert_eq!(a.topk_indices, b.topk_indices);
}

fn case(seed: u64) -> Case {
    let mut random = Random(seed);
    let dims = match seed % 3 {
        0 => SelfAttentionDims { tokens: 1, head: 32, past: 40, ..random_dims(&mut random) },
        1 => SelfAttentionDims { tokens: 70, head: 40, width: 50, ..random_dims(&mut random) },
        _ => random_dims(&mut random),
    };
    Case::random(&mut random, dims)
}

#[test]
fn weights_packed_before_change_no_bit() {
    for seed in 0..30 {
        let case = case(seed);
        let prepared = pack(&case, Instructions::default());
        let expected = case.compute(&Sequential);
        same(&case.compute_with(&prepared, &Sequential), &expected);
        same(&case.compute_with(&prepared, &Threads(3)), &expected);
        same(&case.compute(&Threads(3)), &expected);
    }
}

#[test]
fn levels_of_instructions_agree() {
    for seed in 0..30 {
        let case = case(seed);
        let best = case.compute(&Sequential);
        for limit in [Instructions::Portable, Instructions::Avx2] {
            let found = case.compute_with(&pack(&case, limit), &Sequential);
            if found.topk_indices == best.topk_indices {
                assert_close("output", &found.output, &widen(&best.output), 3e-5);
            }
            assert_close("present_value", &found.present_value, &widen(&best.present_value), 1e-5);
        }
    }
}

#[test]
fn scratch_memory_is_kept_and_does_not_grow() {
    let case = case(1);
    let prepared = pack(&case, Instructions::default());
    assert_eq!(prepared.scratch_bytes(), 0);
    case.compute_with(&prepared, &Sequential);
    let held = prepared.scratch_bytes();
    assert!(held > 0);
    for _ in 0..3 {
        case.compute_with(&prepared, &Sequential);
        assert_eq!(prepared.scratch_bytes(), held);
    }
}

/// A call whose weights are not those that were packed packs its own.
#[test]
fn weights_of_another_shape_are_not_used() {
    let (first, second) = (case(4), case(5));
    assert_ne!(first.dims.width, second.dims.width);
    let prepared = pack(&first, Instructions::default());
    same(&second.compute_with(&prepared, &Sequential), &second.compute(&Sequential));
}

#[test]
fn a_weight_of_the_wrong_length_is_named() {
    let error = Prepared::default().pack(Weight::Output, [2, 3, 4], 1, &[0.0; 23]).unwrap_err();
    assert_eq!(error.to_string(), "`output_weight` must hold 24 elements, found 23");
    let error = Prepared::default().pack(Weight::Query, [2, 3, 3], 2, &[0.0; 18]).unwrap_err();
    assert_eq!(error.to_string(), "`query_weight` must hold 18 elements, found 12", "blocks of unequal widths");
    let mut prepared = Prepared::default();
    for (weight, name) in
        [(Weight::Query, "query_scale"), (Weight::KeyValue, "kv_scale"), (Weight::Input, "input_scale")]
    {
        let data = WeightData::I8 { values: &[0; 24], scales: &[1.0; 7] };
        let error = prepared.pack(weight, [2, 3, 4], 1, data).unwrap_err();
        assert_eq!(error.to_string(), format!("`{name}` must hold 8 elements, found 7"));
    }
    assert_eq!(prepared.weight_bytes(), 0);
}
