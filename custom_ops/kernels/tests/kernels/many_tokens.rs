//! Layers of many tokens, whose blocks are tasks.

use moa_kernels::{Instructions, Prepared, Sequential};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, Rotation};
use crate::support::{Random, Threads, bits};

/// Rows of the batch that are a block each.
fn short_rows(random: &mut Random) -> Case {
    let (kv_heads, head) = random.pick(&[(1, 160), (3, 64), (2, 96)]);
    let top_k = random.between(4, 6);
    let dims = SelfAttentionDims {
        batch: 40,
        tokens: random.between(40, 44),
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

/// Each row of the batch alone has so few slots that queries, attention and output are stages of their own. Nothing is
/// left of an earlier call.
fn check(mut case: Case, limit: Instructions) {
    let prepared = Prepared::new(limit);
    let visible = vec![1; case.attention_mask.len()];
    let mask = std::mem::replace(&mut case.attention_mask, visible);
    case.compute_with(&prepared, &Threads(3));
    case.attention_mask = mask;
    let all = case.compute_with(&prepared, &Threads(3));
    for (row, output) in all.output.chunks(all.output.len() / case.dims.batch).enumerate() {
        let alone = alone(&case, row).compute_with(&prepared, &Sequential);
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
