"""tools/gpu_check without a GPU: floors, statistics, tables, and how a run survives what its stages do."""

import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import cases, conductor, pieces, roofline, sanitize, slim, stats, table
from test_cuda_abi import archive


def case(layer, batch, tokens, past=0, causal=False):
    return cases.Case(layer, batch, tokens, past, causal)


class Floors(unittest.TestCase):
    """Beside figures that were derived by hand from the formulas."""

    def test_work_of_a_prefill(self):
        work = roofline.moa_work(case(cases.BASE, 1, 128))
        router, kv, query = 2 * 128 * 512 * 8, 4 * 128 * 512 * 128, 2 * 128 * 8 * 512 * 128
        self.assertEqual(work.product_flops, router + kv + 2 * query)
        self.assertEqual(work.attention_flops, 4 * 128 * 128 * 8 * 128)
        self.assertAlmostEqual((work.product_flops + work.attention_flops) / 1e9, 0.3701, places=4)
        big = roofline.moa_work(case(cases.BIG, 8, 2048))
        self.assertAlmostEqual((big.product_flops + big.attention_flops) / 1e9, 696.3, places=1)

    def test_causal_attention_is_about_half(self):
        whole, half = (
            roofline.moa_work(case(cases.BASE, 8, 2048, causal=causal)).attention_flops for causal in (False, True)
        )
        self.assertAlmostEqual(half / whole, 2049 / 4096, places=9)

    def test_work_of_a_decode_step(self):
        work = roofline.moa_work(case(cases.JETMOE, 1, 1, 2047, True))
        weights = 2 * (2 * 2 * 2048 * 2048 + 2 * 2048 * 2048) + 4 * 2048 * 8
        cache = 2 * 2 * 2048 * 2048
        self.assertAlmostEqual(work.bytes, weights + cache + 2 * 2 * 2048, delta=1)
        self.assertAlmostEqual(roofline.touched_experts(8, 2, 8), 7.2, places=1)

    def test_widths_of_equal_work(self):
        for layer, batch, tokens, past, width in [
            (cases.BASE, 1, 128, 0, 640),
            (cases.BASE, 8, 2048, 0, 896),
            (cases.BIG, 128, 128, 0, 2304),
            (cases.BIG, 8, 2048, 0, 3584),
            (cases.JETMOE, 1, 128, 0, 3072),
            (cases.JETMOE, 64, 1, 2047, 3456),
        ]:
            one = case(layer, batch, tokens, past)
            self.assertEqual(cases.equal_mac_width(one), width, one.name)
            ours, theirs = roofline.moa_work(one), roofline.mha_work(one)
            ratio = (ours.product_flops + ours.attention_flops) / (theirs.product_flops + theirs.attention_flops)
            self.assertLess(abs(ratio - 1), 0.11, one.name)

    def test_the_floor_is_the_larger_of_both_times(self):
        ceilings = roofline.Ceilings(product=100.0, attention={128: 50.0}, copy=10.0)
        self.assertEqual(roofline.Work(100.0, 50.0, 5.0).floor(ceilings, 128), 2.0)
        self.assertEqual(roofline.Work(100.0, 50.0, 50.0).floor(ceilings, 256), 5.0)

    def test_ceilings_that_were_not_measured_give_no_floor(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "ceilings.json")
            self.assertIsNone(roofline.Ceilings.read(path))
            raw = {"product_flops": 8e14, "attention_flops": {"128": 6e14, "256": None}, "copy_bytes": None}
            path.write_text(json.dumps(raw))
            self.assertIsNone(roofline.Ceilings.read(path))
            path.write_text(json.dumps({**raw, "copy_bytes": 4e12}))
            self.assertEqual(roofline.Ceilings.read(path), roofline.Ceilings(8e14, {128: 6e14}, 4e12))
            self.assertIn("copy not measured TB/s", table.render({"ceilings": {**raw, "launch_gap": 1e-6}}))
            record = timed(cases.TIMED[0].name, 8e-6)
            record["found"]["floor"] = None
            self.assertEqual(table.time_rows({"stages": {"times": [record]}})[0][0][table.HEADER.index("% floor")], "")

    def test_copies_exceed_the_cache_three_times(self):
        self.assertEqual(roofline.copies_for_cold_cache(2_400_000, 60 << 20), 79)
        self.assertEqual(roofline.copies_for_cold_cache(10**9, 60 << 20), 1)


