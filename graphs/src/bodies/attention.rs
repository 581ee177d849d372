//! `MoASelfAttention` and `MoACrossAttention`.

use moa_schema::{AttentionMode, CrossAttentionAttributes, SelfAttentionAttributes};

use super::Matrix;
use super::routing::{Routed, Routing, route};
use crate::FloatType;
use crate::graph::{Attribute, Builder, DType, Value};

/// The lowest number of the activations' type: below every attainable score, and finite, so that a row whose keys are
/// all masked stays free of NaN.
fn masked_score(b: &mut Builder) -> Value {
    b.float(match b.precision().activations() {
        FloatType::F16 => half::f16::MIN.to_f32(),
        _ => f32::MIN,
    })
}

/// Sizes that a body takes from the shapes of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heads {
    /// Model width `C`.
    pub(crate) width: usize,
    /// Experts `E`.
    pub(crate) experts: usize,
    /// Key/value heads `G`.
    pub(crate) kv_heads: usize,
    /// Head width `D`.
    pub(crate) head: usize,
}

/// Inputs of `MoASelfAttention`; shapes as in the schema.
pub(crate) struct SelfValues {
    pub(crate) hidden_states: Value,
    pub(crate) attention_mask: Value,
    pub(crate) router_input: Option<Value>,
    pub(crate) router_weight: Value,
    pub(crate) query_weight: Matrix,
    /// Absent where keys and values are the hidden states.
    pub(crate) kv_weight: Option<Matrix>,
    pub(crate) output_weight: Matrix,
    pub(crate) output_bias: Option<Value>,
    /// Past keys and values.
    pub(crate) past: Option<[Value; 2]>,
    /// Cosines, sines and positions.
    pub(crate) rotary: Option<[Value; 3]>,
}

/// Inputs of `MoACrossAttention`; shapes as in the schema.
pub(crate) struct CrossValues {
    pub(crate) hidden_states: Value,
    pub(crate) key: Value,
    pub(crate) value: Value,
    pub(crate) key_mask: Value,
    pub(crate) query_mask: Value,
    pub(crate) router_weight: Value,
    pub(crate) query_weight: Matrix,
    pub(crate) output_weight: Matrix,
    pub(crate) output_bias: Option<Value>,
}

/// Nodes of `MoASelfAttention`: output, present keys, present values.
pub(crate) fn self_attention(
    b: &mut Builder,
    values: &SelfValues,
    attributes: &SelfAttentionAttributes,
    heads: Heads,
    names: &Routed,
) -> [Value; 3] {
    let hidden = &values.hidden_states;
    let past_size = match &values.past {
        Some([key, _]) => b.size(key, 2),
        None => b.ints(&[0]),
    };
    let end = b.ints(&[i64::MAX]);
    let rotary = values.rotary.as_ref().map(|[cos, sin, ids]| {
        let ids = b.without_negative(ids);
        [cos.clone(), sin.clone(), of_shape(b, &ids, hidden, [0, 1])]
    });
    let [key, value] = keys_and_values(b, values, rotary.as_ref(), heads);
    let mask = of_shape(b, &values.attention_mask, &key, [0, 2]);
    let query_mask = b.slice(&mask, &past_size, &end, 1);
    let query_mask = query_mask_of(b, &query_mask, attributes.skip_padded_queries);
    let (read, router) = (values.router_input.as_ref().unwrap_or(hidden), &values.router_weight);
    let SelfAttentionAttributes { gate_mode, top_k, .. } = *attributes;
    let routing = route(b, read, router, gate_mode, top_k, query_mask.as_ref(), names);
    let keys = KeySet { key: &key, value: &value, mask: &mask };
    let causal = attributes.causal.then(|| causal_mask(b, hidden, &past_size, &key));
    let (scale, mode) = (attributes.scale, attributes.attention_mode);
    let query = Query { scale, rotary: rotary.as_ref(), causal, mode };
    let attended = attend(b, &routing, hidden, &values.query_weight, heads, &keys, &query);
    let output =
        project_back(b, &routing, &attended, &values.output_weight, values.output_bias.as_ref(), query_mask, heads);
    [output, key, value]
}

