"""The TensorRT stage of tools/gpu_check without TensorRT: stand-ins, and how its steps depend on each other."""

import ctypes
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import pieces, tensorrt_kit, tensorrt_stage, tensors

SYMBOLS = """
   7: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cudnnCreate@libcudnn.so.8 (4)
   8: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND initLibNvInferPlugins
   9: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  UND _ZTVN8nvinfer16pluginE
  10: 0000000000001000     8 FUNC    GLOBAL DEFAULT   12 createNvOnnxParser_INTERNAL@@libnvonnxparser.so.8
  11: 0000000000001000     8 FUNC    WEAK   DEFAULT   12 weak
"""

#: Seconds that nothing here takes, however busy the machine is.
LONG = 3600

#: Plays moa-export: notes its words, fails where FAIL names one of them, and writes what the real one writes.
PROGRAM = """
import json, os, pathlib, sys
sys.path.insert(0, TOOLS)
from gpu_check import tensors
words = sys.argv[1:]
with open(os.environ["LOG"], "a") as log:
    log.write(json.dumps(words) + "\\n")
if any(fault in " ".join(words) for fault in os.environ["FAIL"].split(",") if fault):
    print("error[MOA-E5]: it fails\\nhelp: do otherwise")
    sys.exit(5)
if os.environ["TENSORRT_ROOT"] == "/nowhere" and words[0] != "ops":
    print("error[MOA-E6]: TENSORRT_ROOT=/nowhere is not there")
    sys.exit(6)
if words[0] == "ops":
    print("TensorRT      8.6.0\\nGPU           NVIDIA X, compute capability 9.0")
if words[0] == "build":
    target = words[words.index("-o") + 1]
    os.makedirs(os.path.dirname(target) if target.endswith(".plan") else target, exist_ok=True)
    for name in [""] if target.endswith(".plan") else ["model.plan", "encoder_model.plan"]:
        open(os.path.join(target, name) if name else target, "wb").write(b"a plan")
if words[0] == "bench":
    open(words[words.index("--json") + 1], "w").write('{"rows": 2}')
if words[0] == "run" and "compared" in words[3]:
    of_runtime = "ort-function" in words
    numbers = {"out": ("F32", [2], [1.0, 2.0 + (0.5 if os.environ["SALT"] == "far" and not of_runtime else 0.0)])}
    tensors.write(pathlib.Path(words[words.index("--outputs") + 1]), numbers)
elif words[0] == "run":
    if open(words[1], "rb").read() != b"a plan":
        print("error[MOA-E3]: the plan is cut")
        sys.exit(3)
    if "nine" in words[3]:
        print("error[MOA-E3]: expected the range that the engine was built for")
        sys.exit(3)
    open(words[words.index("--outputs") + 1], "wb").write(os.environ["SALT"].encode() or os.urandom(8))
"""


class StandIns(unittest.TestCase):
    def test_functions_of_a_library_are_found(self):
        self.assertEqual(tensorrt_kit.functions(SYMBOLS, False), {"cudnnCreate", "initLibNvInferPlugins"})
        self.assertEqual(tensorrt_kit.functions(SYMBOLS, True), {"createNvOnnxParser_INTERNAL", "weak"})

    def stand_ins(self, folder, parser):
        """The stand-in for the plugins of a wheel whose parser is `parser`, in C."""
        (folder / "tensorrt").mkdir()
        wheel, plugins = folder / "tensorrt.whl", "int initLibNvInferPlugins(void) { return 0; } int other(void) { return 0; }"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, source in [(tensorrt_kit.PLUGINS, plugins), (tensorrt_kit.PARSER, parser)]:
                command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", folder / name]
                subprocess.run(command, input=source, text=True, check=True)
                archive.write(folder / name, f"tensorrt/{name}")
        tensorrt_kit.stand_ins(wheel, folder / "stand_ins")
        return ctypes.CDLL(f"{folder}/stand_ins/{tensorrt_kit.PLUGINS}")

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "there is no C compiler")
    def test_a_stand_in_has_what_the_parser_calls(self):
        with tempfile.TemporaryDirectory() as folder:
            parser = "int initLibNvInferPlugins(); int parse(void) { return initLibNvInferPlugins(); }"
            self.assertEqual(self.stand_ins(Path(folder), parser).initLibNvInferPlugins(None, b""), 1)
        with tempfile.TemporaryDirectory() as folder, self.assertRaisesRegex(ValueError, "calls other of libnvinfer_plugin"):
            self.stand_ins(Path(folder), "int other(); int parse(void) { return other(); }")


