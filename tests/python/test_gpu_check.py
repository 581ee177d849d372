"""tools/gpu_check without a GPU: floors, statistics, tables, and what its files are made of."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import abi, cases, conductor, device, onnx_sessions, roofline, sanitize, stats, table


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


#: What a stage says of its GPU.
DEVICE = {"name": "NVIDIA B", "memory_bytes": 79 << 30, "multiprocessors": 132, "l2_bytes": 50 << 20}


class Table(unittest.TestCase):
    def test_nothing_measured_says_so(self):
        text = table.render({})
        self.assertIn("ceilings: not measured", text)
        self.assertEqual(text.count("not measured\n") >= len(cases.TIMED), True)
        gates = sum(1 for one in cases.TIMED for target in one.targets.values() if target.gate)
        self.assertIn(f"gates met: 0, missed: 0, not measured: {gates}", text)

    def test_the_gpu_is_the_one_that_the_stages_ran_on(self):
        machine = {"gpu": "NVIDIA A", "driver_version": "580", "power.limit": "700.00 W"}
        self.assertTrue(table.render({"machine": machine}).startswith("GPU: NVIDIA A, limit 700.00 W, driver 580\n"))
        text = table.render({"machine": machine, "device": DEVICE})
        self.assertIn("GPU: NVIDIA B, 132 multiprocessors, 79.0 GiB, L2 50 MiB, limit 700.00 W, driver 580\n", text)
        self.assertIn("GPU: not measured, driver ?\n", table.render({"machine": {"gpu": None}, "device": None}))

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

    def test_times_in_other_circumstances_have_their_columns(self):
        record = timed(cases.TIMED[0].name, 8e-6)
        record["found"]["times"][cases.WITHOUT_WGMMA] = {"median": 16e-6}
        row = table.time_rows({"stages": {"times": [record]}})[0][0]
        self.assertEqual(row[table.HEADER.index("no wgmma")], "16.0")

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

    def test_a_run_fails_where_ours_is_wrong_or_a_stage_found_nothing(self):
        held = {"index": 0, "name": "native f16: a", "found": {"errors": {}, "problems": []}}
        tool = {"tool": "memcheck", "summary": "ERROR SUMMARY: 0 errors"}
        right = {
            "stages": {"check-native-f16": [held], "sanitize": [tool], "times": [timed("base", 1e-6)]},
            "onnxruntime": {"records": [{"name": "base", "found": {}, "problems": []}]},
            "lost": [],
        }
        stages = ["check", "sanitize", "times", "onnxruntime"]
        self.assertFalse(table.is_wrong(right, stages))
        hazards = {"tool": "racecheck", "problem": "35 hazards"}
        self.assertFalse(table.is_wrong({**right, "stages": {**right["stages"], "sanitize": [tool, hazards]}}, stages))
        rival = timed("base", 1e-6)
        rival["found"]["notes"]["failed"] = {cases.MHA: "RuntimeError: no back end"}
        self.assertFalse(table.is_wrong({**right, "stages": {**right["stages"], "times": [rival]}}, stages))
        in_place = timed("base", 1e-6)
        in_place["found"]["notes"]["failed"] = {cases.IN_PLACE: "CallError: no memory"}
        faults = {
            "check-native-f16": [{**held, "found": {"errors": {}, "problems": ["off"]}}],
            "check-native-f32": [{"index": 0, "name": "native f32: a", "failed": "CallError: limit (unsupported)"}],
            "sanitize": [{"tool": "memcheck", "problem": "512 errors"}],
            "times": [timed("base", 1e-6, wrong=True)],
        }
        faulty = [{**right, "stages": {**right["stages"], name: records}} for name, records in faults.items()]
        faulty += [{**right, "stages": {**right["stages"], "times": found}} for found in ([in_place], [{"index": 0, "failed": "x"}])]
        faulty += [{**right, "onnxruntime": {"records": [record]}} for record in ({"failed": "x"}, {"found": {}, "problems": ["x"]})]
        faulty += [{**right, "lost": ["a stage"]}]
        faulty += [{**right, "stages": {n: r for n, r in right["stages"].items() if n != name}} for name in right["stages"]]
        for number, results in enumerate(faulty):
            self.assertTrue(table.is_wrong(results, stages), number)
        self.assertEqual(conductor.judge_sanitizer("nothing", 0, False)["problem"], "ended with code 0: nothing")

    def test_volta_on_a_newer_gpu_is_no_proof_of_its_instruction(self):
        for kind, said in [("native f16", 0), ("sm70 f32", 0), ("sm70 f16", 1)]:
            record = {"index": 0, "name": f"{kind}: a", "found": {"errors": {}, "problems": []}}
            text = table.render({"stages": {"check-x": [record]}})
            self.assertEqual(text.count("mma.m8n8k4 in software"), said, kind)

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
        for text in (race.replace("0 hazards", "10 hazards"), "= ERROR SUMMARY: 10 errors\n", "= SUMMARY: none\n"):
            self.assertIn("problem", self.judge(text, 0), text)
        self.assertIn("skipped", self.judge("========= Error: Device not supported\n", 1))
        self.assertEqual(self.judge(call, -9, late=True)["unfinished"], "stopped after 1 calls")
        self.assertIn("problem", self.judge("Traceback\nImportError: x\n", 1))


class Sets(unittest.TestCase):
    """Kernel sets of the sanitizer: a new one loads its modules again, which takes long under memcheck."""

    def test_kinds_share_what_they_can(self):
        made = []

        def make(library, content):
            made.append(os.environ["MOA_CUDA_WGMMA"])
            return mock.Mock()

        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(sanitize.abi, "Library"),
            mock.patch.object(sanitize.abi, "Kernels", make),
        ):
            Path(folder, "kernels.bin").touch()
            sets = sanitize.Sets(folder)
            used = {kind: sets.of(kind) for kind in sanitize.KINDS}
            sets.close()
        self.assertEqual(sorted(made), ["0", "1"])
        self.assertIs(used["f32"], used["tf32"])
        self.assertIsNot(used["f16"], used["wgmma-f16"])
        self.assertTrue(all(kernels.close.call_count == 1 for kernels in used.values()))

    def test_memcheck_sees_every_kind_and_what_nothing_else_checks_first(self):
        kinds = conductor.TOOLS["memcheck"].split(",")
        self.assertEqual(sorted(kinds), sorted(kind for kind in sanitize.KINDS if "elementwise" not in kind))
        self.assertEqual(kinds[:2], ["wgmma-f16", "tf32"])

    def test_racecheck_sees_warpgroups_with_and_without_asynchronous_copies(self):
        kinds = conductor.TOOLS["racecheck"].split(",")
        warpgroups = [kind for kind in kinds if sanitize.KINDS[kind][2]]
        self.assertEqual(warpgroups, ["wgmma-f16", "elementwise-wgmma-f16"])
        calls = sanitize.calls_of("elementwise-wgmma-f16")
        self.assertTrue(calls and all(call.c % 8 and call.d % 8 for call in calls))
        self.assertEqual({sanitize.multiprocessors(call) for call in calls}, {1, 4, 16})


class Calls:
    """A driver that takes everything and keeps the names."""

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        return lambda *_: self.names.append(name) or 0


class Poison(unittest.TestCase):
    def test_initcheck_alone_finds_memory_as_it_is(self):
        for poison in (True, False):
            with mock.patch.object(device.ctypes, "CDLL", lambda _: Calls()):
                gpu = device.Gpu(poison=poison)
            gpu.upload(np.zeros(3))
            self.assertEqual("cuMemsetD8_v2" in gpu.cuda.names, poison)
            self.assertIn("cuMemcpyHtoD_v2", gpu.cuda.names)
        asked = {}
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(conductor, "find_tool", lambda name: name):
            run = conductor.Run(folder, Path(folder, "out"))
            with mock.patch.object(run, "popen", lambda command, tool: asked.update({tool: "--no-poison" in command})):
                for tool, kinds in conductor.TOOLS.items():
                    conductor.Sanitizer(run, tool, kinds, 0.0)
        self.assertEqual([tool for tool, bare in asked.items() if bare], ["initcheck"])


class Watched(dict):
    """An environment that keeps what is done to it."""

    def __init__(self, *values):
        super().__init__(*values)
        self.done = []

    def __setitem__(self, name, value):
        self.done.append((name, value))
        super().__setitem__(name, value)

    def __delitem__(self, name):
        self.done.append((name, None))
        super().__delitem__(name)

    def clear(self):
        self.done.append("cleared")
        super().clear()


class Variables(unittest.TestCase):
    def done(self, value, **before):
        with mock.patch.object(os, "environ", Watched(before)) as environment:
            with self.assertRaises(KeyError), abi.variable("X", value):
                self.assertEqual(os.environ.get("X"), before.get("X") if value is None else value)
                raise KeyError
            self.assertEqual(dict(environment), before)
        return environment.done

    def test_one_name_is_set_and_put_back(self):
        self.assertEqual(self.done(None, X="0", Y="1"), [])
        self.assertEqual(self.done("1", Y="1"), [("X", "1"), ("X", None)])
        self.assertEqual(self.done("1", X="0"), [("X", "1"), ("X", "0")])


class Choices(unittest.TestCase):
    """Results of a call are judged under the experts that it chose, where these are near ties of the best."""

    def setUp(self):
        call = next(call for call in sanitize.CALLS if call.operator == "MoEFeedForward")
        self.operator = call.operator
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


class Layers(unittest.TestCase):
    """The ONNX Runtime stage without ONNX Runtime."""

    def test_a_layer_that_dies_costs_no_other(self):
        program = """