/// Nodes of `MoACrossAttention`: the output.
pub(crate) fn cross_attention(
    b: &mut Builder,
    values: &CrossValues,
    attributes: &CrossAttentionAttributes,
    heads: Heads,
    names: &Routed,
) -> Value {
    let hidden = &values.hidden_states;
    let query_mask = of_shape(b, &values.query_mask, hidden, [0, 1]);
    let query_mask = query_mask_of(b, &query_mask, attributes.skip_padded_queries);
    let key_mask = of_keys_and_values(b, values);
    let routing =
        route(b, hidden, &values.router_weight, attributes.gate_mode, attributes.top_k, query_mask.as_ref(), names);
    let keys = KeySet { key: &values.key, value: &values.value, mask: &key_mask };
    let query = Query { scale: attributes.scale, rotary: None, causal: None, mode: AttentionMode::Softmax };
    let attended = attend(b, &routing, hidden, &values.query_weight, heads, &keys, &query);
    project_back(b, &routing, &attended, &values.output_weight, values.output_bias.as_ref(), query_mask, heads)
}

/// The mask of the keys, where keys and values have its shape, and as many rows as the queries.
fn of_keys_and_values(b: &mut Builder, values: &CrossValues) -> Value {
    let sizes = [b.size(&values.hidden_states, 0), b.size(&values.key, 2)];
    let shape = b.op("Concat", &[&sizes[0], &sizes[1]], [("axis", Attribute::Int(0))]);
    let mask = with_shape(b, &values.key_mask, &shape);
    let mask = of_shape(b, &mask, &values.key, [0, 2]);
    of_shape(b, &mask, &values.value, [0, 2])
}

/// `[B, T, 1]` bool, where padded queries are skipped.
fn query_mask_of(b: &mut Builder, mask: &Value, skip_padded_queries: bool) -> Option<Value> {
    if !skip_padded_queries {
        return None;
    }
    let mask = b.unsqueeze(mask, &[-1]);
    Some(b.cast(&mask, DType::Bool))
}

/// Present keys and values, `[B, G, P + T, D]` each.
#[allow(clippy::cast_possible_wrap)]
fn keys_and_values(b: &mut Builder, values: &SelfValues, rotary: Option<&[Value; 3]>, heads: Heads) -> [Value; 2] {
    let columns = (heads.kv_heads * heads.head) as i64;
    let [key, value] = match &values.kv_weight {
        None => [0, 1].map(|_| values.hidden_states.clone()),
        Some(weight) => {
            let weight = weight.floats(b);
            let weight = b.widen(&weight);
            let both = b.op("MatMul", &[&values.hidden_states, &weight], []);
            let sizes = b.ints(&[columns, columns]);
            b.op2("Split", &[&both, &sizes], [("axis", Attribute::Int(-1))])
        }
    };
    let mut key = heads_first(b, &key, heads);
    let value = heads_first(b, &value, heads);
    if let Some(rotary) = rotary {
        key = rotate(b, &key, rotary, heads.head, 1);
    }
    match &values.past {
        None => [key, value],
        Some([past_key, past_value]) => {
            let mut append = |past: &Value, new: &Value| b.op("Concat", &[past, new], [("axis", Attribute::Int(2))]);
            [append(past_key, &key), append(past_value, &value)]
        }
    }
}

/// `[B, T, G·D]` as `[B, G, T, D]`.
#[allow(clippy::cast_possible_wrap)]
fn heads_first(b: &mut Builder, value: &Value, heads: Heads) -> Value {
    if heads.kv_heads == 1 {
        return b.unsqueeze(value, &[1]);
    }
    let split = b.reshape(value, &[0, 0, heads.kv_heads as i64, heads.head as i64]);
    b.transpose(&split, &[0, 2, 1, 3])
}

/// Rotate-half rotary embedding of `[.., D]`, in f32; `axis` is where the head axis sits in `[B, .., ..]`.
#[allow(clippy::cast_possible_wrap)]
fn rotate(b: &mut Builder, value: &Value, [cos, sin, positions]: &[Value; 3], head: usize, axis: i64) -> Value {
    let mut table = |table: &Value| {
        let rows = b.op("Gather", &[table, positions], [("axis", Attribute::Int(0))]);
        b.unsqueeze(&rows, &[axis])
    };
    let (cos, sin) = (table(cos), table(sin));
    let half = (head / 2) as i64;
    let sizes = b.ints(&[half, half]);
    let value = b.to_float32(value);
    let [first, second] = b.op2("Split", &[&value, &sizes], [("axis", Attribute::Int(-1))]);
    let first_cos = b.op("Mul", &[&first, &cos], []);
    let second_sin = b.op("Mul", &[&second, &sin], []);
    let second_cos = b.op("Mul", &[&second, &cos], []);
    let first_sin = b.op("Mul", &[&first, &sin], []);
    let first = b.op("Sub", &[&first_cos, &second_sin], []);
    let second = b.op("Add", &[&second_cos, &first_sin], []);
    let turned = b.op("Concat", &[&first, &second], [("axis", Attribute::Int(-1))]);
    b.from_float32(&turned)
}

