"""What programs of benches/ say of builds and bytes."""

import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))

import cpu_operator
import cpu_operator_builds as builds
import cpu_operator_goals as goals
import cpu_operator_graphs as graphs
import packed_weights


def run_of(output):
    """A run whose one output is there already."""
    run = mock.Mock()
    run.values = {"y": np.float32(output)}
    return run


class Builds(unittest.TestCase):
    def test_outputs_are_compared_bit_by_bit(self):
        for other, same in [([1, 0, np.nan], True), ([1, -0.0, np.nan], False), ([1, 0, -np.nan], False)]:
            outputs = [{"y": np.float32(values)} for values in ([1, 0, np.nan], other)]
            self.assertEqual(builds.bitwise_equal(*outputs), same, other)

    def test_every_session_is_compared(self):
        args = types.SimpleNamespace(libraries=["a", "b", "c"], sessions=3, turns=1, seconds=0.0, threads=1)
        runs = lambda outputs: {number: run_of([value]) for number, value in enumerate(outputs)}
        turns = [runs(outputs) for outputs in [(1, 1, 2), (3, 3, 3), (4, 4, 4)]]
        times = {number: [[1.0]] for number in range(3)}
        made = mock.patch.object(builds, "sessions", side_effect=turns)
        timed = mock.patch.object(builds, "interleave", return_value=times)
        with made, timed, mock.patch.object(builds, "report"):
            found = [result["same_bits"] for result in builds.measure(None, args)]
        self.assertEqual(found, [True, True, False])


class Statistics(unittest.TestCase):
    def test_quartiles_lie_between_the_values(self):
        for values, found in [([5], [5, 5]), ([1, 9], [3, 7]), ([4, 1, 5, 3, 2], [2, 4])]:
            self.assertEqual(cpu_operator.quartiles(values), found)


def levels(*known):
    """A processor that has these levels of instructions."""
    return mock.patch.object(packed_weights, "has", side_effect=lambda level, flags: level in known)


def large(odd, shape=(1024, 2176)):
    """f32 whose values are bf16, with so many exponents beside one in a panel."""
    values = np.ones(shape, np.float32)
    values[..., :odd, 0] = np.float32(2) ** np.arange(1, odd + 1)
    return values


class PackedWidths(unittest.TestCase):
    def width(self, values, packing="plain", blocks=1):
        return packed_weights.packed_width(values, blocks, packing)

    def test_f32_takes_two_bytes_where_they_hold_every_value(self):
        values = np.random.default_rng(0).standard_normal((3, 8, 40), np.float32)
        bf16 = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
        f16 = values.astype(np.float16).astype(np.float32)
        with levels("avx512"):
            self.assertEqual([self.width(one) for one in (values, bf16, f16, values.astype(np.float16))], [4, 2, 2, 2])
            self.assertEqual(self.width((bf16.view(np.uint32) >> 16).astype(np.uint16)), 2)
            bf16[2, 7, 39] = 0.1
            self.assertEqual(self.width(bf16), 4)
        with levels("avx512", "amx"):
            self.assertEqual(self.width(f16), 4)

    def test_compact_takes_12_bits_of_large_matrices_of_few_exponents(self):
        with levels("avx512"):
            # 1, 14 more, and the 36 that stand beside 1024 rows.
            for odd, width in [(0, 1.5), (50, 1.5), (51, 2)]:
                values = large(odd)
                bits = (values.view(np.uint32) >> 16).astype(np.uint16)
                self.assertEqual([self.width(one, "compact", 17) for one in (values, bits)], [width] * 2, odd)
                self.assertEqual(self.width(values), 2)
            self.assertEqual(self.width(large(0, (1024, 2048)), "compact"), 2)
            self.assertEqual(self.width(large(0, (2, 1024, 1088)), "compact"), 1.5)
            with mock.patch.dict("os.environ", MOA_CPU_PACKING="compact"):
                self.assertEqual(packed_weights.packed_width(large(0)), 1.5)
        for known in [(), ("avx512", "amx")]:
            with levels(*known):
                self.assertEqual(self.width(large(0), "compact"), 2)

    def test_instructions_are_bounded_as_those_of_the_library(self):
        with mock.patch.object(packed_weights, "processor", return_value=" ".join(packed_weights.TILE_FLAGS)):
            for widest, known in [("", [True, True]), ("avx512", [True, False]), ("avx2", [False, False])]:
                with mock.patch.dict("os.environ", MOA_CPU_INSTRUCTIONS=widest):
                    found = [packed_weights.has("avx512", packed_weights.WIDE_FLAGS), packed_weights.has_tiles()]
                    self.assertEqual(found, known, widest)