@unittest.skipUnless(os.environ.get("MOA_EXPORT"), "MOA_EXPORT names no program")
@unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "there is no C compiler")
class RealProgram(unittest.TestCase):
    """moa-export itself, with a library that plays the plugin."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        library = self.place / "libmoa_tensorrt.so"
        include, source = ROOT / "custom_ops/tensorrt/include", ROOT / "tests/cli/fake_tensorrt.c"
        options = ["-std=c11", "-D_GNU_SOURCE", "-shared", "-fPIC", "-I", include]
        subprocess.run([os.environ.get("CC", "cc"), *options, source, "-o", library], check=True)
        self.variables = {**os.environ, "MOA_TENSORRT_LIBRARY": str(library), "XDG_CACHE_HOME": str(self.place / "cache")}

    def ended(self, step, words, model):
        """The one step that `step` of the stage is, with a program that plays TensorRT as `words` say."""
        stage = tensorrt_stage.Stage(self.place, {**self.variables, "MOA_FAKE": words}, time.monotonic() + LONG)
        passed = [tensorrt_stage.FIRST, "export base_layer fp32 fused", "build base_layer fp32 fused"]
        stage.states = dict.fromkeys(passed, "passed")
        with mock.patch("builtins.print"):
            step(stage, os.environ["MOA_EXPORT"], self.place, "base_layer", "fp32", (model, self.place / "plans"))
        (only,) = stage.steps
        return only["state"], only["code"], only["said"]

    def test_a_missing_tensorrt_ends_as_the_stage_expects(self):
        import exports

        model = exports.export("layers/self_small", "fused")
        state, code, said = self.ended(tensorrt_stage.refuse_without_tensorrt, "no-nvinfer", model)
        self.assertEqual((state, code), ("passed", 6), said)
        state, code, said = self.ended(tensorrt_stage.refuse_without_tensorrt, "no-nvinfer", self.place / "nowhere.onnx")
        self.assertEqual((state, code), ("failed", 5), said)

    def test_a_cut_plan_ends_as_the_stage_expects(self):
        plans = self.place / "plans"
        plans.mkdir()
        (plans / "model.plan").write_bytes(b"half of a plan, and the other half")
        tensorrt_stage.write_inputs(self.place / "in.safetensors", "base_layer", "fp32")
        state, code, said = self.ended(tensorrt_stage.refuse_a_cut_plan, "", self.place)
        self.assertEqual((state, code), ("passed", 3), said)


class Models(unittest.TestCase):
    def test_every_case_of_verify_lies_in_the_profiles(self):
        """200 tokens, as the cases of `verify` may have, and the rows of its sweep over a small vocabulary."""
        cases = (ROOT / "src/parity/cases.rs").read_text()
        most = int(re.search(r"pub const MOST_TOKENS: usize = (\d+);", cases)[1])
        for model, found in tensorrt_stage.MODELS.items():
            sizes = {name: [int(size) for size in sizes.split(":")] for name, sizes in (dim.split("=") for dim in found["dims"])}
            self.assertGreaterEqual(sizes.pop("batch")[2], 4, model)
            for name, (least, _, largest) in sizes.items():
                self.assertEqual(least, 0 if name.startswith("past") else 1, model)
                self.assertGreaterEqual(largest, most, f"{model}: {name}")


class Steps(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.place = Path(folder.name)
        self.kit, self.out, self.log = self.place / "kit", self.place / "out", self.place / "log"
        self.work = self.place / "there/work"
        self.kit.mkdir()
        program = self.kit / "moa-export"
        program.write_text(f"#!{sys.executable}\n{textwrap.dedent(PROGRAM).replace('TOOLS', repr(str(ROOT / 'tools')), 1)}")
        program.chmod(program.stat().st_mode | stat.S_IEXEC)

    def run_stage(self, fail="", salt="equal", budget=str(LONG), unpack=lambda *_: None, models="base_layer", dtypes="fp32"):
        words = ["stage", "--kit", self.kit, "--pieces", self.place, "--out", self.out, "--place", self.place / "there"]
        words += ["--models", models, "--dtypes", dtypes, "--budget", budget]
        variables = {"FAIL": fail, "SALT": salt, "LOG": str(self.log)}
        with (
            mock.patch.object(sys, "argv", [str(word) for word in words]),
            mock.patch.dict(os.environ, variables),
            mock.patch.object(tensorrt_stage, "unpack", unpack),
            mock.patch("builtins.print"),
            self.assertRaises(SystemExit) as ended,
        ):
            tensorrt_stage.main()
        steps = json.loads((self.out / "tensorrt.json").read_text())["steps"]
        self.assertEqual(len({step["name"] for step in steps}), len(steps))
        return bool(ended.exception.code), {step["name"]: step["state"] for step in steps}

    def commands(self):
        """What the program was called with, in order."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def test_all_steps_pass(self):
        failed, states = self.run_stage()
        self.assertEqual((failed, set(states.values())), (False, {"passed"}), states)
        commands = self.commands()
        builds = [words for words in commands if words[0] == "build" and "--timing-cache" in words]
        self.assertEqual(len(builds), 2)
        self.assertIn("sequence=1:128:2048", builds[0])
        benches = [words for words in commands if words[0] == "bench" and words[2] != "--backends"]
        self.assertEqual([Path(place).name for place in benches[0][1:3]], ["base_layer-fp32-fused", "base_layer-fp32-standard"])
        self.assertEqual([words[words.index("--seconds") + 1] for words in benches], ["2"] * 3)
        self.assertIn("refuse a cut plan base_layer fp32 fused", states)
        self.assertIn("refuse a missing TensorRT base_layer fp32 fused", states)
        self.assertIn("refuse other shapes base_layer fp32 fused", states)

    def test_one_graph_is_held_beside_onnx_runtime(self):
        failed, states = self.run_stage(models="encoder", salt="near")
        self.assertEqual((failed, set(states.values())), (False, {"passed"}), states)
        self.assertIn("compare encoder fp32 standard", states)
        self.assertFalse([name for name in states if name.startswith(("verify", "bench", "engines"))])
        builds = [words for words in self.commands() if words[0] == "build" and "--timing-cache" in words]
        self.assertEqual({Path(words[1]).name for words in builds}, {"encoder_model.onnx"})
        self.assertEqual({Path(words[words.index("-o") + 1]).name for words in builds}, {"encoder_model.plan"})

    def test_a_graph_whose_outputs_are_far_fails(self):
        failed, states = self.run_stage(models="encoder", salt="far")
        self.assertTrue(failed)
        faults = {name for name, state in states.items() if state == "failed"}
        self.assertEqual(faults, {"compare encoder fp32 fused", "compare encoder fp32 standard"})

    def test_distances_of_tensors(self):
        file = self.place / "a.safetensors"
        tensors.write(file, {"a": ("F32", [2, 1], [1.0, -4.0]), "b": ("I64", [1], [7])})
        found = tensors.read(file)
        self.assertEqual(found, {"a": ([2, 1], (1.0, -4.0)), "b": ([1], (7,))})
        self.assertEqual(tensors.furthest(found, found), 0.0)
        self.assertEqual(tensors.furthest(found | {"a": ([2, 1], (2.0, -4.0))}, found), 0.25)
        for other in ({"a": found["a"]}, found | {"a": ([1, 2], (1.0, -4.0))}, found | {"a": ([2, 1], (float("nan"), -4.0))}):
            self.assertEqual(tensors.furthest(other, found), float("inf"))

    def test_reports_and_the_gpu_are_in_two_files(self):
        self.run_stage(fail="verify")
        self.assertEqual(sorted(file.name for file in self.out.iterdir()), ["tensorrt.json", "tensorrt.txt"])
        found = json.loads((self.out / "tensorrt.json").read_text())
        self.assertEqual(found["gpu"], "NVIDIA X, compute capability 9.0")
        self.assertTrue((self.out / "tensorrt.txt").read_text().startswith("GPU: NVIDIA X, compute capability 9.0\n"))
        reports = {step["name"].split()[0]: step["report"] for step in found["steps"] if "report" in step}
        self.assertEqual(reports, {"verify": None, "bench": {"rows": 2}})

    def test_the_gpu_is_not_told_where_nothing_ran(self):
        self.run_stage(budget="1")
        self.assertTrue((self.out / "tensorrt.txt").read_text().startswith("GPU: not told\n"))

    def test_a_second_run_into_the_same_folder_passes_too(self):
        self.run_stage()
        failed, states = self.run_stage()
        self.assertEqual((failed, set(states.values())), (False, {"passed"}), states)
        for words in self.commands():
            self.assertEqual("--force" in words, words[0] != "ops", words)

    def test_a_failure_leaves_the_rest_alone(self):
        failed, states = self.run_stage(fail=f"fp32-standard-plan,bench {self.work}/base_layer-fp32-standard")
        self.assertTrue(failed)
        self.assertEqual(states["build base_layer fp32 standard"], "failed")
        self.assertIn("code 5: error[MOA-E5]: it fails", (self.out / "tensorrt.txt").read_text())
        self.assertEqual(states["verify base_layer fp32 standard"], "skipped")
        self.assertEqual(states["bench base_layer fp32 1x128"], "skipped")
        self.assertEqual(states["bench base_layer fp32 1x128 fused alone"], "passed")
        self.assertNotIn("bench base_layer fp32 1x128 standard alone", states)
        self.assertEqual(states["verify base_layer fp32 fused"], "passed")
        self.assertEqual(states["equal outputs base_layer fp32 fused"], "passed")

    def test_what_did_not_run_is_written_down(self):
        """The steps are the same, however few of them run."""
        _, whole = self.run_stage()
        for fault in ["fp32-fused-plan", "fp32-fused --form"]:
            shutil.rmtree(self.place / "there")
            failed, states = self.run_stage(fail=fault)
            alone = [name for name in states if name.endswith(" alone")]
            self.assertEqual((failed, {name for name in states if name not in alone}), (True, set(whole)), fault)
        self.assertEqual(self.run_stage(budget="1")[1], dict.fromkeys(whole, "skipped"))

    def test_without_tensorrt_everything_else_is_skipped(self):
        def unpack(*_):
            raise ValueError("part07 is not there")

        failed, states = self.run_stage(unpack=unpack)
        self.assertTrue(failed)
        self.assertEqual(states.pop("unpack"), "failed")
        self.assertEqual(set(states.values()), {"skipped"}, states)
        self.assertFalse(self.log.exists(), "the program was started")
        text = (self.out / "tensorrt.txt").read_text()
        self.assertIn("ValueError: part07 is not there", text)
        self.assertIn("unpack has not passed", text)

    def test_a_step_that_hangs_leaves_time_for_the_others(self):
        stage = tensorrt_stage.Stage(self.place, dict(os.environ), time.monotonic() + LONG)
        stage.states[tensorrt_stage.FIRST] = "passed"
        with mock.patch("builtins.print"), mock.patch.object(tensorrt_stage, "LONGEST", 0.5):
            hangs = stage.run("hangs", [sys.executable, "-c", f"print('begun', flush=True); import time; time.sleep({LONG})"])
        with mock.patch("builtins.print"):
            ends = stage.run("ends", [sys.executable, "-c", ""])
        self.assertEqual((hangs, ends), (False, True))
        self.assertEqual(stage.steps[0]["code"], "time")

    def test_engines_are_built_before_what_is_worth_most_is_timed(self):
        failed, states = self.run_stage(models="base_layer,masked_lm,number_words", dtypes="fp32,fp16")
        self.assertEqual((failed, set(states.values())), (False, {"passed"}), states)
        names = list(states)
        timed = [name for name in names if name.startswith("bench")]
        self.assertEqual(names[-len(timed) :], timed)
        first = ["base_layer fp32 1x128", "base_layer fp16 1x128", "base_layer fp16 8x128", "masked_lm fp32 8x128"]
        first += ["base_layer fp16 1x2048", "number_words fp32 8x16"]
        self.assertEqual(timed[: len(first)], [f"bench {point}" for point in first])
        self.assertEqual(len(timed), 14)
        self.assertEqual(sum(name.startswith("engines") for name in names), 2 * len(timed))

    def test_jobs_share_no_file(self):
        """Of all commands that may run at once, no two write to one place."""
        self.run_stage(models="base_layer,number_words", dtypes="fp32,fp16")
        written = [words[words.index("--json") + 1] for words in self.commands() if words[0] in ("bench", "verify")]
        self.assertEqual(len(written), len(set(written)))
        written = [words[words.index("--timing-cache") + 1] for words in self.commands() if "--timing-cache" in words]
        self.assertEqual(len(written), len(set(written)))
        written = [words[words.index("--outputs") + 1] for words in self.commands() if words[0] == "run"]
        self.assertEqual(len(written), len(set(written)))

    def test_engines_that_were_not_built_in_time_are_built_where_they_are_timed(self):
        with mock.patch.object(tensorrt_stage, "BUILDING", 0.0):
            failed, states = self.run_stage()
        self.assertFalse(failed)
        self.assertEqual(states["build base_layer fp32 fused"], "skipped")
        self.assertEqual(states["engines base_layer fp32 1x128 fused"], "skipped")
        self.assertEqual(states["bench base_layer fp32 1x128"], "passed")

    def test_jobs_run_at_once(self):
        """Two steps that wait for each other both end."""
        stage = tensorrt_stage.Stage(self.place, dict(os.environ), time.monotonic() + LONG)
        stage.states[tensorrt_stage.FIRST] = "passed"
        meeting = threading.Barrier(2, timeout=LONG)

        def body(_):
            meeting.wait()
            return {"state": "passed"}

        with mock.patch("builtins.print"), ThreadPoolExecutor(2) as pool:
            self.assertEqual(list(pool.map(lambda name: stage.step(name, [], body), ["one", "other"])), [True, True])
        self.assertEqual(json.loads((self.place / "tensorrt.json").read_text())["counts"]["passed"], 2)

    def test_a_job_that_raises_is_written_down(self):
        with mock.patch.object(tensorrt_stage, "refuse_a_cut_plan", side_effect=OSError("the disk is full")):
            failed, states = self.run_stage()
        self.assertTrue(failed)
        self.assertEqual(states["job OSError('the disk is full')"], "failed")
        self.assertEqual(states["bench base_layer fp32 1x128"], "passed")

    def test_a_signal_leaves_a_backtrace(self):
        debugger = self.place / "cuda-gdb"
        debugger.write_text("#!/bin/sh\necho \"log $MOA_TENSORRT_LOG $@\"\n")
        debugger.chmod(0o755)
        says = "import os, signal; print('log', os.environ.get('MOA_TENSORRT_LOG'), flush=True)"
        dies = [sys.executable, "-c", f"{says}; os.kill(os.getpid(), signal.SIGKILL)"]
        for places, said in [(f"{self.place}:{os.environ['PATH']}", "log 4 -batch -ex run -ex bt"), ("", "log 4")]:
            stage = tensorrt_stage.Stage(self.place, {**os.environ, "PATH": places}, time.monotonic() + LONG)
            stage.states[tensorrt_stage.FIRST] = "passed"
            with mock.patch("builtins.print"), mock.patch.object(tensorrt_stage, "TOOLKIT", "/nowhere"):
                self.assertFalse(stage.run("dies", dies))
            self.assertEqual((stage.steps[0]["code"], stage.steps[0]["why"]), (-9, "code -9: log None"))
            self.assertIn(said, stage.steps[0]["backtrace"])
        with stage.tracing:
            stage.environment["PATH"] = str(self.place)
            self.assertIn("another program was traced", stage.backtrace(dies, 9.0))

    def test_a_layer_without_implementation_leaves_what_was_left_out(self):
        skips = "print('TensorRT 4: Skipping tactic 0x0 due to exception Mismatched type\\n' * 2)"
        says = f"import os; {skips} if os.environ.get('MOA_TENSORRT_LOG') == '4' else None"
        fails = [sys.executable, "-c", f"{says}; raise SystemExit('error[MOA-E0630]: Could not find any implementation for x')"]
        stage = tensorrt_stage.Stage(self.place, dict(os.environ), time.monotonic() + LONG)
        stage.states[tensorrt_stage.FIRST] = "passed"
        with mock.patch("builtins.print"):
            self.assertFalse(stage.run("fails", fails))
            self.assertFalse(stage.run("fails otherwise", [sys.executable, "-c", "raise SystemExit(1)"]))
        self.assertEqual(stage.steps[0]["tactics"], "TensorRT 4: Skipping tactic 0x0 due to exception Mismatched type")
        self.assertNotIn("tactics", stage.steps[1])
        with stage.tracing:
            self.assertIn("another program was traced", stage.left_out(fails, 9.0))

    def test_outputs_that_differ_between_processes_are_a_failure(self):
        failed, states = self.run_stage(salt="")
        self.assertTrue(failed)
        self.assertEqual(states["equal outputs base_layer fp32 fused"], "failed")

    def test_nothing_starts_when_the_time_is_over(self):
        failed, states = self.run_stage(budget="1")
        self.assertEqual((failed, set(states.values())), (True, {"skipped"}), "nothing was proved")
        self.assertFalse(self.log.exists(), "the program was started")

    def test_a_packed_program_runs(self):
        program = self.place / "moa-export"
        shutil.copy(shutil.which("true"), program)
        tensorrt_kit.pack(program)
        self.assertFalse(program.exists())
        there = self.place / "there"
        there.mkdir()
        self.assertEqual(subprocess.run([tensorrt_stage.unpacked(self.place, there)]).returncode, 0)

    def test_a_wheel_is_unpacked_from_its_pieces(self):
        wheel, there = self.place / "tensorrt.whl", self.place / "unpacked"
        there.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in tensorrt_stage.LIBRARIES:
                archive.writestr(f"tensorrt/{name}", os.urandom(1000))
            for name in ["__init__.py", tensorrt_kit.PLUGINS, "libnvparsers.so.8"]:
                archive.writestr(f"tensorrt/{name}", "")
        pieces.pack(wheel, self.place / "pieces", tensorrt_kit.PACKED, 700, 400)
        libraries = tensorrt_stage.unpack(self.place / "pieces", there)
        self.assertEqual(sorted(file.name for file in libraries.iterdir()), tensorrt_stage.LIBRARIES)
        self.assertEqual([file.name for file in there.iterdir()], ["tensorrt"])
        shutil.rmtree(self.place / "pieces")
        self.assertEqual(tensorrt_stage.unpack(self.place / "pieces", there), libraries)

    def test_half_a_wheel_leaves_nothing(self):
        there, whole = self.place / "unpacked", self.place / "pieces"
        there.mkdir()
        for names, why in [(["libnvinfer.so.8"], "lacks libnvonnxparser.so.8"), (tensorrt_stage.LIBRARIES, "differs")]:
            wheel = self.place / "tensorrt.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in names:
                    archive.writestr(f"tensorrt/{name}", os.urandom(1000))
            parts = pieces.pack(wheel, whole, tensorrt_kit.PACKED, 700, 400)
            if why == "differs":
                parts[1].write_bytes(bytes(700))
            with self.assertRaisesRegex(ValueError, why):
                tensorrt_stage.unpack(whole, there)
            self.assertEqual(list(there.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
