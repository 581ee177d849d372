"""Bytes in which the operator library packs matrices, and how many of them a call reads."""

import os

import numpy as np
import onnx
from onnx import TensorProto

# Columns of a panel of custom_ops/kernels.
PANEL = 32
# The most weights, those of all experts together, that are packed plain whatever is asked for.
PLAIN = 2**21
# Exponents in the table of a panel, beside that of zeros.
EXPONENTS = 15
LEVELS = ("portable", "neon", "avx2", "avx-vnni", "avx512", "amx")
WIDE_FLAGS = {"avx512f", "avx512bw", "avx512dq"}
TILE_FLAGS = WIDE_FLAGS | {"avx512_bf16", "amx_tile", "amx_bf16"}
STORED = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.BFLOAT16: np.uint16}
# Bytes of a value that is packed as it is stored.
INTEGERS = {TensorProto.INT8: 1, TensorProto.INT4: 0.5}


def processor(key):
    """What Linux tells of the first processor under a name; nothing elsewhere."""
    try:
        lines = open("/proc/cpuinfo", encoding="utf-8").read().splitlines()
    except OSError:
        return ""
    parts = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in parts if name.strip() == key), "")


def has(level, flags):
    """Whether the processor has these flags, and the library may use a level of instructions."""
    widest = os.environ.get("MOA_CPU_INSTRUCTIONS") or LEVELS[-1]
    return LEVELS.index(level) <= LEVELS.index(widest) and flags <= set(processor("flags").split())


def has_tiles():
    return has("amx", TILE_FLAGS)


def matrices(values):
    return values.reshape(-1, *values.shape[-2:])


def is_bf16(values):
    return values.dtype == np.uint16 or not any((one.view(np.uint32) & 0xFFFF).any() for one in matrices(values))


def is_f16(values):
    same = lambda one: np.array_equal(one.astype(np.float16).astype(np.float32).view(np.uint32), one.view(np.uint32))
    with np.errstate(over="ignore"):
        return all(same(one) for one in matrices(values))


def is_compact(values, blocks):
    """Whether values of bf16 may be packed in 12 bits: in no panel too many have an exponent that its table lacks."""
    inner, row = values.shape[-2:]
    if values.size <= PLAIN or has_tiles() or not has("avx512", WIDE_FLAGS):
        return False
    most, columns = inner // 8 // 4 + 4, row // blocks
    for one in matrices(values):
        exponents = (one >> 7 if one.dtype == np.uint16 else one.view(np.uint32) >> 23) & 0xFF
        for block in np.split(exponents, blocks, axis=1):
            for first in range(0, columns, PANEL):
                counts = np.bincount(block[:, first : first + PANEL].ravel(), minlength=256)
                if np.sort(counts[1:])[:-EXPONENTS].sum() > most:
                    return False
    return True


def packed_width(values, blocks=1, packing=None):
    """Bytes that the library takes for a weight, without what stands once in a panel.

    `values`, `[..., inner, blocks * columns]`, are f32, f16 or the bits of bf16. Unless `packing` is given, it is what
    `MOA_CPU_PACKING` says.
    """
    if values.dtype == np.float16:
        return 2
    if not is_bf16(values):
        return 2 if is_f16(values) and not has_tiles() else 4
    packing = packing or os.environ.get("MOA_CPU_PACKING")
    return 1.5 if packing == "compact" and is_compact(values, blocks) else 2


def packed_inputs(node):
    """What the library packs of a node: the number of a matrix, that of its scales, and blocks of a row."""
    given = {one.name: one.i for one in node.attribute}
    heads, parts = given.get("kv_num_heads", 1), 1 + given.get("gated", 0)
    return {
        "MoASelfAttention": [(2, None, 1), (3, 13, heads), (4, 14, 2 * heads), (5, 15, 1)],
        "MoACrossAttention": [(5, None, 1), (6, 9, heads), (7, 10, 1)],
        "MoEFeedForward": [(1, None, 1), (2, 6, parts), (3, 7, 1)],
        "LMHead": [(1, 2, 1)],
    }[node.op_type]


class Weights:
    """Matrices of a graph by name, those too that ONNX Runtime transposes when it loads."""

    def __init__(self, graph, folder):
        self.tensors, self.folder = {one.name: one for one in graph.initializer}, folder
        turned = [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in self.tensors]
        self.turned = {node.output[0]: node.input[0] for node in turned}

    def tensor(self, name):
        """None where a name is no weight."""
        return self.tensors.get(self.turned.get(name, name))

    def values(self, name):
        tensor = self.tensor(name)
        where, kind = {one.key: one.value for one in tensor.external_data}, STORED[tensor.data_type]
        if where:
            path, offset = self.folder / where["location"], int(where.get("offset", 0))
            values = np.memmap(path, kind, "r", offset, tuple(tensor.dims))
        else:
            values = np.frombuffer(tensor.raw_data, kind).reshape(tensor.dims)
        return values.T if name in self.turned else values


def read_by_operator(node, weights, tokens, packing):
    """Name and bytes of each matrix with its scales: of experts, those that so many tokens choose."""
    top_k = next((one.i for one in node.attribute if one.name == "top_k"), 1)
    inputs = dict(enumerate(node.input))
    for matrix, scale, blocks in packed_inputs(node):
        name, tensor = inputs.get(matrix), weights.tensor(inputs.get(matrix))
        if tensor is None:
            continue
        width = INTEGERS.get(tensor.data_type) or packed_width(weights.values(name), blocks, packing)
        amount = width * np.prod(tensor.dims, dtype=np.int64)
        if (scales := weights.tensor(inputs.get(scale))) is not None:
            amount += np.dtype(STORED[scales.data_type]).itemsize * np.prod(scales.dims, dtype=np.int64)
        yield name, amount * min(1, tokens * top_k / tensor.dims[0]) if len(tensor.dims) == 3 else amount


def read_by_others(node, weights):
    for name in node.input:
        tensor = weights.tensor(name)
        if tensor is not None and len(tensor.dims) >= 2 and node.op_type not in ("Gather", "Transpose"):
            yield name, 4 * np.prod(tensor.dims, dtype=np.int64)


def of_calls(model, folder=None, tokens=1, packing=None):
    """Bytes of matrices that a call of so many tokens reads at least, where every token takes other experts.

    Those of our operators count as they are packed; those of standard operators count four bytes a value, because ONNX
    Runtime widens them when it loads. `folder` holds the data that is not in `model`.
    """
    weights, found = Weights(model.graph, folder), {}
    for node in model.graph.node:
        ours = node.domain == "ai.moa"
        found |= read_by_operator(node, weights, tokens, packing) if ours else read_by_others(node, weights)
    return int(sum(found.values()))


def of_step(path, packing=None):
    """Those that a step of one token reads of an exported file."""
    return of_calls(onnx.load(path, load_external_data=False), path.parent, packing=packing)
