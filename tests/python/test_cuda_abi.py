"""libmoa_cuda.so through the ctypes of tools/gpu_check, on a fake CUDA driver.

MOA_CUDA_LIBRARY names the library. The system's C++ compiler builds the driver and checks the header.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import compile_cuda
from gpu_check import abi

LIBRARY = os.environ.get("MOA_CUDA_LIBRARY")
HEADER = ROOT / "custom_ops/cuda/include/moa_cuda.h"
FAKE = ROOT / "custom_ops/cuda/fake/fake_cuda.cpp"
COMPILER = os.environ.get("CXX", "c++")


def compile_with(source, target, *options):
    subprocess.run([COMPILER, *options, str(source), "-o", str(target)], check=True)


class Header(unittest.TestCase):
    """The header compiles as C and as C++, and lays its structures out as ctypes does."""

    def test_structures_have_the_layout_of_ctypes(self):
        lines = ['#include "moa_cuda.h"', "#include <stdio.h>", "#include <stddef.h>", "int main(void) {"]
        for name, structure in abi.STRUCTURES.items():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            for field, *_ in structure._fields_:
                lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
        for name in ("MOA_CUDA_ABI_VERSION", "MOA_CUDA_MAX_RANK", "MOA_CUDA_TF32"):
            lines.append(f'printf("{name} %d\\n", (int){name});')
        lines.append("return 0; }")
        expected = {}
        for name, structure in abi.STRUCTURES.items():
            expected[name] = __import__("ctypes").sizeof(structure)
            for field, *_ in structure._fields_:
                expected[f"{name}.{field}"] = getattr(structure, field).offset
        expected |= {
            "MOA_CUDA_ABI_VERSION": abi.ABI_VERSION,
            "MOA_CUDA_MAX_RANK": abi.MAX_RANK,
            "MOA_CUDA_TF32": abi.TF32,
        }
        with tempfile.TemporaryDirectory() as folder:
            for language in ("c", "c++"):
                source, program = Path(folder, f"layout.{language}"), Path(folder, f"layout-{language}")
                source.write_text("\n".join(lines))
                strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{HEADER.parent}"]
                compile_with(source, program, "-x", language, *strict)
                text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
                found = {key: int(value) for key, value in (line.split() for line in text.splitlines())}
                self.assertEqual(found, expected, language)

    def test_every_number_of_the_header_is_that_of_ctypes(self):
        text = HEADER.read_text()
        for prefix, names in (
            ("", [name.upper() for name in ("self_attention", "cross_attention", "feed_forward")]),
            ("", ["F32", "F16", "BF16"]),
            ("", [mode.upper() for mode in abi.GATE_MODES]),
            ("", [activation.upper() for activation in abi.ACTIVATIONS]),
            ("", ["OK", *[name.upper() for name in abi.CODES.values()]]),
        ):
            for number, name in enumerate(names):
                self.assertRegex(text, rf"#define MOA_CUDA_{prefix}{name} {number}\b")


#: Runs in a process of its own, whose libcuda.so.1 is the fake.
PRELUDE = """
import ctypes, json, sys
sys.path.insert(0, sys.argv[1])
from gpu_check import abi
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_log.restype = ctypes.c_char_p
fake.fake_make_current.argtypes = [ctypes.c_size_t]
library = abi.Library(sys.argv[2])
archive = bytes.fromhex(sys.argv[3])
sizes = dict(b=2, t=3, p=4, c=64, e=4, g=1, d=64)
shapes = {
    "hidden_states": (2, 3, 64), "attention_mask": (2, 7), "router_weight": (64, 4), "query_weight": (4, 64, 64),
    "kv_weight": (64, 128), "output_weight": (4, 64, 64), "past_key": (2, 1, 4, 64), "past_value": (2, 1, 4, 64),
}
attributes = dict(top_k=2, kv_num_heads=1, causal=1, scale=0.125, gate_mode="softmax_topk", skip_padded_queries=1)
def log():
    lines = [line for line in fake.fake_log().decode().splitlines() if line != "cuCtxGetCurrent"]
    fake.fake_clear()
    return lines
def refused(work):
    try:
        work()
    except abi.CallError as error:
        return [error.code, str(error)]
    return None
