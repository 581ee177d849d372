//! Factors of products that a node allows to be rounded, where AMX tiles multiply them.

use moa_kernels::{FeedForwardInputs, Instructions, Prepared, Sequential};
use moa_schema::{AccuracyLevel, CrossAttentionDims, FeedForwardDims, SelfAttentionDims};

use crate::cross_attention;
use crate::integers::{int4, integers};
use crate::quantized::Rounding;
use crate::rounded::{assert_rounded, assert_rounded_for_projections, difference, packed, to_bf16};
use crate::self_attention::Case;
use crate::stored::{Narrow, assert_same, compute, compute_on, feed_forward, narrow_inputs, rounded_matrices};
use crate::support::{Random, Threads, bits};
use crate::tiles::has_tiles;

fn in_bf16(values: &mut [f32], _: [usize; 2]) -> Narrow {
    Narrow::round(values, true)
}

/// Types of weights and the level at which rows are rounded beside them; none without tiles, and a word about it.
fn types() -> Vec<(Rounding, AccuracyLevel)> {
    match has_tiles() {
        true => vec![(in_bf16, AccuracyLevel::Bf16), (integers, AccuracyLevel::Int8), (int4, AccuracyLevel::Int8)],
        false => Vec::new(),
    }
}

fn rounding(level: AccuracyLevel) -> Prepared {
    Prepared::new(Instructions::Amx).with_accuracy(level)
}

fn exact() -> Prepared {
    rounding(AccuracyLevel::Activations)
}

/// Every expert has as many rows as there are tokens, enough for tiles; keys of more than one tile, strips that end
/// early, widths that end within a step.
fn cases() -> impl Iterator<Item = Case> {
    let shapes = [[1, 128, 0, 100, 2, 64], [2, 96, 250, 64, 1, 128], [1, 96, 3, 321, 3, 65]];
    shapes.into_iter().zip(0..).map(|([batch, tokens, past, width, kv_heads, head], seed)| {
        let dims = SelfAttentionDims { batch, tokens, past, width, experts: 3, top_k: 3, kv_heads, head };
        Case::random(&mut Random(seed), dims)
    })
}

fn all() -> impl Iterator<Item = (Case, Rounding, AccuracyLevel)> {
    cases().flat_map(|case| types().into_iter().map(move |(round, level)| (case.clone(), round, level)))
}

/// Of few rows beside int4 tiles serve none, and what rounds these is another test's matter.
#[test]
fn hidden_states_are_rounded_for_projections_and_not_for_the_router() {
    let without_int4 = cases().flat_map(|case| types().into_iter().take(2).map(move |kind| (case.clone(), kind)));
    for (mut case, (round, level)) in without_int4 {
        case.attention_mask.fill(1);
        let matrices = rounded_matrices(&mut case, round);
        assert_rounded_for_projections(&mut case, &matrices, &rounding(level), |rows| *rows = to_bf16(rows));
    }
}

#[test]
fn outputs_differ_by_what_rounding_explains() {
    for (mut case, round, level) in all() {
        case.attention_mask.fill(1);
        let matrices = rounded_matrices(&mut case, round);
        let inputs = narrow_inputs(&case, &matrices);
        let [found, exact] = [&rounding(level), &exact()].map(|prepared| compute(&case, &inputs, prepared));
        assert_rounded([&found.output, &exact.output], &case.dims);
        if case.dims.past == 0 {
            assert_rounded([&found.present_value, &exact.present_value], &case.dims);
        }
    }
}