class Statistics(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(stats.quantile([3.0, 1.0, 2.0], 0.5), 2.0)
        self.assertEqual(stats.quantile([1.0, 2.0, 3.0, 4.0], 0.25), 1.75)
        self.assertEqual(stats.quantile([7.0], 0.9), 7.0)
        with self.assertRaises(ValueError):
            stats.quantile([], 0.5)

    def test_halves_show_the_noise(self):
        found = stats.summarize([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
        self.assertEqual((found.median, found.halves, found.count), (1.5, (1.0, 2.0), 6))
        self.assertAlmostEqual(found.noise, 2 / 3)
        self.assertEqual(json.loads(json.dumps(found.to_json()))["iqr"], 1.0)


def timed(name, ours, wrong=False, **rivals):
    times = {cases.OURS: {"median": ours, "iqr": ours / 100}}
    times |= {rival.replace("_", "-"): {"median": value} for rival, value in rivals.items()}
    notes = {"moa": {"regime": "dense"}, **({"wrong": {cases.OURS: "off by 1"}} if wrong else {})}
    return {"index": 0, "name": name, "found": {"times": times, "floor": 4e-6, "notes": notes}}


class Table(unittest.TestCase):
    def test_nothing_measured_says_so(self):
        text = table.render({})
        self.assertIn("ceilings: not measured", text)
        self.assertEqual(text.count("not measured\n") >= len(cases.TIMED), True)
        gates = sum(1 for one in cases.TIMED for target in one.targets.values() if target.gate)
        self.assertIn(f"gates met: 0, missed: 0, not measured: {gates}", text)

    def test_ratios_and_gates(self):
        first = cases.TIMED[0]
        record = timed(first.name, 8e-6, mha_equal=9.6e-6, upstream_eager=160e-6, dense_compiled=7e-6)
        rows, met, missed = table.time_rows({"stages": {"times": [record]}})
        row = dict(zip(table.HEADER, rows[0]))
        self.assertEqual(row["moa us"], "8.0")
        self.assertEqual(row["% floor"], "50")
        self.assertEqual(row[table.SHORT[cases.MHA]], "1.20*")
        self.assertEqual(row[table.SHORT[cases.UPSTREAM]], "20.00+")
        self.assertEqual(row[table.SHORT[cases.DENSE]], "0.88!")
        self.assertEqual(row[table.SHORT[cases.GROUPED]], "")
        self.assertEqual(len(met), 2)
        self.assertIn(f"{first.name} {cases.DENSE}: 0.88, gate 1.0, goal 1.2", missed)
        self.assertIn(f"{first.name} {cases.GROUPED}: not measured", missed)

    def test_a_wrong_result_meets_no_gate(self):
        record = timed(cases.TIMED[0].name, 1e-6, wrong=True, mha_equal=9e-6)
        rows, met, _ = table.time_rows({"stages": {"times": [record]}})
        self.assertEqual(met, [])
        self.assertTrue(rows[0][1].endswith("?") and rows[0][table.HEADER.index("mha=")].endswith("?"))

    def test_warpgroup_products_are_judged_by_all_cases(self):
        self.assertEqual(table.wgmma_verdict({}), "wgmma: not measured")
        records = [timed(one.name, 8e-6) for one in cases.TIMED[:3]]
        for record, seconds in zip(records, (4e-6, 16e-6, 2e-6)):
            record["found"]["times"][cases.WGMMA] = {"median": seconds}
        records[2]["found"]["notes"]["wrong"] = {cases.WGMMA: "off by 1"}
        results = {"stages": {"times": records}}
        rows, _, _ = table.time_rows(results)
        column = table.HEADER.index(table.WGMMA)
        self.assertEqual([row[column] for row in rows[:3]], ["2.00", "0.50", ""])
        self.assertTrue(table.wgmma_verdict(results).startswith("wgmma: 1.00 times as fast as the default over 2 cases"))

    def test_checks_are_counted(self):
        records = [
            {"index": 0, "name": "native f16: a", "found": {"errors": {"output": 1e-4}, "problems": []}},
            {
                "index": 1,
                "name": "native f16: b",
                "found": {"errors": {"output": 0.5}, "problems": ["`output` is off"]},
            },
            {"index": 2, "name": "native f16: c", "failed": "CallError: limit (unsupported)"},
            {"index": 3, "name": "native f16: d", "failed": "RuntimeError: illegal address"},
        ]
        results = {"stages": {"check-native-f32": records}, "lost": ["check-native ended with code 3"]}
        self.assertEqual(table.check_rows(results), [["native f16", 1, 2, 1, "5.0e-01"]])
        lines = table.problems(results)
        self.assertIn("native f16: b: `output` is off", lines)
        self.assertIn("check-native ended with code 3", lines)

    def test_every_case_has_its_own_name(self):
        names = [one.name for one in cases.TIMED]
        self.assertEqual(len(names), len(set(names)))


class Sanitizers(unittest.TestCase):
    def judge(self, text, code, late=False):
        return conductor.judge_sanitizer(text, code, late)

    def test_findings_and_refusals(self):
        call = '{"call": "x", "error": 0.001}\n'
        clean = self.judge(call + "========= ERROR SUMMARY: 0 errors\n", 0)
        self.assertNotIn("problem", clean)
        self.assertEqual(clean["calls"], 1)
        found = self.judge("========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors\n", 9)
        self.assertIn("Invalid __global__ write", found["problem"])
        race = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
        self.assertNotIn("problem", self.judge(race, 0))
        self.assertIn("skipped", self.judge("========= Error: Device not supported\n", 1))
        self.assertEqual(self.judge(call, -9, late=True)["unfinished"], "stopped after 1 calls")
        self.assertIn("problem", self.judge("Traceback\nImportError: x\n", 1))


class Choices(unittest.TestCase):
    """Results of a call are judged under the experts that it chose, where these are near ties of the best."""

    def setUp(self):
        call = next(call for call in sanitize.CALLS if call[0] == "MoEFeedForward")
        self.operator = call[0]
        self.attributes, self.feeds = sanitize.make(np.random.default_rng(3), call)
        self.router = self.feeds["router_weight"] = self.feeds["router_weight"].astype(np.float64)

    def evaluate(self, chosen=None):
        return sanitize.REFERENCES[self.operator](self.attributes, self.feeds, chosen)

    def error(self, output, chosen):
        return sanitize.relative_error(self.operator, self.attributes, self.feeds, output, chosen)

    def with_other(self, indices):
        """The best expert of every token, and the third in place of the second."""
        ranked = np.argsort(-(self.feeds["hidden_states"] @ self.router), axis=-1)
        return np.stack([indices[..., 0], ranked[..., 2]], axis=-1)

    def test_a_near_tie_may_go_either_way(self):
        token = self.feeds["hidden_states"][0, 0].astype(np.float64)
        own = self.evaluate()["topk_indices"]
        other = self.with_other(own)
        second, third = own[0, 0, 1], other[0, 0, 1]
        gap = token @ (self.router[:, second] - self.router[:, third])
        self.router[:, third] += token * (gap - 1e-6) / (token @ token)
        own = self.evaluate()["topk_indices"]
        swapped = own.copy()
        swapped[0, 0] = [own[0, 0, 0], third]
        self.assertTrue((swapped != own).any())
        self.assertLess(self.error(self.evaluate(swapped)["output"], swapped), 1e-12)
        self.assertGreater(self.error(self.evaluate()["output"], swapped), 1e-3)

    def test_any_other_choice_is_wrong(self):
        own = self.evaluate()
        self.assertEqual(self.error(own["output"], own["topk_indices"]), 0)
        self.assertEqual(self.error(own["output"], own["topk_indices"][..., ::-1]), 0)
        far = self.with_other(own["topk_indices"])
        self.assertEqual(self.error(self.evaluate(far)["output"], far), np.inf)
        for never_written in (np.full_like(far, -1), np.zeros_like(far)):
            self.assertEqual(self.error(own["output"], never_written), np.inf)


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

    def test_checks_that_no_time_was_left_for_are_named(self):
        with tempfile.TemporaryDirectory() as folder:
            self.stub(folder, reporting(*FOUND, {"unfinished": 7}))
            run = self.run_in(folder)
            self.finish(run, conductor.Stage(run, "check-x", "check", limit=run.begin + LONG))
            self.assertIn("check-x: no time was left for 7 of its checks", (run.out / "table.txt").read_text())

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
                stage.quiet = 0.1 if last and last[0].get("begin") in (1, 3) else LONG
                return poll()

            with mock.patch.object(stage, "poll", poll_impatiently):
                self.finish(run, stage)
            self.assertEqual([record["index"] for record in run.results["stages"]["check-x"]], [0, 2, 4])
            self.assertEqual(run.results["lost"], ["check-x hung in `n1`", "check-x hung in `n3`"])

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


class Pieces(unittest.TestCase):
    def test_what_is_split_is_joined(self):
        with tempfile.TemporaryDirectory() as folder:
            source, parts, target = (Path(folder, name) for name in ("wheel.whl", "parts", "target"))
            content = bytes(range(256)) * 40
            source.write_bytes(content)
            made = pieces.split(source, parts, piece_bytes=1000)
            self.assertEqual(len(made), 11)
            self.assertEqual(pieces.join(parts, target).read_bytes(), content)
            made[3].write_bytes(b"x" * 1000)
            with self.assertRaisesRegex(ValueError, "differs from what was split"):
                pieces.join(parts, target)
            made[3].unlink()
            with self.assertRaisesRegex(ValueError, "lacks wheel.whl.part03"):
                pieces.join(parts, target)


class Slim(unittest.TestCase):
    def test_machine_code_of_others_is_left_out(self):
        whole = archive(["one"], ["sm_80", "sm_90a", "compute_80"])
        manifest, images = self.parts(slim.slim(whole, ["sm_90a"]))
        self.assertEqual([image["target"] for image in manifest["images"]], ["sm_90a", "compute_80"] * 3)
        for image in manifest["images"]:
            code = images[image["offset"] : image["offset"] + image["bytes"]]
            self.assertEqual(code, f"{image['module']}-{image['target']}\0".encode())
        whole = archive(["one"], ["sm_90a", "compute_80", "compute_90"])
        manifest, _ = self.parts(slim.slim(whole, ["sm_90a", "compute_80"]))
        self.assertEqual([image["target"] for image in manifest["images"]], ["sm_90a", "compute_80"] * 3)
        with self.assertRaisesRegex(ValueError, "no sm_70; it has compute_80, compute_90, sm_90a"):
            slim.slim(whole, ["sm_70"])
        with self.assertRaisesRegex(ValueError, "no kernel archive"):
            slim.slim(b"x", ["sm_70"])

    def parts(self, archive):
        length = int.from_bytes(archive[8:16], "little")
        return json.loads(archive[16 : 16 + length]), archive[16 + length :]


@unittest.skipUnless(os.environ.get("MOA_ORT_LIBRARY"), "MOA_ORT_LIBRARY is not set")
class Sessions(unittest.TestCase):
    """The ONNX Runtime stage on the CPU provider, at a small size."""

    def test_operator_and_standard_form_agree(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(os.environ["MOA_ORT_LIBRARY"], Path(folder, "libmoa_ort.so"))
            report = Path(folder, "report.jsonl")
            places = [str(ROOT / "tools"), str(ROOT / "benches"), os.environ.get("PYTHONPATH", "")]
            command = [sys.executable, "-m", "gpu_check.onnx_sessions", "--kit", folder, "--report", str(report)]
            command += ["--provider", "CPUExecutionProvider", "--small"]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"}
            subprocess.run(command, env=environment, check=True)
            records = conductor.read_lines(report)
        self.assertEqual([record["name"] for record in records], ["small", "small decode"])
        for record in records:
            self.assertNotIn("failed", record)
            self.assertLess(record["found"]["operator f32"]["error"], 1e-5)
            self.assertIn("seconds", record["found"]["standard dense f32"])
            self.assertIn("seconds", record["found"]["MultiHeadAttention f16"])


if __name__ == "__main__":
    unittest.main()
