"""The operator library with kernels for a GPU at hand, in an ONNX Runtime and on a machine that have none.

MOA_ORT_LIBRARY names the library. What it registers is decided once a process, so each case has one of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from test_cuda_abi import archive

LIBRARY = os.environ.get("MOA_ORT_LIBRARY")
HERE = Path(__file__).resolve().parent

SCRIPT = """
import json
import numpy as np
import test_operator_library as cases
from operator_reference import REFERENCES

found = {}
for operator, attributes, feeds in (
    cases.self_case(1, past=3, rope=True, bias=True),
    cases.cross_case(2, "softmax_topk"),
    cases.feed_case(3, "topk_softmax", "silu", 1),
):
    expected = REFERENCES[operator](attributes, feeds)["output"]
    output = cases.compute(operator, attributes, feeds)["output"]
    found[operator] = float(np.abs(output - expected).max())
print(json.dumps(found))
"""


def run_case(kernels):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["MOA_CUDA_KERNELS"] = kernels
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


@unittest.skipUnless(LIBRARY, "MOA_ORT_LIBRARY is not set")
class Registration(unittest.TestCase):
    def assert_serves_the_cpu(self, found):
        for operator in ("MoASelfAttention", "MoACrossAttention", "MoEFeedForward"):
            self.assertLess(found[operator], 1e-4, operator)

    def test_kernels_for_a_gpu_leave_the_cpu_as_it_is(self):
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(archive(["a_kernel"]))
            file.flush()
            self.assert_serves_the_cpu(run_case(file.name))

    def test_an_archive_that_is_not_there_leaves_the_cpu_as_it_is(self):
        self.assert_serves_the_cpu(run_case("/nowhere/kernels.bin"))


if __name__ == "__main__":
    unittest.main()
