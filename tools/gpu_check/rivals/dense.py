"""Every expert's queries in one product, the chosen ones picked, SDPA, and one product back over all experts.

No data-dependent shape, so that it compiles into one graph. With k = E nothing is picked: the shortest schedule that
torch has for this layer.
"""

import torch

from .. import cases
from .common import append, attend, gates, rotate


class DenseExperts:
    name, graph, exact = cases.DENSE, True, True

    def __init__(self, case, attributes, compile_with=None, backend=None):
        self.case, self.attributes, self.backend = case, attributes, backend
        self.forward = self._forward if compile_with is None else torch.compile(self._forward, **compile_with)

    def load(self, feeds):
        layer = self.case.layer
        query = feeds["query_weight"].permute(1, 0, 2).reshape(layer.width, -1)
        return {
            "x": feeds["hidden_states"].clone(),
            "into": torch.cat([query, feeds["kv_weight"]], dim=1).contiguous(),
            "router": feeds["router_weight"].clone(),
            "out": feeds["output_weight"].reshape(-1, layer.width).clone(),
            "bias": feeds["output_bias"].clone() if "output_bias" in feeds else None,
            "cos": feeds["cos_cache"][feeds["position_ids"]].to(feeds["hidden_states"].dtype) if layer.rope else None,
            "sin": feeds["sin_cache"][feeds["position_ids"]].to(feeds["hidden_states"].dtype) if layer.rope else None,
            **append.cache(self.case, feeds),
        }

    def run(self, state):
        return self.forward(state)

    def _forward(self, state):
        case, layer = self.case, self.case.layer
        batch, tokens, slots = case.batch, case.tokens, layer.top_k
        x = state["x"]
        chosen, weights = gates(x.float() @ state["router"], self.attributes)
        both = x @ state["into"]
        wide = layer.experts * layer.inner
        query = both[..., :wide].view(batch, tokens, layer.experts, layer.inner)
        key, value = both[..., wide:].view(batch, tokens, 2, layer.heads, layer.head).permute(2, 0, 3, 1, 4)
        all_chosen = slots == layer.experts
        if all_chosen:
            weights = torch.zeros_like(weights).scatter(-1, chosen, weights)
        else:
            query = query.gather(2, chosen[..., None].expand(-1, -1, -1, layer.inner))
        query = query.view(batch, tokens, slots, layer.heads, layer.head)
        if layer.rope:
            query = rotate(query, state["cos"][:, :, None, None], state["sin"][:, :, None, None])
            key = rotate(key, state["cos"][:, None], state["sin"][:, None])
        key, value = append.to_cache(case, state, key, value)
        mixed = attend(case, query, key, value, self.backend) * weights[..., None].to(x.dtype)
        if not all_chosen:
            empty = x.new_zeros(batch, tokens, layer.experts, layer.inner)
            mixed = empty.scatter(2, chosen[..., None].expand(-1, -1, -1, layer.inner), mixed)
        output = mixed.reshape(batch, tokens, wide) @ state["out"]
        return output if state["bias"] is None else output + state["bias"]
