"""Routing, rotation, caches and attention, as every torch rival does them."""

from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

#: Back ends that compete; `None` leaves the choice to torch.
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    None: None,
}


def pinned(backend):
    """Pins SDPA to one of `BACKENDS`."""
    chosen = BACKENDS[backend]
    return nullcontext() if chosen is None else sdpa_kernel(chosen)


def attend(case, query, key, value, backend):
    """[B, T, k, G, D] over [B, G, S, D]; head g of every slot reads key/value head g. Result [B, T, k, G * D].

    Slots are rows of one head where no mask tells them apart, so that keys and values are read once for all of them;
    a causal prefill uses grouped-query attention.
    """
    batch, tokens, slots, heads, head = query.shape
    layer = case.layer
    with pinned(backend):
        if case.causal and not case.past:
            rows = query.permute(0, 3, 2, 1, 4).reshape(batch, heads * slots, tokens, head)
            mixed = scaled_dot_product_attention(
                rows, key, value, is_causal=True, scale=layer.scale, enable_gqa=slots > 1
            )
            mixed = mixed.view(batch, heads, slots, tokens, head).permute(0, 3, 2, 1, 4)
        else:
            rows = query.permute(0, 3, 1, 2, 4).reshape(batch, heads, tokens * slots, head)
            mixed = scaled_dot_product_attention(rows, key, value, scale=layer.scale)
            mixed = mixed.view(batch, heads, tokens, slots, head).permute(0, 2, 3, 1, 4)
    return mixed.reshape(batch, tokens, slots, layer.inner)


def gates(logits, attributes):
    """Experts [.., k] and f32 weights [.., k] of f32 logits."""
    mode, top_k = attributes["gate_mode"], attributes["top_k"]
    if mode == "topk_softmax":
        best, chosen = logits.topk(top_k, dim=-1)
        return chosen, best.softmax(-1)
    weights, chosen = logits.softmax(-1).topk(top_k, dim=-1)
    if mode == "softmax_topk_renorm":
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def rotate(x, cos, sin):
    """Rotate-half on the last axis; cos and sin end in D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class append:
    """A cache with room for the new tokens, which are written into it in place."""

    @staticmethod
    def cache(case, feeds):
        if not case.past:
            return {}
        room = {}
        for name in ("key", "value"):
            past = feeds[f"past_{name}"]
            room[name] = torch.cat([past, past.new_zeros(*past.shape[:2], case.tokens, past.shape[3])], dim=2)
        return room

    @staticmethod
    def to_cache(case, state, key, value):
        if not case.past:
            return key, value
        state["key"][:, :, case.past :] = key
        state["value"][:, :, case.past :] = value
        return state["key"], state["value"]
