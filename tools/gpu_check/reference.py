"""The three operators in torch f64, on the device of their inputs, from the contract in custom_ops/schema.

Inputs are taken as they are stored and widened. With `indices` given, the experts are those and only their weights
are computed: so a choice that rounding may swap does not hide an error behind it.
"""

import torch
from torch.nn.functional import gelu, relu, silu

ACTIVATIONS = {"relu": relu, "gelu": gelu, "silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}


def scores_of(x, router_weight, gate_mode):
    logits = x.double() @ router_weight.double()
    return logits, logits if gate_mode == "topk_softmax" else logits.softmax(-1)


def route(x, router_weight, top_k, gate_mode, indices=None):
    """Experts and weights [.., k], and the logit margin [..] between the last expert chosen and the first one not."""
    logits, scores = scores_of(x, router_weight, gate_mode)
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    experts = logits.shape[-1]
    margin = ordered[..., top_k - 1] - ordered[..., top_k] if top_k < experts else torch.full_like(ordered[..., 0], 1e9)
    indices = order[..., :top_k] if indices is None else indices.long()
    weights = scores.gather(-1, indices)
    if gate_mode == "softmax_topk_renorm":
        weights = weights / weights.sum(-1, keepdim=True)
    if gate_mode == "topk_softmax":
        weights = weights.softmax(-1)
    return indices, weights, margin


def rotate(x, cos, sin):
    """Rotate-half on the last axis; cos and sin end in D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def by_expert(rows, indices, weight):
    """Row r times the matrix of expert indices[r, s], for every slot s: [R, k, out] of rows [R, in] or [R, k, in].

    The host waits for the device once, for the sizes of all groups.
    """
    flat, slots, experts = indices.reshape(-1), indices.shape[-1], weight.shape[0]
    out = torch.empty(flat.shape[0], weight.shape[-1], dtype=torch.float64, device=rows.device)
    sizes = torch.bincount(flat, minlength=experts).tolist()
    for expert, places in enumerate(flat.argsort(stable=True).split(sizes)):
        given = rows[places // slots] if rows.dim() == 2 else rows.flatten(0, 1)[places]
        out[places] = given @ weight[expert].double()
    return out.reshape(*indices.shape, weight.shape[-1])


def broken_sticks(scores):
    """Shares of a stick along the last axis: sigmoid(score) of what the later keys leave; a score of -inf takes nothing."""
    left = torch.sigmoid(-scores).flip(-1).cumprod(-1).flip(-1)
    after = torch.cat([left[..., 1:], torch.ones_like(left[..., :1])], dim=-1)
    return torch.sigmoid(scores) * after


def mix(query, key, value, seen, scale, mode):
    """Attention of query [T, k, G, D] over key and value [G, S, D]; seen [T, S]. A row that sees no key gives 0."""
    tokens, slots, heads, head = query.shape
    rows = query.permute(2, 0, 1, 3).reshape(heads, tokens * slots, head)
    scores = (rows @ key.transpose(1, 2) * scale).reshape(heads, tokens, slots, -1)
    scores.masked_fill_(~seen[None, :, None, :], float("-inf"))
    shares = broken_sticks(scores) if mode == "stick_breaking" else torch.softmax(scores, -1).nan_to_num_(0.0)
    shares = shares.reshape(heads, tokens * slots, -1)
    return (shares @ value).reshape(heads, tokens, slots, head).permute(1, 2, 0, 3)


def attend(attributes, feeds, key, value, key_mask, query_mask, past=None, angles=None, indices=None):
    """Both attention operators once keys and values [B, G, S, D] are known."""
    x = feeds["hidden_states"].double()
    batch, tokens, _ = x.shape
    heads, head = key.shape[1], key.shape[3]
    top_k = attributes["top_k"]
    read = feeds.get("router_input", x)
    indices, weights, margin = route(read, feeds["router_weight"], top_k, attributes["gate_mode"], indices)
    skipped = query_mask == 0 if attributes["skip_padded_queries"] else torch.zeros_like(query_mask, dtype=torch.bool)
    weights = weights.masked_fill(skipped[..., None], 0.0)
    experts = indices.flatten(0, 1)
    query = by_expert(x.flatten(0, 1), experts, feeds["query_weight"]).reshape(batch, tokens, top_k, heads, head)
    if angles is not None:
        query = rotate(query, *(angle[:, :, None, None] for angle in angles))
    places = torch.arange(key.shape[2], device=x.device)
    mixed = torch.empty_like(query)
    for b in range(batch):
        seen = (key_mask[b] != 0).expand(tokens, -1)
        if past is not None:
            seen = seen & (places[None, :] <= past + torch.arange(tokens, device=x.device)[:, None])
        shares = mix(query[b], key[b], value[b], seen, attributes["scale"], attributes.get("attention_mode"))
        mixed[b] = shares * weights[b][..., None, None]
    output = by_expert(mixed.reshape(-1, top_k, heads * head), experts, feeds["output_weight"]).sum(1).reshape(x.shape)
    if feeds.get("output_bias") is not None:
        output = output + feeds["output_bias"].double()
    output = output.masked_fill(skipped[..., None], 0.0)
    return {"output": output, "topk_indices": indices, "topk_weights": weights, "margin": margin, "skipped": skipped}


def self_attention(attributes, feeds, indices=None):
    x, mask, heads = feeds["hidden_states"].double(), feeds["attention_mask"], attributes["kv_num_heads"]
    batch, tokens, _ = x.shape
    both = x @ feeds["kv_weight"].double() if "kv_weight" in feeds else torch.cat([x, x], dim=-1)
    both = both.reshape(batch, tokens, 2, heads, -1)
    key, value = both.permute(2, 0, 3, 1, 4)
    angles = None
    if feeds.get("cos_cache") is not None:
        angles = [feeds[name].double()[feeds["position_ids"]] for name in ("cos_cache", "sin_cache")]
        key = rotate(key, angles[0][:, None], angles[1][:, None])
    past = 0
    if feeds.get("past_key") is not None:
        past = feeds["past_key"].shape[2]
        key = torch.cat([feeds["past_key"].double(), key], dim=2)
        value = torch.cat([feeds["past_value"].double(), value], dim=2)
    causal_past = past if attributes["causal"] else None
    found = attend(attributes, feeds, key, value, mask, mask[:, past:], causal_past, angles, indices)
    return {**found, "present_key": key, "present_value": value}


def cross_attention(attributes, feeds, indices=None):
    key, value = feeds["key"].double(), feeds["value"].double()
    return attend(attributes, feeds, key, value, feeds["key_mask"], feeds["query_mask"], indices=indices)


def feed_forward(attributes, feeds, indices=None):
    x = feeds["hidden_states"].double()
    batch, tokens, width = x.shape
    rows = x.reshape(-1, width)
    given = None if indices is None else indices.reshape(-1, attributes["top_k"])
    read = feeds.get("router_input", x).reshape(batch * tokens, -1)
    indices, weights, margin = route(read, feeds["router_weight"], attributes["top_k"], attributes["gate_mode"], given)
    hidden = by_expert(rows, indices, feeds["input_weight"])
    factor = 1.0
    if attributes["gated"]:
        hidden, factor = hidden.chunk(2, dim=-1)
    hidden = ACTIVATIONS[attributes["activation"]](hidden) * factor * weights[..., None]
    output = by_expert(hidden, indices, feeds["output_weight"]).sum(1)
    if feeds.get("output_bias") is not None:
        output = output + feeds["output_bias"].double()
    shape = (batch, tokens)
    return {
        "output": output.reshape(*shape, width),
        "topk_indices": indices.reshape(*shape, -1),
        "topk_weights": weights.reshape(*shape, -1),
        "margin": margin.reshape(shape),
        "skipped": torch.zeros(shape, dtype=torch.bool, device=x.device),
    }


OPERATORS = {
    "MoASelfAttention": self_attention,
    "MoACrossAttention": cross_attention,
    "MoEFeedForward": feed_forward,
}
