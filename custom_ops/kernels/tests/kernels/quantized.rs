//! Rows that a node allows to be rounded to int8, and weights in integers.

use moa_kernels::{FeedForwardInputs, Instructions, Int4, Prepared, Sequential, WeightData};
use moa_schema::{AccuracyLevel, BLOCK, CrossAttentionDims, FeedForwardDims, SelfAttentionDims};

use crate::cross_attention;
use crate::integers::{int4, integers};
use crate::rounded::{assert_rounded_for_projections, cases, difference, packed, rounds};
use crate::self_attention::Case;
use crate::skip::skip;
use crate::stored::{Narrow, Round, assert_same, compute, feed_forward, narrow_inputs, rounded_matrices};
use crate::support::{Random, Threads, bits};

/// Vectors of 4 lanes.
#[cfg(target_arch = "aarch64")]
pub(crate) const LIMITS: [Instructions; 1] = [Instructions::Neon];

/// Vectors of 8 lanes, and of 16 where the processor has them.
#[cfg(not(target_arch = "aarch64"))]
pub(crate) const LIMITS: [Instructions; 2] = [Instructions::AvxVnni, Instructions::Avx512];

pub(crate) fn quantizing(limit: Instructions) -> Prepared {
    Prepared::new(limit).with_accuracy(AccuracyLevel::Int8)
}

fn keeping(limit: Instructions) -> Prepared {
    Prepared::new(limit).with_accuracy(AccuracyLevel::Activations)
}

/// Makes matrices integers.
pub(crate) type Rounding = fn(&mut [f32], [usize; 2]) -> Narrow;

/// Most instructions, and the types of integers for which rows are rounded then, or those for which they are not. Where
/// there are none, `say` is called: `skip` where a test checks nothing else.
pub(crate) fn types(rounded: bool, say: fn(&str)) -> impl Iterator<Item = (Instructions, Rounding)> {
    let types: [(Rounding, _); 2] = [
        (integers, WeightData::I8 { values: &[], scales: &[] }),
        (int4, WeightData::I4(Int4 { values: &[], scales: &[] })),
    ];
    let mut all: Vec<_> = LIMITS.into_iter().flat_map(|limit| types.map(|kind| (limit, kind))).collect();
    all.retain(|(limit, (_, weights))| quantizing(*limit).rounds_rows(*weights) == rounded);
    if all.is_empty() {
        say(if rounded { "no rows are rounded beside integers" } else { "rows beside all integers are rounded" });
    }
    all.into_iter().map(|(limit, (round, _))| (limit, round))
}

/// Cases of many tokens, and of single ones.
fn all_cases() -> impl Iterator<Item = Case> {
    let single = (0..20).map(|seed| {
        let (width, top_k) = if seed % 2 == 0 { (256, 4) } else { (50, 2) };
        let dims = SelfAttentionDims {
            batch: 1,
            tokens: 1 + seed as usize % 3,
            past: 20,
            width,
            experts: 5,
            top_k,
            kv_heads: 1,
            head: 128,
        };
        Case::random(&mut Random(seed), dims)
    });
    cases().chain(single)
}

/// Gives every block of rows a scale of 1/64.
pub(crate) fn with_whole_scales(rows: &mut [f32], width: usize) {
    for block in rows.chunks_mut(width).flat_map(|row| row.chunks_mut(BLOCK)) {
        block.iter_mut().for_each(|value| *value = value.clamp(-127.0 / 64.0, 127.0 / 64.0));
        block[0] = 127.0 / 64.0;
    }
}

/// Rounds rows with such scales.
pub(crate) fn round_rows(rows: &mut [f32]) {
    rows.iter_mut().for_each(|value| *value = (*value * 64.0).round_ties_even() / 64.0);
}

fn to_bf16(value: f32) -> f32 {
    half::bf16::from_f32(value).to_f32()
}

