"""The paper's released layer restated: sort the (token, expert) pairs, gather, one product an expert, scatter back.

Same order of operations, copies and host synchronisations (`nonzero` and two `tolist`), so that it cannot enter a CUDA
graph. Scores are materialised and masked, softmax works in f32. `losses` adds the three training losses, which the
released code evaluates at inference too.
"""

import torch

from .. import cases
from .common import append


class Upstream:
    graph, exact = False, True

    def __init__(self, case, attributes, losses, compile_with=None):
        self.name = cases.UPSTREAM if compile_with is None else cases.UPSTREAM_COMPILED
        self.case, self.attributes, self.losses = case, attributes, losses
        self.forward = self._forward if compile_with is None else torch.compile(self._forward, **compile_with)

    def load(self, feeds):
        return {
            "x": feeds["hidden_states"].clone(),
            "router": feeds["router_weight"].clone(),
            "query": feeds["query_weight"].clone(),
            "kv": feeds["kv_weight"].clone(),
            "out": feeds["output_weight"].clone(),
            **append.cache(self.case, feeds),
        }

    def run(self, state):
        return self.forward(state)

    def _topology(self, state):
        """Pairs sorted by expert: their places, their tokens, their gates, and the pairs of each expert on the host."""
        case, layer = self.case, self.case.layer
        probabilities = (state["x"].reshape(case.rows, -1).float() @ state["router"]).softmax(-1)
        gates, experts = probabilities.topk(layer.top_k, dim=-1)
        gates, experts = gates.flatten(), experts.flatten()
        loss = self._loss(probabilities, gates, experts) if self.losses else None
        used = gates.nonzero().squeeze(-1)
        _, order = experts[used].sort(0)
        place = used[order]
        counts = torch.zeros_like(probabilities).scatter(1, experts.view(case.rows, -1), 1).sum(0).long()
        return place, place.div(layer.top_k, rounding_mode="trunc"), gates[place], counts, loss

    def _loss(self, probabilities, gates, experts):
        """Variation of the load, product of load and importance, and size of the logits' norm."""
        layer = self.case.layer
        wide = torch.zeros_like(probabilities).scatter(1, experts.view(-1, layer.top_k), gates.view(-1, layer.top_k))
        load = wide.sum(0)
        variation = load.float().var() / (load.float().mean() ** 2 + 1e-10)
        share = (wide > 0).float().sum(0)
        switch = (probabilities.mean(0) * share / share.sum()).sum() * layer.experts
        return variation + switch + torch.logsumexp(probabilities, -1).square().mean()

    def _experts(self, rows, weight, counts):
        pieces = rows.split(counts.tolist(), dim=0)
        return torch.cat([piece @ weight[expert] for expert, piece in enumerate(pieces)], dim=0)

    def _forward(self, state):
        case, layer = self.case, self.case.layer
        batch, tokens, slots = case.batch, case.tokens, layer.top_k
        place, token, gate, counts, loss = self._topology(state)
        x = state["x"].reshape(case.rows, layer.width)
        chosen = self._experts(x[token], state["query"], counts)
        query = chosen.new_zeros(case.rows * slots, layer.inner).index_add(0, place, chosen)
        query = query.view(batch, tokens, slots, layer.inner).permute(0, 2, 1, 3) * layer.scale
        key, value = (x @ state["kv"]).view(batch, tokens, 2, layer.heads, layer.head).permute(2, 0, 3, 1, 4)
        key, value = append.to_cache(case, state, key, value)
        scores = torch.einsum("bktd,bsd->bkts", query.contiguous(), key[:, 0])
        if case.causal and not case.past:
            future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        shares = scores.float().softmax(-1).to(scores.dtype)
        mixed = torch.einsum("bkts,bsd->btkd", shares, value[:, 0]).reshape(case.rows * slots, layer.inner)
        weighted = self._experts(mixed[place], state["out"], counts) * gate[:, None].to(x.dtype)
        output = weighted.new_zeros(case.rows, layer.width).index_add(0, token, weighted)
        if loss is not None:
            state["loss"] = loss
        return output.view(batch, tokens, layer.width)
