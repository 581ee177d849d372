//! What the kernels refuse, and how.

use moa_kernels::{
    CrossAttentionInputs, CrossAttentionOutputs, FeedForwardInputs, FeedForwardOutputs, Int4, KernelError,
    LmHeadInputs, SelfAttentionInputs, SelfAttentionOutputs, Sequential, WeightData, cross_attention, feed_forward,
    lm_head, self_attention,
};
use moa_schema::{
    Activation, CrossAttentionAttributes, CrossAttentionDims, FeedForwardAttributes, FeedForwardDims, GateMode,
    LmHeadDims, SelfAttentionDims,
};

use crate::self_attention::{Case, Rotation, output_alone};
use crate::support::Random;

const DIMS: SelfAttentionDims =
    SelfAttentionDims { batch: 2, tokens: 3, past: 2, width: 4, experts: 3, top_k: 2, kv_heads: 2, head: 4 };

fn case() -> Case {
    let mut case = Case::random(&mut Random(1), DIMS);
    case.attributes.skip_padded_queries = false;
    case.output_bias = Some(vec![0.5; 4]);
    case.rotation = Some(Rotation { cos: vec![1.0; 6], sin: vec![0.0; 6], position_ids: vec![2; 6] });
    case
}

fn refusal<'a>(case: &'a Case, change: impl FnOnce(&mut SelfAttentionInputs<'a>)) -> Option<KernelError> {
    let mut inputs = case.inputs();
    change(&mut inputs);
    let mut output = vec![0.0; 2 * 3 * 4];
    let mut outputs = output_alone(&mut output);
    self_attention(&case.dims, &case.attributes, &inputs, &mut outputs, &Sequential).err()
}

#[test]
fn well_formed_input_is_accepted() {
    assert_eq!(refusal(&case(), |_| {}), None);
}

#[test]
fn every_short_slice_is_named() {
    let case = case();
    let length = |name, expected, found| Some(KernelError::Length { name, expected, found });
    assert_eq!(refusal(&case, |i| i.hidden_states = &i.hidden_states[1..]), length("hidden_states", 24, 23));
    assert_eq!(refusal(&case, |i| i.attention_mask = &i.attention_mask[1..]), length("attention_mask", 10, 9));
    assert_eq!(refusal(&case, |i| i.router_weight = &i.router_weight[1..]), length("router_weight", 12, 11));
    assert_eq!(refusal(&case, |i| i.query_weight = case.query_weight[1..].into()), length("query_weight", 96, 95));
    assert_eq!(refusal(&case, |i| i.kv_weight = Some(case.kv_weight[1..].into())), length("kv_weight", 64, 63));
    assert_eq!(refusal(&case, |i| i.output_weight = case.output_weight[1..].into()), length("output_weight", 96, 95));
    let scales = |scales| WeightData::I8 { values: &[0; 96], scales };
    assert_eq!(refusal(&case, |i| i.query_weight = scales(&[1.0; 24])), None);
    assert_eq!(refusal(&case, |i| i.query_weight = scales(&[1.0; 23])), length("query_scale", 24, 23));
    assert_eq!(refusal(&case, |i| i.output_weight = scales(&[1.0; 24])), length("output_scale", 12, 24));
    let blocks = [half::bf16::ONE; 25];
    let scales = |values, count| WeightData::I4(Int4 { values, scales: &blocks[..count] });
    assert_eq!(refusal(&case, |i| i.query_weight = scales(&[0; 48], 24)), None);
    assert_eq!(refusal(&case, |i| i.query_weight = scales(&[0; 47], 24)), length("query_weight", 96, 94));
    assert_eq!(refusal(&case, |i| i.query_weight = scales(&[0; 48], 25)), length("query_scale", 24, 25));
    assert_eq!(refusal(&case, |i| i.output_bias = Some(&[0.0])), length("output_bias", 4, 1));
    assert_eq!(refusal(&case, |i| i.past_key = None), length("past_key", 32, 0));
    assert_eq!(refusal(&case, |i| i.past_value = Some(&[0.0])), length("past_value", 32, 1));
    assert_eq!(refusal(&case, |i| i.sin_cache = Some(&[0.0; 4])), length("sin_cache", 6, 4));
    assert_eq!(refusal(&case, |i| i.position_ids = Some(&[0])), length("position_ids", 6, 1));
}

