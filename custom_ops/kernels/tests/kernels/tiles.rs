//! Layers of the sizes that go to AMX tiles where the processor has them; elsewhere the same tests run on vectors.

use moa_kernels::{FeedForwardInputs, Instructions, Prepared, Sequential};
use moa_schema::{CrossAttentionDims, FeedForwardDims, GateMode, SelfAttentionDims};

use crate::cross_attention;
use crate::feed_forward;
use crate::integers::{int4, integers_of_any_scale};
use crate::prepared::pack;
use crate::quantized::Rounding;
use crate::self_attention::Case;
use crate::skip::skip;
use crate::stored::{LEVELS, compute, feed_forward as stored_feed_forward, narrow_inputs, rounded_matrices};
use crate::support::{Random, Threads, assert_close, bits, widen};

/// Rows, keys and heads of several tiles, strips and panels, and of parts of them.
pub(crate) fn large_dims(random: &mut Random) -> SelfAttentionDims {
    let experts = random.between(1, 4);
    SelfAttentionDims {
        batch: random.between(1, 2),
        tokens: random.between(60, 140),
        past: random.pick(&[0, 1, 40, 300]),
        width: random.between(64, 100),
        experts,
        top_k: random.between(1, experts),
        kv_heads: random.between(1, 2),
        head: random.pick(&[64, 70, 96, 128, 300]),
    }
}

/// Random values, with results of about the size of the weights.
fn case_of(random: &mut Random, dims: SelfAttentionDims) -> Case {
    let mut case = Case::random(random, dims);
    let columns = (dims.kv_heads * dims.head) as f32;
    case.output_weight.iter_mut().for_each(|weight| *weight *= columns.powf(-0.5));
    case
}

fn large_case(seed: u64) -> Case {
    let mut random = Random(seed);
    let dims = large_dims(&mut random);
    case_of(&mut random, dims)
}

#[test]
fn large_layers_match_the_reference() {
    for seed in 0..24 {
        large_case(seed).check();
    }
}

/// Tasks of several heads, and parts of them.
fn wide_case(seed: u64) -> Case {
    let mut random = Random(seed);
    let experts = random.pick(&[8, 16]);
    let dims = SelfAttentionDims {
        tokens: random.between(100, 140),
        experts,
        top_k: experts / 2,
        kv_heads: random.between(5, 9),
        head: random.pick(&[32, 64]),
        ..large_dims(&mut random)
    };
    case_of(&mut random, dims)
}

#[test]
fn layers_of_many_heads_match_the_reference() {
    for seed in 0..4 {
        wide_case(seed).check();
    }
}

/// Scales of integers are those of the head that a column belongs to, however many heads a task has.
#[test]
fn layers_of_many_heads_in_integers_match_those_in_f32() {
    for (seed, round) in (0..2).flat_map(|seed| [integers_of_any_scale as Rounding, int4].map(|round| (seed, round))) {
        let mut case = wide_case(seed);
        let matrices = rounded_matrices(&mut case, round);
        for limit in LEVELS {
            let expected = compute(&case, &case.inputs(), &Prepared::new(limit));
            let found = compute(&case, &narrow_inputs(&case, &matrices), &Prepared::new(limit));
            assert_eq!(found.topk_indices, expected.topk_indices);
            assert_close("output", &found.output, &widen(&expected.output), 3e-5);
            assert_close("present_key", &found.present_key, &widen(&expected.present_key), 1e-5);
        }
    }
}

/// Tasks of more rows where there are many, as far as a thread has room for their queries.
#[test]
fn many_tokens_have_the_bits_that_they_have_in_halves() {
    for (head, keys) in [(64, 300), (256, 65), (512, 64)] {
        let dims =
            CrossAttentionDims { batch: 1, tokens: 1024, keys, width: 64, experts: 8, top_k: 8, kv_heads: 1, head };
        let case = cross_attention::Case::random(&mut Random(head as u64), dims).with_padding();
        let (output, indices, weights) = case.compute(&Threads(2));
        let halves = [0..512, 512..1024].map(|tokens| case.part(tokens).compute(&Sequential));
        let [first, second] = halves;
        assert_eq!(bits(&output), [bits(&first.0), bits(&second.0)].concat(), "head of {head}");
        assert_eq!(indices, [first.1, second.1].concat());
        assert_eq!(bits(&weights), [bits(&first.2), bits(&second.2)].concat());
    }
}

