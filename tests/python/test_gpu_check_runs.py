"""How a run of tools/gpu_check survives what its stages do, without a GPU."""

import fcntl
import io
import json
import sys
import tempfile
import textwrap
import time
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import conductor, table
from test_gpu_check import DEVICE

STUB = """
import json, os, sys
from pathlib import Path
start = int(sys.argv[sys.argv.index("--start") + 1])
report = open(sys.argv[sys.argv.index("--report") + 1], "a")
for index in range(start, 5):
    report.write(json.dumps({"begin": index, "name": f"n{index}"}) + "\\n"); report.flush()
    if index in (1, 3):
        os._exit(3)
    report.write(json.dumps({"index": index, "name": f"n{index}", "found": {}}) + "\\n"); report.flush()
"""

PROBE = """
import json, os, sys
problems = ["replay 0 differs"] if {condition} else []
lines = {{"software": {{"torch": "2"}}}}, {{"begin": 0}}, {{"index": 0, "name": "n", "found": {{"problems": problems}}}}
open(sys.argv[sys.argv.index("--report") + 1], "a").writelines(json.dumps(line) + "\\n" for line in lines)
"""

FOUND = [{"begin": 0, "name": "n0"}, {"index": 0, "name": "n0", "found": {}}]


def reporting(*lines):
    """A child that reports these lines."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return f"import json, sys\nopen(sys.argv[sys.argv.index('--report') + 1], 'a').write({text!r})\n"


#: Seconds that nothing here takes, however busy the machine is.
LONG = 3600.0


class Runs(unittest.TestCase):
    def stub(self, folder, program):
        package = Path(folder, "gpu_check")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "child.py").write_text(textwrap.dedent(program))

    def run_in(self, folder, **options):
        return conductor.Run(folder, Path(folder, "out"), **options)

    def finish(self, run, stage):
        with redirect_stdout(io.StringIO()):
            run.wait([stage])

    def test_a_stage_goes_on_behind_what_ended_it(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, STUB)
            run = self.run_in(folder)
            stage = conductor.Stage(run, "check-x", "check", limit=run.begin + LONG)
            self.finish(run, stage)
            done = [record["index"] for record in run.results["stages"]["check-x"]]
            self.assertEqual(done, [0, 2, 4])
            self.assertEqual(len(run.results["lost"]), 2)
            self.assertIn("in `n1`", run.results["lost"][0])
            self.assertTrue((run.out / "results.json").exists() and (run.out / "table.txt").exists())

    def test_what_was_found_is_on_disk_before_its_stage_ends(self):
        """The stage ends well only once it reads in the results what it reported before."""
        patient = """
            import pathlib, time
            results = pathlib.Path("out/results.json")
            for _ in range(6000):
                if results.exists() and json.loads(results.read_text())["stages"].get("check-x"):
                    sys.exit(0)
                time.sleep(0.01)
            sys.exit(7)
            """
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(conductor, "SAVE_SECONDS", 0.0):
            self.stub(folder, reporting(*FOUND) + textwrap.dedent(patient))
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + LONG))
            self.assertEqual((run.results["lost"], run.results["stages"]["check-x"]), ([], [FOUND[1]]))

    def test_warpgroup_products_that_break_their_checks_are_not_timed(self):
        broken = reporting({"begin": 0, "name": "n0"}) + "sys.exit(3)\n"
        refused = reporting({"begin": 0, "name": "n0"}, {"index": 0, "name": "n0", "failed": "RuntimeError: x"})
        wrong = reporting({"begin": 0, "name": "n0"}, {"index": 0, "name": "n0", "found": {"problems": ["x"]}})
        for program, timed in [(broken, False), (refused, False), (wrong, False), (reporting(*FOUND), True)]:
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(conductor, "RESTARTS", 0):
                self.stub(folder, program)
                run = self.run_in(folder, budget=LONG, stages=["times"])
                self.finish(run, conductor.Stage(run, "check-wgmma-f16", "check", limit=run.begin + LONG))
                with mock.patch.object(conductor, "Stage") as stage, mock.patch.object(run, "wait"):
                    run.times()
                self.assertEqual("--no-wgmma" not in stage.call_args.args, timed, program)
                self.assertEqual("warpgroup products broke a check" not in " ".join(run.results["lost"]), timed, program)

    def test_warpgroup_products_may_be_left_out(self):
        for value, timed in (("0", False), ("1", True)):
            with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", {conductor.WGMMA: value}):
                run = self.run_in(folder, budget=LONG, stages=["times"])
                with mock.patch.object(conductor, "Stage") as stage, mock.patch.object(run, "wait"):
                    run.times()
                self.assertEqual("--no-wgmma" not in stage.call_args.args, timed)

    def test_results_are_kept_where_the_table_fails(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(table, "render", side_effect=KeyError("x")):
            run = self.run_in(folder)
            run.results["stages"]["check-x"] = FOUND
            run.save()
            self.assertEqual(json.loads((run.out / "results.json").read_text())["stages"]["check-x"], FOUND)
            self.assertEqual((run.out / "table.txt").read_text(), "there is no table: KeyError: 'x'\n")

    def test_the_device_of_a_stage_is_kept(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, reporting({"step": "torch has a context", "device": DEVICE}))
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "ceilings", "ceilings", limit=run.begin + LONG))
            self.assertEqual(run.results["device"], DEVICE)

    def test_onnxruntime_that_does_not_start_says_why(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "")
            Path(folder, "onnxruntime").mkdir()
            Path(folder, "onnxruntime", "x.whl").touch()
            run = self.run_in(folder, budget=LONG)
            run.onnxruntime()
            self.assertIn("onnxruntime ended with code 1: ", run.results["lost"][0])
            self.assertIn("gpu_check.onnx_sessions", run.results["lost"][0])
            self.assertEqual(run.results["onnxruntime"]["records"], [])

    def test_checks_that_no_time_was_left_for_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, reporting(*FOUND, {"unfinished": 7}))
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + LONG))
            self.assertIn("check-x: no time was left for 7 of its checks", (run.out / "table.txt").read_text())

    def test_checks_know_the_time_of_their_end(self):
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder, budget=LONG, stages=["check"])
            with mock.patch.object(conductor, "Stage") as stage, mock.patch.object(run, "wait"):
                run.checks()
            ends = {call.args[call.args.index("--until") + 1] for call in stage.call_args_list}
            self.assertEqual((len(ends), stage.call_count), (1, len(conductor.CHECKS)))
            kill = stage.call_args.kwargs["limit"] - time.monotonic() + time.time()
            self.assertAlmostEqual(float(ends.pop()), kill - conductor.LAST_CASE, delta=1.0)

    def test_what_is_beside_the_checks_begins_behind_the_native_one(self):
        """Or when its head start is over; all of it ends with the checks."""
        for head, ends_first in [(1.0, True), (0.0, False)]:
            begun, every = [], len(conductor.CHECKS) + len(conductor.TOOLS) + conductor.WARMERS

            class Fake:
                def __init__(self, run, name, *options, limit=None):
                    self.name = self.tool = name
                    self.limit, self.ended, self.polls = limit or options[-1], False, 0
                    self.records, self.lost, self.broke, self.result = [], [], False, {"summary": "0 errors"}
                    begun.append(self)
                    self.after_native = begun[0].ended

                def poll(self):
                    self.polls += 1
                    self.ended = self is not begun[0] or len(begun) == every or ends_first and self.polls == 3
                    return self.ended

                def seen(self):
                    return []

            fakes = {"Stage": Fake, "Sanitizer": type("FakeSanitizer", (Fake,), {}), "HEAD_START": head}
            with (
                tempfile.TemporaryDirectory() as folder,
                mock.patch.multiple(conductor, **fakes),
                redirect_stdout(io.StringIO()),
            ):
                run = self.run_in(folder, budget=LONG, stages=["check", "sanitize", "times"])
                run.checks()
            self.assertEqual((len(begun), begun[0].name), (every, "check-native-f32"))
            checks, beside = begun[: len(conductor.CHECKS)], begun[len(conductor.CHECKS) :]
            self.assertTrue(all(one.name.startswith("check-") for one in checks))
            self.assertEqual({one.after_native for one in beside}, {ends_first})
            self.assertEqual(max(one.limit for one in begun), begun[0].limit)
            self.assertLess(begun[0].limit - run.begin, conductor.CHECK_SHARE * LONG + 60)

    def test_a_stage_that_never_ends_is_stopped(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "import time\ntime.sleep(3600)\n")
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + 1))
            self.assertEqual(run.results["lost"], ["check-x ran out of time"])

    def test_a_stage_that_cannot_begin_is_not_tried_for_ever(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "raise SystemExit(5)\n")
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + LONG))
            self.assertEqual(run.results["lost"], ["check-x ended with code 5"])

    def test_a_stage_that_fails_says_its_last_words(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "import no_such_module\n")
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + LONG))
            self.assertIn("ended with code 1: ModuleNotFoundError: No module named", run.results["lost"][0])
            self.assertIn("no_such_module", (run.out / "log.txt").read_text())

    def test_a_case_that_hangs_is_left_behind(self):
        hanging = STUB.replace("os._exit(3)", "import time; time.sleep(3600)")
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, hanging)
            run = self.run_in(folder)
            stage = conductor.Stage(run, "check-x", "check", limit=run.begin + LONG)
            poll = stage.poll

            def poll_impatiently():
                """Patience ends when the child has begun what it hangs in, and not while it starts."""
                last = conductor.read_lines(stage.report)[-1:]
                stage.quiet = (LONG, 0.1 if last and last[0].get("begin") in (1, 3) else LONG)
                return poll()

            with mock.patch.object(stage, "poll", poll_impatiently):
                self.finish(run, stage)
            self.assertEqual([record["index"] for record in run.results["stages"]["check-x"]], [0, 2, 4])
            self.assertEqual(run.results["lost"], ["check-x hung in `n1`", "check-x hung in `n3`"])

    def test_patience_is_shorter_once_a_case_has_begun(self):
        """The clock stands still, but for one step over the patience of a case."""
        self.assertTrue(all(first >= later for first, later in conductor.QUIET.values()))
        for lines, hung in [((), False), (({"step": "x"},), False), (({"step": "x"}, {"begin": 0, "name": "n0"}), True)]:
            with tempfile.TemporaryDirectory() as folder:
                self.stub(folder, reporting(*lines, {"step": "last"}) + "import time\ntime.sleep(3600)\n")
                run = self.run_in(folder)
                stage = conductor.Stage(run, "check-x", "check", limit=run.begin + LONG)
                self.addCleanup(conductor.kill, stage.process)
                stage.restarts = 0
                while not stage.heard[1]:
                    self.assertFalse(stage.poll())
                    time.sleep(0.01)
                stage.heard = (stage.heard[0] - conductor.QUIET["check"][1] - 1, stage.heard[1])
                self.assertEqual(stage.poll(), hung, lines)

    def test_a_probe_that_hangs_is_not_started_again(self):
        hanging = reporting({"begin": 0, "name": "probe f16"}) + "import time\ntime.sleep(3600)\n"
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.dict(conductor.QUIET, {"probe": (LONG, 0.1)}),
        ):
            self.stub(folder, hanging)
            run = self.run_in(folder)
            stage = conductor.Stage(run, "probe", "probe", limit=run.begin + LONG)
            self.finish(run, stage)
            self.assertEqual(stage.starts, 1)
            self.assertEqual(run.results["lost"], ["probe hung in `probe f16`"])

    def test_what_a_process_started_ends_with_it(self):
        """The second process holds a lock; it ends by itself, and says so, only where nobody ended it."""
        second = """
            import fcntl, os, time
            with open("lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                open("begun", "w").close()
                while not os.path.exists("go"):
                    time.sleep(0.01)
                open("ended", "w").close()
            """
        with tempfile.TemporaryDirectory() as folder:
            run = self.run_in(folder)
            Path(run.kit, "second.py").write_text(textwrap.dedent(second))
            first = "import subprocess, sys; subprocess.run([sys.executable, 'second.py'])"
            process = run.popen([sys.executable, "-c", first], "first")
            while not Path(run.kit, "begun").exists():
                self.assertIsNone(process.poll())
                time.sleep(0.01)
            self.assertEqual(conductor.kill(process), -9)
            Path(run.kit, "go").touch()
            with open(Path(run.kit, "lock")) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.assertFalse(Path(run.kit, "ended").exists())

    def test_overlap_is_given_up_where_it_alone_fails(self):
        for program, lost, environment in [
            (PROBE.format(condition="False"), [], None),
            (PROBE.format(condition="os.environ.get('MOA_CUDA_OVERLAP') != '0'"), ["kernels that overlap fail"], "0"),
            (PROBE.format(condition="True"), [], None),
        ]:
            with tempfile.TemporaryDirectory() as folder:
                self.stub(folder, program)
                run = self.run_in(folder)
                with redirect_stdout(io.StringIO()):
                    run.probe()
                self.assertEqual([line[: len(lost[0])] for line in run.results["lost"]] if lost else [], lost)
                self.assertEqual(run.environment.get(conductor.OVERLAP), environment)
                self.assertEqual(run.results["software"], {"torch": "2"})

    def test_a_probe_that_never_begins_says_nothing_about_overlap(self):
        slow = "import os, sys\nif not os.path.exists('begun'):\n    open('begun', 'w')\n    sys.exit(9)\n"
        for program in (slow + PROBE.format(condition="False"), "raise SystemExit(9)\n"):
            with tempfile.TemporaryDirectory() as folder:
                self.stub(folder, program)
                run = self.run_in(folder)
                with redirect_stdout(io.StringIO()):
                    run.probe()
                self.assertNotIn(conductor.OVERLAP, run.environment)
                self.assertTrue(all("ended with code 9" in line for line in run.results["lost"]), run.results["lost"])
                self.assertIn("probe-again", run.results["stages"])
                self.assertNotIn("probe-no-overlap", run.results["stages"])

    def test_a_stage_that_raises_is_not_the_end(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "raise SystemExit(5)\n")
            run = self.run_in(folder, budget=LONG, stages=["onnxruntime"])
            with redirect_stdout(io.StringIO()), mock.patch.object(run, "times", side_effect=ValueError("x"), __name__="times"):
                run.everything()
            self.assertEqual(run.results["lost"], ["times: ValueError: x"])
            self.assertIn("skipped", run.results["onnxruntime"])

    def test_a_machine_without_a_gpu_gets_a_table_that_says_not_measured(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, "raise SystemExit(5)\n")
            run = self.run_in(folder, budget=LONG, stages=["check", "ceilings", "times", "onnxruntime"])
            with redirect_stdout(io.StringIO()):
                run.everything()
            text = (run.out / "table.txt").read_text()
            self.assertIn("ceilings: not measured", text)
            self.assertIn("ONNX Runtime CUDA: not measured", text)
            self.assertEqual(sorted(path.name for path in run.out.iterdir()), ["log.txt", "results.json", "table.txt"])


if __name__ == "__main__":
    unittest.main()
