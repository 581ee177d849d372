"""The CPU operator beside its rivals, in one run.

    python3 -m pip install numpy onnx onnxruntime torch
    python3 benches/cpu_operator.py [--threads 2] [--rounds 15] [--values bf16] [--accuracy-level 3] [--only NAME ...] [--json FILE]

Builds libmoa_ort.so where MOA_ORT_LIBRARY does not name it. Every contender of a shape runs in bursts that take turns;
a burst starts with calls that are not counted. A ratio is the median over the rounds of rival / ours, both the median
of their burst in that round; "min" is the ratio of the fastest calls. torch is optional. Beside each goal stands the
most that the rates measured in the run allow (`cpu_operator_goals.py`).
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
import onnx
import onnxruntime

import cpu_operator_eager as eager
import cpu_operator_goals as goals
import cpu_operator_graphs as graphs
import packed_weights
from cpu_operator_graphs import Shape
from packed_weights import processor

SHAPES = {
    "E8-1x128": Shape(512, 8, 8, 128, 1, 1, 128, 0),
    "E32-1x128": Shape(512, 16, 32, 256, 1, 1, 128, 0),
    "E32-8x128": Shape(512, 16, 32, 256, 1, 8, 128, 0),
    "E8-1x2048": Shape(512, 8, 8, 128, 1, 1, 2048, 0),
    "E8-1x10": Shape(512, 8, 8, 128, 1, 1, 10, 0),
    "E32-1x1-past128": Shape(512, 8, 32, 128, 1, 1, 1, 128),
    "jetmoe-1x1-past512": Shape(2048, 2, 8, 128, 16, 1, 1, 512, jetmoe=True),
}
SGEMM = (512, 512, 1024)
BF16 = (1024, 1024, 1024)
# Processors that multiply bf16; others take seconds for what bounds nothing.
BF16_FLAGS = {"amx_bf16", "avx512_bf16"}
CLOCKS = {"wall": time.perf_counter, "thread": time.thread_time}
TOLERANCE = 2e-4
# Where factors of products are bf16 or int8.
ROUNDED = 2e-2
# Seconds for which threads of a session look for work after its last call: 36 to 40 ms were seen.
LOOKING = 0.06
ROOT = pathlib.Path(__file__).resolve().parent.parent


def library():
    named = os.environ.get("MOA_ORT_LIBRARY")
    if named:
        return named
    subprocess.run(["cargo", "build", "--release", "-p", "moa-ort"], cwd=ROOT, check=True)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return str(target / "release" / "libmoa_ort.so")


def build_of(path):
    """What tells one build of the library from another."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def cpus(threads):
    """One processor for each thread, the caller's first; nothing where there are too few, or a system has no such choice."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return allowed[:threads] if threads <= len(allowed) else []


@contextlib.contextmanager
def held(chosen):
    """Keeps the calling thread on the first of some processors: it may otherwise share one with a thread of its session for
    as long as a burst takes."""
    if not chosen:
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def session_options(threads):
    """Those of a session whose threads stay on the other ones of `cpus`."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if len(chosen := cpus(threads)) > 1:
        others = ";".join(str(cpu + 1) for cpu in chosen[1:])
        options.add_session_config_entry("session.intra_op_thread_affinities", others)
    return options


class OrtRun:
    """A session of `args.threads` with every input and output bound once; `in_place`: past and present are one buffer."""

    def __init__(self, model, feeds, args, in_place=False):
        options = session_options(args.threads)
        options.register_custom_ops_library(args.library)
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.feeds = {name: np.ascontiguousarray(value) for name, value in feeds.items()}
        for name, value in self.feeds.items():
            self.binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        self.values = {}
        for output in self.session.get_outputs():
            past = self.feeds.get(output.name.replace("present", "past")) if in_place else None
            value = self.values[output.name] = np.zeros(output.shape, self.feeds["x"].dtype) if past is None else past
            self.binding.bind_output(output.name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)

    def __call__(self):
        self.session.run_with_iobinding(self.binding)
        return self.values["y"]


def mha_reference(model, feeds, heads):
    """The dense block in numpy f64."""
    values = [onnx.numpy_helper.to_array(i).astype(np.float64) for i in onnx.ModelProto.FromString(model).graph.initializer]
    x = feeds["x"].astype(np.float64)
    split = [(x @ w).reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3) for w in values[:3]]
    query, key, value = split
    if "past_key" in feeds:
        key = np.concatenate([feeds["past_key"], key], axis=2)
        value = np.concatenate([feeds["past_value"], value], axis=2)
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (scores / scores.sum(-1, keepdims=True)) @ value
    return attended.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ values[3]


def burst(run, seconds, clock):
    """Times of calls in a row, after some that are not counted: for as long as threads of the contender before look for
    work, which takes a processor from this one. After a pause in their place, graphs of many nodes were 1.5 times as
    slow for whole bursts."""
    calls, end = 0, time.perf_counter() + LOOKING
    while calls < 3 or time.perf_counter() < end:
        run()
        calls += 1
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = clock()
        run()
        times.append(clock() - start)
    return times


