#!/usr/bin/env python3
"""Time of one decode step of an exported causal language model, and the share of the read bandwidth that it reaches.

    python3 benches/decode_step.py OUT --library target/release/libmoa_ort.so

Weights that a step reads: of every expert matrix the share of its chosen experts, every other matrix whole, as the
library packs them (`packed_weights.py`). A matrix of standard operators counts four bytes a value, because ONNX Runtime
widens it when it loads. Rows of tables are left out.
Needs numpy, onnx and onnxruntime.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import time

import numpy as np
import onnxruntime

import cpu_operator
import packed_weights


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="what moa-export wrote")
    parser.add_argument("--library", type=pathlib.Path, required=True, help="libmoa_ort.so")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--past", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path, help="where every figure is kept")
    return parser.parse_args()


def feeds(session, past):
    values = {"input_ids": np.array([[5]]), "attention_mask": np.ones([1, past + 1], np.int64),
              "position_ids": np.array([[past]])}
    random = np.random.default_rng(0)
    known = {one.name for one in session.get_inputs()}
    values = {name: value for name, value in values.items() if name in known}
    for one in session.get_inputs():
        if one.name not in values:
            kind = np.float16 if "float16" in one.type else np.float32
            values[one.name] = random.standard_normal([1, one.shape[1], past, one.shape[3]]).astype(kind)
    return values


def main():
    args = arguments()
    model = args.folder / "model.onnx"
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = args.threads
    settings.register_custom_ops_library(str(args.library.resolve()))
    start = time.perf_counter()
    session = onnxruntime.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
    result = {"load_seconds": time.perf_counter() - start, "threads": args.threads, "past": args.past}
    inputs, seconds = feeds(session, args.past), []
    for _ in range(args.steps + 2):
        start = time.perf_counter()
        (logits,) = session.run(["logits"], inputs)
        seconds.append(time.perf_counter() - start)
        assert np.isfinite(logits).all(), "logits are not finite"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    steady, amount = seconds[2:], packed_weights.of_step(model)
    bandwidth = cpu_operator.read_bandwidth(args.threads)
    result |= {"first_call_seconds": seconds[0], "seconds": steady, "bytes": amount, "read_bandwidth": bandwidth,
               "load_average": os.getloadavg(), "onnxruntime": onnxruntime.__version__,
               "peak_bytes": peak}
    median = statistics.median(steady)
    print(f"load {result['load_seconds']:.1f} s, first call {seconds[0]:.3f} s, peak {result['peak_bytes'] / 1e9:.1f} GB")
    print(f"step: median {median:.4f} s, least {min(steady):.4f} s; {amount / 1e9:.2f} GB of weights, "
          f"{amount / median / 1e9:.1f} GB/s, {amount / median / bandwidth:.0%} of {bandwidth / 1e9:.1f} GB/s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