/// Where the router reads what is not rounded, rounding the hidden states before the call changes no bit of it.
#[test]
fn hidden_states_are_rounded_for_projections_and_not_for_the_router() {
    for (mut case, (limit, round)) in
        all_cases().flat_map(|case| types(true, skip).map(move |kind| (case.clone(), kind)))
    {
        let prepared = quantizing(limit);
        with_whole_scales(&mut case.hidden_states, case.dims.width);
        let matrices = rounded_matrices(&mut case, round);
        assert_rounded_for_projections(&mut case, &matrices, &prepared, |rows| round_rows(rows));
    }
}

/// Outputs differ by as much as a rounding to 8 bits of a block explains, and not by nothing.
pub(crate) fn assert_rounded(outputs: [&[f32]; 2], what: &dyn std::fmt::Debug) {
    let found = difference(outputs);
    assert!((3e-4..4e-2).contains(&found), "{found:e} {what:?}");
}

#[test]
fn outputs_differ_by_what_rounding_explains() {
    for (mut case, (limit, round)) in
        all_cases().flat_map(|case| types(true, skip).map(move |kind| (case.clone(), kind)))
    {
        let prepared = quantizing(limit);
        case.attention_mask.fill(1);
        let matrices = rounded_matrices(&mut case, round);
        let inputs = narrow_inputs(&case, &matrices);
        let [found, exact] = [&prepared, &keeping(limit)].map(|prepared| compute(&case, &inputs, prepared));
        assert_rounded([&found.output, &exact.output], &case.dims);
        if case.dims.past == 0 {
            assert_rounded([&found.present_value, &exact.present_value], &case.dims);
        }
    }
}

/// Where processors multiply bf16, keys and values of many tokens are rounded too: doing so before changes no bit.
#[test]
fn cross_attention_rounds_its_rows() {
    for (seed, (limit, round)) in (0..10).flat_map(|seed| types(true, skip).map(move |kind| (seed, kind))) {
        let prepared = quantizing(limit);
        let tokens = if seed % 2 == 0 { 1 } else { 30 };
        let dims =
            CrossAttentionDims { batch: 2, tokens, keys: 20, width: 45, experts: 5, top_k: 2, kv_heads: 2, head: 16 };
        let mut case = cross_attention::Case::random(&mut Random(seed), dims).with_padding();
        let query = round(&mut case.query_weight, [45, 32]);
        let output = round(&mut case.output_weight, [32, 45]);
        let compute = |prepared| case.compute_with(prepared, [query.data(), output.data()], &Sequential);
        let ([found, exact], alike) = ([&prepared, &keeping(limit)].map(compute), case.compute(&Sequential));
        assert_eq!((&found.1, &found.2), (&alike.1, &alike.2));
        if exact.0.iter().any(|value| *value != 0.0) {
            assert_rounded([&found.0, &exact.0], &seed);
        }
        let many = tokens > 1 && limit >= Instructions::Avx512 && rounds();
        [&mut case.key, &mut case.value].into_iter().flatten().for_each(|value| *value = to_bf16(*value));
        let after = case.compute_with(&prepared, [query.data(), output.data()], &Sequential);
        assert_eq!(bits(&after.0) == bits(&found.0), many || after.0.iter().all(|value| *value == 0.0), "{seed}");
    }
}

/// Rows of hidden states and of hidden values, of both halves where gated, of many tokens and of one.
#[test]
fn feed_forward_rounds_its_rows() {
    types(true, skip).for_each(|(limit, round)| feed_forward_rounds(limit, round));
}

