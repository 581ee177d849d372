//! Rows that a node allows to be rounded to bf16.

use half::bf16;
use moa_kernels::{FeedForwardInputs, Instructions, Prepared, SelfAttentionInputs, Sequential, Weight, WeightData};
use moa_schema::{AccuracyLevel, AttentionMode, CrossAttentionDims, FeedForwardDims, SelfAttentionDims};

use crate::cross_attention;
use crate::self_attention::Case;
use crate::skip::skip;
use crate::stored::{Narrow, assert_same, compute, feed_forward, narrow_inputs, rounded_matrices};
use crate::support::{Random, Threads, bits};

fn to_bf16_where_faster() -> Prepared {
    Prepared::new(Instructions::Avx512).with_accuracy(AccuracyLevel::Bf16)
}

/// Whether this processor rounds.
pub(crate) fn rounds() -> bool {
    to_bf16_where_faster().rounds_rows(WeightData::Bf16(&[]))
}

/// For a processor that rounds; a word where this one does not.
pub(crate) fn rounding() -> Option<Prepared> {
    if !rounds() {
        skip("no AVX512_BF16, or none that is faster than AVX-512");
    }
    rounds().then(to_bf16_where_faster)
}

pub(crate) fn exact() -> Prepared {
    Prepared::new(Instructions::Avx512).with_accuracy(AccuracyLevel::Activations)
}

pub(crate) fn to_bf16(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| bf16::from_f32(*value).to_f32()).collect()
}

/// Every expert has four rows or more on average; rows that are moved apart, odd ones, blocks of many tokens, keys of
/// more than one tile.
const SHAPES: [[usize; 7]; 7] = [
    [24, 64, 0, 64, 5, 1, 128],
    [1, 70, 250, 24, 2, 2, 33],
    [1, 40, 0, 24, 2, 2, 16],
    [2, 33, 5, 1024, 3, 1, 32],
    [1, 90, 0, 37, 2, 3, 11],
    [4, 128, 0, 64, 4, 1, 64],
    [1, 10, 9, 64, 4, 1, 32],
];

pub(crate) fn cases() -> impl Iterator<Item = Case> {
    SHAPES.iter().zip(0..).flat_map(|(&[batch, tokens, past, width, top_k, kv_heads, head], seed)| {
        AttentionMode::ALL.map(|mode| {
            let dims = SelfAttentionDims { batch, tokens, past, width, experts: 5, top_k, kv_heads, head };
            let mut case = Case::random(&mut Random(seed), dims);
            case.attributes.attention_mode = mode;
            case.attributes.causal |= mode == AttentionMode::StickBreaking;
            case
        })
    })
}

/// The matrices of a case, as bf16.
fn in_bf16(case: &mut Case) -> [Narrow; 3] {
    rounded_matrices(case, |values, _| Narrow::round(values, true))
}

/// Where the router reads what is not rounded, rounding the hidden states before the call changes no bit of it.
#[test]
fn hidden_states_are_rounded_for_projections_and_not_for_the_router() {
    let Some(prepared) = rounding() else { return };
    for mut case in cases() {
        let matrices = in_bf16(&mut case);
        assert_rounded_for_projections(&mut case, &matrices, &prepared, |rows| *rows = to_bf16(rows));
    }
}

/// Rounding the hidden states by `round` before the call changes no bit where the router reads others, as it does where
/// the call rounds them.
pub(crate) fn assert_rounded_for_projections(
    case: &mut Case,
    matrices: &[Narrow; 3],
    prepared: &Prepared,
    round: impl Fn(&mut Vec<f32>),
) {
    let run = |case: &Case, prepared: &Prepared| compute(case, &narrow_inputs(case, matrices), prepared);
    let (before, router) = (run(case, prepared), run(case, &exact()));
    assert_eq!(before.topk_indices, router.topk_indices);
    assert_eq!(before.topk_weights, router.topk_weights);
    case.router_input = Some(case.hidden_states.clone());
    assert_same(&run(case, prepared), &before);
    round(&mut case.hidden_states);
    assert_same(&run(case, prepared), &before);
}

