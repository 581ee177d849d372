//! Calls that are small enough for Miri, which sees aliasing, data races and memory that nobody wrote: every stage of
//! every operator on several threads. Outside Miri a node has more callers and shapes.

use half::f16;
use moa_kernels::{Instructions, Prepared, Sequential, ThreadPool};
use moa_schema::{CrossAttentionDims, FeedForwardDims, SelfAttentionDims};

use crate::integers::{int4, integers};
use crate::quantized::{Rounding, quantizing};
use crate::self_attention::Case;
use crate::support::{Random, Threads, bits};
use crate::{cross_attention, feed_forward, lm_head, prepared, shared_cache};

const PREFILL: SelfAttentionDims =
    SelfAttentionDims { batch: 1, tokens: 2, past: 1, width: 2, experts: 2, top_k: 1, kv_heads: 2, head: 2 };

/// Of the stage for single tokens.
const STEP: SelfAttentionDims = SelfAttentionDims { tokens: 1, head: 16, ..PREFILL };

/// Of experts that are tasks.
const FEW: SelfAttentionDims = SelfAttentionDims { experts: 4, top_k: 4, kv_heads: 1, head: 16, ..PREFILL };

/// Of several tiles in every stage.
const TILES: SelfAttentionDims =
    SelfAttentionDims { batch: 2, tokens: 70, past: 9, width: 150, experts: 5, top_k: 2, kv_heads: 2, head: 40 };

/// With all tokens visible and keys that are rotated.
fn case(dims: SelfAttentionDims) -> Case {
    let mut case =
        (0..).map(|seed| Case::random(&mut Random(seed), dims)).find(|case| case.rotation.is_some()).unwrap();
    case.attention_mask.fill(1);
    case
}

#[test]
fn threads_share_the_tiles_of_self_attention() {
    for dims in [PREFILL, STEP, FEW] {
        let case = case(dims);
        assert_eq!(case.compute(&Threads(2)).bits(), case.compute(&Sequential).bits());
    }
}

#[test]
fn threads_share_a_cache_in_place() {
    for dims in [PREFILL, STEP] {
        shared_cache::check::<f32>(&case(dims), 1, [true, false], &Threads(2));
    }
}

#[test]
#[cfg_attr(all(miri, target_feature = "f16c"), ignore = "Miri cannot round to f16 with F16C")]
fn threads_share_a_cache_of_halves_in_place() {
    shared_cache::check::<f16>(&case(PREFILL), 1, [true, false], &Threads(2));
}

#[test]
fn calls_share_weights_and_scratch_memory() {
    let (shapes, callers): (&[_], _) = if cfg!(miri) { (&[PREFILL], 2) } else { (&[PREFILL, STEP, TILES], 8) };
    for dims in shapes {
        let case = case(*dims);
        let prepared = prepared::pack(&case, Instructions::default());
        let expected = case.compute(&Sequential).bits();
        std::thread::scope(|scope| {
            for caller in 0..callers {
                let pool = Threads(1 + caller % 3);
                let (case, prepared, expected) = (&case, &prepared, &expected);
                scope.spawn(move || assert_eq!(case.compute_with(prepared, &pool).bits(), *expected));
            }
        });
    }
}

#[test]
fn threads_share_the_tiles_of_cross_attention() {
    let dims =
        CrossAttentionDims { batch: 2, tokens: 1, keys: 2, width: 2, experts: 2, top_k: 1, kv_heads: 1, head: 2 };
    let case = cross_attention::Case::random(&mut Random(1), dims);
    let [together, alone] = [case.compute(&Threads(2)), case.compute(&Sequential)];
    assert_eq!((bits(&together.0), together.1), (bits(&alone.0), alone.1));
}

#[test]
fn threads_share_the_tiles_of_feed_forward() {
    let dims = FeedForwardDims { batch: 1, tokens: 2, width: 2, experts: 2, top_k: 2, hidden: 3 };
    let case = feed_forward::Case::random(&mut Random(1), dims);
    let [together, alone] = [case.compute(&Threads(2)), case.compute(&Sequential)];
    assert_eq!((bits(&together.0), together.1), (bits(&alone.0), alone.1));
}

#[test]
fn threads_share_the_tiles_of_a_head() {
    let case = lm_head::Case::random(&mut Random(1), [1, 2, 3, 260]);
    let types: [Rounding; 2] = [integers, int4];
    for (_, narrow) in types.map(|round| case.rounded(round)) {
        for prepared in [Prepared::default(), quantizing(Instructions::Avx512), quantizing(Instructions::AvxVnni)] {
            let compute = |pool: &dyn ThreadPool| bits(&case.compute(&prepared, narrow.data(), pool));
            assert_eq!(compute(&Threads(2)), compute(&Sequential));
        }
    }
}
