"""ONNX graphs of one attention layer: the operator, its rivals and the ceilings."""

import math
from dataclasses import dataclass

import numpy as np
from onnx import helper, numpy_helper


@dataclass(frozen=True)
class Shape:
    """One layer: width, chosen experts, experts, head width, heads, batch, new tokens, past tokens."""

    width: int
    k: int
    experts: int
    head: int
    heads: int
    batch: int
    tokens: int
    past: int
    jetmoe: bool = False

    @property
    def keys(self):
        return self.past + self.tokens

    @property
    def columns(self):
        return self.heads * self.head

    @property
    def gate_mode(self):
        return "topk_softmax" if self.jetmoe else "softmax_topk"

    def macs(self):
        """Multiply-accumulates: router, queries, keys and values, scores and mixing, output."""
        n = self.batch * self.tokens
        projections = n * self.width * (self.experts + 2 * self.k * self.columns + 2 * self.columns)
        return projections + 2 * n * self.k * self.columns * self.keys

    def mha_macs(self, columns):
        n = self.batch * self.tokens
        return 4 * n * self.width * columns + 2 * n * columns * self.keys

    def mha_heads(self):
        """Heads and head width of the dense block with at most as many multiply-accumulates, and 98 % of them."""
        best = None
        for head in range(32, 257, 8):
            count = int(self.macs() / self.mha_macs(head))
            share = self.mha_macs(count * head) / self.macs()
            if count and share >= 0.98:
                rank = (abs(math.log(head / self.head)), -share)
                best = min(best or (rank, count, head), (rank, count, head))
        return best[1], best[2]

    def cache_bytes(self):
        return 4 * 2 * self.batch * self.columns * self.past