/// What the outputs of both differ by, as a part of them.
pub(crate) fn difference([found, exact]: [&[f32]; 2]) -> f64 {
    let square = |value: f64| value * value;
    let error: f64 = found.iter().zip(exact).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    (error / exact.iter().map(|value| square(f64::from(*value))).sum::<f64>()).sqrt()
}

/// Outputs differ by as much as a rounding to 8 bits explains, and not by nothing.
pub(crate) fn assert_rounded(outputs: [&[f32]; 2], what: &dyn std::fmt::Debug) {
    let found = difference(outputs);
    assert!((1e-4..2e-2).contains(&found), "{found:e} {what:?}");
}

#[test]
fn outputs_differ_by_what_rounding_explains() {
    let Some(prepared) = rounding() else { return };
    for mut case in cases() {
        case.attention_mask.fill(1);
        let matrices = in_bf16(&mut case);
        let inputs = narrow_inputs(&case, &matrices);
        let [found, exact] = [&prepared, &exact()].map(|prepared| compute(&case, &inputs, prepared).output);
        assert_rounded([&found, &exact], &case.dims);
    }
}

#[test]
fn cross_attention_rounds_its_rows() {
    let Some(prepared) = rounding() else { return };
    for seed in 0..10 {
        let dims = CrossAttentionDims {
            batch: 2,
            tokens: 30,
            keys: 20,
            width: 45,
            experts: 5,
            top_k: 2,
            kv_heads: 2,
            head: 16,
        };
        let mut case = cross_attention::Case::random(&mut Random(seed), dims).with_padding();
        let query = Narrow::round(&mut case.query_weight, true);
        let output = Narrow::round(&mut case.output_weight, true);
        let compute = |prepared| case.compute_with(prepared, [query.data(), output.data()], &Sequential);
        let ([found, exact], alike) = ([&prepared, &exact()].map(compute), case.compute(&Sequential));
        assert_eq!((&found.1, &found.2), (&alike.1, &alike.2));
        if exact.0.iter().any(|value| *value != 0.0) {
            assert_rounded([&found.0, &exact.0], &seed);
        }
    }
}

/// Rows of hidden states and of hidden values, of both halves where gated.
#[test]
fn feed_forward_rounds_its_rows() {
    let Some(prepared) = rounding() else { return };
    for (gated, seed) in [(false, 1), (true, 2)] {
        let (mut random, columns) = (Random(seed), if gated { 146 } else { 73 });
        let dims = FeedForwardDims { batch: 1, tokens: 50, width: 67, experts: 5, top_k: 2, hidden: 73 };
        let (hidden_states, router_weight) = (random.values(50 * 67, 1.0), random.values(67 * 5, 1.0));
        let input = Narrow::round(&mut random.values(5 * 67 * columns, 0.3), true);
        let output = Narrow::round(&mut random.values(5 * 73 * 67, 0.3), true);
        let rounded = to_bf16(&hidden_states);
        let inputs = FeedForwardInputs {
            hidden_states: &hidden_states,
            router_weight: &router_weight,
            input_weight: input.data(),
            output_weight: output.data(),
            output_bias: None,
            router_input: Some(&hidden_states),
        };
        let [found, exact] = [&prepared, &exact()].map(|prepared| feed_forward(&dims, gated, &inputs, prepared));
        assert_rounded([&found, &exact], &gated);
        let before = FeedForwardInputs { hidden_states: &rounded, ..inputs };
        assert_eq!(feed_forward(&dims, gated, &before, &prepared), found);
        let own = FeedForwardInputs { router_input: None, ..inputs };
        assert_eq!(feed_forward(&dims, gated, &own, &prepared), found);
    }
}

