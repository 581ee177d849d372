"""The paper's layer in PyTorch eager: split by expert, one mm each, cat, index_add."""


def load():
    """The torch module, None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


class Layer:
    """One call of the layer; numbers as in the operator."""

    def __init__(self, torch, shape, weights, feeds):
        self.torch, self.s = torch, shape
        self.w = {name: torch.from_numpy(value) for name, value in weights.items()}
        self.feeds = {name: torch.from_numpy(value) for name, value in feeds.items()}

    def gate(self, x):
        torch, s = self.torch, self.s
        logits = x @ self.w["router"]
        if s.jetmoe:
            top, indices = logits.topk(s.k, dim=1)
            gates = torch.softmax(top, dim=1)
        else:
            gates, indices = torch.softmax(logits, dim=1).topk(s.k, dim=1)
        order = indices.flatten().sort(stable=True).indices
        sizes = torch.bincount(indices.flatten(), minlength=s.experts).tolist()
        return gates.flatten()[order], order, order.div(s.k, rounding_mode="trunc"), sizes

    def experts(self, rows, sizes, name):
        parts = rows.split(sizes, dim=0)
        return self.torch.cat([self.torch.mm(part, self.w[name][e]) for e, part in enumerate(parts)], dim=0)

    def rotate(self, rows):
        torch, s = self.torch, self.s
        cos, sin = (torch.cat([self.w[n][s.past : s.keys]] * 2, dim=-1) for n in ("cos", "sin"))
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    def __call__(self):
        torch, s = self.torch, self.s
        with torch.no_grad():
            x = self.feeds["x"].reshape(-1, s.width)
            gates, order, tokens, sizes = self.gate(x)
            routed = self.experts(x[tokens], sizes, "query")
            query = torch.zeros(x.shape[0] * s.k, s.columns).index_add(0, order, routed)
            query = query.view(s.batch, s.tokens, s.k, s.heads, s.head).permute(0, 3, 2, 1, 4)
            rows = (x @ self.w["kv"]).view(s.batch, s.tokens, 2, s.heads, s.head).permute(2, 0, 3, 1, 4)
            key, value = rows[0], rows[1]
            if s.jetmoe:
                query, key = self.rotate(query), self.rotate(key)
            if s.past:
                key = torch.cat([self.feeds["past_key"], key], dim=2)
                value = torch.cat([self.feeds["past_value"], value], dim=2)
            scores = torch.einsum("bgktd,bgsd->bgkts", query, key) * s.head**-0.5
            attended = torch.einsum("bgkts,bgsd->bgktd", torch.softmax(scores, dim=-1), value)
            attended = attended.permute(0, 3, 2, 1, 4).reshape(-1, s.columns)
            out = self.experts(attended[order], sizes, "output") * gates[:, None]
            y = torch.zeros(x.shape[0], s.width).index_add(0, tokens, out)
            return y.view(s.batch, s.tokens, s.width)