/// What a router reads is as wide as its weights have rows.
#[test]
fn router_inputs_of_wrong_lengths_are_named() {
    let (case, ones) = (case(), [1.0; 42]);
    let length = |name, expected, found| Some(KernelError::Length { name, expected, found });
    let with =
        |weight, input| refusal(&case, |i| (i.router_weight, i.router_input) = (&ones[..weight], Some(&ones[..input])));
    assert_eq!(with(21, 42), None);
    assert_eq!(with(21, 41), length("router_input", 42, 41));
    assert_eq!(with(20, 36), length("router_weight", 18, 20));
    assert_eq!(with(2, 0), Some(KernelError::Empty { symbol: "R" }));
}

/// Without their projection, keys and values are as wide as the hidden states.
#[test]
fn narrow_hidden_states_are_no_keys() {
    let narrow = refusal(&case(), |inputs| inputs.kv_weight = None);
    assert_eq!(narrow, Some(KernelError::Length { name: "query_weight", expected: 48, found: 96 }));
}

#[test]
fn inputs_of_a_rotation_come_together() {
    let case = case();
    let missing = |name, because| Some(KernelError::Missing { name, because });
    assert_eq!(refusal(&case, |i| i.cos_cache = None), missing("cos_cache", "sin_cache"));
    assert_eq!(refusal(&case, |i| i.sin_cache = None), missing("sin_cache", "cos_cache"));
    assert_eq!(refusal(&case, |i| i.position_ids = None), missing("position_ids", "cos_cache"));
    let caches = |i: &mut SelfAttentionInputs<'_>| (i.cos_cache, i.sin_cache) = (None, None);
    assert_eq!(refusal(&case, caches), missing("cos_cache", "position_ids"));
    assert_eq!(refusal(&case, |i| (i.cos_cache, i.sin_cache, i.position_ids) = (None, None, None)), None);
}

#[test]
fn short_outputs_are_named() {
    let case = case();
    let mut output = vec![0.0; 24];
    let mut topk_weights = vec![0.0; 11];
    let mut outputs = SelfAttentionOutputs {
        output: &mut output,
        present_key: None,
        present_value: None,
        topk_indices: None,
        topk_weights: Some(&mut topk_weights),
    };
    let error = self_attention(&case.dims, &case.attributes, &case.inputs(), &mut outputs, &Sequential).err();
    assert_eq!(error, Some(KernelError::Length { name: "topk_weights", expected: 12, found: 11 }));
}

#[test]
fn every_short_slice_of_cross_attention_is_named() {
    let dims =
        CrossAttentionDims { batch: 2, tokens: 3, keys: 5, width: 4, experts: 3, top_k: 2, kv_heads: 2, head: 4 };
    let (gate_mode, skip_padded_queries) = (GateMode::ALL[0], false);
    let attributes = CrossAttentionAttributes { top_k: 2, kv_num_heads: 2, scale: 0.5, gate_mode, skip_padded_queries };
    let (values, masks) = ([0.25; 96], [1; 10]);
    let refusal = |change: fn(&mut CrossAttentionInputs<'_>), outputs: [usize; 3]| {
        let mut inputs = CrossAttentionInputs {
            hidden_states: &values[..24],
            key: &values[..80],
            value: &values[..80],
            key_mask: &masks,
            query_mask: &masks[..6],
            router_weight: &values[..12],
            query_weight: values[..].into(),
            output_weight: values[..].into(),
            output_bias: Some(&values[..4]),
        };
        change(&mut inputs);
        let (mut output, mut indices, mut weights) =
            (vec![0.0; outputs[0]], vec![0; outputs[1]], vec![0.0; outputs[2]]);
        let (topk_indices, topk_weights) = (Some(&mut indices[..]), Some(&mut weights[..]));
        let mut outputs = CrossAttentionOutputs { output: &mut output, topk_indices, topk_weights };
        cross_attention(&dims, &attributes, &inputs, &mut outputs, &Sequential).err()
    };
    let all = [24, 12, 12];
    assert_eq!(refusal(|_| {}, all), None);
    let length = |name, expected, found| Some(KernelError::Length { name, expected, found });
    assert_eq!(refusal(|i| i.hidden_states = &i.hidden_states[1..], all), length("hidden_states", 24, 23));
    assert_eq!(refusal(|i| i.key = &i.key[1..], all), length("key", 80, 79));
    assert_eq!(refusal(|i| i.value = &i.value[1..], all), length("value", 80, 79));
    assert_eq!(refusal(|i| i.key_mask = &i.key_mask[1..], all), length("key_mask", 10, 9));
    assert_eq!(refusal(|i| i.query_mask = &i.query_mask[1..], all), length("query_mask", 6, 5));
    assert_eq!(refusal(|i| i.router_weight = &i.router_weight[1..], all), length("router_weight", 12, 11));
    assert_eq!(refusal(|i| i.query_weight = [0.0; 95][..].into(), all), length("query_weight", 96, 95));
    assert_eq!(refusal(|i| i.output_weight = [0.0; 97][..].into(), all), length("output_weight", 96, 97));
    assert_eq!(refusal(|i| i.output_bias = Some(&[0.0]), all), length("output_bias", 4, 1));
    assert_eq!(refusal(|_| {}, [23, 12, 12]), length("output", 24, 23));
    assert_eq!(refusal(|_| {}, [24, 11, 12]), length("topk_indices", 12, 11));
    assert_eq!(refusal(|_| {}, [24, 12, 13]), length("topk_weights", 12, 13));
}

