//! Attention by stick-breaking, routers with an input and keys that are the hidden states.

use half::f16;
use moa_kernels::{Prepared, Sequential, WeightData};
use moa_schema::{AttentionMode, SelfAttentionDims};

use crate::self_attention::{Case, random_dims};
use crate::shared_cache;
use crate::stored::{LEVELS, compute, half_activations_round_once, narrow_inputs, rounded_matrices};
use crate::support::{Random, Threads, assert_close, bits, widen};

/// A layer of any mode, with a router that may read rows of its own, and keys that may be the hidden states where these
/// are as wide.
fn layer(random: &mut Random, dims: SelfAttentionDims, mode: AttentionMode) -> Case {
    let SelfAttentionDims { batch, tokens, width, experts, kv_heads, head, .. } = dims;
    let mut case = Case::random(random, dims);
    case.attributes.attention_mode = mode;
    case.attributes.causal |= mode == AttentionMode::StickBreaking;
    case.output_weight.iter_mut().for_each(|weight| *weight *= ((kv_heads * head) as f32).powf(-0.5));
    case.takes_hidden_states = width == kv_heads * head;
    if random.chance(50) {
        let read = random.pick(&[1, 3, 40, 1024]);
        case.router_input = Some(random.hidden_states(batch * tokens, read));
        case.router_weight = random.values(read * experts, 4.0 * (read as f32).powf(-0.5));
    }
    case
}

/// As [`layer`], by stick-breaking.
fn sticks(random: &mut Random, dims: SelfAttentionDims) -> Case {
    layer(random, dims, AttentionMode::StickBreaking)
}

/// Any sizes; half the time with keys that are the hidden states.
fn any_dims(random: &mut Random) -> SelfAttentionDims {
    let dims = random_dims(random);
    let own = dims.kv_heads * dims.head;
    SelfAttentionDims { width: if random.chance(50) { own } else { dims.width }, ..dims }
}

#[test]
fn random_cases_match_the_reference() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let (dims, mode) = (any_dims(&mut random), random.pick(&AttentionMode::ALL));
        layer(&mut random, dims, mode).check();
    }
}

/// More rows and keys than one tile of each holds, and heads of several panels.
fn large_dims() -> Vec<SelfAttentionDims> {
    let dims = |[batch, tokens, past, width, experts, top_k, kv_heads, head]: [usize; 8]| SelfAttentionDims {
        batch,
        tokens,
        past,
        width,
        experts,
        top_k,
        kv_heads,
        head,
    };
    [
        [2, 140, 0, 12, 1, 1, 2, 6],
        [2, 2, 600, 14, 5, 3, 2, 7],
        [1, 70, 251, 33, 33, 17, 3, 11],
        [1, 300, 513, 64, 3, 2, 2, 32],
        [1, 270, 0, 65, 2, 1, 1, 65],
        [1, 90, 200, 256, 4, 2, 1, 256],
    ]
    .map(dims)
    .to_vec()
}

#[test]
fn tile_borders_match_the_reference() {
    for (seed, dims) in large_dims().into_iter().enumerate() {
        sticks(&mut Random(seed as u64), dims).check();
    }
}

/// Single tokens, with as many slots as there are lanes, more, and heads that are no multiples of a vector.
#[test]
fn single_tokens_match_the_reference() {
    for seed in 0..120 {
        let mut random = Random(seed);
        let (kv_heads, top_k) = (random.between(1, 3), random.pick(&[1, 2, 3, 16, 17]));
        let head = random.pick(&[7, 16, 32, 48, 80, 1024]);
        let width = if random.chance(50) { kv_heads * head } else { random.between(1, 40) };
        let dims = SelfAttentionDims {
            batch: random.between(1, 3),
            tokens: 1,
            past: random.pick(&[0, 1, 15, 127, 128, 300]),
            width: if width > 1024 { 9 } else { width },
            experts: top_k + random.between(0, 2),
            top_k,
            kv_heads,
            head,
        };
        sticks(&mut random, dims).check();
    }
}

