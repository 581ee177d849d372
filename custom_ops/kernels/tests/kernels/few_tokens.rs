//! Layers of few tokens, whose experts are tasks.

use moa_kernels::{Instructions, KernelError, Prepared, Sequential, ThreadPool};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, output_alone};
use crate::support::{Crowd, Random, Threads};

/// A few tokens and keys, on both sides of what tasks of an expert's rows take.
fn few_tokens(random: &mut Random) -> Case {
    let (tokens, top_k) = (random.between(2, 34), random.between(3, 9));
    let dims = SelfAttentionDims {
        batch: if random.chance(90) { 1 } else { 2 },
        tokens,
        past: random.pick(&[0, 0, 1, 20, 60]),
        width: random.pick(&[16, 40, 120]),
        experts: top_k + random.between(0, 9),
        top_k,
        kv_heads: if random.chance(90) { 1 } else { 2 },
        head: random.pick(&[16, 48, 80, 128, 24]),
    };
    let mut case = Case::random(random, dims);
    case.output_weight.iter_mut().for_each(|weight| *weight *= (dims.head as f32).powf(-0.5));
    case
}

#[test]
fn few_tokens_match_the_reference() {
    for seed in 0..150 {
        let case = few_tokens(&mut Random(seed));
        case.check();
        for limit in [Instructions::default(), Instructions::Avx2] {
            let compute = |pool: &dyn ThreadPool| case.compute_with(&Prepared::new(limit), pool).bits();
            let alone = compute(&Sequential);
            assert!([compute(&Threads(3)), compute(&Crowd)].iter().all(|bits| *bits == alone), "{seed}, {limit:?}");
        }
    }
}

/// All stages run, since they wait for each other, and the next call finds nothing of this one.
#[test]
fn a_token_that_cannot_be_routed_is_named_once_all_tasks_have_ended() {
    let dims =
        SelfAttentionDims { batch: 1, tokens: 6, past: 2, width: 40, experts: 7, top_k: 4, kv_heads: 1, head: 32 };
    let mut good = Case::random(&mut Random(5), dims);
    good.attention_mask.fill(1);
    let mut bad = Case::random(&mut Random(5), dims);
    bad.attention_mask.fill(1);
    bad.hidden_states[3 * dims.width + 7] = f32::NAN;
    let expected = good.compute(&Sequential).bits();
    for pool in [&Sequential as &dyn ThreadPool, &Threads(3), &Crowd] {
        let (prepared, mut output) = (Prepared::default(), vec![0.0; dims.tokens * dims.width]);
        let mut outputs = output_alone(&mut output);
        let result = prepared.self_attention(&dims, &bad.attributes, &bad.inputs(), &mut outputs, pool);
        assert_eq!(result, Err(KernelError::RouterLogits { batch: 0, token: 3 }));
        assert_eq!(good.compute_with(&prepared, pool).bits(), expected);
    }
}

/// Memory depends on sizes alone, so that a call that chooses experts unevenly grows nothing.
#[test]
fn few_tokens_take_memory_by_size() {
    let dims =
        SelfAttentionDims { batch: 1, tokens: 9, past: 0, width: 40, experts: 20, top_k: 4, kv_heads: 1, head: 32 };
    let [alike, apart] = [0.0, 1.0].map(|factor| {
        let mut case = Case::random(&mut Random(3), dims);
        case.attention_mask.fill(1);
        case.router_weight.iter_mut().for_each(|weight| *weight *= factor);
        let prepared = Prepared::default();
        case.compute_with(&prepared, &Sequential);
        prepared.scratch_bytes()
    });
    // Lists of experts may be shorter; queries of one expert alone have more bytes.
    assert!(alike.abs_diff(apart) < dims.tokens * dims.head * size_of::<f32>(), "{alike} {apart}");
}

/// Nothing of an earlier call is left in what tokens get that see no key, or are not routed.
#[test]
fn few_tokens_get_the_bias_where_they_see_no_key() {
    for skip in [false, true] {
        let mut random = Random(7);
        let dims =
            SelfAttentionDims { batch: 1, tokens: 5, past: 3, width: 40, experts: 6, top_k: 4, kv_heads: 1, head: 32 };
        let mut case = Case::random(&mut random, dims);
        let prepared = Prepared::default();
        (case.attributes.skip_padded_queries, case.output_bias) = (skip, Some(vec![0.5; dims.width]));
        case.attention_mask.fill(1);
        assert!(case.compute_with(&prepared, &Sequential).output.chunks(dims.width).all(|row| row != [0.5; 40]));
        case.attention_mask.fill(0);
        let nothing = if skip { 0.0 } else { 0.5 };
        assert_eq!(case.compute_with(&prepared, &Sequential).output, vec![nothing; dims.tokens * dims.width]);
    }
}