#[test]
fn every_short_slice_of_a_feed_forward_layer_is_named() {
    let dims = FeedForwardDims { batch: 2, tokens: 3, width: 4, experts: 3, top_k: 2, hidden: 8 };
    let values = [0.25; 192];
    for (gated, columns) in [(false, 96), (true, 192)] {
        let attributes =
            FeedForwardAttributes { top_k: 2, gate_mode: GateMode::ALL[0], activation: Activation::Silu, gated };
        let refusal = |change: fn(&mut FeedForwardInputs<'_>), outputs: [usize; 3]| {
            let mut inputs = FeedForwardInputs {
                hidden_states: &values[..24],
                router_weight: &values[..12],
                input_weight: values[..columns].into(),
                output_weight: values[..96].into(),
                output_bias: Some(&values[..4]),
                router_input: None,
            };
            change(&mut inputs);
            let (mut output, mut indices, mut weights) =
                (vec![0.0; outputs[0]], vec![0; outputs[1]], vec![0.0; outputs[2]]);
            let (topk_indices, topk_weights) = (Some(&mut indices[..]), Some(&mut weights[..]));
            let mut outputs = FeedForwardOutputs { output: &mut output, topk_indices, topk_weights };
            feed_forward(&dims, &attributes, &inputs, &mut outputs, &Sequential).err()
        };
        let all = [24, 12, 12];
        assert_eq!(refusal(|_| {}, all), None);
        let length = |name, expected, found| Some(KernelError::Length { name, expected, found });
        assert_eq!(refusal(|i| i.hidden_states = &i.hidden_states[1..], all), length("hidden_states", 24, 23));
        assert_eq!(refusal(|i| i.router_weight = &i.router_weight[1..], all), length("router_weight", 12, 11));
        assert_eq!(refusal(|i| i.input_weight = [0.0; 95][..].into(), all), length("input_weight", columns, 95));
        assert_eq!(refusal(|i| i.output_weight = [0.0; 95][..].into(), all), length("output_weight", 96, 95));
        assert_eq!(refusal(|i| i.output_bias = Some(&[0.0]), all), length("output_bias", 4, 1));
        assert_eq!(refusal(|i| i.router_input = Some(i.hidden_states), all), None);
        assert_eq!(refusal(|i| i.router_input = Some(&i.hidden_states[1..]), all), length("router_input", 24, 23));
        assert_eq!(refusal(|_| {}, [25, 12, 12]), length("output", 24, 25));
        assert_eq!(refusal(|_| {}, [24, 11, 12]), length("topk_indices", 12, 11));
        assert_eq!(refusal(|_| {}, [24, 12, 11]), length("topk_weights", 12, 11));
    }
}

