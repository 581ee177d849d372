"""What a call costs at least: operations over the rates, and bytes over the bandwidth, of the same machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from .cases import equal_mac_width


@dataclass(frozen=True)
class Ceilings:
    """Rates that were measured in this run: FLOP/s of a large product and of long attention by head width, and
    bytes/s of a device copy, reads and writes counted."""

    product: float
    attention: dict
    copy: float

    @classmethod
    def read(cls, path):
        """The ceilings that a file of JSON holds; None where there is none, or it lacks a rate."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError:
            return None
        rates = {int(head): rate for head, rate in (raw["attention_flops"] or {}).items() if rate}
        if not raw["product_flops"] or not raw["copy_bytes"]:
            return None
        return cls(raw["product_flops"], rates, raw["copy_bytes"])

    def attention_rate(self, head):
        """Rate for the nearest head width that was measured; that of products where none was."""
        if not self.attention:
            return self.product
        nearest = min(self.attention, key=lambda width: abs(width - head))
        return self.attention[nearest]


@dataclass(frozen=True)
class Work:
    """Operations (a multiply-accumulate counts 2) and compulsory bytes of one call."""

    product_flops: float
    attention_flops: float
    bytes: float

    def floor(self, ceilings, head):
        """Seconds that no implementation can beat."""
        busy = self.product_flops / ceilings.product + self.attention_flops / ceilings.attention_rate(head)
        return max(busy, self.bytes / ceilings.copy)


def touched_experts(rows, top_k, experts):
    """Experts that `rows` tokens with k random distinct choices touch, as an expectation."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def seen_keys(case):
    """Keys that an average query sees."""
    if case.causal:
        return case.past + (case.tokens + 1) / 2
    return case.keys


def moa_work(case, element=2):
    """The MoA layer of `case`; `element` is bytes of an activation or weight."""
    layer, rows = case.layer, case.rows
    inner = layer.inner
    products = 2 * rows * layer.width * (layer.experts + 2 * inner + 2 * layer.top_k * inner)
    attention = 4 * rows * seen_keys(case) * layer.top_k * inner
    chosen = touched_experts(rows, layer.top_k, layer.experts)
    weights = element * layer.width * (2 * inner * chosen + 2 * inner) + 4 * layer.width * layer.experts
    moved = weights + element * 2 * rows * layer.width + _cache_bytes(case, inner, element)
    return Work(products, attention, moved)


def mha_work(case, element=2):
    """An MHA block of as many multiply-accumulates."""
    width, inner, rows = case.layer.width, equal_mac_width(case), case.rows
    moved = element * (4 * width * inner + 2 * rows * width) + _cache_bytes(case, inner, element)
    return Work(8 * rows * width * inner, 4 * rows * seen_keys(case) * inner, moved)


def _cache_bytes(case, inner, element):
    """Keys and values that are read from a cache, and the new ones that are written to it."""
    return element * 2 * inner * case.batch * (case.past + case.tokens) if case.past else 0


def copies_for_cold_cache(touched_bytes, cache_bytes):
    """Copies of all inputs that must take turns so that none is still in the last-level cache at its next turn."""
    return max(1, -(-3 * cache_bytes // max(1, int(touched_bytes))))
