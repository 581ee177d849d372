"""A few small calls for compute-sanitizer: numpy and ctypes alone, so that nothing but our kernels runs.

Results are compared with the plain loops of `operator_reference`, loosely: the sanitizer's findings are the point.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from operator_reference import REFERENCES

from . import abi, device

TOLERANCE = {"f32": 1e-4, "tf32": 4e-3, "f16": 4e-3, "bf16": 3e-2}

#: Element type, whether products may round to TF32, and whether large ones use warpgroups.
KINDS = {
    "f16": ("f16", False, False),
    "f32": ("f32", False, False),
    "bf16": ("bf16", False, False),
    "tf32": ("f32", True, False),
    "wgmma-f16": ("f16", False, True),
    "wgmma-bf16": ("bf16", False, True),
    "elementwise-wgmma-f16": ("f16", False, True),
}

#: Columns that these lack, so that no vector fits and nothing is copied asynchronously: older releases of racecheck do not
#: follow copies that arrive at a barrier in shared memory (`cp.async.mbarrier.arrive`).
ELEMENTWISE, LACKING = "elementwise-", 4

#: Logit margins under which rounding may choose another expert.
NEAR_TIE = 1e-4

#: Columns of what the routers of MoLM's layers read.
ROUTED_BY = 24


class Call(NamedTuple):
    """An operator and its sizes, by the symbols of the contract."""

    operator: str
    b: int
    t: int
    p: int
    c: int
    e: int
    k: int
    g: int
    d: int
    #: What is particular about it; `modular` is a layer of MoLM.
    extra: dict


CALLS = [
    Call("MoASelfAttention", 2, 21, 0, 64, 4, 4, 1, 64, {}),
    Call("MoASelfAttention", 1, 1, 9, 64, 8, 2, 1, 64, {}),
    Call("MoASelfAttention", 2, 5, 6, 40, 5, 2, 2, 24, {"rope": True, "bias": True}),
    Call("MoASelfAttention", 3, 100, 0, 64, 8, 4, 1, 64, {}),
    Call("MoASelfAttention", 3, 100, 0, 64, 8, 2, 2, 64, {"rope": True}),
    Call("MoACrossAttention", 2, 7, 0, 64, 4, 2, 1, 64, {"keys": 19}),
    Call("MoEFeedForward", 2, 9, 0, 64, 4, 2, 1, 96, {"gated": 1}),
    Call("MoEFeedForward", 3, 100, 0, 40, 5, 2, 1, 56, {"gated": 0}),
    Call("MoASelfAttention", 1, 1, 130, 64, 4, 2, 1, 128, {}),
    Call("MoASelfAttention", 1, 2, 130, 64, 4, 4, 1, 256, {}),
    Call("MoASelfAttention", 2, 5, 130, 128, 5, 2, 2, 64, {"modular": True}),
    Call("MoASelfAttention", 1, 1, 130, 128, 4, 2, 1, 128, {"modular": True}),
    Call("MoASelfAttention", 1, 2, 130, 256, 4, 4, 1, 256, {"modular": True}),
    Call("MoEFeedForward", 1, 2, 0, 64, 8, 2, 1, 96, {"gated": 0, "modular": True}),
]

#: The same, planned as for one multiprocessor, or for so few that tiles of 64 rows are many, or blocks that stay would wait
#: for the last of them: small calls with the tiles of large ones.
LARGE_CALLS = [
    Call("MoASelfAttention", 1, 300, 0, 512, 4, 4, 1, 64, {"multiprocessors": 16}),
    Call("MoASelfAttention", 1, 20, 0, 64, 4, 2, 1, 64, {}),
    Call("MoASelfAttention", 1, 40, 0, 64, 4, 2, 1, 64, {}),
    Call("MoASelfAttention", 1, 150, 0, 64, 4, 2, 1, 64, {}),
    Call("MoASelfAttention", 1, 300, 0, 64, 4, 4, 1, 64, {}),
    Call("MoASelfAttention", 1, 520, 0, 64, 4, 4, 1, 64, {"multiprocessors": 4}),
    Call("MoASelfAttention", 2, 150, 9, 72, 4, 4, 1, 128, {"rope": True, "bias": True}),
    Call("MoASelfAttention", 2, 150, 0, 64, 4, 2, 1, 256, {}),
    Call("MoEFeedForward", 2, 280, 0, 64, 2, 1, 1, 136, {"gated": 1}),
    Call("MoASelfAttention", 1, 40, 0, 64, 4, 2, 1, 64, {"modular": True}),
    Call("MoASelfAttention", 2, 150, 9, 128, 4, 2, 1, 128, {"modular": True}),
    Call("MoASelfAttention", 2, 50, 0, 256, 4, 2, 1, 256, {"modular": True}),
]


def calls_of(kind):
    """The calls that are made with one of `KINDS`."""
    if kind.startswith(ELEMENTWISE):
        return [narrower(call) for call in LARGE_CALLS if call.operator != "MoEFeedForward"]
    return LARGE_CALLS if KINDS[kind][2] else CALLS + LARGE_CALLS


def narrower(call):
    """A call of fewer columns in rows and heads."""
    return call._replace(c=call.c - LACKING, d=call.d - LACKING)


def multiprocessors(call):
    """As for how many multiprocessors a call is planned; None for those of the device."""
    return None if call in CALLS else call.extra.get("multiprocessors", 1)


def to_bits(values, element):
    """Values in the bytes of an element type."""
    if element != "bf16":
        return np.ascontiguousarray(values, {"f32": np.float32, "f16": np.float16}[element])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_values(bits, element):
    """f64 values of the bytes of an element type."""
    if element != "bf16":
        return bits.astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def make(random, call):
    """Attributes and f32 feeds of one entry of `CALLS`."""
    operator, b, t, p, c, e, k, g, d, extra = call
    floats = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    feeds = {"hidden_states": floats(b, t, c), "router_weight": floats(c, e) * 0.3}
    modular = extra.get("modular", False)
    if modular:
        feeds |= {"router_input": floats(b, t, ROUTED_BY), "router_weight": floats(ROUTED_BY, e) * 0.3}
    attributes = {"top_k": k, "gate_mode": "topk_softmax"}
    if operator == "MoEFeedForward":
        columns = d * (2 if extra["gated"] else 1)
        feeds |= {"input_weight": floats(e, c, columns) * c**-0.5, "output_weight": floats(e, d, c) * d**-0.5}
        activation = "gelu_tanh" if modular else "silu"
        return attributes | {"activation": activation, "gated": extra["gated"]}, feeds
    attributes |= {"kv_num_heads": g, "scale": d**-0.5, "skip_padded_queries": 1}
    feeds |= {"query_weight": floats(e, c, g * d) * c**-0.5, "output_weight": floats(e, g * d, c) * d**-0.5}
    if extra.get("bias"):
        feeds["output_bias"] = floats(c)
    if operator == "MoACrossAttention":
        keys = extra["keys"]
        feeds |= {"key": floats(b, g, keys, d), "value": floats(b, g, keys, d)}
        feeds |= {"key_mask": mask(random, b, keys), "query_mask": mask(random, b, t)}
        return attributes, feeds
    feeds["attention_mask"] = mask(random, b, p + t)
    if modular:
        attributes["attention_mode"] = "stick_breaking"
    else:
        feeds["kv_weight"] = floats(c, 2 * g * d) * c**-0.5
    if p:
        feeds |= {"past_key": floats(b, g, p, d), "past_value": floats(b, g, p, d)}
    if extra.get("rope"):
        angles = np.arange(p + t)[:, None] / 10.0 ** (np.arange(d // 2) / (d // 2))
        feeds |= {"cos_cache": np.cos(angles).astype(np.float32), "sin_cache": np.sin(angles).astype(np.float32)}
        feeds["position_ids"] = np.tile(np.arange(p, p + t), (b, 1))
    return attributes | {"causal": 1}, feeds


def mask(random, rows, length):
    """The first row whole, the others right-padded."""
    places = np.arange(length)
    cuts = random.integers(1, length + 1, rows)
    cuts[0] = length
    return (places[None, :] < cuts[:, None]).astype(np.int32)


def compute(kernels, gpu, call, kind, random):
    """One call on the GPU with one of `KINDS`, and its relative error."""
    operator, (element, tf32, _) = call.operator, KINDS[kind]
    attributes, feeds = make(random, call)
    whole = {"router_weight", "router_input", "cos_cache", "sin_cache"}
    stored = {
        name: to_bits(value, element) if value.dtype == np.float32 and name not in whole else value
        for name, value in feeds.items()
    }
    seen = {
        name: to_values(value, element)
        if name in feeds and feeds[name].dtype == np.float32 and name not in whole
        else value
        for name, value in stored.items()
    }
    shapes = {name: value.shape for name, value in stored.items()}
    wanted = abi.OUTPUTS[operator]
    plan = kernels.plan(operator, attributes, element, shapes, wanted, tf32, multiprocessors(call))
    kinds = {"topk_indices": np.int64, "topk_weights": np.float32}
    activations = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[element]
    results = {name: np.empty(shape, kinds.get(name, activations)) for name, shape in plan.output_shapes.items()}
    inputs = {name: gpu.upload(value) for name, value in stored.items()}
    outputs = {name: gpu.allocate(value.nbytes) for name, value in results.items()}
    workspace = gpu.allocate(max(256, plan.workspace_bytes))
    plan.bind(inputs, outputs, workspace)(gpu.stream)
    gpu.synchronize()
    for name, value in results.items():
        gpu.download(value, outputs[name])
    gpu.free_all()
    plan.close()
    error = relative_error(operator, attributes, seen, to_values(results["output"], element), results["topk_indices"])
    return {"regime": plan.regime, "launches": plan.launches, "error": float(error)}


def relative_error(operator, attributes, feeds, output, chosen):
    """‖output - expected‖ / ‖expected‖ under the experts that were chosen; infinite where they are none of the best."""
    expected = REFERENCES[operator](attributes, feeds)
    differs = (np.sort(chosen) != np.sort(expected["topk_indices"])).any(-1)
    if differs.any():
        read = feeds.get("router_input", feeds["hidden_states"])
        logits = np.sort(read[differs] @ feeds["router_weight"].astype(np.float64))[:, ::-1]
        k, experts = attributes["top_k"], logits.shape[-1]
        if k == experts or (logits[:, k - 1] - logits[:, k] > NEAR_TIE).any() or not valid(chosen, experts):
            return np.inf
        expected = REFERENCES[operator](attributes, feeds, chosen)
    return np.linalg.norm(output - expected["output"]) / np.linalg.norm(expected["output"])


def valid(chosen, experts):
    """Whether every token has different experts that there are."""
    return ((chosen >= 0) & (chosen < experts)).all() and (np.diff(np.sort(chosen)) > 0).all()


class Sets:
    """Kernel sets by what has to be said when they are made: each loads an element type once, whatever kinds use it."""

    def __init__(self, kit):
        self.library = abi.Library(Path(kit, "libmoa_cuda.so"))
        self.content, self.made = Path(kit, "kernels.bin").read_bytes(), {}

    def of(self, kind):
        wgmma = KINDS[kind][2]
        if wgmma not in self.made:
            with abi.variable("MOA_CUDA_WGMMA", str(int(wgmma))):
                self.made[wgmma] = abi.Kernels(self.library, self.content)
        return self.made[wgmma]

    def close(self):
        for kernels in self.made.values():
            kernels.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kit", required=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--no-poison", action="store_true", help="leave outputs and workspace unwritten, for initcheck")
    options = parser.parse_args()
    gpu = device.Gpu(poison=not options.no_poison)
    sets, random = Sets(options.kit), np.random.default_rng(options.seed)
    wrong = 0
    for kind in options.kinds.split(","):
        for call in calls_of(kind):
            found = compute(sets.of(kind), gpu, call, kind, random)
            wrong += not found["error"] <= TOLERANCE[kind.rpartition("-")[2]]
            print(json.dumps({"call": f"{call.operator} {call[1:-1]} {kind}", **found}), flush=True)
    sets.close()
    print(json.dumps({"wrong": wrong}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