/// `[T, 1, S]` bool: query `i` sees keys `0 ..= P + i`. Places are f32, which holds them exactly up to 2^24: tract
/// computes with the sizes of integers before it knows them, and wrongly where a row has no past.
fn causal_mask(b: &mut Builder, hidden: &Value, past_size: &Value, key: &Value) -> Value {
    let axis = b.ints(&[0]);
    let (zero, one) = (b.float32(0.0), b.float32(1.0));
    let (total, tokens) = (b.size(key, 2), b.size(hidden, 1));
    let [past, tokens, total] = [past_size, &tokens, &total].map(|size| {
        let size = b.op("Squeeze", &[size, &axis], []);
        b.cast(&size, DType::Float32)
    });
    let rows = b.op("Range", &[&zero, &tokens, &one], []);
    let rows = b.op("Add", &[&rows, &past], []);
    let rows = b.unsqueeze(&rows, &[1, 2]);
    let columns = b.op("Range", &[&zero, &total, &one], []);
    b.op("LessOrEqual", &[&columns, &rows], [])
}

/// `matrix`, where its shape is that of the axes `axes` of `other`.
fn of_shape(b: &mut Builder, matrix: &Value, other: &Value, axes: [i64; 2]) -> Value {
    let (sizes, places) = (b.op("Shape", &[other], []), b.ints(&axes));
    let shape = b.op("Gather", &[&sizes, &places], [("axis", Attribute::Int(0))]);
    with_shape(b, matrix, &shape)
}

/// `matrix`, where a runtime finds that its shape is `shape`. It would spread a mask, or positions, of one row or
/// column over all of them; no other shape has as many elements and can be spread over that one.
fn with_shape(b: &mut Builder, matrix: &Value, shape: &Value) -> Value {
    let shaped = b.op("Reshape", &[matrix, shape], []);
    b.op("Max", &[matrix, &shaped], [])
}

struct KeySet<'a> {
    /// `[B, G, S, D]`.
    key: &'a Value,
    /// `[B, G, S, D]`.
    value: &'a Value,
    /// `[B, S]` int32.
    mask: &'a Value,
}

struct Query<'a> {
    scale: f32,
    rotary: Option<&'a [Value; 3]>,
    /// `[T, 1, S]` bool.
    causal: Option<Value>,
    mode: AttentionMode,
}

/// Chosen queries against shared keys and values: `[B, T, k, G·D]`.
#[allow(clippy::cast_possible_wrap)]
fn attend(
    b: &mut Builder,
    routing: &Routing,
    hidden: &Value,
    query_weight: &Matrix,
    heads: Heads,
    keys: &KeySet<'_>,
    settings: &Query<'_>,
) -> Value {
    let Heads { width, experts, kv_heads, head } = heads;
    let (groups, slots) = (kv_heads as i64, routing.top_k() as i64);
    let query_weight = query_weight.floats(b);
    let query = routing.map(b, hidden, &query_weight, [experts, width, kv_heads * head]);
    let scale = b.float(settings.scale);
    let query = b.op("Mul", &[&query, &scale], []);
    let query = rows_per_group(b, &query, settings.rotary, heads, slots);
    let key_columns = b.transpose(keys.key, &[0, 1, 3, 2]);
    let scores = b.op("MatMul", &[&query, &key_columns], []);
    let outer = b.ints(&[0, groups]);
    let inner = b.ints(&[slots, -1]);
    let tokens = b.size(hidden, 1);
    let shape = b.op("Concat", &[&outer, &tokens, &inner], [("axis", Attribute::Int(0))]);
    let scores = b.op("Reshape", &[&scores, &shape], []);
    let allowed = b.unsqueeze(keys.mask, &[1, 2, 3]);
    let mut allowed = b.cast(&allowed, DType::Bool);
    if let Some(causal) = &settings.causal {
        allowed = b.op("And", &[&allowed, causal], []);
    }
    let probabilities = match settings.mode {
        AttentionMode::Softmax => softmax(b, &scores, &allowed),
        AttentionMode::StickBreaking => stick_breaking(b, &scores, &allowed),
    };
    let rows = b.size(&query, 2);
    let keys_last = b.ints(&[-1]);
    let shape = b.op("Concat", &[&outer, &rows, &keys_last], [("axis", Attribute::Int(0))]);
    let probabilities = b.op("Reshape", &[&probabilities, &shape], []);
    let attended = b.op("MatMul", &[&probabilities, keys.value], []);
    slots_per_token(b, &attended, heads, slots)
}

