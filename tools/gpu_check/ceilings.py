"""What this machine reaches: a large product, long attention, a device copy, and the gap between two kernels."""

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from . import feeds
from .rivals.common import BACKENDS
from .stats import quantile
from .timing import Contestant

SIDE = 8192
COPY_BYTES = 4 << 30
LENGTH = 4096


def median_seconds(call, samples=15):
    contestant = Contestant("ceiling", [call], graph=True)
    contestant.prepare()
    return quantile([contestant.sample() for _ in range(samples)], 0.5)


def product_rate(dtype=torch.bfloat16):
    """FLOP/s of a square product of random matrices through the vendor's library."""
    left, right = (torch.randn(SIDE, SIDE, device=feeds.DEVICE, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * SIDE**3 / median_seconds(lambda: torch.mm(left, right, out=out))


def attention_rate(head, heads, batch=4, dtype=torch.bfloat16):
    """FLOP/s of unmasked attention, and the back end of SDPA that reached it."""
    query, key, value = (torch.randn(batch, heads, LENGTH, head, device=feeds.DEVICE, dtype=dtype) for _ in range(3))
    best = (0.0, None)
    for name in ("flash", "cudnn"):

        def call(backend=BACKENDS[name]):
            with sdpa_kernel(backend):
                scaled_dot_product_attention(query, key, value)

        try:
            best = max(best, (4 * batch * heads * LENGTH**2 * head / median_seconds(call), name))
        except RuntimeError:
            continue
    return best


def copy_rate():
    """Bytes/s of a device copy, reads and writes counted."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=feeds.DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_seconds(lambda: target.copy_(source))


def launch_gap():
    """Seconds between the ends of two tiny dependent kernels of one graph."""
    cell = torch.zeros(1, device=feeds.DEVICE)
    return median_seconds(lambda: cell.add_(1.0))


def measure():
    """All ceilings, as JSON; what cannot be measured is None, and `problems` says why."""
    problems = []

    def attempt(name, call):
        try:
            return call()
        except Exception as error:  # noqa: BLE001 — the other ceilings are still worth measuring.
            problems.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
            return None

    attention = {
        head: attempt(f"attention {head}", lambda head=head, heads=heads: attention_rate(head, heads)) or (None, None)
        for head, heads in ((64, 32), (128, 16), (256, 8))
    }
    return {
        "product_flops": attempt("product", product_rate),
        "attention_flops": {str(head): rate for head, (rate, _) in attention.items()},
        "attention_backend": {str(head): name for head, (_, name) in attention.items()},
        "copy_bytes": attempt("copy", copy_rate),
        "launch_gap": attempt("launch gap", launch_gap),
        "problems": problems,
    }