import json, os, sys
report, name = sys.argv[1:]
if name == "dies":
    os.abort()
print(json.dumps({"name": name, "found": {}, "text": ""}), file=open(report, "a"))
sys.exit(name == "fails")
"""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.jsonl")
            command = [sys.executable, "-c", program, report]
            self.assertTrue(onnx_sessions.run_layers(["one", "dies", "fails", "two"], command, report))
            records = conductor.read_lines(report)
            self.assertEqual([record["name"] for record in records], ["one", "dies", "fails", "two"])
            self.assertEqual(records[1]["failed"], "ended with code -6")
            self.assertFalse(onnx_sessions.run_layers(["dies", "fails"], command, report))

    def test_a_layer_that_hangs_is_ended(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(onnx_sessions, "LONGEST", 0.5):
            report = Path(folder, "report.jsonl")
            command = [sys.executable, "-c", "import time; time.sleep(3600)"]
            self.assertFalse(onnx_sessions.run_layers(["hangs"], command, report))
            self.assertEqual([record["name"] for record in conductor.read_lines(report)], ["hangs"])

    def test_contestants_take_turns(self):
        calls = []

        class Bound:
            def __init__(self, name, graph, fails=False):
                self.name, self.graph, self.fails = name, graph, fails

            def seconds(self):
                calls.append(self.name)
                if self.fails and len(calls) > 3:
                    raise RuntimeError("illegal memory\nand more")
                return float(len(calls))

        found = {}
        onnx_sessions.time_in_turns({"a": Bound("a", True), "b": Bound("b", False, fails=True)}, found)
        self.assertEqual("".join(calls), "ababaaa")
        self.assertEqual(found["a"], {"seconds": 5.0, "iqr": 3.0, "graph": True})
        self.assertEqual(found["b"], {"failed": "illegal memory"})


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
