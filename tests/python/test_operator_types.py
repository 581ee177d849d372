"""Weights in bfloat16 and float16, and activations in float16, through real sessions with the operator library."""

import unittest

import ml_dtypes
import numpy as np

from operator_reference import REFERENCES
from test_operator_library import ACTIVATION_OUTPUTS, compute, cross_case, feed_case, self_case

# Inputs whose type is that of the activations, and those whose type is that of the trained matrices.
ACTIVATION_INPUTS = {"hidden_states", "output_bias", "past_key", "past_value", "key", "value"}
WEIGHTS = {"query_weight", "kv_weight", "output_weight", "input_weight"}


class OperatorTypes(unittest.TestCase):
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
