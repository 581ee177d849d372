"""What programs of benches/ say of builds and bytes."""

import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))

import cpu_operator_builds as builds


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


if __name__ == "__main__":
    unittest.main()
