"""Calls whose results are compared with the f64 reference, and how: fresh inputs, poisoned memory, bitwise repeats."""

from dataclasses import dataclass, replace

import torch

from . import cases, feeds, reference
from .compare import compare
from .ours import Call, unaligned

#: Sizes that no tile divides.
ODD = cases.Layer("odd", 72, 5, 2, 3, 24, "softmax_topk_renorm")

#: The same, with products that are large enough for warpgroups.
WIDE = cases.Layer("wide", 520, 7, 3, 2, 72, "softmax_topk_renorm")

#: More experts than a warp has lanes.
MANY = cases.Layer("many", 64, 40, 3, 1, 64, "softmax_topk_renorm")

#: A layer of MoLM: sticks, keys and values that are the hidden states, a router with an input of its own.
MOLM = cases.Layer("molm", 512, 8, 2, 4, 128, "softmax_topk", routed_by=64, sticks=True)

#: The same width in heads of other kernels.
MOLM_NARROW = replace(MOLM, name="molm-64", heads=8, head=64)
MOLM_WIDE = replace(MOLM, name="molm-256", heads=2, head=256)

#: Element types, and whether products may round to TF32.
KINDS = {"f32": ("f32", False), "tf32": ("f32", True), "f16": ("f16", False), "bf16": ("bf16", False)}


#: Small checks at the front, and how many of the tile checks and of the large ones come behind them, so that a path
#: whose time runs out has seen the largest tiles.
FIRST, EARLY = 4, 2


@dataclass(frozen=True)
class Check:
    """One call of one operator."""

    case: cases.Case
    operator: str = "MoASelfAttention"
    pads: str = "none"
    routing: str = "even"
    #: Keys of a cross-attention; hidden columns of a feed-forward layer.
    extent: int = 0
    activation: str = "silu"
    gated: bool = False
    unaligned: bool = False
    skip: bool = True
    #: Planned as for a device of so few, so that a small call takes the kernels of a large one.
    multiprocessors: int | None = None
    #: Rows behind those that the call adds to caches that grow in place.
    room: int | None = None

    @property
    def name(self):
        notes = [
            "" if self.operator == "MoASelfAttention" else self.operator.removeprefix("Mo"),
            f"past {self.case.past}" if self.case.past else "",
            "causal" if self.case.causal else "",
            self.pads if self.pads != "none" else "",
            self.routing if self.routing != "even" else "",
            f"{self.activation}{'*' if self.gated else ''} {self.extent}" if "Feed" in self.operator else "",
            "unaligned" if self.unaligned else "",
            "" if self.skip else "pads routed",
            f"as on {self.multiprocessors} SM" if self.multiprocessors else "",
            f"in place, {self.room} to spare" if self.room is not None else "",
        ]
        layer, case = self.case.layer, self.case
        return " ".join([layer.name, layer.gate_mode, f"{case.batch}x{case.tokens}", *filter(None, notes)])

    def make(self, source, dtype):
        """Attributes, feeds and the names of all outputs."""
        case = self.case
        if self.operator == "MoASelfAttention":
            options = {"pads": self.pads, "routing": self.routing, "skip": self.skip}
            attributes, given, wanted = feeds.self_attention(source, case, dtype, **options)
        elif self.operator == "MoACrossAttention":
            options = {"pads": self.pads, "routing": self.routing}
            attributes, given, wanted = feeds.cross_attention(source, case, dtype, self.extent, **options)
        else:
            options = (self.extent, self.activation, self.gated, self.routing)
            attributes, given, wanted = feeds.feed_forward(source, case, dtype, *options)
        given = unaligned(given) if self.unaligned else given
        return attributes, given, [*wanted, "topk_indices", "topk_weights"]


def _case(layer, batch, tokens, past=0, causal=False):
    return cases.Case(layer, batch, tokens, past, causal)


def _with(layer, gate_mode):
    return replace(layer, gate_mode=gate_mode)