/// Behind weights that drive caches out, the past is read where it stood.
#[test]
fn far_weights_match_the_reference() {
    for (batch, past) in [(1, 300), (2, 128)] {
        let (width, head) = (1024, 1024);
        let dims = SelfAttentionDims { batch, tokens: 1, past, width, experts: 5, top_k: 5, kv_heads: 1, head };
        let mut case = sticks(&mut Random(8), dims);
        case.attention_mask.fill(1);
        case.query_weight.iter_mut().for_each(|weight| *weight *= 0.3);
        case.check();
        half_activations_round_once(case, 8);
    }
}

/// What lies between these calls is the number of threads alone.
#[test]
fn threads_change_no_bit_and_levels_little() {
    let mut random = Random(5);
    let only = SelfAttentionDims { batch: 2, tokens: 1, past: 200, kv_heads: 2, head: 32, ..any_dims(&mut random) };
    for dims in large_dims().into_iter().take(4).chain([only]) {
        let case = sticks(&mut Random(17), dims);
        let first = case.compute_with(&Prepared::new(LEVELS[0]), &Sequential);
        for limit in LEVELS {
            let alone = case.compute_with(&Prepared::new(limit), &Sequential);
            assert_close("output", &alone.output, &widen(&first.output), 2e-5);
            for threads in [2, 8] {
                let together = case.compute_with(&Prepared::new(limit), &Threads(threads));
                assert_eq!(together.bits(), alone.bits(), "{limit:?} {threads}");
                assert_eq!(together.topk_indices, alone.topk_indices);
            }
        }
    }
}

/// A row takes the same whoever shares its block, and how much of the sequence a call has.
#[test]
fn cached_steps_agree_with_one_pass() {
    let dims =
        SelfAttentionDims { batch: 1, tokens: 40, past: 0, width: 32, experts: 4, top_k: 2, kv_heads: 2, head: 16 };
    let mut whole = sticks(&mut Random(21), dims);
    (whole.rotation, whole.router_input) = (None, None);
    whole.router_weight = Random(3).router(32, 4);
    whole.attention_mask.fill(1);
    let expected = whole.compute(&Sequential);
    let hidden_states = whole.hidden_states.clone();
    let mut step = whole;
    for token in 0..40 {
        step.dims = SelfAttentionDims { tokens: 1, past: token, ..dims };
        step.hidden_states = hidden_states[token * 32..][..32].to_vec();
        step.attention_mask = vec![1; token + 1];
        let computed = step.compute(&Sequential);
        assert_close("output", &computed.output, &widen(&expected.output[token * 32..][..32]), 1e-5);
        (step.past_key, step.past_value) = (computed.present_key, computed.present_value);
    }
    assert_eq!(bits(&step.past_key), bits(&expected.present_key));
}

#[test]
fn caches_may_be_shared() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let dims = match seed % 3 {
            0 => SelfAttentionDims { batch: 7, tokens: 1 + seed as usize % 5, kv_heads: 1, ..any_dims(&mut random) },
            1 => SelfAttentionDims { tokens: 1, head: 16, past: 150, ..random_dims(&mut random) },
            _ => SelfAttentionDims { tokens: 70, ..any_dims(&mut random) },
        };
        let width = if random.chance(50) { dims.kv_heads * dims.head } else { dims.width };
        let case = sticks(&mut random, SelfAttentionDims { width, ..dims });
        for in_place in [[true, true], [false, true]] {
            shared_cache::check::<f32>(&case, 3, in_place, &Threads(2));
            shared_cache::check::<f16>(&case, 3, in_place, &Threads(2));
        }
    }
}

#[test]
fn half_activations_are_rounded_once() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let dims = match seed % 3 {
            0 => SelfAttentionDims { tokens: 1, head: 32, past: 40, ..any_dims(&mut random) },
            1 => SelfAttentionDims { tokens: 70, head: 40, width: 80, kv_heads: 2, ..any_dims(&mut random) },
            _ => any_dims(&mut random),
        };
        let mode = random.pick(&AttentionMode::ALL);
        half_activations_round_once(layer(&mut random, dims, mode), seed);
    }
}

