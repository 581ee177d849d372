"""Grouped products in Triton: pairs sorted by expert, gathered on load, scattered on store, all on the device."""

import torch

from .. import cases
from .common import append, attend, gates, rotate

try:
    import triton
    import triton.language as tl
except ImportError:  # On a machine without Triton the rival is reported as missing.
    triton = None

BLOCK_M = 64


def plan(chosen, experts):
    """Pairs sorted by expert, and where each expert's pairs start; sizes never reach the host."""
    flat = chosen.flatten()
    ordered, pairs = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=flat.device))
    return pairs.int(), bounds.int()


def grouped_product(rows, weight, pairs, bounds, divide):
    """Row `pair // divide` of `rows` times the matrix of the pair's expert, stored at row `pair`: [pairs, out]."""
    experts, inner, columns = weight.shape
    out = torch.empty(pairs.numel(), columns, dtype=rows.dtype, device=rows.device)
    blocks = triton.cdiv(pairs.numel(), BLOCK_M) + experts
    wide = 128 if columns % 128 == 0 else 64
    _grouped_kernel[(blocks, triton.cdiv(columns, wide))](
        rows,
        weight,
        out,
        pairs,
        bounds,
        inner,
        columns,
        divide,
        EXPERTS=experts,
        BLOCK_M=BLOCK_M,
        BLOCK_N=wide,
        BLOCK_K=64 if inner % 64 == 0 else 16,
        num_warps=4,
        num_stages=4,
    )
    return out


if triton is not None:

    @triton.jit
    def _grouped_kernel(
        rows,
        weight,
        out,
        pairs,
        bounds,
        inner,
        columns,
        divide,
        EXPERTS: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        block, column = tl.program_id(0), tl.program_id(1)
        # The expert of this block: blocks are dealt out in the order of experts, each rounded up.
        first, expert, low, high = 0, -1, 0, 0
        for candidate in tl.static_range(EXPERTS):
            start = tl.load(bounds + candidate)
            end = tl.load(bounds + candidate + 1)
            count = (end - start + BLOCK_M - 1) // BLOCK_M
            mine = (block >= first) & (block < first + count)
            expert = tl.where(mine, candidate, expert)
            low = tl.where(mine, start + (block - first) * BLOCK_M, low)
            high = tl.where(mine, end, high)
            first += count
        if expert < 0:
            return
        place = low + tl.arange(0, BLOCK_M)
        valid = place < high
        pair = tl.load(pairs + place, mask=valid, other=0)
        row = (pair // divide).to(tl.int64)
        across = column * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        base = weight + expert.to(tl.int64) * inner * columns
        for step in range(0, inner, BLOCK_K):
            down = step + tl.arange(0, BLOCK_K)
            left = tl.load(rows + row[:, None] * inner + down[None, :], mask=valid[:, None], other=0.0)
            right = tl.load(base + down[:, None] * columns + across[None, :], mask=across[None, :] < columns, other=0.0)
            total = tl.dot(left, right, total)
        target = out + pair.to(tl.int64)[:, None] * columns + across[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=valid[:, None] & (across[None, :] < columns))


class GroupedExperts:
    name, graph, exact = cases.GROUPED, True, True

    def __init__(self, case, attributes, backend=None, product=grouped_product):
        if triton is None and product is grouped_product:
            raise RuntimeError("Triton is not installed")
        self.case, self.attributes, self.backend, self.product = case, attributes, backend, product

    def load(self, feeds):
        names = ("hidden_states", "router_weight", "query_weight", "kv_weight", "output_weight", "output_bias")
        state = {name: feeds[name].clone() for name in names if name in feeds}
        if self.case.layer.rope:
            for name in ("cos", "sin"):
                state[name] = feeds[f"{name}_cache"][feeds["position_ids"]].to(feeds["hidden_states"].dtype)
        return {**state, **append.cache(self.case, feeds)}

    def run(self, state):
        case, layer = self.case, self.case.layer
        batch, tokens, slots = case.batch, case.tokens, layer.top_k
        x = state["hidden_states"].view(case.rows, layer.width)
        chosen, weights = gates(x.float() @ state["router_weight"], self.attributes)
        pairs, bounds = plan(chosen, layer.experts)
        query = self.product(x, state["query_weight"], pairs, bounds, slots)
        query = query.view(batch, tokens, slots, layer.heads, layer.head)
        key, value = (x @ state["kv_weight"]).view(batch, tokens, 2, layer.heads, layer.head).permute(2, 0, 3, 1, 4)
        if layer.rope:
            query = rotate(query, state["cos"][:, :, None, None], state["sin"][:, :, None, None])
            key = rotate(key, state["cos"][:, None], state["sin"][:, None])
        key, value = append.to_cache(case, state, key, value)
        mixed = attend(case, query, key, value, self.backend).view(case.rows * slots, layer.inner)
        back = self.product(mixed, state["output_weight"], pairs, bounds, 1)
        weights = weights[:, None, :].to(back.dtype)
        output = torch.bmm(weights, back.view(case.rows, slots, layer.width)).view(batch, tokens, layer.width)
        return output + state["output_bias"] if "output_bias" in state else output