def interleave(runs, rounds, seconds, threads, clock=time.perf_counter):
    """Bursts of every contender in turn, in another order each round."""
    found, order = {name: [] for name in runs}, list(runs)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            with held(cpus(threads)):
                found[name].append(burst(runs[name], seconds, clock))
    return found


def quartiles(values):
    """The first and the third, within the range of the values, however few these are."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [first, third]


def summary(bursts):
    medians = [statistics.median(times) for times in bursts]
    return {
        "min_ms": 1e3 * min(min(times) for times in bursts),
        "median_ms": 1e3 * statistics.median(medians),
        "quartiles_ms": [1e3 * quartile for quartile in quartiles(medians)],
        "burst_medians_ms": [1e3 * median for median in medians],
    }


def ratio(rival, ours):
    pairs = [a / b for a, b in zip(rival["burst_medians_ms"], ours["burst_medians_ms"])]
    return {"median": statistics.median(pairs), "min": rival["min_ms"] / ours["min_ms"], "range": [min(pairs), max(pairs)]}


def contenders(shape, weights, feeds, args, torch):
    runs = {"ours": OrtRun(graphs.operator(shape, weights, feeds, args.accuracy_level), feeds, args)}
    if shape.past:
        roomy = graphs.with_room(shape, feeds)
        in_place = graphs.operator(shape, weights, roomy, args.accuracy_level)
        runs[goals.IN_PLACE] = OrtRun(in_place, roomy, args, in_place=True)
    dense_feeds, model = graphs.mha_feeds(shape, feeds), graphs.mha(shape, weights, feeds | graphs.mha_feeds(shape, feeds))
    runs["mha"] = OrtRun(model, dense_feeds, args)
    check("mha", runs["mha"](), mha_reference(model, dense_feeds, shape.mha_heads()[0]))
    for name, graph in graphs.standard_graphs(shape, weights, feeds).items():
        runs[f"standard:{name}"] = OrtRun(graph, feeds, args)
    if torch:
        runs["eager"] = eager.Layer(torch, shape, weights, feeds)
    exact = OrtRun(graphs.operator(shape, weights, feeds), feeds, args) if args.accuracy_level else runs["ours"]
    exact = np.array(exact())
    for name, run in runs.items():
        if name != "mha":
            rounds = args.accuracy_level and name in ("ours", goals.IN_PLACE)
            check(name, np.asarray(run()), exact, ROUNDED if rounds else TOLERANCE)
    return runs


def bytes_of_call(shape, weights, feeds):
    """Bytes of weights, as the library packs them, and cache that one call must read at least."""
    model = onnx.ModelProto.FromString(graphs.operator(shape, weights, feeds))
    return packed_weights.of_calls(model, tokens=shape.batch * shape.tokens) + shape.cache_bytes()


CEILINGS = ("sgemm", "empty", "bf16", "read")


def ceilings(bytes_read, args, torch):
    """What bounds every contender: f32 and bf16 products, a call that computes nothing, reading as many bytes."""
    rows, inner, columns = SGEMM
    runs = {
        "sgemm": OrtRun(graphs.matmul(rows, inner, columns), {"x": np.ones((rows, inner), np.float32)}, args),
        "empty": OrtRun(graphs.matmul(1, 1, 1), {"x": np.ones((1, 1), np.float32)}, args),
    }
    if torch:
        rows, inner, columns = BF16
        weights = torch.ones(bytes_read // 4)
        runs["read"] = weights.sum
        if BF16_FLAGS & set(processor("flags").split()):
            left, right = torch.ones(rows, inner).bfloat16(), torch.ones(inner, columns).bfloat16()
            runs["bf16"] = lambda: torch.mm(left, right)
    return runs


def check(name, found, expected, tolerance=TOLERANCE):
    error = float(np.max(np.abs(found - expected)) / (np.max(np.abs(expected)) + 1e-30))
    if not error <= tolerance:
        sys.exit(f"{name} differs from the expected output by {error:.2e}")


def read_bandwidth(threads, megabytes=512, repeats=7):
    """Bytes per second that `threads` threads read from memory at best."""
    data = np.ones(megabytes * 2**18, np.float32)
    best = 0.0
    for _ in range(repeats):
        parts = np.array_split(data, threads)
        workers = [threading.Thread(target=np.dot, args=(part, part)) for part in parts]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, data.nbytes / (time.perf_counter() - start))
    return best


def cpu_name():
    return processor("model name") or platform.processor()


def machine(args):
    """What a run was made on and with."""
    versions = {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": args.threads, "versions": versions,
            "packing": os.environ.get("MOA_CPU_PACKING") or "plain", "load_before": os.getloadavg()}


def shortened(value):
    """The same with seven digits of every float: no clock tells more."""
    if isinstance(value, dict):
        return {name: shortened(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def write_json(path, machine, results):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shortened({"machine": machine, "results": results}), separators=(",", ":")) + "\n")


def measure(name, shape, args, torch, bandwidth):
    weights, feeds = graphs.rounded(graphs.make_weights(shape), args.values), graphs.make_feeds(shape)
    bytes_read = bytes_of_call(shape, weights, feeds)
    runs = contenders(shape, weights, feeds, args, torch) | ceilings(bytes_read, args, torch)
    found = interleave(runs, args.rounds, args.seconds, args.threads, CLOCKS[args.clock])
    result = {"shape": dataclasses.asdict(shape), "macs": shape.macs(), "load": os.getloadavg()}
    heads, head = shape.mha_heads()
    result["mha"] = {"heads": heads, "head": head, "macs": shape.mha_macs(heads * head)}
    result["times"] = {contender: summary(bursts) for contender, bursts in found.items()}
    ours = result["times"]["ours"]
    rivals = {n: t for n, t in result["times"].items() if n not in ("ours", goals.IN_PLACE, *CEILINGS)}
    result["ratios"] = {name: ratio(times, ours) for name, times in rivals.items()}
    if in_place := result["times"].get(goals.IN_PLACE):
        result["ratios_in_place"] = {name: ratio(times, in_place) for name, times in rivals.items()}
    result |= {"sgemm_macs": math.prod(SGEMM), "bf16_macs": math.prod(BF16)}
    for kind in goals.KINDS:
        result[f"sgemm_gflops_{kind}"] = 2e-6 * math.prod(SGEMM) / result["times"]["sgemm"][f"{kind}_ms"]
        result[f"of_sgemm_{kind}"] = goals.of_sgemm(result, ours, kind)
    result["weight_bytes"] = bytes_read
    result["gigabytes_per_second"] = bytes_read / ours["median_ms"] * 1e-6
    fastest = {kind: times["min_ms"] for kind, times in result["times"].items()}
    read = bytes_read / fastest["read"] if "read" in fastest else 0.0
    result["read_bytes_per_ms"] = max(read, bandwidth * 1e-3)
    result["floor"] = goals.floor(result, fastest)
    result["goals"] = list(goals.verdicts(name, result))
    return result


def report(name, result):
    times, ratios = result["times"], result["ratios"]
    print(f"\n{name}: {result['macs'] / 1e6:.1f} M multiply-accumulates, mha {result['mha']['macs'] / 1e6:.1f} M")
    for contender, t in times.items():
        line = f"  {contender:18} {t['median_ms']:9.3f} ms  [{t['quartiles_ms'][0]:.3f}, {t['quartiles_ms'][1]:.3f}]"
        line += f"  min {t['min_ms']:.3f}"
        if contender in ratios:
            r = ratios[contender]
            line += f"   ratio {r['median']:.2f} (min/min {r['min']:.2f}, {r['range'][0]:.2f} .. {r['range'][1]:.2f})"
        print(line)
    floor = result["floor"]
    print(f"  sgemm {result['sgemm_gflops_min']:.0f} GFLOP/s; weights and cache {result['gigabytes_per_second']:.1f} GB/s;", end=" ")
    print(f"at the highest rates of this run {floor['ms']:.3f} ms ({floor['bound']})")
    for goal in result["goals"]:
        most = "" if goal["most"] is None else f", at most {goal['most']:.2f}"
        found = f"{goal['median']:.2f} (min/min {goal['min']:.2f})"
        print(f"  {goal['what']:26} {found}, goal {goal['goal']:g}{most}: {goal['verdict']}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a burst")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="thread: for one thread on a busy machine")
    parser.add_argument("--values", choices=graphs.VALUES, default="fp32", help="what the values of the layer's f32 matrices are rounded to")
    parser.add_argument("--accuracy-level", type=int, choices=[0, 3], default=0, help="of ours: 3 lets products have factors of bf16")
    parser.add_argument("--only", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if args.clock == "thread" and args.threads != 1:
        parser.error("--clock thread counts the calling thread alone: it needs --threads 1")
    if args.accuracy_level and args.values != "bf16":
        parser.error("--accuracy-level 3 changes products with weights of bf16 alone: it needs --values bf16")
    args.library = library()
    torch = eager.load()
    if torch:
        torch.set_num_threads(args.threads)
    head = machine(args)
    head["versions"]["torch"] = torch and torch.__version__
    bandwidth = read_bandwidth(args.threads)
    head |= {"clock": args.clock, "values": args.values, "accuracy_level": args.accuracy_level, "read_gigabytes_per_second": bandwidth * 1e-9, "rounds": args.rounds}
    head["build"] = build_of(args.library)
    print(f"{head['cpu']}, {head['cores']} cores, {args.threads} threads; values of {args.values}; {head['versions']}; read {bandwidth * 1e-9:.1f} GB/s")
    print(f"{args.library}, {head['build'][:12]}")
    results = {}
    for name in args.only:
        results[name] = measure(name, SHAPES[name], args, torch, bandwidth)
        report(name, results[name])
    head["load_after"] = os.getloadavg()
    if args.json:
        write_json(args.json, head, results)


if __name__ == "__main__":
    main()
