"""The CPU operator with matrices in integers beside multi-head attention whose matrices are, in one run.

    python3 -m pip install numpy onnx onnxruntime
    python3 benches/integers.py [--threads 2] [--rounds 9] [--bits 8 4] [--only NAME ...] [--json FILE]

The rival is ONNX Runtime's block of `cpu_operator.py` with as many multiply-accumulates, whose four products are
`com.microsoft.MatMulNBits` with a scale for each 32 values. Both stand there twice: with level 0, where what is
multiplied with integers stays f32, and with level 4, where it may be int8; there factors of our attention may be bf16
too, which is not told apart, and the rival's stay f32. Outputs are compared with numpy in f64 and
with the operator in f32 on what the integers stand for. Bursts take turns as in `cpu_operator.py`, which see for ratios.
"""

import argparse
import dataclasses
import os
import pathlib

import numpy as np
import onnxruntime
from onnx import ModelProto, TensorProto, helper, numpy_helper

import cpu_operator as bench
import cpu_operator_graphs as graphs

BLOCK = 32
LEVELS = (0, 4)
# Inputs of a node from the router's matrix to the scales of its integers.
MATRICES = ("query", "kv", "output")
TABLES = ("cos", "sin")


def to_bf16(values):
    """f32 rounded to the nearest bf16, and its bits."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + (bits >> 16 & 1) + 0x7FFF) >> 16
    return (bits << 16).astype(np.uint32).view(np.float32), bits.astype(np.uint16)


def blocks_of(matrix):
    """Matrices [..., rows, columns] in blocks of rows, [..., blocks, BLOCK, columns], filled up with zeros."""
    missing = -matrix.shape[-2] % BLOCK
    padded = np.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + [(0, missing), (0, 0)])
    return padded.reshape(*matrix.shape[:-2], -1, BLOCK, matrix.shape[-1])


def in_integers(matrix, bits):
    """The integers of a matrix and its scales, both as initializers have them, and what they stand for."""
    if bits == 8:
        scale = np.abs(matrix).max(-2) / np.float32(127)
        integers = np.rint(matrix / scale[..., None, :])
        return (TensorProto.INT8, integers.astype(np.int8).tobytes()), scale, integers * scale[..., None, :]
    blocks = blocks_of(matrix)
    scale, stored = to_bf16(np.abs(blocks).max(-2) / np.float32(7))
    integers = np.clip(np.rint(blocks / scale[..., None, :]), -8, 7)
    rows = lambda values: values.reshape(*matrix.shape[:-2], -1, matrix.shape[-1])[..., : matrix.shape[-2], :]
    flat = rows(integers).astype(np.int8).ravel() & 15
    packed = (flat[::2] | flat[1::2] << 4).astype(np.uint8).tobytes()
    return (TensorProto.INT4, packed), stored, rows(integers * scale[..., None, :]).astype(np.float32)


class IntegerGraph(graphs.Graph):
    """A graph whose matrices are integers."""

    def tensor(self, data_type, dims, raw):
        self.count += 1
        name = f"constant_{self.count}"
        self.initializers.append(helper.make_tensor(name, data_type, dims, raw, raw=True))
        return name

    def model(self, shape, feeds, outputs):
        model = ModelProto.FromString(super().model(shape, feeds, outputs))
        model.ir_version, model.opset_import[0].version = 10, 21
        return model.SerializeToString()


def operator(shape, weights, feeds, bits, level):
    """The layer as one node, and its weights as the integers stand for them."""
    g, stands_for = IntegerGraph(), dict(weights)
    names, scales = {}, {}
    for matrix in MATRICES:
        (data_type, raw), scale, stands_for[matrix] = in_integers(weights[matrix], bits)
        names[matrix] = g.tensor(data_type, weights[matrix].shape, raw)
        kind = TensorProto.FLOAT if bits == 8 else TensorProto.BFLOAT16
        scales[matrix] = g.tensor(kind, scale.shape, scale.tobytes())
    mask = g.constant(np.ones((shape.batch, shape.keys), np.int32))
    inputs = ["x", mask, g.constant(weights["router"]), *names.values(), ""]
    inputs += ["past_key", "past_value"] if shape.past else ["", ""]
    positions = np.tile(np.arange(shape.past, shape.keys), (shape.batch, 1))
    rotary = [*(g.constant(weights[table]) for table in TABLES), g.constant(positions)] if shape.jetmoe else [""] * 3
    g.add(
        "MoASelfAttention", *inputs, *rotary, "", *scales.values(), names=list(graphs.layer_outputs(shape)), domain="ai.moa",
        top_k=shape.k, kv_num_heads=shape.heads, causal=int(shape.jetmoe), scale=shape.head**-0.5, gate_mode=shape.gate_mode,
        skip_padded_queries=1, attention_mode="softmax", accuracy_level=level,
    )  # fmt: skip
    return g.model(shape, feeds, graphs.layer_outputs(shape)), stands_for


def many_bits(g, x, matrix, bits, level, **names):
    """`x` times a matrix in integers, and what they stand for."""
    blocks = np.moveaxis(blocks_of(matrix), -1, 0)
    most, middle = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(most)
    integers = np.rint(blocks / np.where(scale == 0, 1, scale))
    stored = (integers + middle).astype(np.uint8)
    stored = stored if bits == 8 else stored[..., ::2] | stored[..., 1::2] << 4
    rows, columns = matrix.shape
    attributes = dict(K=rows, N=columns, bits=bits, block_size=BLOCK, accuracy_level=level)
    out = g.add(
        "MatMulNBits", x, g.constant(stored), g.constant(scale.astype(np.float32).ravel()), domain="com.microsoft",
        **attributes, **names,
    )  # fmt: skip
    stands_for = np.moveaxis((integers * scale).reshape(columns, -1)[:, :rows], 0, -1)
    return out, stands_for


def attention(shape, feeds, bits, level):
    """The dense block, and its four matrices as the integers stand for them."""
    plain = ModelProto.FromString(graphs.mha(shape, None, feeds))
    matrices = [numpy_helper.to_array(tensor) for tensor in plain.graph.initializer]
    heads, head = shape.mha_heads()
    g = IntegerGraph()
    projected = [many_bits(g, "x", matrix, bits, level) for matrix in matrices[:3]]
    (block,) = [node for node in plain.graph.node if node.op_type == "MultiHeadAttention"]
    inputs = [name for name, _ in projected] + list(block.input)[3:]
    g.add("MultiHeadAttention", *inputs, names=list(block.output), domain="com.microsoft", num_heads=heads)
    last = many_bits(g, block.output[0], matrices[3], bits, level, names=["y"])
    stand_for = [values for _, values in [*projected, last]]
    exact = graphs.Graph()
    for values in stand_for:
        exact.constant(values)
    outputs = graphs.layer_outputs(shape, heads, head)
    return g.model(shape, feeds, outputs), exact.model(shape, feeds, outputs)


def contenders(shape, args, bits):
    weights, feeds = graphs.make_weights(shape), graphs.make_feeds(shape)
    dense_feeds, runs = graphs.mha_feeds(shape, feeds), {}
    for level in LEVELS:
        tolerance = bench.ROUNDED if level else bench.TOLERANCE
        model, stands_for = operator(shape, weights, feeds, bits, level)
        runs[f"ours {level}"] = run = bench.OrtRun(model, feeds, args)
        expected = bench.OrtRun(graphs.operator(shape, stands_for, feeds), feeds, args)
        bench.check(f"ours {level}", np.array(run()), expected(), tolerance)
        model, exact = attention(shape, dense_feeds, bits, level)
        runs[f"MHA {level}"] = run = bench.OrtRun(model, dense_feeds, args)
        bench.check(f"MHA {level}", run(), bench.mha_reference(exact, dense_feeds, shape.mha_heads()[0]), 3 * tolerance)
    return runs


def measure(shape, args, bits):
    runs = contenders(shape, args, bits)
    found = bench.interleave(runs, args.rounds, args.seconds, args.threads)
    times = {name: bench.summary(bursts) for name, bursts in found.items()}
    ratios = {f"MHA {level} / ours {level}": (f"MHA {level}", f"ours {level}") for level in LEVELS}
    ratios["ours 0 / ours 4"] = ("ours 0", "ours 4")
    ratios = {name: bench.ratio(times[rival], times[ours]) for name, (rival, ours) in ratios.items()}
    return {"shape": dataclasses.asdict(shape), "bits": bits, "load": os.getloadavg(), "times": times, "ratios": ratios}


def report(name, result):
    print(f"\n{name}, {result['bits']} bits")
    for contender, t in result["times"].items():
        quartiles = f"[{t['quartiles_ms'][0]:.3f}, {t['quartiles_ms'][1]:.3f}]"
        print(f"  {contender:8} {t['median_ms']:9.3f} ms  {quartiles}  min {t['min_ms']:.3f}")
    for what, r in result["ratios"].items():
        print(f"  {what:16} {r['median']:.2f} (min/min {r['min']:.2f}, {r['range'][0]:.2f} .. {r['range'][1]:.2f})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="length of a burst")
    parser.add_argument("--bits", type=int, nargs="*", choices=[8, 4], default=[8, 4])
    parser.add_argument("--only", nargs="*", default=list(bench.SHAPES), choices=list(bench.SHAPES))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.library = bench.library()
    head = bench.machine(args) | {"rounds": args.rounds, "build": bench.build_of(args.library)}
    print(f"{head['cpu']}, {head['cores']} cores, {args.threads} threads; onnxruntime {onnxruntime.__version__}")
    print(f"{args.library}, {head['build'][:12]}")
    results = {}
    for name, bits in [(name, bits) for name in args.only for bits in args.bits]:
        results[f"{name}-int{bits}"] = result = measure(bench.SHAPES[name], args, bits)
        report(name, result)
    head["load_after"] = os.getloadavg()
    if args.json:
        bench.write_json(args.json, head, results)


if __name__ == "__main__":
    main()
