//! Layers whose rows of hidden states are moved apart: from 32 tokens on, with a width of 1024 elements.

use moa_kernels::{Instructions, Sequential};
use moa_schema::{CrossAttentionDims, FeedForwardDims, SelfAttentionDims};

use crate::self_attention::Case;
use crate::support::{Random, Threads};
use crate::{cross_attention, feed_forward, prepared};

const WIDTH: usize = 1024;

/// Blocks of many tokens, and stages where a layer has more than one head.
#[test]
fn self_attention_of_wide_rows() {
    for (seed, kv_heads, tokens, past) in [(1, 1, 33, 0), (2, 2, 40, 3), (3, 1, 300, 0)] {
        let dims = SelfAttentionDims { batch: 1, tokens, past, width: WIDTH, experts: 3, top_k: 2, kv_heads, head: 16 };
        let case = Case::random(&mut Random(seed), dims);
        case.check();
        assert_eq!(case.compute(&Threads(3)).bits(), case.compute(&Sequential).bits());
    }
}

#[test]
fn cross_attention_and_feed_forward_of_wide_rows() {
    let attention =
        CrossAttentionDims { batch: 2, tokens: 20, keys: 5, width: WIDTH, experts: 3, top_k: 2, kv_heads: 1, head: 16 };
    cross_attention::Case::random(&mut Random(4), attention).check();
    let layer = FeedForwardDims { batch: 1, tokens: 35, width: WIDTH, experts: 3, top_k: 2, hidden: 20 };
    feed_forward::Case::random(&mut Random(5), layer).check();
}

fn row_of_batch(case: &Case, batch: usize) -> Case {
    let tokens = case.dims.tokens;
    Case {
        dims: SelfAttentionDims { batch: 1, ..case.dims },
        attributes: case.attributes,
        hidden_states: case.hidden_states[batch * tokens * WIDTH..][..tokens * WIDTH].to_vec(),
        attention_mask: case.attention_mask[batch * tokens..][..tokens].to_vec(),
        router_weight: case.router_weight.clone(),
        query_weight: case.query_weight.clone(),
        kv_weight: case.kv_weight.clone(),
        router_input: None,
        takes_hidden_states: false,
        output_weight: case.output_weight.clone(),
        output_bias: case.output_bias.clone(),
        past_key: Vec::new(),
        past_value: Vec::new(),
        rotation: None,
    }
}

/// The rows of a batch of few tokens, which stay, and of many have the same bits.
#[test]
fn wide_rows_have_the_bits_of_rows_that_stay() {
    let dims =
        SelfAttentionDims { batch: 2, tokens: 20, past: 0, width: WIDTH, experts: 3, top_k: 2, kv_heads: 2, head: 16 };
    let mut both = Case::random(&mut Random(6), dims);
    both.rotation = None;
    for limit in [Instructions::Portable, Instructions::Avx2, Instructions::Avx512] {
        let expected = both.compute_with(&prepared::pack(&both, limit), &Sequential);
        for batch in 0..2 {
            let part = row_of_batch(&both, batch);
            let found = part.compute_with(&prepared::pack(&part, limit), &Sequential);
            let len = found.output.len();
            assert!(found.output == expected.output[batch * len..][..len], "{limit:?} {batch}");
        }
    }
}
