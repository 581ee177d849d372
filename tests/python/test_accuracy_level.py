"""Nodes that say how accurate their products must be, on ONNX Runtime."""

import unittest

import numpy as np

from test_operator_library import OperatorCase, compute, cross_case, feed_case, large_case
from test_operator_types import SCALES, in_int4, in_integers
from test_stick_breaking import molm_case

MATRICES = ("query_weight", "kv_weight", "input_weight", "output_weight")


def cases():
    """Many tokens times matrices whose values are bf16, all of them constants."""
    for operator, attributes, feeds in (
        large_case(),
        molm_case(1, own_keys=True, sizes=(2, 90, 70, 5, 2, 1, 16)),
        cross_case(1, sizes=(2, 90, 70, 32, 7, 3, 2, 8)),
        feed_case(1, gated=1, activation="silu", sizes=(2, 150, 32, 5, 2, 40)),
    ):
        constants = [name for name in MATRICES if name in feeds]
        for name in constants:
            feeds[name] = (feeds[name].view(np.uint32) & 0xFFFF0000).view(np.float32)
        yield operator, attributes, feeds, constants


def integer_cases():
    """The same times matrices of int8 and of int4."""
    random = np.random.default_rng(6)
    for operator, attributes, feeds, constants in cases():
        for narrow, _ in (in_integers(feeds, lambda shape: random.uniform(0.002, 0.02, shape)), in_int4(feeds, random)):
            yield operator, attributes, narrow, [*constants, *(SCALES & narrow.keys())]


class AccuracyLevel(OperatorCase):
    def products_are_as_accurate_as(self, level, operator, attributes, feeds, constants):
        exact = compute(operator, attributes, feeds, constants=constants)
        same = compute(operator, {**attributes, "accuracy_level": 0}, feeds, constants=constants)
        rounded = compute(operator, {**attributes, "accuracy_level": level}, feeds, constants=constants)
        for name, value in exact.items():
            self.assertEqual(value.tobytes(), same[name].tobytes(), f"{operator} {name}")
            if name.startswith("topk"):
                self.assertEqual(value.tobytes(), rounded[name].tobytes(), f"{operator} {name}")
            else:
                error = np.linalg.norm(rounded[name] - value) / np.linalg.norm(value)
                self.assertLess(error, 0.02, f"{operator} {name}")

    def threads_change_no_bit(self, level, operator, attributes, feeds, constants):
        attributes = {**attributes, "accuracy_level": level}
        one, two = (compute(operator, attributes, feeds, threads=n, constants=constants) for n in (1, 2))
        for name, value in one.items():
            self.assertEqual(value.tobytes(), two[name].tobytes(), f"{operator} {name}")

    def test_products_are_as_accurate_as_the_node_says(self):
        for case in cases():
            self.products_are_as_accurate_as(3, *case)
        for case in integer_cases():
            self.products_are_as_accurate_as(4, *case)

    def test_threads_change_no_bit(self):
        for case in cases():
            self.threads_change_no_bit(3, *case)
        for case in integer_cases():
            self.threads_change_no_bit(4, *case)

    def test_nothing_is_rounded_to_int8_beside_floats(self):
        for operator, attributes, feeds, constants in cases():
            exact = compute(operator, attributes, feeds, constants=constants)
            found = compute(operator, {**attributes, "accuracy_level": 4}, feeds, constants=constants)
            for name, value in exact.items():
                self.assertEqual(value.tobytes(), found[name].tobytes(), f"{operator} {name}")

    def test_other_levels_are_refused(self):
        for operator, attributes, feeds in (large_case(), cross_case(0), feed_case(0)):
            for level in (-1, 1, 2, 5):
                expected = f"attribute `accuracy_level` must be 0, 3 or 4, found {level}"
                self.refused(operator, {**attributes, "accuracy_level": level}, feeds, "the_node", expected)


if __name__ == "__main__":
    unittest.main()
