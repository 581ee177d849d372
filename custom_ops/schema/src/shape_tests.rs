//! Every input of every operator, with a size that does not fit.

use super::*;
use crate::{AttentionMode, Attributes, GateMode};

const ATTRIBUTES: SelfAttentionAttributes = SelfAttentionAttributes {
    top_k: 2,
    kv_num_heads: 2,
    causal: true,
    scale: 0.5,
    gate_mode: GateMode::SoftmaxTopk,
    skip_padded_queries: true,
    attention_mode: AttentionMode::Softmax,
};

fn shapes() -> Vec<Vec<usize>> {
    vec![
        vec![3, 5, 16],
        vec![3, 9],
        vec![16, 4],
        vec![4, 16, 8],
        vec![16, 16],
        vec![4, 8, 16],
        vec![16],
        vec![3, 2, 4, 4],
        vec![3, 2, 4, 4],
    ]
}

fn dims(shapes: &[Vec<usize>]) -> Result<SelfAttentionDims, ShapeError> {
    let shapes: Vec<_> = shapes.iter().map(|s| Some(s.as_slice())).collect();
    SelfAttentionDims::new(&shapes, &ATTRIBUTES)
}

#[test]
fn sizes_are_read_from_shapes() {
    let found = dims(&shapes()).unwrap();
    let expected =
        SelfAttentionDims { batch: 3, tokens: 5, past: 4, width: 16, experts: 4, top_k: 2, kv_heads: 2, head: 4 };
    assert_eq!(found, expected);
}

#[test]
fn every_wrong_dimension_is_named() {
    for (input, shape) in shapes().iter().enumerate() {
        for axis in 0..shape.len() {
            let mut wrong = shapes();
            wrong[input][axis] += 1;
            let error = dims(&wrong).expect_err("a wrong dimension passed").to_string();
            assert!(error.starts_with("MoASelfAttention: "), "{error}");
        }
    }
}

/// The past of 4 rows in a buffer of `rows`, and a mask of `keys`.
fn shared(rows: usize, keys: usize) -> Vec<Vec<usize>> {
    let mut shapes = shapes();
    shapes[own::PAST_KEY][2] = rows;
    shapes[own::PAST_VALUE][2] = rows;
    shapes[own::ATTENTION_MASK][1] = keys;
    shapes
}

#[test]
fn the_mask_says_whether_a_cache_is_shared() {
    for (rows, keys, expected) in [
        (4, 9, Some((4, None))),
        (0, 5, Some((0, None))),
        (9, 9, Some((4, Some(9)))),
        (30, 9, Some((4, Some(30)))),
        (5, 5, Some((0, Some(5)))),
        (30, 5, Some((0, Some(30)))),
        (30, 4, None),
        (30, 31, None),
        (4, 5, None),
        (4, 10, None),
    ] {
        let shapes = shared(rows, keys);
        let given: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
        let found = SelfAttentionDims::with_capacity(&given, &ATTRIBUTES);
        let found = found.map(|(dims, capacity)| (dims.past, capacity)).ok();
        assert_eq!(found, expected, "{rows} rows, a mask of {keys}");
    }
}

#[test]
fn a_shared_cache_is_refused_where_none_is_served() {
    let expected = "MoASelfAttention: attention_mask has 9 columns, expected 35: 30 of the past and 5 of hidden_states; \
                    fewer are for caches with room, which ONNX Runtime's kernels take";
    assert_eq!(dims(&shared(30, 9)).unwrap_err().to_string(), expected);
}

/// Of five new tokens two have room.
#[test]
fn a_shared_cache_that_is_full_is_told() {
    let expected = "MoASelfAttention: attention_mask has 9 columns, expected 12: 7 of the past and 5 of hidden_states; a \
                    cache that is both past and present has room for 7";
    assert_eq!(dims(&shared(7, 9)).unwrap_err().to_string(), expected);
}