/// Scales that are powers of 2 times integers are f32, and without a projection of keys there are two matrices.
#[test]
fn narrow_weights_have_the_bits_of_f32_without_a_projection_of_keys() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let dims = SelfAttentionDims { kv_heads: 2, head: 16, width: 32, ..random_dims(&mut random) };
        let mut case = sticks(&mut random, dims);
        let matrices = rounded_matrices(&mut case, crate::integers::integers);
        let narrow = narrow_inputs(&case, &matrices);
        assert!(matches!(narrow.query_weight, WeightData::I8 { .. }));
        let narrow = moa_kernels::SelfAttentionInputs { kv_weight: None, ..narrow };
        for limit in LEVELS {
            let expected = compute(&case, &case.inputs(), &Prepared::new(limit));
            crate::stored::assert_same(&compute(&case, &narrow, &Prepared::new(limit)), &expected);
        }
        case.check();
    }
}

/// NaN in a padded token reaches no other one, whether its key is projected or not.
#[test]
fn padding_may_hold_nan() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let tokens = random.pick(&[1, 6, 70]);
        let dims = SelfAttentionDims { tokens, ..any_dims(&mut random) };
        let head = if tokens == 1 { 16 } else { dims.head };
        let width = if random.chance(50) { dims.kv_heads * head } else { dims.width };
        let mut case = sticks(&mut random, SelfAttentionDims { head, width, ..dims });
        case.attributes.skip_padded_queries = true;
        let clean = case.compute(&Sequential);
        let SelfAttentionDims { past, kv_heads, .. } = case.dims;
        for (place, _) in case.attention_mask.iter().enumerate().filter(|(_, mask)| **mask == 0) {
            let (row, key) = (place / (past + tokens), place % (past + tokens));
            if key >= past {
                case.hidden_states[(row * tokens + key - past) * width..][..width].fill(f32::NAN);
                continue;
            }
            for pair in row * kv_heads..(row + 1) * kv_heads {
                case.past_key[(pair * past + key) * head..][..head].fill(f32::NAN);
                case.past_value[(pair * past + key) * head..][..head].fill(f32::NAN);
            }
        }
        assert_eq!(bits(&case.compute(&Sequential).output), bits(&clean.output), "seed {seed}");
    }
}

/// Scores far beyond what an exponential holds: the last key takes all, or nothing.
#[test]
fn large_scores_stay_finite() {
    for (tokens, past, head) in [(1, 300, 16), (1, 300, 6), (300, 20, 16)] {
        for factor in [100.0, 1e4, 1e30] {
            let dims = SelfAttentionDims { batch: 1, tokens, past, width: 16, experts: 3, top_k: 2, kv_heads: 1, head };
            let mut case = sticks(&mut Random(tokens as u64), dims);
            case.attributes.scale *= factor;
            case.attention_mask.fill(1);
            let output = case.compute(&Sequential).output;
            assert!(output.iter().all(|value| value.is_finite()), "{tokens} {head} {factor}");
            if factor == 100.0 {
                case.check();
            }
        }
    }
}

/// A query that sees no key gives 0, and the bias is all of its output.
#[test]
fn a_query_without_keys_gives_the_bias() {
    for (tokens, head) in [(1, 16), (1, 5), (40, 16)] {
        let dims = SelfAttentionDims { batch: 2, tokens, past: 3, width: 8, experts: 3, top_k: 2, kv_heads: 1, head };
        let mut case = sticks(&mut Random(4), dims);
        (case.attributes.skip_padded_queries, case.output_bias) = (false, Some(vec![0.5; 8]));
        let prepared = Prepared::default();
        case.attention_mask.fill(1);
        assert_ne!(case.compute_with(&prepared, &Sequential).output, vec![0.5; 2 * tokens * 8]);
        case.attention_mask.fill(0);
        assert_eq!(case.compute_with(&prepared, &Sequential).output, vec![0.5; 2 * tokens * 8]);
    }
}

/// Stick-breaking has an order of keys, whether the attribute says so or not.
#[test]
fn sticks_are_causal() {
    let mut random = Random(9);
    let dims = SelfAttentionDims { tokens: 9, ..any_dims(&mut random) };
    let mut case = sticks(&mut random, dims);
    let causal = case.compute(&Sequential);
    case.attributes.causal = false;
    assert_eq!(case.compute(&Sequential).bits(), causal.bits());
}
