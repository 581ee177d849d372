"""Every kernel is launched by some call of tools/gpu_check: what a plan launches, on a fake CUDA driver.

MOA_CUDA_LIBRARY names the library. The system's C++ compiler builds the driver.
"""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from test_cuda_abi import FAKE, LIBRARY, archive, compile_with

KERNELS = ROOT / "custom_ops/cuda/kernels"
HAS_TORCH = importlib.util.find_spec("torch") is not None

#: What the sources of the modules ask of the architecture, by the paths of the checks.
CONDITIONS = {
    "native": {"HAS_TENSOR_CORES_16", "HAS_TENSOR_CORES_TF32", "1"},
    "wgmma": {"HAS_WARPGROUP_PRODUCTS"},
    "sm80": {"HAS_TENSOR_CORES_16", "HAS_TENSOR_CORES_TF32", "1"},
    "sm75": {"HAS_TURING_CORES"},
    "sm70": {"HAS_VOLTA_CORES", "NEEDS_PLAIN_UNITS_BF16", "1"},
}


def entry_points(element, conditions):
    """The kernels of a module under these conditions; those under none belong to every path."""
    names, open_one = set(), None
    for line in (KERNELS / f"{element}.cu").read_text().splitlines():
        if found := re.match(r"#if (\w+)", line):
            open_one = found.group(1)
        elif line == "#endif":
            open_one = None
        elif (found := re.match(r"KERNEL\((\w+),", line)) and (open_one is None or open_one in conditions):
            names.add(found.group(1))
    return names


class Launches:
    """Plans on the fake driver, and the names of what they launch."""

    def __init__(self):
        from gpu_check import abi

        self.abi, self.library = abi, abi.Library(LIBRARY)
        self.fake = ctypes.CDLL("libcuda.so.1")
        self.fake.fake_log.restype = ctypes.c_char_p
        names = set()
        for source in KERNELS.glob("*.cu"):
            names |= set(re.findall(r"^KERNEL\((\w+),", source.read_text(), re.M))
        self.archive = archive(sorted(names), ("sm_90a", "compute_70", "compute_75", "compute_80"))

    def kernels(self, path=None, wgmma=False):
        os.environ["MOA_CUDA_WGMMA"] = "1" if wgmma else "0"
        return self.abi.Kernels(self.library, self.archive, device=0, path=path)

    def of(self, kernels, operator, attributes, element, shapes, wanted, tf32, multiprocessors, shared=False):
        plan = kernels.plan(operator, attributes, element, shapes, wanted, tf32, multiprocessors, shared)
        far = iter(range(1, 99))
        places = [{name: next(far) << 48 for name in names} for names in (shapes, plan.output_shapes)]
        if shared:
            places[1] |= {present: places[0][past] for present, past in self.abi.SHARED.items()}
        self.fake.fake_clear()
        plan.bind(*places, next(far) << 48)(None)
        plan.close()
        log = self.fake.fake_log().decode()
        return set(re.findall(r"^cuLaunchKernelEx (\w+)", log, re.M))


def reached_by_checks():
    """What the stage `check` launches, by path and element type; without data."""
    import torch
    from gpu_check import checks, child, conductor, feeds

    class Shapes(feeds.Source):
        def __init__(self):
            self.device = "meta"

        def normal(self, *shape, deviation=1.0, dtype=torch.float32):
            return torch.empty(shape, dtype=dtype, device="meta")

        def uniform(self, *shape):
            return torch.empty(shape, device="meta")

        def integers(self, low, high, *shape, dtype=torch.int64):
            return torch.full(shape, low, dtype=dtype)

    launches, found = Launches(), {}
    for path, kinds in conductor.CHECKS:
        kernels = launches.kernels(child.PATHS[path], path == "wgmma")
        for kind in kinds.split(","):
            element, tf32 = checks.KINDS[kind]
            reached = found.setdefault(f"{path} {element}", set())
            for check in checks.checks_of(path):
                attributes, given, wanted = check.make(Shapes(), feeds.DTYPES[element])
                shared = check.room is not None
                given = feeds.with_room(given, check.case.tokens + check.room) if shared else given
                shapes = {name: tuple(tensor.shape) for name, tensor in given.items()}
                options = (tf32, check.multiprocessors, shared)
                reached |= launches.of(kernels, check.operator, attributes, element, shapes, wanted, *options)
    return found


def reached_by_sanitizer():
    """What the stage `sanitize` launches, by element type."""
    import numpy as np
    from gpu_check import sanitize

    launches, found, random = Launches(), {}, np.random.default_rng(1)
    for kind, (element, tf32, wgmma) in sanitize.KINDS.items():
        kernels = launches.kernels(wgmma=wgmma)
        reached = found.setdefault(element, set())
        for call in sanitize.calls_of(kind):
            attributes, given = sanitize.make(random, call)
            shapes = {name: value.shape for name, value in given.items()}
            wanted = launches.abi.OUTPUTS[call.operator]
            options = (tf32, sanitize.multiprocessors(call))
            reached |= launches.of(kernels, call.operator, attributes, element, shapes, wanted, *options)
    return found


@unittest.skipUnless(LIBRARY, "MOA_CUDA_LIBRARY is not set")
class Reach(unittest.TestCase):
    maxDiff = None

    def reached(self, name):
        """What one of the functions above finds, in a process whose libcuda.so.1 is the fake."""
        with tempfile.TemporaryDirectory() as folder:
            compile_with(FAKE, Path(folder, "libcuda.so.1"), "-std=c++17", "-O1", "-shared", "-fPIC")
            program = (
                f"import json, sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})\n"
                f"import test_gpu_check_reach as reach\n"
                f"print(json.dumps({{key: sorted(names) for key, names in reach.{name}().items()}}))"
            )
            environment = {**os.environ, "LD_LIBRARY_PATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, "-c", program]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def missing(self, reached, element, *paths):
        expected = entry_points(element, set().union(*(CONDITIONS[path] for path in paths)))
        self.assertGreater(len(expected), 10)
        return sorted(expected - set(reached))

    @unittest.skipUnless(HAS_TORCH, "torch is not installed")
    def test_the_checks_launch_every_kernel_of_every_path(self):
        found = self.reached("reached_by_checks")
        found = {
            key: [*names, *found.get(key.replace("native", "wgmma"), [])] if key.startswith("native") else names
            for key, names in found.items()
        }
        self.assertGreater(len(found), 8)
        missing = {}
        for key, names in found.items():
            path, element = key.split()
            if path == "wgmma":
                continue
            paths = ("native", "wgmma") if path == "native" else (path,)
            missing[key] = self.missing(names, element, *paths)
        self.assertEqual({key: names for key, names in missing.items() if names}, {})

    def test_the_sanitizer_sees_every_kernel_of_its_own_path(self):
        found = self.reached("reached_by_sanitizer")
        self.assertEqual(set(found), {"f32", "f16", "bf16"})
        missing = {element: self.missing(names, element, "native", "wgmma") for element, names in found.items()}
        self.assertEqual({element: names for element, names in missing.items() if names}, {})


if __name__ == "__main__":
    unittest.main()
