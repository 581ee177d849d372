"""Weights in fewer bytes, and activations in float16, through real sessions with the operator library."""

import unittest

import ml_dtypes
import numpy as np

from operator_reference import REFERENCES
from test_operator_library import ACTIVATION_OUTPUTS, compute, cross_case, feed_case, self_case

# Inputs whose type is that of the activations, and those whose type is that of the trained matrices.
ACTIVATION_INPUTS = {"hidden_states", "output_bias", "past_key", "past_value", "key", "value"}
WEIGHTS = {"query_weight", "kv_weight", "output_weight", "input_weight"}
SCALES = {"query_scale", "kv_scale", "output_scale", "input_scale"}


def in_integers(feeds, scale_of):
    """Matrices `[.., inner, columns]` as int8, with scales `[.., columns]` that `scale_of` makes of their shape."""
    narrow, wide = dict(feeds), dict(feeds)
    for name in WEIGHTS & feeds.keys():
        *matrices, _, columns = feeds[name].shape
        scale = scale_of((*matrices, columns)).astype(np.float32)
        integers = np.clip(np.rint(feeds[name] / scale[..., None, :]), -127, 127).astype(np.int8)
        narrow[name], narrow[name.replace("_weight", "_scale")] = integers, scale
        wide[name] = integers * scale[..., None, :]
    return narrow, wide


BLOCK = 32