#[test]
fn missing_input_is_named() {
    let all = shapes();
    let mut partial: Vec<_> = all.iter().map(|s| Some(s.as_slice())).collect();
    partial[own::OUTPUT_WEIGHT] = None;
    let error = SelfAttentionDims::new(&partial, &ATTRIBUTES).expect_err("output_weight is required");
    assert_eq!(error.to_string(), "MoASelfAttention: input `output_weight` must be [E, G * D, C], found nothing");
    for missing in [own::PAST_KEY, own::PAST_VALUE] {
        let mut partial: Vec<_> = all.iter().map(|s| Some(s.as_slice())).collect();
        partial[missing] = None;
        let error = SelfAttentionDims::new(&partial, &ATTRIBUTES).expect_err("one cache alone").to_string();
        let name = SELF_ATTENTION.inputs[missing].name;
        let start = format!("MoASelfAttention: input `{name}` must be [");
        assert!(error.starts_with(&start) && error.ends_with("found nothing"), "{error}");
    }
}

/// Without their projection keys and values are the hidden states, and as wide.
#[test]
fn keys_and_values_may_be_hidden_states() {
    let mut all = shapes();
    let found = |all: &[Vec<usize>], scale: Option<&[usize]>| {
        let mut given: Vec<_> = all.iter().map(|s| Some(s.as_slice())).collect();
        given.resize(SELF_ATTENTION.inputs.len(), None);
        (given[own::KV_WEIGHT], given[own::KV_SCALE]) = (None, scale);
        SelfAttentionDims::new(&given, &ATTRIBUTES).map_err(|error| error.to_string())
    };
    let narrow = "MoASelfAttention: without kv_weight, query_weight must have 16 columns as hidden_states, found 8";
    assert_eq!(found(&all, None), Err(narrow.to_owned()));
    all[own::QUERY_WEIGHT][2] = 16;
    all[own::OUTPUT_WEIGHT][1] = 16;
    all[own::PAST_KEY][3] = 8;
    all[own::PAST_VALUE][3] = 8;
    assert_eq!(found(&all, None).map(|dims| dims.head), Ok(8));
    let scale = "MoASelfAttention: kv_scale is there and kv_weight is not";
    assert_eq!(found(&all, Some(&[32])), Err(scale.to_owned()));
}