/// Values that a token does not see may be NaN, beside one that it sees in a pair too.
#[test]
fn what_is_not_seen_is_not_added() {
    let Some(prepared) = rounding() else { return };
    let all = [0, 1].into_iter().flat_map(|cut| cases().map(move |case| (case, cut)));
    for (mut case, cut) in all.filter(|(case, _)| case.dims.batch == 1) {
        let (width, tokens) = (case.dims.width, case.dims.tokens - cut);
        (case.attributes.causal, case.rotation) = (true, None);
        case.attention_mask.fill(1);
        case.router_input = Some(case.hidden_states.clone());
        let matrices = in_bf16(&mut case);
        let before = compute(&case, &narrow_inputs(&case, &matrices), &prepared).output;
        case.hidden_states[(tokens - 1) * width..].fill(f32::NAN);
        let after = compute(&case, &narrow_inputs(&case, &matrices), &prepared).output;
        let seen = (tokens - 1) * width;
        assert_eq!(bits(&after[..seen]), bits(&before[..seen]), "{:?}", case.dims);
        assert!(after[seen..].iter().all(|value| value.is_nan()));
    }
}

#[test]
fn threads_change_no_bit_of_rounded_rows() {
    let Some(_) = rounding() else { return };
    for mut case in cases() {
        in_bf16(&mut case);
        let prepared = packed(&case, rounding().unwrap(), &case.inputs());
        let alone = case.compute_with(&prepared, &Sequential);
        for threads in [1, 2, 3, 8] {
            assert_same(&case.compute_with(&prepared, &Threads(threads)), &alone);
        }
    }
}

pub(crate) fn packed(case: &Case, prepared: Prepared, inputs: &SelfAttentionInputs<'_>) -> Prepared {
    let SelfAttentionDims { width, experts, kv_heads, head, .. } = case.dims;
    let columns = kv_heads * head;
    let mut prepared = prepared;
    for (weight, shape, blocks, data) in [
        (Weight::Router, [1, width, experts], 1, WeightData::F32(inputs.router_weight)),
        (Weight::Query, [experts, width, columns], kv_heads, inputs.query_weight),
        (Weight::KeyValue, [1, width, 2 * columns], 2 * kv_heads, inputs.kv_weight.unwrap()),
        (Weight::Output, [experts, columns, width], 1, inputs.output_weight),
    ] {
        prepared.pack(weight, shape, blocks, data).unwrap();
    }
    prepared
}

/// Values of bf16 are rounded with whether they are given so, packed so, or f32; a router of such values is not.
#[test]
fn values_of_bf16_count_and_not_how_they_are_stored() {
    let Some(_) = rounding() else { return };
    for mut case in cases() {
        case.router_weight = to_bf16(&case.router_weight);
        let matrices = in_bf16(&mut case);
        let expected = compute(&case, &narrow_inputs(&case, &matrices), &rounding().unwrap());
        for inputs in [narrow_inputs(&case, &matrices), case.inputs()] {
            let prepared = packed(&case, rounding().unwrap(), &inputs);
            assert_same(&compute(&case, &inputs, &prepared), &expected);
        }
        assert!(packed(&case, rounding().unwrap(), &case.inputs()).thread_bytes() > 0);
    }
}

#[test]
fn weights_that_bf16_does_not_hold_and_few_rows_change_nothing() {
    let Some(prepared) = rounding() else { return };
    for mut case in cases() {
        assert_same(&compute(&case, &case.inputs(), &prepared), &compute(&case, &case.inputs(), &exact()));
        let matrices = rounded_matrices(&mut case, |values, _| Narrow::round(values, false));
        let inputs = narrow_inputs(&case, &matrices);
        assert_same(&compute(&case, &inputs, &prepared), &compute(&case, &inputs, &exact()));
    }
    for seed in 0..20 {
        let dims =
            SelfAttentionDims { batch: 1, tokens: 3, past: 5, width: 40, experts: 2, top_k: 2, kv_heads: 1, head: 32 };
        let mut case = Case::random(&mut Random(seed), dims);
        let matrices = in_bf16(&mut case);
        let inputs = narrow_inputs(&case, &matrices);
        assert_same(&compute(&case, &inputs, &prepared), &compute(&case, &inputs, &exact()));
    }
}
