"""Builds of the operator library beside each other, in one run.

    python3 -m pip install numpy onnx onnxruntime
    python3 benches/cpu_operator_builds.py BEFORE.so AFTER.so[=PACKING] [--shapes NAME ...] [--sessions 4] [--turns 5]
        [--layers 18] [--threads 2] [--dtype fp16] [--values bf16] [--in-place] [--json FILE]

Every build gets sessions of its own in this process, made in random order, one after the other: where the pages of a
session lie counts for some % of a short call. Bursts of calls take turns, in another order each turn. A ratio is the time
of the first build / that of another, both from the same turn: from medians of bursts, from their 5th percentiles, and
from the fastest calls of all turns. Besides the shapes of `cpu_operator.py`, a name of the form `512,8,32,128,1,1,1,128` is
width, k, E, head, heads, batch, tokens and past. With `--layers` each layer has weights of its own and the next one takes its
output, as in a model, whose weights come from memory. Builds are named whose outputs have other bits than those of the
first in any session. With `=PACKING` a build packs weights as `MOA_CPU_PACKING` says, so that one build may stand beside
itself. JSON names builds by the SHA-256 of their files, in the order in which they were given, and their ways to pack.
"""

import argparse
import os
import pathlib
import random
import statistics
import typing

import numpy as np

import cpu_operator_graphs as graphs
from cpu_operator import SHAPES, OrtRun, build_of, interleave, machine, quartiles, summary, write_json
from cpu_operator_graphs import Shape


PACKINGS = ("=plain", "=compact")


class Library(typing.NamedTuple):
    path: pathlib.Path
    packing: str

    def __str__(self):
        return f"{self.path}={self.packing}" if self.packing else str(self.path)


def library_of(name):
    path, _, packing = name.rpartition("=") if name.endswith(PACKINGS) else (name, "", "")
    return Library(pathlib.Path(path), packing)


def shape_of(name):
    if name in SHAPES:
        return SHAPES[name]
    try:
        return Shape(*(int(size) for size in name.split(",")))
    except (TypeError, ValueError):
        known = ", ".join(SHAPES)
        raise argparse.ArgumentTypeError(f"{name}: expected one of {known}, or eight sizes with commas between") from None


def sessions(shape, args):
    """A run for each build, by number; with `--in-place` past and present of each are one buffer."""
    layers, feeds = [graphs.make_weights(shape, seed) for seed in range(args.layers)], graphs.make_feeds(shape)
    if args.dtype == "fp16":
        layers, feeds = [graphs.halved(weights) for weights in layers], graphs.halved(feeds)
    layers = [graphs.rounded(weights, args.values) for weights in layers]
    if args.in_place:
        feeds = graphs.with_room(shape, feeds)
    runs = {}
    for number, library in random.sample(list(enumerate(args.libraries)), len(args.libraries)):
        own = {name: value.copy() for name, value in feeds.items()}
        build = argparse.Namespace(threads=args.threads, library=str(library.path.resolve()))
        os.environ["MOA_CPU_PACKING"] = library.packing
        runs[number] = OrtRun(graphs.operators(shape, layers, own), own, build, args.in_place)
    return dict(sorted(runs.items()))


def fifth_percentile(times):
    return sorted(times)[len(times) // 20]


def compare(first, other):
    """Ratios of the times of two builds."""
    result = {}
    for name, statistic in (("median", statistics.median), ("5th percentile", fifth_percentile)):
        ratios = [statistic(a) / statistic(b) for a, b in zip(first, other)]
        result[name] = {"ratio": statistics.median(ratios), "quartiles": quartiles(ratios)}
    result["min"] = {"ratio": min(map(min, first)) / min(map(min, other))}
    return result


def report(library, result):
    line = f"  {library}: {result['median_ms']:.4f} ms, min {result['min_ms']:.4f}"
    if ratios := result["ratios"]:
        median, fifth = ratios["median"], ratios["5th percentile"]
        line += f"; {median['ratio']:.3f} times as fast [{median['quartiles'][0]:.3f}, {median['quartiles'][1]:.3f}]"
        line += f", 5th percentile {fifth['ratio']:.3f}, min {ratios['min']['ratio']:.3f}; "
        line += "the same bits" if result["same_bits"] else "OTHER BITS"
    print(line, flush=True)


def bitwise_equal(a, b):
    """Whether outputs are the same bit by bit, as 0 and -0 are not and a NaN is to itself."""
    return all(np.array_equal(a[name].view(np.uint8), b[name].view(np.uint8)) for name in a)


def measure(shape, args):
    found, same, results = {}, [True] * len(args.libraries), []
    for _ in range(args.sessions):
        runs = sessions(shape, args)
        for number, run in runs.items():
            run()
            same[number] &= bitwise_equal(run.values, runs[0].values)
        for number, bursts in interleave(runs, args.turns, args.seconds, args.threads).items():
            found.setdefault(number, []).extend(bursts)
    for number, library in enumerate(args.libraries):
        ratios = compare(found[0], found[number]) if number else None
        results.append(summary(found[number]) | {"ratios": ratios, "same_bits": same[number]})
        report(library, results[-1])
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("libraries", type=library_of, nargs="+", metavar="LIBRARY", help="the first is what others are held against")
    parser.add_argument("--shapes", type=str, nargs="+", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--sessions", type=int, default=4, help="how often sessions are made anew")
    parser.add_argument("--turns", type=int, default=5, help="of each set of sessions")
    parser.add_argument("--layers", type=int, default=1, help="layers one behind the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a burst")
    parser.add_argument("--dtype", choices=["fp32", "fp16"], default="fp32", help="of matrices, activations and caches")
    parser.add_argument("--values", choices=graphs.VALUES, default="fp32", help="what the values of f32 matrices are rounded to")
    parser.add_argument("--in-place", action="store_true", help="past and present are one buffer")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    for library in args.libraries:
        if not library.path.is_file():
            parser.error(f"{library.path}: no such file; `cargo build --release -p moa-ort` makes target/release/libmoa_ort.so")
    try:
        shapes = {name: shape_of(name) for name in args.shapes}
    except argparse.ArgumentTypeError as wrong:
        parser.error(str(wrong))
    if args.dtype == "fp16" and args.values != "fp32":
        parser.error("--values: the values of fp16 matrices are those of fp16")
    if args.layers < 1 or args.in_place and args.layers > 1:
        parser.error("--layers: a number from 1 on; with --in-place 1, since layers share one past")
    if args.in_place and not all(shape.past for shape in shapes.values()):
        parser.error("--in-place: a shape without a past has no cache to share; name others with --shapes")
    kept = ("dtype", "values", "layers", "in_place", "sessions", "turns", "seconds")
    head = machine(args) | {name: getattr(args, name) for name in kept}
    head["builds"] = [build_of(library.path) for library in args.libraries]
    head["packing"] = [library.packing or "plain" for library in args.libraries]
    results = {}
    for name, shape in shapes.items():
        print(f"{name}, {args.layers} layers, {args.dtype}, values of {args.values}, {args.threads} threads{', in place' if args.in_place else ''}")
        results[name] = measure(shape, args)
    if args.json:
        write_json(args.json, head, results)


if __name__ == "__main__":
    main()