/// Keys are rounded once they are scaled, so values alone may be rounded beforehand.
#[test]
fn attention_rounds_its_factors() {
    if !has_tiles() {
        return;
    }
    let dims =
        CrossAttentionDims { batch: 1, tokens: 100, keys: 300, width: 64, experts: 2, top_k: 2, kv_heads: 1, head: 64 };
    let mut random = Random(1);
    let mut case = cross_attention::Case::random(&mut random, dims).with_padding();
    case.key_mask.fill(1);
    for values in [&mut case.key, &mut case.value] {
        *values = random.values(values.len(), 1.5);
    }
    let query = Narrow::round(&mut case.query_weight, true);
    let output = Narrow::round(&mut case.output_weight, true);
    let compute = |case: &cross_attention::Case| {
        let prepared = rounding(AccuracyLevel::Bf16);
        bits(&case.compute_with(&prepared, [query.data(), output.data()], &Sequential).0)
    };
    let found = compute(&case);
    assert!(found.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    case.value = to_bf16(&case.value);
    assert!(compute(&case) == found, "values are rounded anyway");
    case.value.iter_mut().for_each(|value| *value *= 1.0 + 2f32.powi(-7));
    assert!(compute(&case) != found);
}

#[test]
fn feed_forward_rounds_its_rows() {
    for (round, level) in types() {
        for (gated, seed) in [(false, 1), (true, 2)] {
            let (mut random, columns) = (Random(seed), if gated { 2 * 200 } else { 200 });
            let dims = FeedForwardDims { batch: 1, tokens: 80, width: 99, experts: 3, top_k: 3, hidden: 200 };
            let (hidden_states, router_weight) = (random.values(80 * 99, 1.0), random.values(99 * 3, 1.0));
            let input = round(&mut random.values(3 * 99 * columns, 0.3), [99, columns]);
            let output = round(&mut random.values(3 * 200 * 99, 0.3), [200, 99]);
            let rounded = to_bf16(&hidden_states);
            let inputs = FeedForwardInputs {
                hidden_states: &hidden_states,
                router_weight: &router_weight,
                input_weight: input.data(),
                output_weight: output.data(),
                output_bias: None,
                router_input: Some(&hidden_states),
            };
            let run =
                |inputs: &FeedForwardInputs<'_>, prepared: &Prepared| feed_forward(&dims, gated, inputs, prepared);
            let found = run(&inputs, &rounding(level));
            assert_rounded([&found, &run(&inputs, &exact())], &gated);
            let before = FeedForwardInputs { hidden_states: &rounded, ..inputs };
            assert!(run(&before, &rounding(level)) == found);
        }
    }
}

/// What a later token holds reaches no earlier one. Beside NaN attention is on vectors, and not rounded.
#[test]
fn what_is_not_seen_is_not_added() {
    for (mut case, round, level) in all().filter(|(case, ..)| case.dims.batch == 1) {
        let SelfAttentionDims { width, tokens, .. } = case.dims;
        (case.attributes.causal, case.rotation) = (true, None);
        case.attention_mask.fill(1);
        case.router_input = Some(case.hidden_states.clone());
        let matrices = rounded_matrices(&mut case, round);
        let before = compute(&case, &narrow_inputs(&case, &matrices), &rounding(level)).output;
        let last = (tokens - 1) * width;
        case.hidden_states[last..].iter_mut().for_each(|value| *value *= -3.0);
        let others = compute(&case, &narrow_inputs(&case, &matrices), &rounding(level)).output;
        assert!(others[..last] == before[..last] && others[last..] != before[last..], "{:?}", case.dims);
        case.hidden_states[last..].fill(f32::NAN);
        let after = compute(&case, &narrow_inputs(&case, &matrices), &rounding(level)).output;
        let (seen, unseen) = after.split_at(last);
        assert!(difference([seen, &before[..seen.len()]]) <= 1e-2, "{:?}", case.dims);
        assert!(unseen.iter().all(|value| value.is_nan()));
    }
}

#[test]
fn threads_and_packing_change_no_bit() {
    for (mut case, round, level) in all() {
        let matrices = rounded_matrices(&mut case, round);
        let inputs = narrow_inputs(&case, &matrices);
        let expected = compute(&case, &inputs, &rounding(level));
        let prepared = packed(&case, rounding(level), &inputs);
        assert_same(&compute(&case, &inputs, &prepared), &expected);
        for threads in [1, 3, 8] {
            assert_same(&compute_on(&case, &inputs, &prepared, &Threads(threads)), &expected);
        }
    }
}

/// Beside integers a matrix of floats meets rows as they are.
#[test]
fn rows_beside_floats_are_not_rounded_where_others_are() {
    for (mut case, ..) in all().filter(|(.., level)| *level == AccuracyLevel::Int8) {
        case.attention_mask.fill(1);
        let [query, _, output] = rounded_matrices(&mut case.clone(), integers);
        let matrices = [query, in_bf16(&mut case.kv_weight, [0; 2]), output];
        let inputs = narrow_inputs(&case, &matrices);
        let [found, expected] =
            [&rounding(AccuracyLevel::Int8), &exact()].map(|prepared| compute(&case, &inputs, prepared));
        assert_eq!(bits(&found.present_key), bits(&expected.present_key));
        assert_eq!(bits(&found.present_value), bits(&expected.present_value));
        assert!(found.output != expected.output, "{:?}", case.dims);
    }
}

/// Nor does attention to many keys round then, which is on tiles where such weights are not.
#[test]
fn weights_that_bf16_does_not_hold_change_nothing() {
    if !has_tiles() {
        return;
    }
    for (seed, [tokens, past]) in [(1, [128, 0]), (2, [171, 853])] {
        let dims = SelfAttentionDims { batch: 1, tokens, past, width: 64, experts: 4, top_k: 3, kv_heads: 1, head: 64 };
        let case = Case::random(&mut Random(seed), dims);
        let [found, expected] =
            [&rounding(AccuracyLevel::Bf16), &exact()].map(|prepared| compute(&case, &case.inputs(), prepared));
        assert_same(&found, &expected);
    }
}

/// Few tokens beside integers are quantized as they are without tiles, and beside bf16 they are not rounded.
#[test]
fn few_tokens_are_computed_as_without_tiles() {
    for (seed, (round, level)) in types().into_iter().cycle().take(12).enumerate() {
        let tokens = 1 + seed % 15;
        let dims =
            SelfAttentionDims { batch: 1, tokens, past: 5, width: 96, experts: 2, top_k: 2, kv_heads: 1, head: 64 };
        let mut case = Case::random(&mut Random(seed as u64), dims);
        let matrices = rounded_matrices(&mut case, round);
        let inputs = narrow_inputs(&case, &matrices);
        let without = Prepared::new(Instructions::Avx512).with_accuracy(level);
        assert_same(&compute(&case, &inputs, &rounding(level)), &compute(&case, &inputs, &without));
    }
}