def in_int4(feeds, random):
    """Matrices `[.., inner, columns]` as int4, with bfloat16 scales `[.., ceil(inner / 32), columns]`."""
    narrow, wide = dict(feeds), dict(feeds)
    for name in WEIGHTS & feeds.keys():
        *matrices, inner, columns = feeds[name].shape
        scale = random.uniform(-0.08, 0.08, (*matrices, -(-inner // BLOCK), columns)).astype(ml_dtypes.bfloat16)
        each = np.repeat(scale.astype(np.float32), BLOCK, axis=-2)[..., :inner, :]
        integers = np.clip(np.rint(feeds[name] / each), -8, 7).astype(ml_dtypes.int4)
        narrow[name], narrow[name.replace("_weight", "_scale")] = integers, scale
        wide[name] = integers.astype(np.float32) * each
    return narrow, wide


class OperatorTypes(unittest.TestCase):
    def test_int4_has_the_bits_of_the_weights_that_scales_make_of_it(self):
        random = np.random.default_rng(4)
        for operator, attributes, feeds in (
            self_case(21, "topk_softmax", 1, past=4, rope=True),
            self_case(22, bias=True),
            cross_case(23, bias=True),
            feed_case(24, gated=1, activation="silu"),
        ):
            narrow, wide = in_int4(feeds, random)
            found = compute(operator, attributes, narrow, constants=WEIGHTS | SCALES)
            for name, value in compute(operator, attributes, wide).items():
                self.assertEqual(found[name].tobytes(), value.tobytes(), f"{operator} {name}")

    def test_int4_needs_the_scales_of_its_blocks(self):
        for operator, attributes, feeds in (self_case(25, past=2), cross_case(26), feed_case(27, gated=1)):
            narrow, _ = in_int4(feeds, np.random.default_rng(5))
            for scale in sorted(SCALES & narrow.keys()):
                for given, word in (
                    ({n: value for n, value in narrow.items() if n != scale}, f"input `{scale}` is absent"),
                    ({**narrow, scale: narrow[scale][..., 1:]}, f"input `{scale}` must be"),
                    ({**narrow, scale: np.concatenate([narrow[scale]] * 2, -2)}, f"input `{scale}` must be"),
                    ({**narrow, scale: narrow[scale][..., 0, :]}, f"input `{scale}` of int4 weights must be"),
                ):
                    with self.assertRaises(Exception) as caught:
                        compute(operator, attributes, given, constants=WEIGHTS | SCALES)
                    for text in ("the_node", word):
                        self.assertIn(text, str(caught.exception))

    def test_integers_are_the_weights_that_their_scales_make_of_them(self):
        random = np.random.default_rng(3)
        powers = lambda shape: 2.0 ** random.integers(-9, -4, shape)
        others = lambda shape: random.uniform(0.002, 0.02, shape)
        for operator, attributes, feeds in (
            self_case(21, "topk_softmax", 1, past=4, rope=True),
            self_case(22, bias=True),
            cross_case(23, bias=True),
            feed_case(24, gated=1, activation="silu"),
        ):
            for constants in (set(), WEIGHTS | SCALES):
                narrow, wide = in_integers(feeds, powers)
                found = compute(operator, attributes, narrow, constants=constants)
                for name, value in compute(operator, attributes, wide).items():
                    self.assertEqual(found[name].tobytes(), value.tobytes(), f"{operator} {name}")
            narrow, wide = in_integers(feeds, others)
            expected = REFERENCES[operator](attributes, wide)
            found = compute(operator, attributes, narrow, constants=WEIGHTS | SCALES)
            np.testing.assert_array_equal(found["topk_indices"], expected["topk_indices"])
            for name in ACTIVATION_OUTPUTS & found.keys():
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)

    def test_integers_need_their_scales_and_floats_have_none(self):
        for operator, attributes, feeds in (self_case(25, past=2), cross_case(26), feed_case(27, gated=1)):
            narrow, wide = in_integers(feeds, np.ones)
            for scale in sorted(SCALES & narrow.keys()):
                for given, word in (
                    ({n: value for n, value in narrow.items() if n != scale}, f"input `{scale}` is absent"),
                    ({**wide, scale: narrow[scale]}, f"input `{scale}` is there"),
                    ({**narrow, scale: narrow[scale][..., 1:]}, f"input `{scale}` must be"),
                ):
                    with self.assertRaises(Exception) as caught:
                        compute(operator, attributes, given)
                    for text in ("the_node", word):
                        self.assertIn(text, str(caught.exception))

    def test_stored_weights_have_the_bits_of_the_same_weights_as_f32(self):
        for operator, attributes, feeds in (
            self_case(11, "topk_softmax", 1, past=4, rope=True),
            self_case(12, bias=True),
            cross_case(13, bias=True),
            feed_case(14, gated=1, activation="silu"),
        ):
            for stored in (ml_dtypes.bfloat16, np.float16):
                narrow = {n: value.astype(stored) if n in WEIGHTS else value for n, value in feeds.items()}
                wide = {n: value.astype(np.float32) if n in WEIGHTS else value for n, value in narrow.items()}
                found = compute(operator, attributes, narrow, constants=WEIGHTS)
                for name, value in compute(operator, attributes, wide).items():
                    self.assertEqual(found[name].tobytes(), value.tobytes(), f"{operator} {stored} {name}")

    def test_half_activations(self):
        for operator, attributes, feeds in (
            self_case(15, "topk_softmax", 1, past=4, rope=True, bias=True),
            self_case(16),
            cross_case(17, bias=True),
            feed_case(18, gated=1, activation="silu", bias=True),
        ):
            for stored in (np.float32, np.float16, ml_dtypes.bfloat16):
                kinds = {**dict.fromkeys(WEIGHTS, stored), **dict.fromkeys(ACTIVATION_INPUTS, np.float16)}
                narrow = {n: value.astype(kinds.get(n, value.dtype)) for n, value in feeds.items()}
                wide = {n: narrow[n].astype(value.dtype) for n, value in feeds.items()}
                expected = REFERENCES[operator](attributes, wide)
                found = compute(operator, attributes, narrow, constants=WEIGHTS)
                np.testing.assert_array_equal(found["topk_indices"], expected["topk_indices"])
                for name in ACTIVATION_OUTPUTS & found.keys():
                    self.assertEqual(found[name].dtype, np.float16)
                    # Half a unit of f16 for the result and for each key and value that it was made from.
                    scale = np.abs(expected[name]).max()
                    np.testing.assert_allclose(found[name], expected[name], rtol=2e-3, atol=2e-3 * scale)

    def test_types_that_do_not_belong_together_are_refused(self):
        operator, attributes, feeds = self_case(0, past=2)
        for name, words in [
            ("kv_weight", ["MoASelfAttention"]),
            ("past_key", ["MoASelfAttention"]),
            ("router_weight", ["router_weight", "float16"]),
        ]:
            with self.assertRaises(Exception) as caught:
                compute(operator, attributes, {**feeds, name: feeds[name].astype(np.float16)})
            for word in ["the_node", *words]:
                self.assertIn(word, str(caught.exception))


if __name__ == "__main__":
    unittest.main()
