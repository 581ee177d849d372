"""The ONNX Runtime operator library against a numpy f64 reference, through real sessions.

MOA_ORT_LIBRARY names the shared library. The contract is that of custom_ops/schema.
"""

import gc
import os
import threading
import unittest

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from operator_reference import REFERENCES, feed_forward

LIBRARY = os.environ.get("MOA_ORT_LIBRARY")

FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64
ONNX_TYPES = {
    "float32": FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "int4": TensorProto.INT4,
    "int8": TensorProto.INT8,
    "int32": INT32,
    "int64": INT64,
}

INPUTS = {
    "MoASelfAttention": (
        "hidden_states attention_mask router_weight query_weight kv_weight output_weight output_bias past_key past_value "
        "cos_cache sin_cache position_ids router_input query_scale kv_scale output_scale"
    ).split(),
    "MoACrossAttention": [
        "hidden_states",
        "key",
        "value",
        "key_mask",
        "query_mask",
        "router_weight",
        "query_weight",
        "output_weight",
        "output_bias",
        "query_scale",
        "output_scale",
    ],
    "MoEFeedForward": (
        "hidden_states router_weight input_weight output_weight output_bias router_input input_scale output_scale"
    ).split(),
}
CHOICE = [("topk_indices", INT64), ("topk_weights", FLOAT)]
OUTPUTS = {
    "MoASelfAttention": [("output", FLOAT), ("present_key", FLOAT), ("present_value", FLOAT), *CHOICE],
    "MoACrossAttention": [("output", FLOAT), *CHOICE],
    "MoEFeedForward": [("output", FLOAT), *CHOICE],
}
# Outputs whose type is that of the activations.
ACTIVATION_OUTPUTS = {"output", "present_key", "present_value"}
GATE_MODES = ["softmax_topk", "softmax_topk_renorm", "topk_softmax"]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]


def model_bytes(operator, attributes, feeds, outputs=None, name="the_node", constants=()):
    """A model with one node whose inputs are graph inputs of the feeds' types; absent inputs have no feed."""
    half = feeds["hidden_states"].dtype == np.float16
    names = [input_name if input_name in feeds else "" for input_name in INPUTS[operator]]
    while names and not names[-1]:
        names.pop()
    kinds = {n: TensorProto.FLOAT16 if half and n in ACTIVATION_OUTPUTS else kind for n, kind in OUTPUTS[operator]}
    wanted = [pair for pair in kinds.items() if outputs is None or pair[0] in outputs]
    all_names = [pair[0] for pair in OUTPUTS[operator]]
    last = max(all_names.index(pair[0]) for pair in wanted)
    out_names = [n if n in {pair[0] for pair in wanted} else "" for n in all_names[: last + 1]]
    node = helper.make_node(operator, names, out_names, name=name, domain="ai.moa", **attributes)
    given = [n for n in names if n and n not in constants]
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(n, ONNX_TYPES[str(feeds[n].dtype)], [None] * feeds[n].ndim) for n in given],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in wanted],
        [numpy_helper.from_array(feeds[n], n) for n in names if n in constants],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.moa", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def session(model, threads=1):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(LIBRARY)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def compute(operator, attributes, feeds, outputs=None, threads=1, constants=()):
    given = {name: value for name, value in feeds.items() if name not in constants}
    found = session(model_bytes(operator, attributes, feeds, outputs, constants=constants), threads).run(None, given)
    names = [pair[0] for pair in OUTPUTS[operator] if outputs is None or pair[0] in outputs]
    return dict(zip(names, found))


def masks(random, rows, length):
    """The first row whole, the others right-padded, left-padded, with holes, or all padding."""
    mask = np.ones((rows, length), np.int32)
    for row in mask[1:]:
        cut = int(random.integers(1, length + 1))
        kind = random.integers(4)
        if kind == 0:
            row[cut:] = 0
        elif kind == 1:
            row[: length - cut] = 0
        elif kind == 2:
            row[random.random(length) < 0.4] = 0
        else:
            row[:] = 0
    return mask


def floats(random, *shape, amplitude=1.0):
    return random.uniform(-amplitude, amplitude, shape).astype(np.float32)


