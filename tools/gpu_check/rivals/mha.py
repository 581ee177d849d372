"""A standard multi-head attention block: fused Q, K, V projection, SDPA on its best backend, output projection."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from .common import pinned


class MultiHeadAttention:
    """`inner` columns in heads of `head`, on tokens of `width`. Decoding appends to its cache in place."""

    graph, exact = True, False

    def __init__(self, name, case, inner, width, head=None, backend=None):
        self.name, self.case, self.inner, self.width = name, case, inner, width
        self.head = head or case.layer.head
        self.heads = inner // self.head
        self.backend = backend

    def load(self, feeds):
        hidden, case = feeds["hidden_states"], self.case
        make = {"dtype": hidden.dtype, "device": hidden.device}
        state = {
            "x": torch.randn(case.batch, case.tokens, self.width, **make),
            "qkv": torch.randn(3 * self.inner, self.width, **make) * self.width**-0.5,
            "out": torch.randn(self.width, self.inner, **make) * self.inner**-0.5,
        }
        if case.past:
            shape = (case.batch, self.heads, case.keys, self.head)
            state["key"], state["value"] = torch.randn(*shape, **make), torch.randn(*shape, **make)
        return state

    def run(self, state):
        case = self.case
        qkv = linear(state["x"], state["qkv"]).view(case.batch, case.tokens, 3, self.heads, self.head)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        causal = case.causal
        if case.past:
            state["key"][:, :, case.past :] = key
            state["value"][:, :, case.past :] = value
            # One new token may see the whole cache.
            key, value, causal = state["key"], state["value"], False
        with pinned(self.backend):
            mixed = scaled_dot_product_attention(query, key, value, is_causal=causal)
        return linear(mixed.transpose(1, 2).reshape(case.batch, case.tokens, self.inner), state["out"])
