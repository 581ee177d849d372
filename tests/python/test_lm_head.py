"""`LMHead`, the product at the end of a language model, through real sessions with the operator library."""

import unittest

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper, numpy_helper

from test_operator_library import LIBRARY, floats, session
from test_operator_types import BLOCK, in_int4, in_integers

INPUTS = ["hidden_states", "output_weight", "output_scale"]
CONSTANTS = {"output_weight", "output_scale"}
BFLOAT16 = ml_dtypes.bfloat16

# Batch, tokens, width and vocabulary: one element, parts of blocks and whole ones, several tasks, and rows that are
# moved apart.
SHAPES = [(1, 1, 1, 1), (1, 1, 64, 300), (3, 5, 45, 33), (2, 70, 96, 385), (1, 40, 1024, 130)]


# Types that numpy has no number for in the runtime, and those that a graph casts to them.
CASTS = {"int4": np.int8, "bfloat16": np.float32}


def fewest_constants(feeds):
    """The inputs that must be constants: the oldest runtime casts nothing to int4."""
    return () if feeds["output_weight"].dtype == np.int8 else ("output_weight",)


def fed(value):
    """What a session is given for it."""
    return value.astype(CASTS.get(value.dtype.name, value.dtype))


def model_bytes(feeds, attributes=None, constants=()):
    """A model with one node; what is no constant is an input of the graph, or cast from one."""
    names = [name for name in INPUTS if name in feeds]
    given = [name for name in names if name not in constants]
    cast = [name for name in given if feeds[name].dtype.name in CASTS]
    onnx_type = lambda value: helper.np_dtype_to_tensor_dtype(value.dtype)
    graph = helper.make_graph(
        [
            *(helper.make_node("Cast", [f"{name}_given"], [name], to=onnx_type(feeds[name])) for name in cast),
            helper.make_node("LMHead", names, ["logits"], name="the_node", domain="ai.moa", **(attributes or {})),
        ],
        "graph",
        [helper.make_tensor_value_info(f"{n}_given" if n in cast else n, onnx_type(fed(feeds[n])), None) for n in given],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(feeds[name], name) for name in names if name in constants],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("ai.moa", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def compute(feeds, attributes=None, threads=1, constants=CONSTANTS):
    running = session(model_bytes(feeds, attributes, constants), threads)
    given = {name.removesuffix("_given"): name for name in (value.name for value in running.get_inputs())}
    return running.run(None, {name: fed(feeds[key]) for key, name in given.items()})[0]


def cases():
    """Inputs with a matrix of int8, of int4 and of bfloat16, and the weights that each holds."""
    random = np.random.default_rng(7)
    for batch, tokens, width, vocabulary in SHAPES:
        feeds = {
            "hidden_states": floats(random, batch, tokens, width),
            "output_weight": floats(random, width, vocabulary, amplitude=(3.0 / width) ** 0.5),
        }
        for narrow, wide in (in_integers(feeds, lambda shape: random.uniform(0.002, 0.02, shape)), in_int4(feeds, random)):
            yield narrow, wide["output_weight"]
        narrow = feeds["output_weight"].astype(BFLOAT16)
        yield {**feeds, "output_weight": narrow}, narrow.astype(np.float32)


def cases_of_integers():
    """Those with scales."""
    return (case for case in cases() if "output_scale" in case[0])


def with_whole_scales(rows):
    """Rows whose blocks are rounded to int8 by a scale of 1/64, and what they are rounded to."""
    rows = np.clip(rows, -127 / 64, 127 / 64)
    rows[..., ::BLOCK] = 127 / 64
    return rows, np.rint(rows * 64) / 64


def in_bf16(rows):
    """Rows rounded to bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def product(hidden_states, weight):
    return hidden_states.astype(np.float64) @ weight.astype(np.float64)


class LmHead(unittest.TestCase):
    def setUp(self):
        if not LIBRARY:
            self.fail("MOA_ORT_LIBRARY must name the operator library")

    def test_logits_match_the_reference(self):
        for feeds, weight in cases():
            expected = product(feeds["hidden_states"], weight)
            for attributes in ({}, {"accuracy_level": 0}):
                for constants in (fewest_constants(feeds), ("output_weight",), CONSTANTS):
                    with self.subTest(shape=expected.shape, weight=feeds["output_weight"].dtype, constants=constants):
                        found = compute(feeds, attributes, constants=constants)
                        self.assertEqual(found.dtype, np.float32)
                        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

    def test_rows_may_be_rounded_to_int8_or_bf16(self):
        for feeds, weight in cases_of_integers():
            rows, integers = with_whole_scales(feeds["hidden_states"])
            feeds["hidden_states"] = rows
            found = compute(feeds, {"accuracy_level": 4})
            exact, *rounded = (product(factor, weight) for factor in (rows, integers, in_bf16(rows)))
            with self.subTest(shape=exact.shape, weight=feeds["output_weight"].dtype):
                close = [np.isclose(found, expected, rtol=1e-5, atol=1e-5) for expected in (exact, *rounded)]
                self.assertTrue(np.any(close, 0).all(), "rows are multiplied as they are, in int8 blocks or in bf16")
                self.assertLess(np.linalg.norm(found - exact), 0.02 * np.linalg.norm(exact))

    def test_rows_beside_bf16_may_be_rounded_to_it(self):
        for feeds, weight in cases():
            exact, rounded = (product(rows, weight) for rows in (feeds["hidden_states"], in_bf16(feeds["hidden_states"])))
            found = compute(feeds, {"accuracy_level": 3})
            with self.subTest(shape=exact.shape, weight=feeds["output_weight"].dtype):
                allowed = (exact, rounded) if feeds["output_weight"].dtype == BFLOAT16 else (exact,)
                close = [np.isclose(found, expected, rtol=1e-5, atol=1e-5) for expected in allowed]
                self.assertTrue(np.any(close, 0).all())

    def test_threads_and_constants_change_no_bit(self):
        for feeds, _ in cases():
            fewest = fewest_constants(feeds)
            for level in (0, 3, 4):
                attributes = {"accuracy_level": level}
                expected = compute(feeds, attributes)
                for threads, constants in ((1, fewest), (2, fewest), (2, CONSTANTS), (4, CONSTANTS)):
                    found = compute(feeds, attributes, threads, constants)
                    self.assertEqual(found.tobytes(), expected.tobytes(), f"{level} {threads} {expected.shape}")

    def test_scales_of_powers_of_two_round_no_weight(self):
        """One token that is 1 at one element and 0 at the others has the row of that element as its logits."""
        random = np.random.default_rng(8)
        weight = {"output_weight": floats(random, 70, 50)}
        hidden_states = np.eye(70, dtype=np.float32)[None]
        powers = lambda shape: 2.0 ** random.integers(-9, -4, shape)
        for narrow, wide in (in_integers(weight, powers), in_int4(weight, random)):
            found = compute({"hidden_states": hidden_states, **narrow})
            np.testing.assert_array_equal(found[0], wide["output_weight"])

    def refused(self, feeds, *words, attributes=None, constants=CONSTANTS):
        with self.assertRaises(Exception) as caught:
            compute(feeds, attributes, constants=constants)
        for word in ("the_node", *words):
            self.assertIn(word, str(caught.exception))

    def test_wrong_shapes_are_named(self):
        [*_, (int8, _), (int4, _)] = [pair for pair in cases_of_integers() if pair[0]["hidden_states"].shape == (3, 5, 45)]
        for feeds in (int8, int4):
            states, weight, scale = (feeds[name] for name in INPUTS)
            for name, value, words in (
                ("hidden_states", states[0], ["input `hidden_states` must be [B, T, C], found [5, 45]"]),
                ("hidden_states", states[:, :0], ["hidden_states holds no token"]),
                ("hidden_states", states[..., :0], ["hidden_states has no columns"]),
                ("hidden_states", states[..., 1:], ["`output_weight`", "[45, 33] where [44, 33] is needed"]),
                ("output_weight", weight[1:], ["`output_weight`", "[44, 33] where [45, 33] is needed"]),
                ("output_weight", weight[None], ["`output_weight`", "[1, 45, 33]"]),
                ("output_weight", weight[:, :0], ["output_weight has no columns"]),
                ("output_scale", scale[..., 1:], ["`output_scale`", "must be"]),
                ("output_scale", np.concatenate([scale, scale]), ["`output_scale`", "must be"]),
                ("output_scale", scale[None], ["`output_scale`", "must be"]),
            ):
                for constants in (fewest_constants(feeds), CONSTANTS):
                    with self.subTest(name=name, shape=value.shape, weight=weight.dtype, constants=constants):
                        self.refused({**feeds, name: value}, "LMHead", *words, constants=constants)

    def test_scales_of_another_type_are_named(self):
        for feeds, _ in cases_of_integers():
            scale = feeds["output_scale"]
            other = np.stack([scale] * -(-feeds["hidden_states"].shape[-1] // BLOCK)) if scale.ndim == 1 else scale[0]
            expected = f"input `output_scale` of {feeds['output_weight'].dtype} weights must be"
            for constants in (fewest_constants(feeds), CONSTANTS):
                self.refused({**feeds, "output_scale": other}, expected, constants=constants)

    def test_integers_need_their_scales(self):
        for feeds, _ in cases_of_integers():
            without = {name: value for name, value in feeds.items() if name != "output_scale"}
            for constants in (fewest_constants(feeds), CONSTANTS):
                self.refused(without, "input `output_scale` is absent", constants=constants)

    def test_other_levels_are_refused(self):
        feeds, _ = next(cases())
        for level in (-1, 1, 2, 5):
            expected = f"attribute `accuracy_level` must be 0, 3 or 4, found {level}"
            self.refused(feeds, expected, attributes={"accuracy_level": level})

    def test_other_floats_have_another_operator(self):
        feeds = {"hidden_states": np.ones((1, 1, 2), np.float32), "output_weight": np.ones((2, 3), np.float32)}
        for stored in (np.float32, np.float16):
            self.refused({**feeds, "output_weight": feeds["output_weight"].astype(stored)}, "LMHead")

    def test_a_refused_call_leaves_the_session_usable(self):
        for feeds, _ in cases():
            running = session(model_bytes(feeds, constants=CONSTANTS))
            states = {"hidden_states": feeds["hidden_states"]}
            [before] = running.run(None, states)
            with self.assertRaises(Exception):
                running.run(None, {"hidden_states": np.concatenate([feeds["hidden_states"]] * 2, -1)})
            np.testing.assert_array_equal(running.run(None, states)[0], before)


if __name__ == "__main__":
    unittest.main()