/// Softmax over the last axis of `scores` `[B, G, T, k, S]` where `allowed`, 0 elsewhere.
fn softmax(b: &mut Builder, scores: &Value, allowed: &Value) -> Value {
    let (masked, zero) = (masked_score(b), b.float(0.0));
    let scores = b.op("Where", &[allowed, scores, &masked], []);
    let probabilities = b.op("Softmax", &[&scores], [("axis", Attribute::Int(-1))]);
    b.op("Where", &[allowed, &probabilities, &zero], [])
}

/// [`AttentionMode::StickBreaking`] over the last axis of `scores` `[B, G, T, k, S]` where `allowed`, 0 elsewhere; in
/// f32: `sigmoid(s_j) · exp(-sum softplus(s_m))` over the keys `m` after `j`.
fn stick_breaking(b: &mut Builder, scores: &Value, allowed: &Value) -> Value {
    let (zero, axis) = (b.float32(0.0), b.int(4));
    let scores = b.to_float32(scores);
    let taken = b.op("Softplus", &[&scores], []);
    let taken = b.op("Where", &[allowed, &taken, &zero], []);
    let after = [("exclusive", Attribute::Int(1)), ("reverse", Attribute::Int(1))];
    let taken = b.op("CumSum", &[&taken, &axis], after);
    let taken = b.op("Neg", &[&taken], []);
    let left = b.op("Exp", &[&taken], []);
    let share = b.op("Sigmoid", &[&scores], []);
    let weights = b.op("Mul", &[&share, &left], []);
    let weights = b.op("Where", &[allowed, &weights, &zero], []);
    b.from_float32(&weights)
}

/// `[B, T, k, G·D]` as `[B, G, T·k, D]`.
#[allow(clippy::cast_possible_wrap)]
fn rows_per_group(b: &mut Builder, query: &Value, rotary: Option<&[Value; 3]>, heads: Heads, slots: i64) -> Value {
    let (groups, head) = (heads.kv_heads as i64, heads.head as i64);
    let mut query = query.clone();
    if let Some(rotary) = rotary {
        let split = b.reshape(&query, &[0, 0, slots * groups, head]);
        query = rotate(b, &split, rotary, heads.head, 2);
    }
    if groups == 1 {
        return b.reshape(&query, &[0, 1, -1, head]);
    }
    let split = b.reshape(&query, &[0, 0, slots, groups, head]);
    let grouped = b.transpose(&split, &[0, 3, 1, 2, 4]);
    b.reshape(&grouped, &[0, 0, -1, head])
}

/// `[B, G, T·k, D]` as `[B, T, k, G·D]`.
#[allow(clippy::cast_possible_wrap)]
fn slots_per_token(b: &mut Builder, attended: &Value, heads: Heads, slots: i64) -> Value {
    let (groups, head) = (heads.kv_heads as i64, heads.head as i64);
    if groups == 1 {
        return b.reshape(attended, &[0, -1, slots, head]);
    }
    let split = b.reshape(attended, &[0, 0, -1, slots, head]);
    let grouped = b.transpose(&split, &[0, 2, 3, 1, 4]);
    b.reshape(&grouped, &[0, 0, slots, groups * head])
}

/// Weighted sum through the chosen output projections, plus bias; skipped queries stay 0.
fn project_back(
    b: &mut Builder,
    routing: &Routing,
    attended: &Value,
    output_weight: &Matrix,
    bias: Option<&Value>,
    query_mask: Option<Value>,
    heads: Heads,
) -> Value {
    let Heads { width, experts, kv_heads, head } = heads;
    let output_weight = output_weight.floats(b);
    let output = routing.reduce(b, attended, &output_weight, [experts, kv_heads * head, width]);
    let Some(bias) = bias else { return output };
    let output = b.op("Add", &[&output, bias], []);
    let Some(mask) = query_mask else { return output };
    let zero = b.float(0.0);
    b.op("Where", &[&mask, &output, &zero], [])
}