#[test]
fn threads_do_not_change_a_bit_of_a_large_layer() {
    for case in (0..6).map(large_case).chain((0..2).map(wide_case)) {
        let alone = case.compute(&Sequential).bits();
        for threads in 2..=3 {
            assert_eq!(case.compute(&Threads(threads)).bits(), alone);
        }
    }
}

/// Widths of which a wide task of the output and a narrow one would leave columns of other widths for the last.
#[test]
fn threads_do_not_change_a_bit_where_the_last_columns_are_few() {
    for (seed, (width, tokens)) in [(832, 512), (384, 1024), (288, 520), (448, 300)].into_iter().enumerate() {
        let dims = FeedForwardDims { batch: 1, tokens, width, experts: 8, top_k: 2, hidden: 64 };
        let case = feed_forward::Case::random(&mut Random(seed as u64), dims);
        let alone = bits(&case.compute(&Sequential).0);
        for threads in [2, 4, 8] {
            assert_eq!(bits(&case.compute(&Threads(threads)).0), alone, "{dims:?}, {threads} threads");
        }
    }
}

/// Whether the processor has tiles, and a word about it where it has none: there vectors would be compared with
/// themselves.
pub(crate) fn has_tiles() -> bool {
    let bytes = |limit| Prepared::new(limit).thread_bytes();
    let found = bytes(Instructions::Amx) > bytes(Instructions::Avx512);
    if !found {
        skip("no AMX tiles");
    }
    found
}

#[test]
fn levels_of_instructions_agree_on_large_layers() {
    if !has_tiles() {
        return;
    }
    let mut on_tiles = 0;
    for seed in 0..16 {
        let case = large_case(seed);
        let best = case.compute_with(&pack(&case, Instructions::Amx), &Sequential);
        let found = case.compute_with(&pack(&case, Instructions::Avx512), &Sequential);
        assert_eq!(found.topk_indices, best.topk_indices, "the router is computed on vectors everywhere");
        let is_other = bits(&found.output) != bits(&best.output);
        let SelfAttentionDims { batch, tokens, past, experts, top_k, .. } = case.dims;
        let fewest = if top_k == experts { 96 } else { 192 };
        assert!(
            !is_other || batch * tokens >= fewest || tokens * top_k >= 512 && past + tokens >= 1024,
            "few tokens and keys are computed on vectors"
        );
        on_tiles += usize::from(is_other);
        assert_close("output", &found.output, &widen(&best.output), 3e-5);
        assert_close("present_key", &found.present_key, &widen(&best.present_key), 1e-5);
        assert_close("present_value", &found.present_value, &widen(&best.present_value), 1e-5);
    }
    assert!(on_tiles >= 4, "products of {on_tiles} layers went to tiles");
}

/// Rounds to bf16.
fn round_where(rounds: bool, weights: &mut [f32]) {
    weights.iter_mut().filter(|_| rounds).for_each(|weight| *weight = half::bf16::from_f32(*weight).to_f32());
}

/// Few tokens go to tiles where two bytes hold the weights or where there are many keys, and whether weights are packed
/// makes no difference.
#[test]
fn few_tokens_go_to_tiles_by_their_weights_and_keys() {
    if !has_tiles() {
        return;
    }
    let mut random = Random(1);
    for ([tokens, past, top_k], rounds, on_tiles) in [
        ([120, 0, 3], false, false),
        ([120, 0, 3], true, true),
        ([171, 852, 3], false, false),
        ([170, 854, 3], false, false),
        ([171, 853, 3], false, true),
        ([95, 0, 4], false, false),
        ([96, 0, 4], false, true),
    ] {
        let sizes = large_dims(&mut random);
        let dims = SelfAttentionDims { batch: 1, tokens, past, experts: 4, top_k, head: 128, ..sizes };
        let mut case = case_of(&mut random, dims);
        for weights in [&mut case.query_weight, &mut case.kv_weight, &mut case.output_weight] {
            round_where(rounds, weights);
        }
        let compute = |limit| bits(&case.compute_with(&pack(&case, limit), &Sequential).output);
        let differs = compute(Instructions::Amx) != compute(Instructions::Avx512);
        assert_eq!(differs, on_tiles, "{tokens} tokens behind {past}, {top_k} of 4 experts, rounded: {rounds}");
        assert_eq!(bits(&case.compute(&Sequential).output), compute(Instructions::Amx));
    }
}

