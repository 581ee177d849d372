"""The layers that are timed, and what their times must reach.

A ratio is the rival's time over ours: 1 is a draw, more is faster than the rival.
"""

import math
from dataclasses import dataclass, field, replace

#: Rivals, by the names that tables and JSON use.
MHA = "mha-equal"
BLOCK = "transformer-512"
UPSTREAM = "upstream-eager"
UPSTREAM_COMPILED = "upstream-compiled"
HF_EAGER = "hf-jetmoe-eager"
HF_SDPA = "hf-jetmoe-sdpa"
DENSE = "dense-compiled"
GROUPED = "grouped-triton"
OURS = "moa"

#: Ours again: writing the whole new cache, growing it in place, with the inputs in the cache, and without overlap of
#: kernels.
PRESENT = f"{OURS}+present"
IN_PLACE = f"{OURS}, in place"
WARM = f"{OURS}, warm cache"
SERIAL = f"{OURS}, no overlap"
#: And without the warpgroup products of Hopper, which plans use for large products unless `MOA_CUDA_WGMMA` is 0.
WITHOUT_WGMMA = f"{OURS}, no wgmma"

#: Tokens of a call up to which no product is large enough for them.
WGMMA_ROWS = 256


@dataclass(frozen=True)
class Layer:
    """Sizes of one MoA layer: C = width, E = experts, k = top_k, G = heads of keys and values, D = head."""

    name: str
    width: int
    experts: int
    top_k: int
    heads: int
    head: int
    gate_mode: str
    bias: bool = False
    rope: bool = False
    #: Columns R of an input that the router reads, 0 where it reads the hidden states.
    routed_by: int = 0
    #: As in MoLM, sticks are broken, and keys and values are the hidden states.
    sticks: bool = False

    @property
    def inner(self):
        """Columns of one expert's query projection, G * D."""
        return self.heads * self.head

    @property
    def scale(self):
        return 1.0 / math.sqrt(self.head)


BASE = Layer("base", 512, 8, 8, 1, 128, "softmax_topk")
BIG = Layer("big", 512, 32, 16, 1, 256, "softmax_topk")
JETMOE = Layer("jetmoe", 2048, 8, 2, 16, 128, "topk_softmax", bias=True, rope=True)


@dataclass(frozen=True)
class Target:
    """What a ratio must reach: `gate` for a release, `goal` as ambition; None where none is set."""

    gate: float | None = None
    goal: float | None = None


@dataclass(frozen=True)
class Case:
    """One timed call: `tokens` new tokens in each of `batch` sequences, behind `past` cached ones."""

    layer: Layer
    batch: int
    tokens: int
    past: int = 0
    causal: bool = False
    targets: dict = field(default_factory=dict, hash=False, compare=False)
    #: Smallest share of the floor that is asked for, where no rival is the yardstick.
    floor_gate: float | None = None

    @property
    def name(self):
        shape = f"{self.batch}x{self.tokens}" if not self.past else f"decode {self.batch}, past {self.past}"
        return f"{self.layer.name} {shape}{' causal' if self.causal and not self.past else ''}"

    @property
    def keys(self):
        return self.past + self.tokens

    @property
    def rows(self):
        """Tokens of the call, N."""
        return self.batch * self.tokens

    @property
    def decode(self):
        return self.past > 0


def equal_mac_width(case):
    """Inner width of an MHA block (its four projections and attention) with the multiply-accumulates of `case`.

    From `4·C·w + 2·S·w = C·(E + 2·G·D + 2·k·G·D) + 2·S·k·G·D` for each token, rounded to heads of D.
    """
    layer = case.layer
    inner = layer.inner
    routed = layer.width * (layer.experts + 2 * inner + 2 * layer.top_k * inner)
    attention = 2 * case.keys * layer.top_k * inner
    width = (routed + attention) / (4 * layer.width + 2 * case.keys)
    return max(1, round(width / layer.head)) * layer.head


