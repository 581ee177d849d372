"""From shapes to results without a GPU: libmoa_cuda.so plans and launches through a fake driver, which runs the kernels
themselves on their emulator; results stand beside the plain loops of the reference.

MOA_CUDA_LIBRARY names the library; the system's C++ compiler builds driver and kernels.
"""

import importlib.util
import os
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import test_cuda_abi
from test_cuda_abi import FAKE, LIBRARY, ROOT, compile_with

KERNELS = ROOT / "custom_ops/cuda/kernels"
OPTIONS = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-fPIC"]
UNITS = [*(KERNELS / f"{module}.cu" for module in ("f32", "f16", "bf16")), FAKE.parent / "emulated.cpp"]
UNITS += [KERNELS / f"emulator/{name}.cpp" for name in ("block", "signal", "warp", "warpgroup")]

#: One seed for every run, so that a run fails for a reason; EMULATION_SEED names another one.
SEED = os.environ.get("EMULATION_SEED", "1")

#: Every call of the sanitizer, with every kernel that its plan names, on one element type and code path.
SCRIPT = """
import os
import numpy as np
from gpu_check import device, sanitize
emulated = ctypes.CDLL(os.environ["EMULATED"])
fake.fake_emulate.argtypes = [ctypes.c_void_p]
fake.fake_emulate(ctypes.cast(emulated.emulated_launch, ctypes.c_void_p))
gpu = device.Gpu()
element, path = os.environ["CASE"].split()
path = None if path == "native" else (int(path[0]), int(path[1]))
random, found, names = np.random.default_rng(int(os.environ["SEED"])), [], []
for call in sanitize.CALLS:
    while True:
        kernels = abi.Kernels(library, build(names), path=path)
        try:
            found.append({"call": list(call[:9]), **sanitize.compute(kernels, gpu, call, element, random)})
            break
        except abi.CallError as error:
            assert error.code == 3, error
            names.append(str(error).split("`")[1])
        finally:
            kernels.close()
print(json.dumps(found))
"""

#: The checks of tools/gpu_check as they run on a GPU, at a small size: repeats, replays, faults.
CHECKS = """
import os
from dataclasses import replace
from unittest import mock
import test_gpu_check_dry as dry
from gpu_check import cases, checks, ours
emulated = ctypes.CDLL(os.environ["EMULATED"])
fake.fake_emulate.argtypes = [ctypes.c_void_p]
fake.fake_emulate(ctypes.cast(emulated.emulated_launch, ctypes.c_void_p))
test = dry.WithoutGpu()
test.setUp()
bind = ours.Call.bind

def bind_to_graphs(call, given):
    run = bind(call, given)

    def kept():
        if dry.HostGraph.open_one is None:
            return run()
        dry.HostGraph.open_one.calls.append(run)

    return kept

ours.Call.bind = bind_to_graphs
kind, path = os.environ["CASE"].split()
path = None if path == "native" else (int(path[0]), int(path[1]))
names, problems = [], {}

def with_kernels(work):
    while True:
        kernels = abi.Kernels(library, build(names), device=0, path=path)
        try:
            return work(kernels)
        except abi.CallError as error:
            assert error.code == 3, error
            names.append(str(error).split("`")[1])
        finally:
            kernels.close()

for check in map(test.small, checks.all_checks()):
    found = with_kernels(lambda kernels: checks.run_check(kernels, check, kind, int(os.environ["SEED"])))
    if found["problems"]:
        problems[check.name] = found["problems"]
if path is None:
    with mock.patch.object(cases, "JETMOE", replace(cases.JETMOE, width=64, head=16, heads=2)):
        problems |= {"faults": found} if (found := with_kernels(checks.fault_checks)) else {}
print(json.dumps(problems))
"""


@unittest.skipUnless(LIBRARY, "MOA_CUDA_LIBRARY is not set")
class Emulated(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        place = Path(cls.folder.name)
        compile_with(FAKE, place / "libcuda.so.1", "-std=c++17", "-O1", "-shared", "-fPIC")
        objects = [place / f"{unit.name}.o" for unit in UNITS]
        with ThreadPoolExecutor(2) as pool:
            list(
                pool.map(lambda pair: compile_with(pair[0], pair[1], *OPTIONS, "-c", "-x", "c++"), zip(UNITS, objects))
            )
        cls.emulated = place / "libemulated.so"
        compile_with(objects[0], cls.emulated, "-shared", *map(str, objects[1:]))

    run_script = test_cuda_abi.Calls.run_script

    def compute(self, case):
        variables = {"EMULATED": str(self.emulated), "CASE": case, "SEED": SEED}
        found = self.run_script(SCRIPT, variables=variables, helpers=True)
        for one in found:
            self.assertLess(one["error"], self.limits[case.split()[0]], f"{case}, seed {SEED}: {one}")
        return found

    limits = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}

    def test_every_element_type_on_the_newest_kernels(self):
        regimes = set()
        for element in self.limits:
            regimes |= {one["regime"] for one in self.compute(f"{element} native")}
        self.assertEqual(regimes, {"dense", "sparse", "grouped", "grouped-reduce"})

    def test_older_kernels(self):
        for case in ("f16 80", "bf16 80", "f32 70", "f16 70"):
            self.compute(case)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_the_checks_of_a_gpu_hold(self):
        for case in ("bf16 native", "f16 70"):
            variables = {"EMULATED": str(self.emulated), "CASE": case, "SEED": SEED}
            self.assertEqual(self.run_script(CHECKS, variables=variables, helpers=True), {}, f"{case}, seed {SEED}")


if __name__ == "__main__":
    unittest.main()