#[test]
fn feed_forward_of_few_tokens_goes_to_tiles_by_its_weights() {
    if !has_tiles() {
        return;
    }
    let mut random = Random(2);
    let (width, experts, hidden) = (96, 4, 160);
    for ([tokens, top_k], rounds, on_tiles) in
        [([120, 3], false, false), ([120, 3], true, true), ([192, 3], false, true), ([60, 4], false, true)]
    {
        let dims = FeedForwardDims { batch: 1, tokens, width, experts, top_k, hidden };
        let hidden_states = random.values(tokens * width, 1.0);
        let router = random.values(width * experts, 1.0);
        let (mut input, mut output) =
            (random.values(experts * width * hidden, 0.3), random.values(experts * hidden * width, 0.3));
        round_where(rounds, &mut input);
        round_where(rounds, &mut output);
        let inputs = FeedForwardInputs {
            hidden_states: &hidden_states,
            router_weight: &router,
            input_weight: (&input).into(),
            output_weight: (&output).into(),
            output_bias: None,
            router_input: None,
        };
        let compute = |limit| bits(&stored_feed_forward(&dims, false, &inputs, &Prepared::new(limit)));
        let differs = compute(Instructions::Amx) != compute(Instructions::Avx512);
        assert_eq!(differs, on_tiles, "{tokens} tokens, {top_k} of 4 experts, rounded: {rounds}");
    }
}

/// Keys, queries and values too small or too large for tiles.
#[test]
fn levels_of_instructions_agree_on_extreme_magnitudes() {
    if !has_tiles() {
        return;
    }
    for (seed, (query, key, value)) in
        [(1e-30, 1e20, 1.0), (1e25, 1e-25, 1.0), (1.0, 1.0, 1e-28), (1.0, 1.0, 1e25), (1e-40, 1.0, 1.0)]
            .into_iter()
            .enumerate()
    {
        let mut case = large_case(seed as u64);
        let SelfAttentionDims { width, kv_heads, head, .. } = case.dims;
        case.rotation = None;
        case.output_bias = None;
        case.past_key.iter_mut().for_each(|element| *element *= key);
        case.past_value.iter_mut().for_each(|element| *element *= value);
        for row in case.kv_weight.chunks_mut(2 * kv_heads * head).take(width) {
            let (keys, values) = row.split_at_mut(kv_heads * head);
            keys.iter_mut().for_each(|weight| *weight *= key);
            values.iter_mut().for_each(|weight| *weight *= value);
        }
        case.query_weight.iter_mut().for_each(|weight| *weight *= query);
        let [found, expected] = [Instructions::Amx, Instructions::Avx512]
            .map(|limit| case.compute_with(&pack(&case, limit), &Sequential).output);
        let largest = expected.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        assert!(largest > 0.0 && largest.is_finite());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 1e-4 * largest, "seed {seed}: {found} {expected}");
        }
    }
}

/// A token of NaN that is masked changes no bit of another token, though they share blocks of every product.
#[test]
fn padding_may_hold_nan_in_large_layers() {
    for seed in 0..4 {
        let mut case = large_case(seed);
        case.attributes.skip_padded_queries = true;
        case.attributes.gate_mode = GateMode::SoftmaxTopk;
        let SelfAttentionDims { tokens, past, width, .. } = case.dims;
        for row in case.attention_mask.chunks_mut(past + tokens) {
            row[past..].iter_mut().enumerate().for_each(|(token, mask)| *mask = i32::from(token % 5 != 1));
        }
        let clean = case.compute(&Sequential);
        for (token, row) in case.hidden_states.chunks_mut(width).enumerate() {
            if token % tokens % 5 == 1 {
                row.fill(f32::NAN);
            }
        }
        assert_eq!(bits(&case.compute(&Sequential).output), bits(&clean.output));
    }
}

/// What a later token holds reaches no earlier one, infinite as it may be.
#[test]
fn causal_queries_of_large_layers_do_not_read_the_future() {
    for seed in 0..4 {
        let mut case = large_case(seed);
        case.attributes.causal = true;
        case.attention_mask.fill(1);
        case.router_weight.fill(0.0);
        let SelfAttentionDims { batch, tokens, width, .. } = case.dims;
        let clean = case.compute(&Sequential);
        for row in case.hidden_states.chunks_mut(width).skip(tokens - 1).step_by(tokens) {
            row.fill(3e38);
        }
        let poisoned = case.compute(&Sequential);
        assert!(poisoned.present_value.iter().any(|value| !value.is_finite()));
        for batch in 0..batch {
            let rows = batch * tokens * width..((batch + 1) * tokens - 1) * width;
            assert_close("output", &poisoned.output[rows.clone()], &widen(&clean.output[rows]), 3e-5);
        }
    }
}