def make_weights(shape, seed=0):
    random = np.random.default_rng(seed)

    def normal(*dims, fan_in):
        return (random.standard_normal(dims, np.float32) * fan_in**-0.5).astype(np.float32)

    c, e, gd = shape.width, shape.experts, shape.columns
    weights = {
        "router": normal(c, e, fan_in=c),
        "query": normal(e, c, gd, fan_in=c),
        "kv": normal(c, 2 * gd, fan_in=c),
        "output": normal(e, gd, c, fan_in=gd),
    }
    if shape.jetmoe:
        angle = np.arange(shape.keys)[:, None] * 10000.0 ** -(np.arange(shape.head // 2) * 2 / shape.head)
        weights["cos"], weights["sin"] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return weights


def make_feeds(shape, seed=1):
    random = np.random.default_rng(seed)
    feeds = {"x": random.standard_normal((shape.batch, shape.tokens, shape.width), np.float32)}
    if shape.past:
        cache = (shape.batch, shape.heads, shape.past, shape.head)
        feeds["past_key"] = random.standard_normal(cache, np.float32)
        feeds["past_value"] = random.standard_normal(cache, np.float32)
    return feeds


def halved(values):
    """What an export in fp16 stores and takes: matrices of experts, activations and caches."""
    kept = ("router", "cos", "sin")
    return {name: value if name in kept else value.astype(np.float16) for name, value in values.items()}


VALUES = ("fp32", "bf16", "fp16")


def rounded(weights, dtype):
    """f32 whose values are those of a narrower type, as a checkpoint in that type gives them to an export in fp32."""

    def narrow(value):
        if dtype == "fp16":
            return value.astype(np.float16).astype(np.float32)
        bits = value.view(np.uint32)
        return (bits + (bits >> 16 & 1) + 0x7FFF & 0xFFFF0000).astype(np.uint32).view(np.float32)

    matrices = () if dtype == "fp32" else ("router", "query", "kv", "output")
    return {name: narrow(value) if name in matrices else value for name, value in weights.items()}


def with_room(shape, feeds):
    """Caches with a row for each new token behind the past: buffers that hold past and present."""
    room = np.zeros((shape.batch, shape.heads, shape.tokens, shape.head), feeds["x"].dtype)
    return {name: np.concatenate([value, room], axis=2) if "past" in name else value for name, value in feeds.items()}


class Graph:
    """Nodes that are added one by one."""

    def __init__(self):
        self.nodes, self.initializers, self.count = [], [], 0

    def constant(self, value, name=None):
        self.count += 1
        name = name or f"constant_{self.count}"
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values):
        return self.constant(np.array(values, np.int64))

    def add(self, op, *inputs, outputs=1, names=None, domain="", **attributes):
        self.count += 1
        names = names or [f"value_{self.count}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, domain=domain, **attributes))
        return names[0] if len(names) == 1 else names

    def model(self, shape, feeds, outputs):
        inputs = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in feeds.items()]
        wanted = [helper.make_tensor_value_info(n, inputs[0].type.tensor_type.elem_type, d) for n, d in outputs.items()]
        graph = helper.make_graph(self.nodes, "layer", inputs, wanted, self.initializers)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moa", 1), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def layer_outputs(shape, heads=None, head=None):
    outputs = {"y": (shape.batch, shape.tokens, shape.width)}
    if shape.past:
        cache = (shape.batch, heads or shape.heads, shape.keys, head or shape.head)
        outputs |= {"present_key": cache, "present_value": cache}
    return outputs


def operator(shape, weights, feeds, accuracy_level=0):
    """The layer as one `ai.moa.MoASelfAttention` node."""
    return operators(shape, [weights], feeds, accuracy_level)


def operators(shape, layers, feeds, accuracy_level=0):
    """A node for each of `layers`, one behind the other, with one past for all; the last one's outputs are the model's."""
    g = Graph()
    x, mask = "x", g.constant(np.ones((shape.batch, shape.keys), np.int32))
    for number, weights in enumerate(layers):
        inputs = [x, mask, *(g.constant(weights[name]) for name in ("router", "query", "kv", "output")), ""]
        inputs += ["past_key", "past_value"] if shape.past else ["", ""]
        if shape.jetmoe:
            positions = np.tile(np.arange(shape.past, shape.keys), (shape.batch, 1))
            inputs += [g.constant(weights["cos"]), g.constant(weights["sin"]), g.constant(positions)]
        while not inputs[-1]:
            inputs.pop()
        outputs = [name if number == len(layers) - 1 else f"{name}_{number}" for name in layer_outputs(shape)]
        g.add(
            "MoASelfAttention", *inputs, names=outputs, domain="ai.moa",
            top_k=shape.k, kv_num_heads=shape.heads, causal=int(shape.jetmoe), scale=shape.head**-0.5,
            gate_mode=shape.gate_mode, skip_padded_queries=1, attention_mode="softmax",
            **({"accuracy_level": accuracy_level} if accuracy_level else {}),
        )  # fmt: skip
        x = outputs[0]
    return g.model(shape, feeds, layer_outputs(shape))


def mha(shape, _weights, feeds):
    """The dense block of equal multiply-accumulates: four MatMuls and `com.microsoft.MultiHeadAttention`."""
    heads, head = shape.mha_heads()
    random, columns, g = np.random.default_rng(2), heads * head, Graph()

    def weight(rows, columns):
        return g.constant(random.standard_normal((rows, columns), np.float32) * np.float32(rows**-0.5))

    inputs = [g.add("MatMul", "x", weight(shape.width, columns)) for _ in range(3)]
    names = ["attended"]
    if shape.past:
        inputs += ["", "", "", "past_key", "past_value"]
        names += ["present_key", "present_value"]
    attended = g.add("MultiHeadAttention", *inputs, names=names, domain="com.microsoft", num_heads=heads)
    attended = attended if isinstance(attended, str) else attended[0]
    g.add("MatMul", attended, weight(columns, shape.width), names=["y"])
    return g.model(shape, feeds, layer_outputs(shape, heads, head))


def mha_feeds(shape, feeds, seed=3):
    heads, head = shape.mha_heads()
    random, changed = np.random.default_rng(seed), dict(feeds)
    for name in ("past_key", "past_value"):
        if name in feeds:
            changed[name] = random.standard_normal((shape.batch, heads, shape.past, head), np.float32)
    return changed


class Standard:
    """The layer in standard operators; subclasses differ in how experts are computed."""

    def __init__(self, shape, weights, feeds):
        self.s, self.w, self.feeds, self.g = shape, weights, feeds, Graph()
        self.n = shape.batch * shape.tokens

    def build(self):
        s, g = self.s, self.g
        self.x = g.add("Reshape", "x", g.ints(self.n, s.width))
        self.route()
        query = self.queries()  # [n, k, G * D]
        query = g.add("Reshape", query, g.ints(s.batch, s.tokens, s.k, s.heads, s.head))
        query = g.add("Transpose", query, perm=[0, 3, 1, 2, 4])
        if s.jetmoe:
            query = self.rotate(query)
        query = g.add("Reshape", query, g.ints(s.batch, s.heads, s.tokens * s.k, s.head))
        key, value = self.cache()
        scores = g.add("MatMul", g.add("Mul", query, g.constant(np.float32(s.head**-0.5))), key)
        attended = g.add("MatMul", g.add("Softmax", scores, axis=-1), value)
        attended = g.add("Reshape", attended, g.ints(s.batch, s.heads, s.tokens, s.k, s.head))
        attended = g.add("Transpose", attended, perm=[0, 2, 3, 1, 4])
        attended = g.add("Reshape", attended, g.ints(self.n, s.k, s.columns))
        y = self.outputs(g.add("Mul", attended, g.add("Unsqueeze", self.gates, g.ints(2))))
        g.add("Reshape", y, g.ints(s.batch, s.tokens, s.width), names=["y"])
        return g.model(s, self.feeds, layer_outputs(s))

    def route(self):
        s, g = self.s, self.g
        logits = g.add("MatMul", self.x, g.constant(self.w["router"]))
        if s.jetmoe:
            top, self.indices = g.add("TopK", logits, g.ints(s.k), outputs=2, axis=-1)
            self.gates = g.add("Softmax", top, axis=-1)
        elif s.k == s.experts:
            self.gates, self.indices = g.add("Softmax", logits, axis=-1), None
        else:
            self.gates, self.indices = g.add("TopK", g.add("Softmax", logits, axis=-1), g.ints(s.k), outputs=2, axis=-1)

    def rotate(self, rows):
        g, row = self.g, slice(self.s.past, self.s.keys)
        cos, sin = (np.concatenate([self.w[n][row]] * 2, axis=-1)[0] for n in ("cos", "sin"))
        first, second = g.add("Split", rows, outputs=2, axis=-1)
        turned = g.add("Concat", g.add("Neg", second), first, axis=-1)
        return g.add("Add", g.add("Mul", rows, g.constant(cos)), g.add("Mul", turned, g.constant(sin)))

    def cache(self):
        """Keys [B, G, D, S] and values [B, G, S, D]."""
        s, g = self.s, self.g
        rows = g.add("MatMul", self.x, g.constant(self.w["kv"]))
        rows = g.add("Reshape", rows, g.ints(s.batch, s.tokens, 2, s.heads, s.head))
        rows = g.add("Transpose", rows, perm=[2, 0, 3, 1, 4])
        key, value = g.add("Split", rows, outputs=2, axis=0)
        cache = g.ints(s.batch, s.heads, s.tokens, s.head)
        key, value = g.add("Reshape", key, cache), g.add("Reshape", value, cache)
        if s.jetmoe:
            key = self.rotate(key)
        if s.past:
            key = g.add("Concat", "past_key", key, names=["present_key"], axis=2)
            value = g.add("Concat", "past_value", value, names=["present_value"], axis=2)
        return g.add("Transpose", key, perm=[0, 1, 3, 2]), value


class Dense(Standard):
    """Every expert for every token, two MatMuls; the chosen ones are gathered and scattered."""

    def queries(self):
        s, g = self.s, self.g
        weight = self.w["query"].transpose(1, 0, 2).reshape(s.width, -1)
        rows = g.add("MatMul", self.x, g.constant(weight))
        rows = g.add("Reshape", rows, g.ints(self.n, s.experts, s.columns))
        return rows if self.indices is None else g.add("GatherElements", rows, self.spread(), axis=1)

    def spread(self):
        s, g = self.s, self.g
        indices = g.add("Unsqueeze", self.indices, g.ints(2))
        return g.add("Expand", indices, g.ints(self.n, s.k, s.columns))

    def outputs(self, rows):
        s, g = self.s, self.g
        if self.indices is not None:
            zeros = g.constant(np.zeros((self.n, s.experts, s.columns), np.float32))
            rows = g.add("ScatterElements", zeros, self.spread(), rows, axis=1)
        rows = g.add("Reshape", rows, g.ints(self.n, s.experts * s.columns))
        return g.add("MatMul", rows, g.constant(self.w["output"].reshape(-1, s.width)))


class Grouped(Standard):
    """One MatMul per expert over the rows that chose it."""

    def places(self, expert):
        """Positions in the flat [n * k] of the pairs of one expert."""
        s, g = self.s, self.g
        if self.indices is None:
            return g.constant(np.arange(self.n, dtype=np.int64) * s.k + expert)
        flat = g.add("Reshape", self.indices, g.ints(-1))
        chosen = g.add("Equal", flat, g.constant(np.int64(expert)))
        return g.add("Squeeze", g.add("NonZero", chosen), g.ints(0))

    def queries(self):
        s, g = self.s, self.g
        self.all_places, parts = [self.places(expert) for expert in range(s.experts)], []
        for expert, places in enumerate(self.all_places):
            tokens = g.add("Div", places, g.constant(np.int64(s.k)))
            parts.append(g.add("MatMul", g.add("Gather", self.x, tokens, axis=0), g.constant(self.w["query"][expert])))
        rows, self.order = g.add("Concat", *parts, axis=0), g.add("Concat", *self.all_places, axis=0)
        empty = g.constant(np.zeros((self.n * s.k, s.columns), np.float32))
        index = g.add("Unsqueeze", self.order, g.ints(1))
        return g.add("ScatterND", empty, index, rows)

    def outputs(self, rows):
        s, g = self.s, self.g
        rows, parts = g.add("Reshape", rows, g.ints(self.n * s.k, s.columns)), []
        for expert, places in enumerate(self.all_places):
            parts.append(g.add("MatMul", g.add("Gather", rows, places, axis=0), g.constant(self.w["output"][expert])))
        rows = g.add("Concat", *parts, axis=0)
        empty = g.constant(np.zeros((self.n * s.k, s.width), np.float32))
        rows = g.add("ScatterND", empty, g.add("Unsqueeze", self.order, g.ints(1)), rows)
        rows = g.add("Reshape", rows, g.ints(self.n, s.k, s.width))
        return g.add("ReduceSum", rows, g.ints(1), keepdims=0)


class Chosen(Standard):
    """The weights of the chosen experts are gathered; for single tokens."""

    def gathered(self, name):
        weight = self.g.constant(self.w[name])
        return weight if self.indices is None else self.g.add("Gather", weight, self.flat, axis=0)

    def queries(self):
        s, g = self.s, self.g
        self.flat = None if self.indices is None else g.add("Reshape", self.indices, g.ints(-1))
        return g.add("Reshape", g.add("MatMul", self.x, self.gathered("query")), g.ints(1, s.k, s.columns))

    def outputs(self, rows):
        s, g = self.s, self.g
        rows = g.add("Reshape", rows, g.ints(s.k, 1, s.columns))
        parts = g.add("MatMul", rows, self.gathered("output"))
        return g.add("ReduceSum", parts, g.ints(0), keepdims=0)


def standard_graphs(shape, weights, feeds):
    """Every standard graph that suits the shape, by name."""
    kinds = {"dense": Dense, "grouped": Grouped}
    if shape.batch * shape.tokens == 1:
        kinds["chosen"] = Chosen
    return {name: kind(shape, weights, feeds).build() for name, kind in kinds.items()}


def matmul(rows, inner, columns):
    """One MatMul with a constant right factor."""
    g = Graph()
    weight = np.random.default_rng(4).standard_normal((inner, columns), np.float32)
    g.add("MatMul", "x", g.constant(weight), names=["y"])
    return g.model(None, {"x": np.zeros((rows, inner), np.float32)}, {"y": (rows, columns)})