def _prefill(layer, batch, tokens, targets, **options):
    return Case(layer, batch, tokens, targets=targets, **options)


def _decode(layer, batch, context, targets, **options):
    return Case(layer, batch, 1, past=context - 1, causal=True, targets=targets, **options)


_SMALL_BASE = {
    MHA: Target(1.0, 1.15),
    UPSTREAM: Target(15, 40),
    GROUPED: Target(3, 5),
    DENSE: Target(1.0, 1.2),
}
_HF = {UPSTREAM: Target()}

#: In the order in which they are measured: what a release hangs on first.
TIMED = [
    _prefill(BASE, 1, 128, _SMALL_BASE),
    _prefill(BASE, 16, 128, {**_SMALL_BASE, UPSTREAM: Target(15, 25)}),
    _prefill(
        BASE, 8, 2048, {MHA: Target(0.95, 1.05), UPSTREAM: Target(4, 6), GROUPED: Target(None, 1.3), DENSE: Target(1.0)}
    ),
    _decode(
        BASE,
        64,
        2048,
        {MHA: Target(3.5, 5), UPSTREAM: Target(10, 20), GROUPED: Target(None, 3), DENSE: Target(None, 1.5)},
    ),
    _decode(
        BASE,
        1,
        128,
        {MHA: Target(1.1, 1.4), UPSTREAM: Target(25, 60), GROUPED: Target(None, 8), DENSE: Target(None, 1.5)},
    ),
    _prefill(
        BIG,
        8,
        2048,
        {MHA: Target(0.85, 0.97), UPSTREAM: Target(2.5, 3.5), GROUPED: Target(None, 1.35), DENSE: Target(None, 1.15)},
    ),
    _prefill(
        BIG,
        128,
        128,
        {MHA: Target(0.65, 0.85), UPSTREAM: Target(3.5, 5), GROUPED: Target(None, 1.5), DENSE: Target(None, 1.3)},
    ),
    _decode(
        BIG,
        8,
        2048,
        {MHA: Target(3, 4.4), UPSTREAM: Target(25, 45), GROUPED: Target(None, 6), DENSE: Target(None, 1.5)},
    ),
    _prefill(
        JETMOE,
        8,
        2048,
        {
            MHA: Target(0.80, 0.95),
            HF_EAGER: Target(3, 4),
            HF_SDPA: Target(1.4, 1.7),
            GROUPED: Target(None, 1.35),
            DENSE: Target(None, 1.8),
        },
        causal=True,
    ),
    _decode(
        JETMOE,
        1,
        2048,
        {MHA: Target(1.0, 1.2), HF_EAGER: Target(10, 25), GROUPED: Target(None, 4), DENSE: Target(None, 2)},
    ),
    _decode(
        JETMOE, 8, 128, {HF_EAGER: Target(8, 13), GROUPED: Target(None, 3), DENSE: Target(None, 1.15)}, floor_gate=0.85
    ),
    _decode(
        JETMOE,
        64,
        2048,
        {MHA: Target(1.3, 1.45), HF_EAGER: Target(3, 6), GROUPED: Target(None, 1.5), DENSE: Target(None, 1.1)},
    ),
    _prefill(BASE, 1, 2048, {UPSTREAM: Target(2.5)}),
    _prefill(BASE, 8, 2048, {UPSTREAM: Target(4, 10)}, causal=True),
    _prefill(BASE, 128, 128, {UPSTREAM: Target(2.5)}),
    _prefill(BIG, 1, 128, {UPSTREAM: Target(2.5)}),
    _prefill(BIG, 8, 2048, {UPSTREAM: Target(2.5, 5)}, causal=True),
]


def tiny(case, width=32, head=8, heads=2, tokens=6, past=0):
    """`case` at a size for a CPU, with the same structure."""
    heads = min(heads, case.layer.heads)
    layer = replace(case.layer, width=width, head=head, heads=heads)
    return replace(case, layer=layer, batch=2, tokens=1 if case.decode else tokens, past=past if case.decode else 0)