def self_case(seed, gate_mode="softmax_topk", causal=0, past=0, rope=False, bias=False, skip=1, sizes=None):
    random = np.random.default_rng(seed)
    b, t, c, e, k, g, d = sizes or (3, 6, 16, 5, 2, 2, 6)
    feeds = {
        "hidden_states": floats(random, b, t, c),
        "attention_mask": masks(random, b, past + t),
        "router_weight": floats(random, c, e, amplitude=2.0),
        "query_weight": floats(random, e, c, g * d),
        "kv_weight": floats(random, c, 2 * g * d, amplitude=0.7),
        "output_weight": floats(random, e, g * d, c),
    }
    if bias:
        feeds["output_bias"] = floats(random, c)
    if past:
        feeds["past_key"], feeds["past_value"] = floats(random, b, g, past, d), floats(random, b, g, past, d)
    if rope:
        angle = random.uniform(-3, 3, (past + t, d // 2))
        feeds["cos_cache"], feeds["sin_cache"] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        feeds["position_ids"] = random.integers(0, past + t, (b, t))
    attributes = {
        "top_k": k,
        "kv_num_heads": g,
        "causal": causal,
        "scale": float(d) ** -0.5,
        "gate_mode": gate_mode,
        "skip_padded_queries": skip,
        "attention_mode": "softmax",
    }
    return "MoASelfAttention", attributes, feeds


def cross_case(seed, gate_mode="softmax_topk", bias=False, skip=1, sizes=None):
    random = np.random.default_rng(seed)
    b, t, s, c, e, k, g, d = sizes or (3, 5, 9, 16, 5, 2, 2, 7)
    feeds = {
        "hidden_states": floats(random, b, t, c),
        "key": floats(random, b, g, s, d),
        "value": floats(random, b, g, s, d),
        "key_mask": masks(random, b, s),
        "query_mask": masks(random, b, t),
        "router_weight": floats(random, c, e, amplitude=2.0),
        "query_weight": floats(random, e, c, g * d),
        "output_weight": floats(random, e, g * d, c),
    }
    if bias:
        feeds["output_bias"] = floats(random, c)
    attributes = {
        "top_k": k,
        "kv_num_heads": g,
        "scale": float(d) ** -0.5,
        "gate_mode": gate_mode,
        "skip_padded_queries": skip,
    }
    return "MoACrossAttention", attributes, feeds


def feed_case(seed, gate_mode="softmax_topk", activation="relu", gated=0, bias=False, sizes=None):
    random = np.random.default_rng(seed)
    b, t, c, e, k, f = sizes or (2, 7, 12, 6, 3, 10)
    feeds = {
        "hidden_states": floats(random, b, t, c),
        "router_weight": floats(random, c, e, amplitude=2.0),
        "input_weight": floats(random, e, c, 2 * f if gated else f),
        "output_weight": floats(random, e, f, c, amplitude=0.5),
    }
    if bias:
        feeds["output_bias"] = floats(random, c)
    attributes = {"top_k": k, "gate_mode": gate_mode, "activation": activation, "gated": gated}
    return "MoEFeedForward", attributes, feeds


def large_case():
    """Enough tokens that every stage has several tasks."""
    return self_case(7, causal=1, rope=True, bias=True, past=5, sizes=(2, 150, 64, 9, 3, 2, 16))


class OperatorCase(unittest.TestCase):
    """A test of the library, with what compares an operator with its reference."""

    def setUp(self):
        if not LIBRARY:
            self.fail("MOA_ORT_LIBRARY must name the operator library")

    def check(self, operator, attributes, feeds, outputs=None):
        found = compute(operator, attributes, feeds, outputs)
        expected = REFERENCES[operator](attributes, feeds)
        for name, value in found.items():
            if value.dtype == np.int64:
                np.testing.assert_array_equal(value, expected[name], name)
            else:
                np.testing.assert_allclose(value, expected[name], rtol=2e-5, atol=2e-5, err_msg=name)
        return found

    def refused(self, operator, attributes, feeds, *words):
        """The runtime raises, every word is in the text, and the library still works."""
        with self.assertRaises(Exception) as caught:
            compute(operator, attributes, feeds)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.check(*feed_case(0))


class OperatorLibrary(OperatorCase):
    def test_self_attention(self):
        for seed, gate_mode in enumerate(GATE_MODES):
            for causal in (0, 1):
                for past in (0, 4):
                    for extras in (False, True):
                        with self.subTest(gate_mode=gate_mode, causal=causal, past=past, extras=extras):
                            self.check(*self_case(seed, gate_mode, causal, past, extras, extras, int(not extras)))

    def test_self_attention_larger(self):
        self.check(*large_case())

    def test_skipped_queries_are_exactly_zero(self):
        operator, attributes, feeds = self_case(1, causal=1, bias=True)
        feeds["attention_mask"] = np.array([[0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [0] * 6], np.int32)
        found = self.check(operator, attributes, feeds)
        padded = feeds["attention_mask"] == 0
        self.assertTrue((found["output"][padded] == 0).all())
        self.assertTrue((found["topk_weights"][padded] == 0).all())
        self.assertTrue((found["topk_indices"][padded] == [0, 1]).all())

    def test_one_token_against_a_cache(self):
        for seed in range(3):
            self.check(*self_case(seed, "topk_softmax", 1, past=300, rope=True, sizes=(2, 1, 16, 8, 2, 2, 8)))

    def test_steps_with_a_cache_agree_with_one_pass(self):
        operator, attributes, feeds = self_case(3, causal=1, sizes=(1, 5, 16, 5, 2, 2, 6))
        feeds["attention_mask"][:] = 1
        whole = compute(operator, attributes, feeds)["output"]
        past = {}
        for t in range(5):
            step = {**feeds, **past, "hidden_states": feeds["hidden_states"][:, t : t + 1]}
            step["attention_mask"] = np.ones((1, t + 1), np.int32)
            found = compute(operator, attributes, step)
            np.testing.assert_allclose(found["output"][:, 0], whole[:, t], rtol=1e-5, atol=1e-5)
            past = {"past_key": found["present_key"], "past_value": found["present_value"]}

    def test_an_empty_past_is_no_past(self):
        operator, attributes, feeds = self_case(4, causal=1)
        empty = np.zeros((3, 2, 0, 6), np.float32)
        with_past = compute(operator, attributes, {**feeds, "past_key": empty, "past_value": empty})
        without = compute(operator, attributes, feeds)
        np.testing.assert_array_equal(with_past["output"], without["output"])

    def test_cross_attention(self):
        for seed, gate_mode in enumerate(GATE_MODES):
            for bias in (False, True):
                for skip in (0, 1):
                    with self.subTest(gate_mode=gate_mode, bias=bias, skip=skip):
                        self.check(*cross_case(seed, gate_mode, bias, skip))

    def test_feed_forward(self):
        for seed, gate_mode in enumerate(GATE_MODES):
            for activation in ACTIVATIONS:
                for gated in (0, 1):
                    with self.subTest(gate_mode=gate_mode, activation=activation, gated=gated):
                        self.check(*feed_case(seed, gate_mode, activation, gated, bias=bool(gated)))

    def test_optional_outputs_may_be_absent(self):
        operator, attributes, feeds = self_case(5, past=2)
        for outputs in (["output"], ["output", "present_value"], ["output", "topk_weights"]):
            found = self.check(operator, attributes, feeds, outputs)
            self.assertEqual(sorted(found), sorted(outputs))

    def test_ties_take_the_lower_expert(self):
        operator, attributes, feeds = feed_case(6)
        feeds["router_weight"][:] = 0
        found = self.check(operator, attributes, feeds)
        self.assertTrue((found["topk_indices"] == [0, 1, 2]).all())

    def test_wrong_rank_names_node_and_input(self):
        operator, attributes, feeds = self_case(0)
        wrong = {**feeds, "kv_weight": feeds["kv_weight"][None]}
        self.refused(operator, attributes, wrong, "the_node`: input `kv_weight`", "[1, 16, 24] where [16, 24]")
        wrong = {**feeds, "attention_mask": feeds["attention_mask"].reshape(-1)}
        self.refused(operator, attributes, wrong, "the_node", "`attention_mask`")

    def test_wrong_size_names_node_and_input(self):
        operator, attributes, feeds = cross_case(0)
        wrong = {**feeds, "output_weight": feeds["output_weight"][:, 1:]}
        self.refused(operator, attributes, wrong, "MoACrossAttention", "the_node", "`output_weight`")
        operator, attributes, feeds = feed_case(0)
        wrong = {**feeds, "hidden_states": feeds["hidden_states"][:, :0]}
        self.refused(operator, attributes, wrong, "the_node", "hidden_states holds no token")

    def test_wrong_dtype_names_node_and_input(self):
        operator, attributes, feeds = self_case(0)
        wrong = {**feeds, "hidden_states": feeds["hidden_states"].astype(np.float64)}
        self.refused(operator, attributes, wrong, "the_node", "hidden_states", "double")
        wrong = {**feeds, "attention_mask": feeds["attention_mask"].astype(np.int64)}
        self.refused(operator, attributes, wrong, "the_node", "attention_mask", "int64")

    def test_missing_inputs_are_named(self):
        operator, attributes, feeds = self_case(0, rope=True, past=2)
        for name in ("past_value", "sin_cache", "position_ids"):
            wrong = {key: value for key, value in feeds.items() if key != name}
            self.refused(operator, attributes, wrong, "the_node", f"`{name}`", "found nothing")
        wrong = {key: value for key, value in feeds.items() if key != "output_weight"}
        self.refused(operator, attributes, wrong, "the_node", "input 5")
        wrong = {key: value for key, value in feeds.items() if key != "kv_weight"}
        self.refused(operator, attributes, wrong, "without kv_weight, query_weight must have 16 columns", "found 12")

    def test_top_k_beyond_the_experts_is_refused(self):
        for operator, attributes, feeds in (self_case(0), cross_case(0), feed_case(0)):
            self.refused(operator, {**attributes, "top_k": 99}, feeds, "the_node", "top_k is 99", "experts")

    def test_every_missing_attribute_is_named(self):
        for operator, attributes, feeds in (self_case(0), cross_case(0), feed_case(0)):
            for name in attributes:
                wrong = {key: value for key, value in attributes.items() if key != name}
                self.refused(operator, wrong, feeds, "the_node", f"attribute `{name}`")

    def test_bad_attribute_values_are_named(self):
        operator, attributes, feeds = self_case(0)
        for name, value in [
            ("top_k", 0),
            ("top_k", 2.0),
            ("kv_num_heads", -1),
            ("causal", 2),
            ("scale", float("nan")),
            ("gate_mode", "softmax"),
        ]:
            self.refused(operator, {**attributes, name: value}, feeds, "the_node", f"attribute `{name}`")
        operator, attributes, feeds = feed_case(0)
        wrong = {**attributes, "activation": "tanh"}
        self.refused(operator, wrong, feeds, "the_node", "`tanh`", "relu, gelu, gelu_tanh, silu")

    def test_nan_router_logits_name_the_token(self):
        operator, attributes, feeds = feed_case(0)
        feeds["hidden_states"][1, 3, 2] = np.nan
        self.refused(operator, attributes, feeds, "the_node", "router logits of batch 1, token 3")

    def test_a_position_outside_the_cache_is_named(self):
        operator, attributes, feeds = self_case(0, rope=True)
        feeds["position_ids"][1, 2] = 6
        self.refused(operator, attributes, feeds, "the_node", "position_ids of batch 1, token 2 is 6")

    def test_past_and_present_in_one_buffer_are_refused(self):
        operator, attributes, feeds = self_case(0, past=4)
        running = session(model_bytes(operator, attributes, feeds))
        b, g, _, d = feeds["past_key"].shape
        shared = np.zeros((b, g, 10, d), np.float32)
        binding = running.io_binding()
        for name, value in feeds.items():
            if name == "past_key":
                pointer, shape = shared.ctypes.data, value.shape
                binding.bind_input(name, "cpu", 0, np.float32, shape, pointer)
            else:
                binding.bind_cpu_input(name, value)
        binding.bind_output("present_key", "cpu", 0, np.float32, shared.shape, shared.ctypes.data)
        for name, _ in OUTPUTS[operator]:
            if name != "present_key":
                binding.bind_output(name)
        with self.assertRaises(Exception) as caught:
            running.run_with_iobinding(binding)
        for word in ("the_node", "`present_key`", "`past_key`"):
            self.assertIn(word, str(caught.exception))

    def test_a_failed_call_leaves_the_session_usable(self):
        operator, attributes, feeds = feed_case(0)
        running = session(model_bytes(operator, attributes, feeds))
        before = running.run(None, feeds)[0]
        with self.assertRaises(Exception):
            running.run(None, {**feeds, "router_weight": feeds["router_weight"][1:]})
        np.testing.assert_array_equal(running.run(None, feeds)[0], before)

    def test_sessions_are_independent(self):
        first_case, second_case = self_case(1), feed_case(2)
        first = session(model_bytes(*first_case))
        second = session(model_bytes(*second_case))
        alone = second.run(None, second_case[2])[0]
        first.run(None, first_case[2])
        del first
        gc.collect()
        np.testing.assert_array_equal(second.run(None, second_case[2])[0], alone)
        again = session(model_bytes(*first_case))
        self.assertEqual(again.run(None, first_case[2])[0].shape, (3, 6, 16))

    def test_options_may_register_the_library_twice(self):
        operator, attributes, feeds = feed_case(0)
        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(LIBRARY)
        options.register_custom_ops_library(LIBRARY)
        model = model_bytes(operator, attributes, feeds)
        running = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        expected = feed_forward(attributes, feeds)["output"]
        np.testing.assert_allclose(running.run(None, feeds)[0], expected, rtol=2e-5, atol=2e-5)

    def test_sessions_may_be_made_by_many_threads(self):
        operator, attributes, feeds = feed_case(3)
        expected = compute(operator, attributes, feeds)["output"]
        results = [None] * 8

        def work(index):
            results[index] = compute(operator, attributes, feeds)["output"]

        run_threads(work, 8)
        for result in results:
            np.testing.assert_array_equal(result, expected)

    def test_eight_threads_share_one_session(self):
        operator, attributes, feeds = large_case()
        for threads in (1, 2):
            running = session(model_bytes(operator, attributes, feeds), threads)
            expected = running.run(None, feeds)
            results = [[] for _ in range(8)]

            def work(index):
                for _ in range(5):
                    results[index].append(running.run(None, feeds))

            run_threads(work, 8)
            for outputs in [outputs for result in results for outputs in result]:
                for found, value in zip(outputs, expected):
                    self.assertEqual(found.tobytes(), value.tobytes())
            self.assertEqual([len(result) for result in results], [5] * 8)

    def test_thread_count_does_not_change_a_bit(self):
        for operator, attributes, feeds in (
            large_case(),
            cross_case(1, sizes=(2, 90, 70, 32, 7, 3, 2, 8)),
            feed_case(1, gated=1, activation="silu", sizes=(2, 150, 32, 5, 2, 40)),
        ):
            one = compute(operator, attributes, feeds, threads=1)
            two = compute(operator, attributes, feeds, threads=2)
            four = compute(operator, attributes, feeds, threads=4)
            for name, value in one.items():
                self.assertEqual(value.tobytes(), two[name].tobytes(), name)
                self.assertEqual(value.tobytes(), four[name].tobytes(), name)

    def test_kernel_wins_over_a_function_of_the_same_name(self):
        operator, attributes, feeds = feed_case(2)
        model = onnx.ModelProto.FromString(model_bytes(operator, attributes, feeds, ["output"]))
        body = helper.make_node("Mul", ["hidden_states", "hidden_states"], ["output"])
        opsets = [helper.make_opsetid("", 17)]
        function = helper.make_function(
            "ai.moa", operator, INPUTS[operator], ["output"], [body], opsets, list(attributes)
        )
        model.functions.append(function)
        found = session(model.SerializeToString()).run(None, feeds)[0]
        expected = feed_forward(attributes, feeds)["output"]
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def run_threads(work, count):
    """Runs work(0) .. work(count - 1) together and raises what any of them raised."""
    errors = []

    def guarded(index):
        try:
            work(index)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


if __name__ == "__main__":
    unittest.main()