fn feed_forward_rounds(limit: Instructions, round: impl Round) {
    let prepared = quantizing(limit);
    for (gated, tokens, hidden) in [(false, 50, 73), (true, 50, 64), (true, 50, 73), (false, 1, 64), (true, 1, 73)] {
        let (mut random, columns) = (Random(tokens as u64), if gated { 2 * hidden } else { hidden });
        let dims = FeedForwardDims { batch: 1, tokens, width: 67, experts: 5, top_k: 2, hidden };
        let (mut hidden_states, router_weight) = (random.values(tokens * 67, 1.0), random.values(67 * 5, 1.0));
        with_whole_scales(&mut hidden_states, 67);
        let read = hidden_states.clone();
        let input = round(&mut random.values(5 * 67 * columns, 0.3), [67, columns]);
        let output = round(&mut random.values(5 * hidden * 67, 0.3), [hidden, 67]);
        let inputs = FeedForwardInputs {
            hidden_states: &read,
            router_weight: &router_weight,
            input_weight: input.data(),
            output_weight: output.data(),
            output_bias: None,
            router_input: Some(&read),
        };
        let compute = |hidden_states: &[f32], prepared: &Prepared| {
            let inputs = FeedForwardInputs { hidden_states, ..inputs };
            feed_forward(&dims, gated, &inputs, prepared)
        };
        let before = compute(&hidden_states, &prepared);
        assert_rounded([&before, &compute(&hidden_states, &keeping(limit))], &(gated, tokens));
        round_rows(&mut hidden_states);
        assert_eq!(bits(&compute(&hidden_states, &prepared)), bits(&before), "{gated} {tokens}");
    }
}

/// A token that is not a number is none of another's business.
#[test]
fn a_row_that_is_not_a_number_stays_alone() {
    let all = all_cases().filter(|case| case.dims.batch == 1 && case.dims.tokens > 1);
    for (mut case, (limit, round)) in all.flat_map(|case| types(true, skip).map(move |kind| (case.clone(), kind))) {
        let prepared = quantizing(limit);
        let seen = (case.dims.tokens - 1) * case.dims.width;
        (case.attributes.causal, case.rotation) = (true, None);
        case.attention_mask.fill(1);
        case.router_input = Some(case.hidden_states.clone());
        let matrices = rounded_matrices(&mut case, round);
        let before = compute(&case, &narrow_inputs(&case, &matrices), &prepared).output;
        case.hidden_states[seen + case.dims.width / 2] = f32::NAN;
        let after = compute(&case, &narrow_inputs(&case, &matrices), &prepared).output;
        assert_eq!(bits(&after[..seen]), bits(&before[..seen]), "{:?}", case.dims);
        assert!(after[seen..].iter().all(|value| value.is_nan()));
    }
}

#[test]
fn threads_and_packing_change_no_bit() {
    for (mut case, (limit, round)) in
        all_cases().flat_map(|case| types(true, skip).map(move |kind| (case.clone(), kind)))
    {
        let matrices = rounded_matrices(&mut case, round);
        let inputs = narrow_inputs(&case, &matrices);
        let expected = compute(&case, &inputs, &quantizing(limit));
        let prepared = packed(&case, quantizing(limit), &inputs);
        assert!(prepared.thread_bytes() > packed(&case, keeping(limit), &inputs).thread_bytes());
        for threads in [1, 2, 3, 8] {
            assert_same(&case.compute_with(&prepared, &Threads(threads)), &expected);
        }
    }
}

/// What a processor multiplies as fast as it is stays so.
#[test]
fn integers_that_are_not_faster_have_rows_as_they_are() {
    for (limit, round) in types(false, skip) {
        for mut case in all_cases() {
            let matrices = rounded_matrices(&mut case, round);
            let inputs = narrow_inputs(&case, &matrices);
            assert_same(&compute(&case, &inputs, &quantizing(limit)), &compute(&case, &inputs, &keeping(limit)));
        }
    }
}

#[test]
fn floats_have_rows_as_they_are() {
    for (limit, mut case) in LIMITS.into_iter().flat_map(|limit| all_cases().map(move |case| (limit, case))) {
        let prepared = quantizing(limit);
        assert_same(&compute(&case, &case.inputs(), &prepared), &compute(&case, &case.inputs(), &keeping(limit)));
        let matrices = rounded_matrices(&mut case, |values, _| Narrow::round(values, true));
        let inputs = narrow_inputs(&case, &matrices);
        assert_same(&compute(&case, &inputs, &prepared), &compute(&case, &inputs, &keeping(limit)));
    }
}