/// What a head of 2 * 3 tokens, as wide as 33 elements, and 5 columns refuses.
fn refusal_of_a_head(hidden_states: usize, output_weight: WeightData<'_>, logits: usize) -> Option<KernelError> {
    let dims = LmHeadDims { batch: 2, tokens: 3, width: 33, vocabulary: 5 };
    let hidden_states = &[0.25; 199][..hidden_states];
    lm_head(&dims, &LmHeadInputs { hidden_states, output_weight }, &mut [0.0; 31][..logits], &Sequential).err()
}

#[test]
fn every_slice_of_a_head_of_another_length_is_named() {
    let length = |name, expected, found| Some(KernelError::Length { name, expected, found });
    let (floats, blocks) = ([0.25; 166], [half::bf16::ONE; 11]);
    let float = |count: usize| floats[..count].into();
    let int8 = |values, scales| WeightData::I8 { values: &[1; 166][..values], scales: &floats[..scales] };
    let int4 = |bytes, scales| WeightData::I4(Int4 { values: &[1; 84][..bytes], scales: &blocks[..scales] });
    for weight in [float(165), int8(165, 5), int4(83, 10)] {
        assert_eq!(refusal_of_a_head(198, weight, 30), None);
        for found in [197, 199] {
            assert_eq!(refusal_of_a_head(found, weight, 30), length("hidden_states", 198, found));
        }
        for found in [29, 31] {
            assert_eq!(refusal_of_a_head(198, weight, found), length("logits", 30, found));
        }
    }
    for (weight, name, expected, found) in [
        (float(164), "output_weight", 165, 164),
        (float(166), "output_weight", 165, 166),
        (int8(164, 5), "output_weight", 165, 164),
        (int8(166, 5), "output_weight", 165, 166),
        (int8(165, 4), "output_scale", 5, 4),
        (int8(165, 10), "output_scale", 5, 10),
        (int4(82, 10), "output_weight", 165, 164),
        (int4(84, 10), "output_weight", 165, 168),
        (int4(83, 5), "output_scale", 10, 5),
        (int4(83, 11), "output_scale", 10, 11),
    ] {
        assert_eq!(refusal_of_a_head(198, weight, 30), length(name, expected, found));
    }
}

#[test]
fn sizes_of_zero_of_a_head_are_named() {
    for (zero, symbol) in ["B", "T", "C", "V"].into_iter().enumerate() {
        let size = |index| usize::from(index != zero);
        let dims = LmHeadDims { batch: size(0), tokens: size(1), width: size(2), vocabulary: size(3) };
        let none: &[f32] = &[];
        let inputs = LmHeadInputs { hidden_states: none, output_weight: none.into() };
        assert_eq!(lm_head(&dims, &inputs, &mut [], &Sequential), Err(KernelError::Empty { symbol }));
    }
}

#[test]
fn router_logits_that_are_no_numbers_name_their_token() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut case = case();
        case.hidden_states[4 * 4 + 1] = bad;
        let error = refusal(&case, |_| {});
        assert_eq!(error, Some(KernelError::RouterLogits { batch: 1, token: 1 }));
        assert_eq!(error.unwrap().to_string(), "the router logits of batch 1, token 1 are not finite");
    }
}

#[test]
fn a_position_outside_the_cache_is_named() {
    for position in [3, -1, i64::MIN] {
        let mut case = case();
        if let Some(rotation) = case.rotation.as_mut() {
            rotation.position_ids[5] = position;
        }
        let expected = KernelError::Position { batch: 1, token: 2, position, positions: 3 };
        assert_eq!(refusal(&case, |_| {}), Some(expected));
    }
}

#[test]
fn sizes_of_zero_and_top_k_beyond_the_experts_are_named() {
    let mut wrong = case();
    wrong.dims.head = 0;
    assert_eq!(refusal(&wrong, |_| {}), Some(KernelError::Empty { symbol: "D" }));
    for top_k in [0, 4] {
        let mut wrong = case();
        wrong.dims.top_k = top_k;
        assert_eq!(refusal(&wrong, |_| {}), Some(KernelError::TopK { top_k, experts: 3 }));
    }
}
