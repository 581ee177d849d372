//! Layers in which tasks take the rows of an expert from queries through attention.

use moa_kernels::{Instructions, Prepared, Sequential};
use moa_schema::SelfAttentionDims;

use crate::self_attention::{Case, Rotation};
use crate::support::{Random, Threads, bits};

/// More slots than near caches hold, where experts have enough rows in each row of the batch.
fn many_rows(random: &mut Random) -> Case {
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

/// One row of the batch.
fn alone(case: &Case, row: usize) -> Case {
    fn part<T: Copy>(values: &[T], row: usize, batch: usize) -> Vec<T> {
        values.chunks(values.len() / batch).nth(row).unwrap().to_vec()
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

/// Each row of the batch alone has so few slots that queries and attention are stages of their own. Nothing is left of
/// an earlier call.
#[test]
fn rows_of_an_expert_have_the_bits_of_stages() {
    for (seed, limit) in [Instructions::Avx512, Instructions::Avx512, Instructions::Avx2].into_iter().enumerate() {
        let mut case = many_rows(&mut Random(seed as u64));
        case.attributes.skip_padded_queries = seed > 0;
        let prepared = Prepared::new(limit);
        let visible = vec![1; case.attention_mask.len()];
        let mask = std::mem::replace(&mut case.attention_mask, visible);
        case.compute_with(&prepared, &Threads(3));
        case.attention_mask = mask;
        let all = case.compute_with(&prepared, &Threads(3));
        for (row, output) in all.output.chunks(all.output.len() / case.dims.batch).enumerate() {
            let alone = alone(&case, row).compute_with(&prepared, &Sequential);
            assert_eq!(bits(output), bits(&alone.output), "{seed}: row {row} of {:?}", case.dims);
        }
    }
}