def all_checks():
    """Every regime, ragged lengths, single tokens, skewed routing, idle experts, caches and rotation."""
    base, big, jetmoe = cases.BASE, cases.BIG, cases.JETMOE
    cross, ffn = {"operator": "MoACrossAttention"}, {"operator": "MoEFeedForward"}
    return [
        Check(_case(base, 1, 1)),
        Check(_case(base, 1, 128)),
        Check(_case(base, 3, 77, causal=True), pads="ragged"),
        Check(_case(base, 5, 130), pads="mixed"),
        Check(_case(base, 2, 65), pads="mixed", skip=False),
        Check(_case(base, 1, 1, 127, True)),
        Check(_case(base, 9, 1, 300, True), pads="ragged"),
        Check(_case(base, 2, 5, 40, True)),
        Check(_case(base, 1, 2048, causal=True)),
        Check(_case(_with(base, "topk_softmax"), 2, 33)),
        Check(_case(big, 1, 1)),
        Check(_case(big, 2, 90), routing="same"),
        Check(_case(big, 3, 211, causal=True), pads="ragged"),
        Check(_case(big, 2, 300), routing="idle"),
        Check(_case(big, 8, 1, 513, True)),
        Check(_case(_with(big, "softmax_topk_renorm"), 4, 257), pads="mixed", routing="same"),
        Check(_case(jetmoe, 1, 1)),
        Check(_case(jetmoe, 1, 1, 17, True)),
        Check(_case(jetmoe, 3, 1, 2047, True)),
        Check(_case(jetmoe, 8, 1, 127, True), routing="same"),
        Check(_case(jetmoe, 1, 64, causal=True)),
        Check(_case(jetmoe, 2, 300, causal=True), routing="idle"),
        Check(_case(jetmoe, 2, 301, causal=True), pads="mixed"),
        Check(_case(jetmoe, 1, 600, causal=True), routing="same"),
        *(Check(_case(_with(ODD, mode), 2, 19, causal=True), pads="mixed") for mode in cases_gate_modes()),
        Check(_case(ODD, 1, 1, 7, True)),
        *(Check(_case(_with(MANY, mode), 2, 33, causal=True), pads="mixed") for mode in cases_gate_modes()),
        Check(_case(MANY, 1, 1, 7, True)),
        Check(_case(ODD, 3, 200), routing="idle"),
        *(Check(_case(layer, 1, 1, 127, True)) for layer in (MOLM, MOLM_NARROW, MOLM_WIDE)),
        Check(_case(MOLM, 3, 1, 1500, True), pads="ragged"),
        Check(_case(MOLM, 2, 130, causal=True), pads="mixed"),
        Check(_case(MOLM, 2, 300, 41, True), pads="ragged", routing="idle"),
        Check(_case(MOLM, 4, 1, 200, True), room=55),
        Check(_case(base, 3, 1, 200, True), room=55),
        Check(_case(base, 2, 90, 37, True), pads="ragged", room=0),
        Check(_case(jetmoe, 8, 1, 127, True), room=384),
        Check(_case(ODD, 2, 7, 5, True), pads="mixed", room=3),
        Check(_case(base, 2, 128), unaligned=True),
        Check(_case(jetmoe, 2, 150, causal=True), unaligned=True),
        Check(_case(base, 3, 40), **cross, extent=57, pads="mixed"),
        Check(_case(base, 6, 1), **cross, extent=300, pads="ragged"),
        Check(_case(big, 2, 190), **cross, extent=64),
        Check(_case(ODD, 2, 7), **cross, extent=11, pads="mixed"),
        Check(_case(base, 1, 1), **ffn, extent=512, activation="relu"),
        Check(_case(base, 3, 100), **ffn, extent=512, activation="gelu"),
        Check(_case(jetmoe, 1, 1), **ffn, extent=5632, gated=True),
        Check(_case(jetmoe, 4, 100), **ffn, extent=5632, gated=True),
        Check(_case(jetmoe, 2, 300), **ffn, extent=704, gated=True, routing="same"),
        Check(_case(ODD, 3, 21), **ffn, extent=40, activation="gelu", gated=True, routing="idle"),
        Check(_case(MOLM, 1, 1), **ffn, extent=2048, activation="gelu_tanh"),
        Check(_case(MOLM, 4, 100), **ffn, extent=2048, activation="gelu_tanh"),
    ]


def large_checks():
    """Products of the largest tiles, on short sequences: every regime, ragged tiles, rotation, gates, bias."""
    base, big, jetmoe = cases.BASE, cases.BIG, cases.JETMOE
    ffn = {"operator": "MoEFeedForward"}
    return [
        Check(_case(base, 67, 128)),
        Check(_case(jetmoe, 33, 130, causal=True), routing="idle"),
        Check(_case(base, 67, 128), unaligned=True),
        Check(_case(big, 65, 130), pads="mixed"),
        Check(_case(WIDE, 190, 65, causal=True), pads="ragged"),
        Check(_case(replace(base, head=64), 67, 128, causal=True), pads="mixed"),
        Check(_case(base, 9, 256, 300, True), pads="ragged"),
        Check(_case(replace(base, head=64), 3, 100, causal=True), pads="ragged", multiprocessors=20),
        Check(_case(big, 40, 130), **ffn, extent=520),
        Check(_case(jetmoe, 33, 100), **ffn, extent=704, gated=True),
    ]