"""


@unittest.skipUnless(LIBRARY, "MOA_CUDA_LIBRARY is not set")
class Calls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        options = ["-std=c++17", "-O1", "-shared", "-fPIC"]
        compile_with(FAKE, Path(cls.folder.name, "libcuda.so.1"), *options)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def run_script(self, script, kernels=(), driver=True, variables=None, helpers=False):
        environment = {**os.environ, **(variables or {}), "PYTHONDONTWRITEBYTECODE": "1"}
        if driver:
            environment["LD_LIBRARY_PATH"] = self.folder.name
        program = PRELUDE if driver else PRELUDE.split("fake =")[0] + "library = abi.Library(sys.argv[2])\n"
        if helpers:
            here = str(Path(__file__).resolve().parent)
            program += f"sys.path.insert(0, {here!r})\nfrom test_cuda_abi import archive as build\n"
        arguments = [sys.executable, "-c", program + textwrap.dedent(script), str(ROOT / "tools"), LIBRARY]
        done = subprocess.run(
            [*arguments, archive(list(kernels)).hex()], env=environment, capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def kernel_names(self, shapes="shapes", wanted=("output", "present_key", "present_value")):
        """The kernels that a plan asks for, one by one, from the errors that name what is missing."""
        known = []
        while True:
            answer = self.run_script(
                f"""
                kernels = abi.Kernels(library, archive, device=0)
                print(json.dumps(refused(lambda: kernels.plan(
                    "MoASelfAttention", attributes, "bf16", {shapes}, {list(wanted)}))))
                """,
                known,
            )
            if answer is None:
                return known
            self.assertEqual(answer[0], 3, answer)
            known.append(answer[1].split("`")[1])

    def test_one_call_from_shapes_to_launches(self):
        answer = self.run_script(
            """
            kernels = abi.Kernels(library, archive, device=0)
            facts = kernels.facts()
            wanted = ["output", "present_key", "present_value"]
            plan = kernels.plan("MoASelfAttention", attributes, "bf16", shapes, wanted)
            log()
            far = lambda index: (index + 1) << 32
            inputs = {name: far(index) for index, name in enumerate(abi.INPUTS["MoASelfAttention"]) if name in shapes}
            outputs = {name: far(20 + index) for index, name in enumerate(plan.output_shapes)}
            launch = plan.bind(inputs, outputs, far(40))
            launch(7)
            calls = log()
            launch(None)
            second = log()
            faults = kernels.faults()
            plan.close(); kernels.close()
            print(json.dumps([facts, plan.output_shapes, plan.launches, calls, second, faults, log()]))
            """,
            self.kernel_names(),
        )
        facts, shapes, launches, calls, second, faults, end = answer
        self.assertEqual([facts["compute_major"], facts["device_minor"], facts["multiprocessors"]], [9, 0, 132])
        self.assertEqual(shapes, {"output": [2, 3, 64], "present_key": [2, 1, 7, 64], "present_value": [2, 1, 7, 64]})
        self.assertEqual(len(calls), launches + 2)
        self.assertEqual([calls[0], calls[-1]], ["cuCtxPushCurrent 1000", "cuCtxPopCurrent"])
        self.assertTrue(all(" stream 7" in line for line in calls[1:-1]), calls)
        self.assertTrue(all(" stream 0" in line for line in second[1:-1]), second)
        self.assertEqual(faults, 0)
        self.assertIn("cuDevicePrimaryCtxRelease 0", end)
        self.assertTrue(any(line.startswith("cuModuleUnload") for line in end))

    def test_the_calls_of_the_sanitizer_reach_the_driver(self):
        answer = self.run_script(
            """
            import numpy as np
            from gpu_check import device, sanitize
            gpu = device.Gpu()
            random, found = np.random.default_rng(1), []
            for element in abi.ELEMENTS:
                names = []
                for call in sanitize.CALLS:
                    while True:
                        kernels = abi.Kernels(library, build(names))
                        try:
                            one = sanitize.compute(kernels, gpu, call, element, random)
                            launched = sum(line.startswith("cuLaunchKernelEx") for line in log())
                            found.append([one["launches"], launched, bool(one["error"] <= 1.0)])
                            break
                        except abi.CallError as error:
                            assert error.code == 3, error
                            names.append(str(error).split("`")[1])
                        finally:
                            kernels.close()
            print(json.dumps([found, len(gpu.owned), len(abi.ELEMENTS) * len(sanitize.CALLS)]))
            """,
            helpers=True,
        )
        found, left, calls = answer
        self.assertEqual(len(found), calls)
        for planned, launched, right in found:
            self.assertEqual(planned, launched)
            self.assertFalse(right, "nothing was computed")
        self.assertEqual(left, 0)

    def test_overlap_can_be_switched_off(self):
        script = """
            kernels = abi.Kernels(library, archive, device=0)
            plan = kernels.plan("MoASelfAttention", attributes, "bf16", shapes, ["output"])
            far = lambda index: (index + 1) << 32
            log()
            plan.bind({name: far(index) for index, name in enumerate(shapes)} , {"output": far(20)}, far(40))(7)
            print(json.dumps([" attribute 6=1" in line for line in log() if line.startswith("cuLaunch")]))
            """
        names = self.kernel_names()
        self.assertTrue(any(self.run_script(script, names)))
        self.assertFalse(any(self.run_script(script, names, variables={"MOA_CUDA_OVERLAP": "0"})))

    def test_warpgroup_products_can_be_asked_for(self):
        large = {
            "hidden_states": (1, 32768, 512),
            "attention_mask": (1, 32768),
            "router_weight": (512, 4),
            "query_weight": (4, 512, 128),
            "kv_weight": (512, 256),
            "output_weight": (4, 128, 512),
        }
        script = f"""
            large = {large}
            kernels = abi.Kernels(library, archive, device=0)
            plan = kernels.plan("MoASelfAttention", attributes, "bf16", large, ["output"])
            far = lambda index: (index + 1) << 40
            log()
            plan.bind({{name: far(index) for index, name in enumerate(large)}}, {{"output": far(20)}}, far(40))(7)
            print(json.dumps(["_wgmma_" in line for line in log() if line.startswith("cuLaunch")]))
            """
        names = self.kernel_names(str(large), ["output"])
        of_many = ("route_tokens", "project_wgmma_128x256", "attend_wgmma_d128_r128", "output_wgmma_128x256")
        wgmma = [f"moa_{name}" for name in of_many]
        refused = {"MOA_CUDA_WGMMA": "0"}
        self.assertTrue(any(self.run_script(script, names + wgmma)))
        self.assertFalse(any(self.run_script(script, names)), "the archive has none")
        self.assertFalse(any(self.run_script(script, names + wgmma, variables=refused)))

    def test_every_refusal_has_its_code_and_its_line(self):
        answers = self.run_script(
            """
            def plan(kernels=None, operator="MoASelfAttention", element="bf16", given=shapes, **changes):
                return (kernels or abi.Kernels(library, archive, device=0)).plan(
                    operator, {**attributes, **changes}, element, given, ["output"])
            def old_structure():
                node = abi.node_of("MoASelfAttention", attributes, "bf16")
                node.struct_size = 500
                library.call("moa_cuda_output_shapes", ctypes.byref(node), None, 0, None, 0)
            def failing(call, number):
                fake.fake_clear(); fake.fake_fail(call, number, 2)
                return abi.Kernels(library, archive, device=0)
            print(json.dumps({
                "shape": refused(lambda: plan(given={**shapes, "kv_weight": (64, 64)})),
                "top_k": refused(lambda: plan(top_k=5)),
                "scale": refused(lambda: plan(scale=float("nan"))),
                "heads": refused(lambda: plan(kv_num_heads=0)),
                "causal": refused(lambda: plan(causal=2)),
                "size": refused(old_structure),
                "archive": refused(lambda: abi.Kernels(library, b"nonsense", device=0)),
                "context": refused(lambda: abi.Kernels(library, archive)),
                "path": refused(lambda: abi.Kernels(library, archive, device=0, path=(12, 0))),
                "driver": refused(lambda: failing(b"cuMemAlloc", 1)),
            }))
            """
        )
        expected = {
            "shape": (1, "MoASelfAttention: input `kv_weight` must be [C, 2 * G * D], keys first, found [64, 64]"),
            "top_k": (1, "MoASelfAttention: top_k is 5, but the router has 4 experts"),
            "scale": (1, "`scale` must be finite"),
            "heads": (1, "`kv_num_heads` must be at least 1"),
            "causal": (1, "`causal` must be below 2, found 2"),
            "size": (1, "`moa_cuda_node` has struct_size 500, this library knows 52"),
            "archive": (3, "the kernel archive does not begin with MOACUDA1"),
            "context": (1, "the calling thread has no current CUDA context"),
            "path": (1, "kernels of compute capability 12.0 cannot run on a device of 9.0"),
            "driver": (4, "cuMemAlloc failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory"),
        }
        self.assertEqual(set(answers), set(expected))
        for name, (code, text) in expected.items():
            self.assertEqual(answers[name][0], code, (name, answers[name]))
            self.assertTrue(answers[name][1].startswith(text), (name, answers[name]))

    def test_a_machine_without_a_driver_or_kernels_is_told_so(self):
        script = """
            options = abi.Options(device=0)
            handle = ctypes.c_void_p()
            try:
                library.call("moa_cuda_create", ctypes.byref(options), ctypes.byref(handle))
                print(json.dumps(None))
            except abi.CallError as error:
                print(json.dumps([error.code, str(error)]))
            """
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(archive([]))
            file.flush()
            code, text = self.run_script(script, driver=False, variables={"MOA_CUDA_KERNELS": file.name})
        self.assertEqual(code, 3)
        self.assertIn("libcuda.so.1 cannot be loaded", text)
        code, text = self.run_script(script, variables={"MOA_CUDA_KERNELS": "/nowhere/kernels.bin"})
        self.assertEqual(code, 3)
        self.assertIn("the kernel archive /nowhere/kernels.bin cannot be read", text)


def archive(kernels, targets=("sm_90a", "compute_70", "compute_80")):
    """A kernel archive whose images are their own names."""
    images, payload = [], b""
    for module in abi.ELEMENTS:
        for target in targets:
            text = f"{module}-{target}\0".encode()
            resources = [
                {"name": name, "registers": 40, "shared_bytes": 0, "local_bytes": 0, "max_threads": 256}
                for name in kernels
            ]
            place = {"offset": len(payload), "bytes": len(text)}
            images.append({"module": module, "target": target, **place, "kernels": resources})
            payload += text
    kernels = [path for ending in ("cu", "cuh") for path in (ROOT / "custom_ops/cuda/kernels").glob(f"*.{ending}")]
    source_hash = compile_cuda.source_hash({path.name: path.read_text() for path in kernels})
    manifest = json.dumps({"source_hash": source_hash, "compiler": "", "images": images}).encode()
    return b"MOACUDA1" + struct.pack("<Q", len(manifest)) + manifest + payload


if __name__ == "__main__":
    unittest.main()
