//! `MoACrossAttention`.

use std::ops::Range;

use moa_kernels::{CrossAttentionInputs, CrossAttentionOutputs, Prepared, Sequential, ThreadPool, WeightData};
use moa_schema::{AttentionMode, CrossAttentionAttributes, CrossAttentionDims, GateMode};

use crate::attention_reference::Attend;
use crate::routing_reference::Gate;
use crate::support::{Random, Threads, assert_close, bits, widen};

pub(crate) struct Case {
    dims: CrossAttentionDims,
    attributes: CrossAttentionAttributes,
    pub(crate) hidden_states: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
    pub(crate) key_mask: Vec<i32>,
    query_mask: Vec<i32>,
    router_weight: Vec<f32>,
    pub(crate) query_weight: Vec<f32>,
    pub(crate) output_weight: Vec<f32>,
    output_bias: Option<Vec<f32>>,
}

pub(crate) type Computed = (Vec<f32>, Vec<i64>, Vec<f32>);

impl Case {
    pub(crate) fn random(random: &mut Random, dims: CrossAttentionDims) -> Self {
        let CrossAttentionDims { batch, tokens, keys, width, experts, top_k, kv_heads, head } = dims;
        let attributes = CrossAttentionAttributes {
            top_k,
            kv_num_heads: kv_heads,
            scale: (head as f32).powf(-0.5),
            gate_mode: random.pick(&GateMode::ALL),
            skip_padded_queries: random.chance(70),
        };
        let fan_in = (width as f32).powf(-0.5);
        let mut case = Self {
            dims,
            attributes,
            hidden_states: random.hidden_states(batch * tokens, width),
            key: random.values(batch * kv_heads * keys * head, 1.5),
            value: random.values(batch * kv_heads * keys * head, 1.5),
            key_mask: (0..batch).flat_map(|_| random.mask(keys)).collect(),
            query_mask: (0..batch).flat_map(|_| random.mask(tokens)).collect(),
            router_weight: random.router(width, experts),
            query_weight: random.values(experts * width * kv_heads * head, 3.0 * fan_in),
            output_weight: random.values(experts * kv_heads * head * width, 1.0),
            output_bias: random.chance(50).then(|| random.values(width, 1.0)),
        };
        case.poison_masked_keys();
        case
    }

    /// NaN wherever no query may look.
    fn poison_masked_keys(&mut self) {
        let CrossAttentionDims { keys, kv_heads, head, .. } = self.dims;
        for cache in [&mut self.key, &mut self.value] {
            for (row, chunk) in cache.chunks_mut(head).enumerate() {
                let (batch, key) = (row / keys / kv_heads, row % keys);
                if self.key_mask[batch * keys + key] == 0 {
                    chunk.fill(f32::NAN);
                }
            }
        }
    }

    /// The same with padding routed as all else.
    pub(crate) fn with_padding(mut self) -> Self {
        self.attributes.skip_padded_queries = false;
        self
    }

    /// The same layer for some tokens of the only row.
    pub(crate) fn part(&self, tokens: Range<usize>) -> Self {
        let width = self.dims.width;
        Self {
            dims: CrossAttentionDims { tokens: tokens.len(), ..self.dims },
            hidden_states: self.hidden_states[tokens.start * width..tokens.end * width].to_vec(),
            query_mask: self.query_mask[tokens].to_vec(),
            key: self.key.clone(),
            value: self.value.clone(),
            key_mask: self.key_mask.clone(),
            router_weight: self.router_weight.clone(),
            query_weight: self.query_weight.clone(),
            output_weight: self.output_weight.clone(),
            output_bias: self.output_bias.clone(),
            ..*self
        }
    }

    pub(crate) fn compute(&self, pool: &dyn ThreadPool) -> Computed {
        self.compute_with(&Prepared::default(), self.matrices(), pool)
    }

    /// Of queries and of the output.
    fn matrices(&self) -> [WeightData<'_>; 2] {
        [(&self.query_weight).into(), (&self.output_weight).into()]
    }

