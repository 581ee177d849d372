"""Fresh random inputs of the operators, by the names of custom_ops/schema."""

import torch

#: Where everything happens; the tests of this folder put it on the CPU.
DEVICE = "cuda"

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Source:
    """Random tensors from one seed."""

    def __init__(self, seed, device):
        self.device = device
        self.generator = torch.Generator(device=device)
        self.generator.manual_seed(seed)

    def normal(self, *shape, deviation=1.0, dtype=torch.float32):
        values = torch.randn(*shape, generator=self.generator, device=self.device) * deviation
        return values.to(dtype)

    def uniform(self, *shape):
        return torch.rand(*shape, generator=self.generator, device=self.device)

    def integers(self, low, high, *shape, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)


def padding(source, batch, keys, kind):
    """int32 [B, S]. `none`: no padding; `ragged`: right-padded to random lengths; `mixed`: left, right, holes, one
    row all padding."""
    mask = torch.ones(batch, keys, dtype=torch.int32, device=source.device)
    if kind == "none":
        return mask
    places = torch.arange(keys, device=source.device)
    for row in range(batch):
        cut = int(source.integers(1, keys + 1, 1))
        if kind == "ragged":
            mask[row] = (places < cut).int()
        else:
            variants = [
                (places < cut).int(),
                (places >= keys - cut).int(),
                (source.uniform(keys) < 0.6).int(),
                torch.zeros_like(places, dtype=torch.int32),
            ]
            mask[row] = variants[row % 4]
    return mask


def skew(hidden, router, kind, top_k):
    """Steers the routing through one feature that is the same for every token.

    `same`: every token chooses experts 0 … k - 1. `idle`: nobody chooses the last expert. `even`: left as it is.
    """
    if kind == "even":
        return
    hidden[..., 0] = 1.0
    router[0] = 0.0
    if kind == "same":
        router[0, :top_k] = 30.0
    else:
        router[0, -1] = -30.0


def rope_tables(source, positions, head):
    angles = torch.arange(positions, device=source.device)[:, None] * torch.exp(
        -torch.arange(head // 2, device=source.device) * (9.2103 / (head // 2))
    )
    return torch.cos(angles).float().contiguous(), torch.sin(angles).float().contiguous()


def read_by_router(source, case, hidden, routing):
    """The router's own input by its name, if the layer has one, and its weights; `hidden` is skewed where it has none."""
    layer = case.layer
    width = layer.routed_by or layer.width
    read = source.normal(case.batch, case.tokens, width) if layer.routed_by else hidden
    router = source.normal(width, layer.experts, deviation=2.0 * width**-0.5)
    skew(read, router, routing, layer.top_k)
    return {"router_input": read} if layer.routed_by else {}, router


def self_attention(source, case, dtype, pads="none", routing="even", present=True, skip=True):
    """Feeds and attributes of `MoASelfAttention` for a case."""
    layer, past = case.layer, case.past
    batch, tokens, width, inner = case.batch, case.tokens, layer.width, layer.inner
    hidden = source.normal(batch, tokens, width)
    read, router = read_by_router(source, case, hidden, routing)
    feeds = {
        "hidden_states": hidden.to(dtype),
        "attention_mask": padding(source, batch, case.keys, pads),
        "router_weight": router,
        "query_weight": source.normal(layer.experts, width, inner, deviation=width**-0.5, dtype=dtype),
        "output_weight": source.normal(layer.experts, inner, width, deviation=inner**-0.5, dtype=dtype),
    }
    if not layer.sticks:
        feeds["kv_weight"] = source.normal(width, 2 * inner, deviation=width**-0.5, dtype=dtype)
    feeds |= read
    if layer.bias:
        feeds["output_bias"] = source.normal(width, dtype=dtype)
    if past:
        for name in ("past_key", "past_value"):
            feeds[name] = source.normal(batch, layer.heads, past, layer.head, dtype=dtype)
    if layer.rope:
        feeds["cos_cache"], feeds["sin_cache"] = rope_tables(source, case.keys, layer.head)
        feeds["position_ids"] = torch.arange(past, case.keys, device=source.device).repeat(batch, 1)
    attributes = {
        "top_k": layer.top_k,
        "kv_num_heads": layer.heads,
        "causal": int(case.causal),
        "scale": layer.scale,
        "gate_mode": layer.gate_mode,
        "skip_padded_queries": int(skip),
        "attention_mode": "stick_breaking" if layer.sticks else "softmax",
    }
    outputs = ["output", *(["present_key", "present_value"] if present else [])]
    return attributes, feeds, outputs


def with_room(feeds, rows):
    """The same feeds with `rows` rows behind the past, for the new tokens and more; what stands there is never read."""
    grown = dict(feeds)
    for name in ("past_key", "past_value"):
        past = feeds[name]
        room = torch.full((*past.shape[:2], rows, past.shape[3]), float("nan"), dtype=past.dtype, device=past.device)
        grown[name] = torch.cat([past, room], dim=2).contiguous()
    return grown


def cross_attention(source, case, dtype, keys, pads="none", routing="even"):
    """Feeds and attributes of `MoACrossAttention`: the layer of `case` over `keys` given keys and values."""
    attributes, feeds, _ = self_attention(source, case, dtype, routing=routing)
    layer, batch = case.layer, case.batch
    for name in ("attention_mask", "kv_weight", "past_key", "past_value", "cos_cache", "sin_cache", "position_ids"):
        feeds.pop(name, None)
    for name in ("key", "value"):
        feeds[name] = source.normal(batch, layer.heads, keys, layer.head, dtype=dtype)
    feeds["key_mask"] = padding(source, batch, keys, pads)
    feeds["query_mask"] = padding(source, batch, case.tokens, pads)
    del attributes["causal"], attributes["attention_mode"]
    return attributes, feeds, ["output"]


def feed_forward(source, case, dtype, hidden, activation, gated, routing="even"):
    """Feeds and attributes of `MoEFeedForward` with `hidden` columns for each expert."""
    layer = case.layer
    width, columns = layer.width, hidden * (2 if gated else 1)
    states = source.normal(case.batch, case.tokens, width)
    read, router = read_by_router(source, case, states, routing)
    feeds = {
        "hidden_states": states.to(dtype),
        **read,
        "router_weight": router,
        "input_weight": source.normal(layer.experts, width, columns, deviation=width**-0.5, dtype=dtype),
        "output_weight": source.normal(layer.experts, hidden, width, deviation=hidden**-0.5, dtype=dtype),
    }
    if layer.bias:
        feeds["output_bias"] = source.normal(width, dtype=dtype)
    attributes = {
        "top_k": layer.top_k,
        "gate_mode": layer.gate_mode,
        "activation": activation,
        "gated": int(gated),
    }
    return attributes, feeds, ["output"]