def tile_checks():
    """Small calls with the tiles of large ones, and of few rows with those of many."""
    base, big, jetmoe = cases.BASE, cases.BIG, cases.JETMOE
    alone = {"multiprocessors": 1}
    return [
        Check(_case(replace(base, head=64), 3, 130, causal=True), pads="ragged", **alone),
        Check(_case(jetmoe, 3, 140, 21, True), pads="ragged", **alone),
        Check(_case(WIDE, 5, 61, causal=True), pads="mixed", **alone),
        Check(_case(big, 2, 270), routing="idle", **alone),
        *(Check(_case(layer, 2, 270, 30, True), pads="ragged", **alone) for layer in (MOLM, MOLM_NARROW, MOLM_WIDE)),
        Check(_case(jetmoe, 1, 1100), operator="MoEFeedForward", extent=136, gated=True, **alone),
    ]


def checks_of(path):
    """The checks of a code path, the largest tiles among the first. Warpgroup products compute large calls alone."""
    if path == "wgmma":
        return large_checks()
    small, tiles = all_checks(), tile_checks()
    large = large_checks() if path == "native" else []
    early = [*small[:FIRST], *tiles[:EARLY], *large[:EARLY]]
    return [*early, *small[FIRST:], *tiles[EARLY:], *large[EARLY:]]


def cases_gate_modes():
    return ["softmax_topk", "softmax_topk_renorm", "topk_softmax"]


def bitwise_equal(a, b):
    return all(torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a)


def run_check(kernels, check, kind, seed):
    """One check with one element type: what was found, as JSON."""
    element, tf32 = KINDS[kind]
    attributes, given, wanted = check.make(feeds.Source(seed, feeds.DEVICE), feeds.DTYPES[element])
    shared = check.room is not None
    held = feeds.with_room(given, check.case.tokens + check.room) if shared else given
    call = Call(kernels, check.operator, attributes, element, held, wanted, tf32, check.multiprocessors, shared)
    try:
        run = call.bind(held)
        call.poison()
        run()
        torch.cuda.synchronize()
        first = call.copies()
        caches = {name: held[past][:, :, : check.case.keys].clone() for name, past in call.shared.items()}
        evaluate = reference.OPERATORS[check.operator]
        verdict = compare(first | caches, lambda indices: evaluate(attributes, given, indices), kind)
        verdict.problems += repeats(call, run, first)
        verdict.problems += changes(check, call, held, caches)
        found = {"regime": call.plan.regime, "launches": call.plan.launches, "workspace": call.plan.workspace_bytes}
        return {**found, "errors": verdict.errors, "swapped": verdict.swapped, "problems": verdict.problems}
    finally:
        call.close()


def repeats(call, run, first):
    """Problems of later runs: another workspace content, then replays of a captured graph, must not change a bit."""
    problems = []
    call.poison(0x00)
    run()
    torch.cuda.synchronize()
    if not bitwise_equal(call.outputs, first):
        problems.append("another content of the workspace changes the result")
    graph = torch.cuda.CUDAGraph()
    call.poison()
    with torch.cuda.graph(graph):
        run()
    for replay in range(3):
        call.poison(0xFF if replay % 2 else 0x5A)
        graph.replay()
        torch.cuda.synchronize()
        if not bitwise_equal(call.outputs, first):
            problems.append(f"replay {replay} of a captured graph differs")
            break
    return problems


def changes(check, call, held, caches):
    """Problems of caches that grew in place: other bits after later runs, or something behind the new rows."""
    problems = []
    for name, past in call.shared.items():
        if not torch.equal(held[past][:, :, : check.case.keys].view(torch.uint8), caches[name].view(torch.uint8)):
            problems.append(f"later runs change {name}")
        if not held[past][:, :, check.case.keys :].isnan().all():
            problems.append(f"something was written behind the new rows of {name}")
    return problems


def fault_checks(kernels):
    """A NaN in the input, or a position outside the rotary caches, gives NaN and a bit, and leaves other sequences alone."""
    problems = []
    case = _case(cases.JETMOE, 2, 8, causal=True)
    for what, bit in (("router", 1), ("position", 2)):
        before = kernels.faults()
        attributes, given, wanted = feeds.self_attention(feeds.Source(bit, feeds.DEVICE), case, torch.float16)
        if what == "router":
            given["hidden_states"][0, 3] = float("nan")
        else:
            given["position_ids"][0, 3] = 10_000_000
        call = Call(kernels, "MoASelfAttention", attributes, "f16", given, wanted)
        call.bind(given)()
        torch.cuda.synchronize()
        rows = call.outputs["output"].isnan().any(-1)
        if before & bit:
            problems.append(f"{what}: bit {bit} of the faults was set by an earlier call")
        elif not kernels.faults() & bit:
            problems.append(f"{what}: bit {bit} of the faults is not set")
        if not rows[0, 3] or rows[1].any() or rows[0, :3].any():
            problems.append(
                f"{what}: NaN rows are {rows.nonzero().tolist()}, expected [0, 3], none before it, none of sequence 1"
            )
        call.close()
    return problems