    pub(crate) fn compute_with(
        &self,
        prepared: &Prepared,
        [query_weight, output_weight]: [WeightData<'_>; 2],
        pool: &dyn ThreadPool,
    ) -> Computed {
        let CrossAttentionDims { batch, tokens, width, top_k, .. } = self.dims;
        let mut output = vec![f32::NAN; batch * tokens * width];
        let mut topk_indices = vec![-1; batch * tokens * top_k];
        let mut topk_weights = vec![f32::NAN; batch * tokens * top_k];
        let inputs = CrossAttentionInputs {
            hidden_states: &self.hidden_states,
            key: &self.key,
            value: &self.value,
            key_mask: &self.key_mask,
            query_mask: &self.query_mask,
            router_weight: &self.router_weight,
            query_weight,
            output_weight,
            output_bias: self.output_bias.as_deref(),
        };
        let mut outputs = CrossAttentionOutputs {
            output: &mut output,
            topk_indices: Some(&mut topk_indices),
            topk_weights: Some(&mut topk_weights),
        };
        prepared.cross_attention(&self.dims, &self.attributes, &inputs, &mut outputs, pool).unwrap();
        (output, topk_indices, topk_weights)
    }

    pub(crate) fn check(&self) {
        let (output, indices, weights) = self.compute(&Sequential);
        let routed: Vec<bool> =
            self.query_mask.iter().map(|&mask| mask != 0 || !self.attributes.skip_padded_queries).collect();
        let reference = Attend {
            gate: Gate {
                router_weight: &self.router_weight,
                width: self.dims.width,
                experts: self.dims.experts,
                top_k: self.dims.top_k,
                mode: self.attributes.gate_mode,
            },
            read: &self.hidden_states,
            hidden_states: &self.hidden_states,
            width: self.dims.width,
            mode: AttentionMode::Softmax,
            query_weight: &self.query_weight,
            output_weight: &self.output_weight,
            output_bias: self.output_bias.as_deref(),
            key: &widen(&self.key),
            value: &widen(&self.value),
            key_mask: &self.key_mask,
            routed: &routed,
            causal_past: None,
            rotary: None,
            scale: self.attributes.scale,
            batch: self.dims.batch,
            tokens: self.dims.tokens,
            keys: self.dims.keys,
            kv_heads: self.dims.kv_heads,
            head: self.dims.head,
        };
        assert_close("output", &output, &reference.output(&indices, &weights), 3e-5);
    }
}

fn random_dims(random: &mut Random) -> CrossAttentionDims {
    let experts = random.between(1, 9);
    CrossAttentionDims {
        batch: random.between(1, 3),
        tokens: random.between(1, 12),
        keys: random.between(1, 20),
        width: random.between(1, 24),
        experts,
        top_k: random.between(1, experts),
        kv_heads: random.between(1, 3),
        head: random.between(1, 12),
    }
}

#[test]
fn random_cases_match_the_reference() {
    for seed in 0..300 {
        let mut random = Random(seed);
        let dims = random_dims(&mut random);
        Case::random(&mut random, dims).check();
    }
}

/// More rows, keys and experts than one tile of each holds.
#[test]
fn tile_borders_match_the_reference() {
    for (seed, (tokens, keys, experts, top_k)) in
        [(140, 3, 1, 1), (2, 513, 5, 5), (1, 129, 64, 7), (70, 300, 33, 2), (3, 256, 17, 1)].into_iter().enumerate()
    {
        let dims = CrossAttentionDims { batch: 2, tokens, keys, width: 16, experts, top_k, kv_heads: 2, head: 5 };
        Case::random(&mut Random(seed as u64), dims).check();
    }
}

#[test]
fn no_keys_at_all_yields_zero() {
    let mut random = Random(3);
    let dims = CrossAttentionDims { keys: 0, ..random_dims(&mut random) };
    let mut case = Case::random(&mut random, dims);
    case.output_bias = None;
    assert!(case.compute(&Sequential).0.iter().all(|value| *value == 0.0));
}

#[test]
fn threads_do_not_change_a_bit() {
    for seed in 0..12 {
        let mut random = Random(seed);
        let dims = CrossAttentionDims { tokens: 70, ..random_dims(&mut random) };
        let case = Case::random(&mut random, dims);
        let alone = case.compute(&Sequential);
        for threads in 1..=4 {
            let (output, indices, weights) = case.compute(&Threads(threads));
            assert_eq!(bits(&output), bits(&alone.0));
            assert_eq!((indices, bits(&weights)), (alone.1.clone(), bits(&alone.2)));
        }
    }
}
