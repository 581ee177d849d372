"""The three operators in numpy f64, straight from the contract in custom_ops/schema."""

import math

import numpy as np


def softmax(x):
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def broken_sticks(scores):
    """What the keys of [.., S] take of a stick: the last one its share sigmoid(score), each before it its share of the rest."""
    left = 1.0 / (1.0 + np.exp(scores))
    after = np.ones_like(scores)
    after[..., :-1] = np.cumprod(left[..., :0:-1], axis=-1)[..., ::-1]
    return (1.0 - left) * after


def route(x, router_weight, top_k, gate_mode, chosen=None):
    """Experts [.., k] and weights [.., k] in f64; a stable sort keeps the lower expert among equals. `chosen` are experts
    [.., k] that were chosen elsewhere, where rounding may decide between near ties."""
    logits = x.astype(np.float64) @ router_weight.astype(np.float64)
    scores = logits if gate_mode == "topk_softmax" else softmax(logits)
    indices = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k] if chosen is None else chosen.copy()
    weights = np.take_along_axis(scores, indices, axis=-1)
    if gate_mode == "softmax_topk_renorm":
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if gate_mode == "topk_softmax":
        weights = softmax(weights)
    return indices, weights


def rotate(x, cos, sin):
    """Rotate-half on the last axis; cos and sin are [.., D / 2]."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(attributes, feeds, key, value, key_mask, query_mask, causal_past=None, angles=None, chosen=None):
    """Both attention operators once keys and values [B, G, S, D] are known."""
    x, bias = feeds["hidden_states"].astype(np.float64), feeds.get("output_bias")
    heads, top_k = attributes["kv_num_heads"], attributes["top_k"]
    batch, tokens, _ = x.shape
    head = key.shape[-1]
    read = feeds.get("router_input", x)
    weigh = broken_sticks if attributes.get("attention_mode") == "stick_breaking" else softmax
    indices, weights = route(read, feeds["router_weight"], top_k, attributes["gate_mode"], chosen)
    output = np.zeros_like(x)
    for b in range(batch):
        for t in range(tokens):
            if attributes["skip_padded_queries"] and not query_mask[b, t]:
                indices[b, t], weights[b, t] = np.arange(top_k), 0.0
                continue
            seen = key_mask[b] != 0
            if causal_past is not None:
                seen = seen & (np.arange(len(seen)) <= causal_past + t)
            for expert, weight in zip(indices[b, t], weights[b, t]):
                query = (x[b, t] @ feeds["query_weight"][expert].astype(np.float64)).reshape(heads, head)
                if angles is not None:
                    query = rotate(query, angles[0][b, t], angles[1][b, t])
                mixed = np.zeros((heads, head))
                if seen.any():
                    scores = np.einsum("gd,gsd->gs", query, key[b][:, seen]) * attributes["scale"]
                    mixed = np.einsum("gs,gsd->gd", weigh(scores), value[b][:, seen])
                output[b, t] += weight * (mixed.reshape(-1) @ feeds["output_weight"][expert].astype(np.float64))
            if bias is not None:
                output[b, t] += bias
    return {"output": output, "topk_indices": indices, "topk_weights": weights}


def self_attention(attributes, feeds, chosen=None):
    x, mask, heads = feeds["hidden_states"].astype(np.float64), feeds["attention_mask"], attributes["kv_num_heads"]
    batch, tokens, _ = x.shape
    both = x @ feeds["kv_weight"].astype(np.float64) if "kv_weight" in feeds else np.concatenate([x, x], axis=-1)
    keys_values = both.reshape(batch, tokens, 2, heads, -1)
    key, value = keys_values.transpose(2, 0, 3, 1, 4)
    angles = None
    if "cos_cache" in feeds:
        angles = [feeds[name].astype(np.float64)[feeds["position_ids"]] for name in ("cos_cache", "sin_cache")]
        angles = [angle[:, :, None, :] for angle in angles]
        key = rotate(key, *(angle.transpose(0, 2, 1, 3) for angle in angles))
    past = 0
    if "past_key" in feeds:
        past = feeds["past_key"].shape[2]
        key = np.concatenate([feeds["past_key"], key], axis=2)
        value = np.concatenate([feeds["past_value"], value], axis=2)
    causal_past = past if attributes["causal"] else None
    found = attend(attributes, feeds, key, value, mask, mask[:, past:], causal_past, angles, chosen)
    return {**found, "present_key": key, "present_value": value}


def cross_attention(attributes, feeds, chosen=None):
    key, value = feeds["key"].astype(np.float64), feeds["value"].astype(np.float64)
    return attend(attributes, feeds, key, value, feeds["key_mask"], feeds["query_mask"], chosen=chosen)


def feed_forward(attributes, feeds, chosen=None):
    activations = {
        "relu": lambda x: np.maximum(x, 0.0),
        "gelu": lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
        "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x / (1.0 + np.exp(-x)),
    }
    x = feeds["hidden_states"].astype(np.float64)
    read = feeds.get("router_input", x)
    indices, weights = route(read, feeds["router_weight"], attributes["top_k"], attributes["gate_mode"], chosen)
    output = np.zeros_like(x)
    for place in np.ndindex(x.shape[:2]):
        for expert, weight in zip(indices[place], weights[place]):
            hidden = x[place] @ feeds["input_weight"][expert].astype(np.float64)
            factor = 1.0
            if attributes["gated"]:
                hidden, factor = np.split(hidden, 2)
            hidden = activations[attributes["activation"]](hidden) * factor
            output[place] += weight * (hidden @ feeds["output_weight"][expert].astype(np.float64))
        output[place] += feeds.get("output_bias", 0.0)
    return {"output": output, "topk_indices": indices, "topk_weights": weights}


REFERENCES = {
    "MoASelfAttention": self_attention,
    "MoACrossAttention": cross_attention,
    "MoEFeedForward": feed_forward,
}