def model(nodes, **weights):
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items() if isinstance(value, np.ndarray)]
    tensors += [value for value in weights.values() if not isinstance(value, np.ndarray)]
    return helper.make_model(helper.make_graph(nodes, "graph", [], [], tensors))


def attention(*, scales=()):
    inputs = ["x", "mask", "router", "query", "kv", "output", "", "", "", "cos", "sin", "positions", "", *scales]
    return helper.make_node("MoASelfAttention", inputs, ["y"], domain="ai.moa", top_k=2, kv_num_heads=2)


class BytesOfCalls(unittest.TestCase):
    SHAPES = {"router": (8, 4), "query": (4, 8, 16), "kv": (8, 32), "output": (4, 16, 8)}

    def given(self, kind=np.float32):
        tables = {"cos": np.ones((64, 4), np.float32), "sin": np.ones((64, 4), np.float32)}
        return tables | {name: np.full(shape, 0.5, kind) for name, shape in self.SHAPES.items()}

    def test_chosen_experts_count_as_they_are_packed(self):
        weights = self.given()
        one = model([attention()], **weights)
        self.assertEqual(packed_weights.of_calls(one), 2 * (32 + 2 * 128 + 256 + 2 * 128))
        self.assertEqual(packed_weights.of_calls(one, tokens=9), 2 * (32 + 4 * 128 + 256 + 4 * 128))
        weights["query"][3, 7, 15] = 0.1
        one = model([attention()], **weights)
        self.assertEqual(packed_weights.of_calls(one), 2 * (32 + 256 + 2 * 128) + 4 * 2 * 128)

    def test_integers_count_with_their_scales(self):
        scales = {"query_scale": np.ones((4, 16), np.float32), "kv_scale": np.ones(32, np.float32)}
        scales["output_scale"] = np.ones((4, 8), np.float32)
        weights = self.given(np.int8) | scales | {"router": np.full((8, 4), 0.5, np.float32)}
        found = packed_weights.of_calls(model([attention(scales=scales)], **weights))
        self.assertEqual(found, 2 * 32 + 2 * 128 + 256 + 2 * 128 + 4 * (2 * 16 + 32 + 2 * 8))
        weights["query"] = helper.make_tensor("query", TensorProto.INT4, (4, 8, 16), bytes(256), raw=True)
        blocks = helper.make_tensor("query_scale", TensorProto.BFLOAT16, (4, 1, 16), bytes(128), raw=True)
        weights["query_scale"] = blocks
        found = packed_weights.of_calls(model([attention(scales=scales)], **weights))
        self.assertEqual(found, 2 * 32 + 128 + 256 + 2 * 128 + 2 * 2 * 16 + 4 * (32 + 2 * 8))

    def test_a_head_that_is_the_table_of_tokens_counts(self):
        nodes = [helper.make_node("Gather", ["table", "ids"], ["x"])]
        nodes.append(helper.make_node("Transpose", ["table"], ["turned"]))
        table = np.full((300, 8), 0.5, np.float32)
        product = helper.make_node("MatMul", ["y", "turned"], ["logits"])
        self.assertEqual(packed_weights.of_calls(model([*nodes, product], table=table)), 4 * 2400)
        head = helper.make_node("LMHead", ["y", "turned"], ["logits"], domain="ai.moa")
        self.assertEqual(packed_weights.of_calls(model([*nodes, head], table=table)), 2 * 2400)
        self.assertEqual(packed_weights.of_calls(model(nodes, table=table)), 0)

    def test_a_layer_counts_what_its_matrices_are_packed_in(self):
        shape = graphs.Shape(1024, 1, 17, 128, 1, 1, 2, 4)
        weights, feeds = graphs.rounded(graphs.make_weights(shape), "bf16"), graphs.make_feeds(shape)
        small, experts, caches = 1024 * (17 + 2 * 128), 2 * 2 * 1024 * 128, 2 * 4 * 128 * 4
        with levels("avx512"):
            for packing, width in [("plain", 2), ("compact", 1.5)]:
                with mock.patch.dict("os.environ", MOA_CPU_PACKING=packing):
                    found = cpu_operator.bytes_of_call(shape, weights, feeds)
                self.assertEqual(found, 2 * small + width * experts + caches, packing)

    def test_runs_that_count_other_bytes_are_told(self):
        run = lambda **shapes: {"results": {shape: {"weight_bytes": count} for shape, count in shapes.items()}}
        self.assertIsNone(goals.counted_apart([run(a=1, b=2), run(b=2), run(a=1)]))
        self.assertEqual(goals.counted_apart([run(a=1, b=2), run(a=1, b=3)]), "b")


if __name__ == "__main__":
    unittest.main()
