//! Layers of many tokens, whose blocks are tasks.

use moa_kernels::{Instructions, Prepared, Sequential};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, Rotation};
use crate::support::{Crowd, Random, Threads, bits};

/// Rows of the batch that are a block each.
fn short_rows(random: &mut Random) -> Case {
    let (kv_heads, head) = random.pick(&[(1, 160), (3, 64), (2, 96)]);
    let top_k = random.between(4, 6);
    let dims = SelfAttentionDims {
        batch: 16,
        tokens: random.between(100, 104),
        past: random.between(30, 40),
        width: random.pick(&[16, 40]),
        experts: top_k + random.between(0, 2),
        top_k,
        kv_heads,
        head,
    };
    Case::random(random, dims)
}

/// Rows of the batch that are two blocks, in which an expert has more rows than one product.
fn long_rows(random: &mut Random) -> Case {
    let tokens = random.between(280, 284);
    let dims =
        SelfAttentionDims { batch: 4, tokens, past: 0, width: 16, experts: 24, top_k: 12, kv_heads: 1, head: 64 };
    let mut case = Case::random(random, dims);
    case.attention_mask.fill(1);
    (0..dims.top_k).for_each(|expert| case.router_weight[2 * expert] = 40.0 + expert as f32);
    case
}

/// One row that is two blocks for few threads.
fn one_row(random: &mut Random) -> Case {
    let dims = SelfAttentionDims {
        batch: 1,
        tokens: random.between(130, 140),
        past: random.between(0, 9),
        width: random.pick(&[16, 40]),
        experts: 6,
        top_k: 6,
        kv_heads: random.between(1, 2),
        head: 64,
    };
    Case::random(random, dims)
}

/// One row of the batch.
fn alone(case: &Case, row: usize) -> Case {
    fn part<T: Copy>(values: &[T], row: usize, batch: usize) -> Vec<T> {
        values[row * values.len() / batch..(row + 1) * values.len() / batch].to_vec()
    }
    let batch = case.dims.batch;
    Case {
        dims: SelfAttentionDims { batch: 1, ..case.dims },
        attributes: case.attributes,
        hidden_states: part(&case.hidden_states, row, batch),
        attention_mask: part(&case.attention_mask, row, batch),
        router_weight: case.router_weight.clone(),
        query_weight: case.query_weight.clone(),
        kv_weight: case.kv_weight.clone(),
        router_input: None,
        takes_hidden_states: false,
        output_weight: case.output_weight.clone(),
        output_bias: case.output_bias.clone(),
        past_key: part(&case.past_key, row, batch),
        past_value: part(&case.past_value, row, batch),
        rotation: case.rotation.as_ref().map(|rotation| Rotation {
            cos: rotation.cos.clone(),
            sin: rotation.sin.clone(),
            position_ids: part(&rotation.position_ids, row, batch),
        }),
    }
}

/// In one thread, and in any number of threads, the bits are those of rows that are alone with more threads than blocks
/// serve, so that queries, attention and output are stages of their own. Nothing is left of an earlier call.
fn check(mut case: Case, limit: Instructions) {
    let [blocks, stages] = [Prepared::new(limit), Prepared::new(limit)];
    let visible = vec![1; case.attention_mask.len()];
    let mask = std::mem::replace(&mut case.attention_mask, visible);
    case.compute_with(&blocks, &Sequential);
    case.attention_mask = mask;
    let all = case.compute_with(&blocks, &Sequential);
    assert_eq!(case.compute_with(&Prepared::new(limit), &Threads(3)).bits(), all.bits());
    for (row, output) in all.output.chunks(all.output.len() / case.dims.batch).enumerate() {
        let alone = alone(&case, row).compute_with(&stages, &Crowd);
        assert!(bits(output) == bits(&alone.output), "row {row} of {:?}", case.dims);
    }
}

#[test]
fn blocks_of_short_rows_have_the_bits_of_stages() {
    for (seed, limit) in [Instructions::Avx512, Instructions::Avx512, Instructions::Avx2].into_iter().enumerate() {
        let mut case = short_rows(&mut Random(seed as u64));
        case.attributes.skip_padded_queries = seed > 0;
        check(case, limit);
    }
}

#[test]
fn blocks_of_long_rows_have_the_bits_of_stages() {
    check(long_rows(&mut Random(5)), Instructions::Avx512);
}

#[test]
fn two_blocks_of_one_row_have_the_bits_of_stages() {
    for seed in 0..6 {
        let limit = [Instructions::Avx512, Instructions::Avx2][seed as usize % 2];
        let mut case = one_row(&mut Random(seed));
        case.attributes.skip_padded_queries = seed % 3 > 0;
        check(case, limit);
    }
}