/// A router may read an input of its own, of another width.
#[test]
fn routers_may_have_an_input() {
    let attributes = feed_forward(true, 2);
    let all = feed_forward_shapes(true);
    let tokens = all[ffn::HIDDEN_STATES].clone();
    let found = |router: &[usize], input: &[usize]| {
        let mut given: Vec<_> = all.iter().map(|s| Some(s.as_slice())).collect();
        given.resize(FEED_FORWARD.inputs.len(), None);
        (given[ffn::ROUTER_WEIGHT], given[ffn::ROUTER_INPUT]) = (Some(router), Some(input));
        FeedForwardDims::new(&given, &attributes).map(|dims| dims.experts).map_err(|error| error.to_string())
    };
    let experts = all[ffn::ROUTER_WEIGHT][1];
    assert_eq!(found(&[7, experts], &[tokens[0], tokens[1], 7]), Ok(experts));
    for (router, input, expected) in [
        ([6, experts], [tokens[0], tokens[1], 7], "input `router_weight` must be [C, E], or [R, E] where"),
        ([7, experts], [tokens[0], tokens[1] + 1, 7], "input `router_input` must be [B, T, R], found"),
        ([0, experts], [tokens[0], tokens[1], 0], "router_input has no columns"),
    ] {
        let error = found(&router, &input).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

const CROSS: CrossAttentionAttributes = CrossAttentionAttributes {
    top_k: 2,
    kv_num_heads: 2,
    scale: 0.5,
    gate_mode: GateMode::SoftmaxTopk,
    skip_padded_queries: true,
};

fn cross_shapes() -> Vec<Vec<usize>> {
    vec![
        vec![3, 5, 16],
        vec![3, 2, 7, 4],
        vec![3, 2, 7, 4],
        vec![3, 7],
        vec![3, 5],
        vec![16, 6],
        vec![6, 16, 8],
        vec![6, 8, 16],
        vec![16],
    ]
}

fn cross_dims(shapes: &[Vec<usize>], attributes: &CrossAttentionAttributes) -> Result<CrossAttentionDims, String> {
    let shapes: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
    CrossAttentionDims::new(&shapes, attributes).map_err(|error| error.to_string())
}

fn feed_forward(gated: bool, top_k: usize) -> FeedForwardAttributes {
    FeedForwardAttributes { top_k, gate_mode: GateMode::TopkSoftmax, activation: crate::Activation::Silu, gated }
}

fn feed_forward_shapes(gated: bool) -> Vec<Vec<usize>> {
    let columns = if gated { 20 } else { 10 };
    vec![vec![3, 5, 16], vec![16, 6], vec![6, 16, columns], vec![6, 10, 16], vec![16]]
}

fn feed_forward_dims(shapes: &[Vec<usize>], attributes: &FeedForwardAttributes) -> Result<FeedForwardDims, String> {
    let shapes: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
    FeedForwardDims::new(&shapes, attributes).map_err(|error| error.to_string())
}

/// What `check` says of every change of one axis of `shapes`, in either direction; `free` lists the axes that decide
/// sizes alone.
fn wrong_axes(
    shapes: &[Vec<usize>],
    free: &[(usize, usize)],
    start: &str,
    check: impl Fn(&[Vec<usize>]) -> Option<String>,
) {
    for input in 0..shapes.len() {
        for axis in (0..shapes[input].len()).filter(|axis| !free.contains(&(input, *axis))) {
            for change in [1, -1] {
                let mut wrong = shapes.to_vec();
                wrong[input][axis] = wrong[input][axis].checked_add_signed(change).unwrap();
                let error = check(&wrong).unwrap_or_else(|| panic!("passed: {wrong:?}"));
                assert!(error.starts_with(start), "{error}");
            }
        }
        let mut flat = shapes.to_vec();
        flat[input].push(1);
        assert!(check(&flat).is_some(), "a rank too many: {flat:?}");
    }
}

#[test]
fn every_wrong_dimension_of_cross_attention_is_named() {
    let found = cross_dims(&cross_shapes(), &CROSS).unwrap();
    let (batch, tokens, keys, width) = (3, 5, 7, 16);
    let expected = CrossAttentionDims { batch, tokens, keys, width, experts: 6, top_k: 2, kv_heads: 2, head: 4 };
    assert_eq!(found, expected);
    wrong_axes(&cross_shapes(), &[], "MoACrossAttention: ", |shapes| cross_dims(shapes, &CROSS).err());
    let own = |kv_num_heads| CrossAttentionAttributes { kv_num_heads, ..CROSS };
    for (attributes, part) in [
        (CrossAttentionAttributes { top_k: 7, ..CROSS }, "top_k is 7, but the router has 6 experts"),
        (CrossAttentionAttributes { top_k: 0, ..CROSS }, "top_k is 0"),
        (own(3), "8 columns, not a multiple of kv_num_heads = 3"),
        (own(0), "kv_num_heads = 0"),
    ] {
        let error = cross_dims(&cross_shapes(), &attributes).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn every_wrong_dimension_of_feed_forward_is_named() {
    for gated in [false, true] {
        let (shapes, attributes) = (feed_forward_shapes(gated), feed_forward(gated, 2));
        let found = feed_forward_dims(&shapes, &attributes).unwrap();
        let expected = FeedForwardDims { batch: 3, tokens: 5, width: 16, experts: 6, top_k: 2, hidden: 10 };
        assert_eq!(found, expected);
        let check = |shapes: &[Vec<usize>]| feed_forward_dims(shapes, &attributes).err();
        wrong_axes(&shapes, &[(0, 0), (0, 1)], "MoEFeedForward: ", check);
        let error = feed_forward_dims(&feed_forward_shapes(!gated), &attributes).unwrap_err();
        assert!(error.contains("`input_weight` must be [E, C, F], or [E, C, 2 * F] where gated"), "{error}");
        let error = feed_forward_dims(&shapes, &feed_forward(gated, 7)).unwrap_err();
        assert!(error.contains("top_k is 7, but the router has 6 experts"), "{error}");
    }
}

type Refusal<'a> = &'a dyn Fn(&[Option<&[usize]>]) -> Option<ShapeError>;

/// Scales have the shape that a type of integers asks for, and who takes floats alone refuses them.
#[test]
fn scales_fit_their_matrices() {
    let attributes = feed_forward(true, 2);
    let refusals: [(Attributes, Vec<Vec<usize>>, Refusal<'_>); 3] = [
        (Attributes::SelfAttention(ATTRIBUTES), shapes(), &|shapes| SelfAttentionDims::new(shapes, &ATTRIBUTES).err()),
        (Attributes::CrossAttention(CROSS), cross_shapes(), &|shapes| CrossAttentionDims::new(shapes, &CROSS).err()),
        (Attributes::FeedForward(attributes), feed_forward_shapes(true), &|shapes| {
            FeedForwardDims::new(shapes, &attributes).err()
        }),
    ];
    for (attributes, shapes, refusal) in refusals {
        let operator = attributes.operator();
        for [matrix, scale] in operator.matrices() {
            let with = |shape: &[usize], check: Refusal<'_>| {
                let mut given: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
                given.resize(operator.inputs.len(), None);
                given[scale] = Some(shape);
                check(&given).map(|error| error.to_string())
            };
            let name = operator.inputs[scale].name;
            for fitting in IntegerType::ALL.map(|integers| integers.scale_shape(&shapes[matrix])) {
                assert_eq!(with(&fitting, refusal), None, "{name}");
                for axis in 0..fitting.len() {
                    let mut long = fitting.clone();
                    long[axis] += 1;
                    let error = with(&long, refusal).unwrap();
                    assert!(error.contains(&format!("input `{name}` must be [")), "{error}");
                }
                let error = with(&fitting, &|given| refuse_integers(operator, given).err()).unwrap();
                assert!(error.contains(&format!("`{name}` is for weights in integers")), "{error}");
            }
        }
        let floats: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
        assert_eq!(refuse_integers(operator, &floats), Ok(()));
    }
}

#[test]
fn a_call_without_a_token_is_refused() {
    for empty in [[0, 5], [3, 0]] {
        let no_token = |mut shapes: Vec<Vec<usize>>| {
            shapes[0][..2].copy_from_slice(&empty);
            shapes
        };
        let expected = format!("holds no token (batch {}, sequence {})", empty[0], empty[1]);
        let attributes = feed_forward(true, 2);
        for error in [
            dims(&no_token(shapes())).unwrap_err().to_string(),
            cross_dims(&no_token(cross_shapes()), &CROSS).unwrap_err(),
            feed_forward_dims(&no_token(feed_forward_shapes(true)), &attributes).unwrap_err(),
        ] {
            assert!(error.contains(&expected), "{error}");
        }
    }
}

#[test]
fn sizes_of_nothing_are_refused() {
    let empty = |mut shapes: Vec<Vec<usize>>, axes: &[(usize, usize)]| {
        axes.iter().for_each(|(input, axis)| shapes[*input][*axis] = 0);
        shapes
    };
    let attributes = feed_forward(false, 2);
    for error in [
        dims(&empty(shapes(), &[(0, 2)])).unwrap_err().to_string(),
        cross_dims(&empty(cross_shapes(), &[(0, 2)]), &CROSS).unwrap_err(),
        feed_forward_dims(&empty(feed_forward_shapes(false), &[(0, 2)]), &attributes).unwrap_err(),
    ] {
        assert!(error.contains("hidden_states has no columns"), "{error}");
    }
    let error = feed_forward_dims(&empty(feed_forward_shapes(false), &[(2, 2), (3, 1)]), &attributes).unwrap_err();
    assert!(error.contains("output_weight has no rows"), "{error}");
    let heads = [(own::QUERY_WEIGHT, 2), (own::KV_WEIGHT, 1), (own::OUTPUT_WEIGHT, 1)];
    let heads_of_cross = [(cross::QUERY_WEIGHT, 2), (cross::OUTPUT_WEIGHT, 1)];
    for error in [
        dims(&empty(shapes(), &heads)).unwrap_err().to_string(),
        cross_dims(&empty(cross_shapes(), &heads_of_cross), &CROSS).unwrap_err(),
    ] {
        assert!(error.contains("query_weight has 0 columns"), "{error}");
    }
}

#[test]
fn attributes_of_self_attention_fit_its_weights() {
    let with = |top_k, kv_num_heads| {
        let attributes = SelfAttentionAttributes { top_k, kv_num_heads, ..ATTRIBUTES };
        let shapes = shapes();
        let shapes: Vec<_> = shapes.iter().map(|shape| Some(shape.as_slice())).collect();
        SelfAttentionDims::new(&shapes, &attributes).map_err(|error| error.to_string())
    };
    assert_eq!(with(4, 2).map(|dims| dims.top_k), Ok(4));
    for (top_k, kv_heads, part) in [
        (5, 2, "top_k is 5, but the router has 4 experts"),
        (0, 2, "top_k is 0"),
        (2, 3, "8 columns, not a multiple of kv_num_heads = 3"),
    ] {
        let error = with(top_k, kv_heads).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn every_wrong_dimension_of_a_rotation_is_named() {
    let mut rotated = shapes();
    rotated.extend([vec![30, 2], vec![30, 2], vec![3, 5]]);
    assert_eq!(dims(&rotated), dims(&shapes()));
    wrong_axes(&rotated, &[], "MoASelfAttention: ", |shapes| dims(shapes).err().map(|error| error.to_string()));
    let mut odd = rotated.clone();
    for (input, axis) in [(own::QUERY_WEIGHT, 2), (own::OUTPUT_WEIGHT, 1), (own::KV_WEIGHT, 1)] {
        odd[input][axis] = if input == own::KV_WEIGHT { 12 } else { 6 };
    }
    odd[own::PAST_KEY][3] = 3;
    odd[own::PAST_VALUE][3] = 3;
    let error = dims(&odd).unwrap_err().to_string();
    assert_eq!(error, "MoASelfAttention: rotary embedding needs an even head width, found 3");
    let mut empty = rotated.clone();
    (empty[own::COS_CACHE][0], empty[own::SIN_CACHE][0]) = (0, 0);
    let error = dims(&empty).unwrap_err().to_string();
    assert_eq!(error, "MoASelfAttention: cos_cache has no rows, and every token needs one");
    for missing in [own::COS_CACHE, own::SIN_CACHE, own::POSITION_IDS] {
        let mut given: Vec<_> = rotated.iter().map(|shape| Some(shape.as_slice())).collect();
        given[missing] = None;
        let error = SelfAttentionDims::new(&given, &ATTRIBUTES).unwrap_err().to_string();
        assert!(error.ends_with("found nothing"), "{error}");
        let mut alone = vec![None; rotated.len()];
        alone[..own::COS_CACHE].clone_from_slice(&given[..own::COS_CACHE]);
        alone[missing] = Some(rotated[missing].as_slice());
        let error = SelfAttentionDims::new(&alone, &ATTRIBUTES).unwrap_err().to_string();
        assert!(error.ends_with("found nothing"), "{error}");
    }
}

#[test]
fn the_head_has_a_row_for_each_element_of_a_token() {
    let found = |shapes: [Option<&[usize]>; 3]| LmHeadDims::new(&shapes).map_err(|error| error.to_string());
    let (states, weight): (&[usize], &[usize]) = (&[2, 3, 40], &[40, 7]);
    let dims = LmHeadDims { batch: 2, tokens: 3, width: 40, vocabulary: 7 };
    for scale in [Some(&[7][..]), Some(&[2, 7]), None] {
        assert_eq!(found([Some(states), Some(weight), scale]), Ok(dims));
    }
    for (states, weight, scale, word) in [
        (&[6, 40][..], weight, &[7][..], "input `hidden_states` must be [B, T, C], found [6, 40]"),
        (&[2, 0, 40], weight, &[7], "holds no token"),
        (&[2, 3, 0], &[0, 7], &[7], "hidden_states has no columns"),
        (states, &[40, 0], &[0], "output_weight has no columns"),
        (states, &[41, 7], &[7], "found [41, 7] where [40, 7] is needed"),
        (states, weight, &[8], "`output_scale`"),
        (states, weight, &[1, 7], "`output_scale`"),
    ] {
        let refused = found([Some(states), Some(weight), Some(scale)]).expect_err(word);
        assert!(refused.starts_with("LMHead: ") && refused.contains(word), "{refused}");
    }
}
