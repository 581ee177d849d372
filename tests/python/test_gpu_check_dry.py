"""The GPU half of tools/gpu_check with the GPU taken away: torch's CUDA calls do nothing, graphs replay on the host,
and our kernels are the reference. Every line of the checks and of the timed cases runs; no time is looked at."""

import ctypes
import importlib.util
import itertools
import sys
import unittest
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    from gpu_check import bench, cases, checks, child, feeds, reference, roofline, table, timing
    from gpu_check.rivals import grouped
    from test_gpu_check_rivals import plain_grouped

    HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
    if HAS_TRANSFORMERS:
        # It looks at torch.cuda when it is imported, which must be before the tests replace parts of that.
        import transformers.models.jetmoe.modeling_jetmoe  # noqa: F401

    # The sizes are far too small to share.
    torch.set_num_threads(1)


class HostGraph:
    """Keeps what is called while it is open, and calls it again at each replay."""

    open_one = None

    def __init__(self):
        self.calls = []

    def replay(self):
        for call in self.calls:
            call()


@contextmanager
def capture(graph):
    HostGraph.open_one = graph
    yield
    HostGraph.open_one = None


class HostPlan:
    """A plan of the C ABI that computes with the reference; `spoil` changes its result."""

    spoil = staticmethod(lambda outputs: None)

    def __init__(self, operator, attributes, element, shapes, wanted):
        self.operator, self.attributes, self.shapes, self.wanted, self.element = (
            operator,
            attributes,
            shapes,
            wanted,
            element,
        )
        self.workspace_bytes, self.launches, self.regime = 512, 3, "dense"
        x = shapes["hidden_states"]
        past = shapes.get("past_key", (0, 0, 0, 0))[2]
        width = shapes["query_weight"][2] // attributes["kv_num_heads"] if "query_weight" in shapes else 0
        self.keys = shapes["attention_mask"][1] if "attention_mask" in shapes else 0
        cache = (x[0], attributes.get("kv_num_heads", 1), max(past, self.keys), width)
        chosen = (x[0], x[1], attributes["top_k"])
        every = {"output": x, "present_key": cache, "present_value": cache}
        every |= {"topk_indices": chosen, "topk_weights": chosen}
        self.output_shapes = {name: every[name] for name in wanted}

    def bind(self, inputs, outputs, workspace):
        assert workspace % 256 == 0
        seen = {name: view(address, self.shapes[name], self.dtype(name)) for name, address in inputs.items()}
        made = {name: view(address, self.output_shapes[name], self.dtype(name)) for name, address in outputs.items()}

        def launch(stream):
            pasts = [name for name in ("past_key", "past_value") if name in seen]
            now = seen | {name: seen[name][:, :, : self.keys - seen["hidden_states"].shape[1]] for name in pasts}
            found = reference.OPERATORS[self.operator](self.attributes, now)
            for name, tensor in made.items():
                rows = tensor[:, :, : self.keys] if name.startswith("present") else tensor
                rows.copy_(found[name].to(tensor.dtype))
            HostPlan.spoil(made)

        def kept(stream):
            if HostGraph.open_one is not None:
                HostGraph.open_one.calls.append(lambda: launch(stream))
            else:
                launch(stream)

        return kept

    def dtype(self, name):
        if name in ("attention_mask", "key_mask", "query_mask"):
            return torch.int32
        if name in ("position_ids", "topk_indices"):
            return torch.int64
        whole = name in ("router_weight", "router_input", "cos_cache", "sin_cache", "topk_weights")
        return torch.float32 if whole else feeds.DTYPES[self.element]

    def close(self):
        pass


def view(address, shape, dtype):
    """A tensor over memory at an address, as a kernel sees it."""
    size = torch.empty((), dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    buffer = (ctypes.c_ubyte * (count * size)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class HostKernels:
    def plan(self, operator, attributes, element, shapes, wanted, tf32=False, multiprocessors=None, shared=False):
        return HostPlan(operator, attributes, element, shapes, wanted)

    def faults(self):
        return 0


if HAS_TORCH:
    OURS = bench.Ours(HostKernels(), HostKernels(), HostKernels())


class Event:
    clock = 0.0

    def __init__(self, **_):
        self.at = 0.0

    def record(self):
        Event.clock += 1.0
        self.at = Event.clock

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return other.at - self.at


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class WithoutGpu(unittest.TestCase):
    def setUp(self):
        stack = self.enterContext(ExitStack()) if hasattr(self, "enterContext") else ExitStack()
        self.addCleanup(stack.close)
        stream = SimpleNamespace(wait_stream=lambda other: None, cuda_stream=0)
        fakes = {
            "synchronize": lambda *_: None,
            "current_stream": lambda: stream,
            "Stream": lambda: stream,
            "stream": lambda _: nullcontext(),
            "CUDAGraph": HostGraph,
            "graph": capture,
            "Event": Event,
            "_sleep": lambda _: None,
            "empty_cache": lambda: None,
        }
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(feeds, "DEVICE", "cpu"))
        stack.enter_context(mock.patch.object(timing, "calls_of_a_replay", lambda seconds, copies: copies))
        stack.enter_context(mock.patch.object(timing, "LEAST_CALLS", 3))
        stack.enter_context(mock.patch.object(bench, "host_seconds", lambda call: (0.0, 0.0)))
        stack.enter_context(mock.patch.object(torch, "compile", lambda function, **_: function))
        stack.enter_context(mock.patch.object(grouped, "triton", object()))
        stack.enter_context(mock.patch.object(grouped.GroupedExperts.__init__, "__defaults__", (None, plain_grouped)))
        stack.enter_context(mock.patch("gpu_check.rivals.common.BACKENDS", {"flash": None, "cudnn": None, None: None}))

    def small(self, check):
        case = check.case
        head, heads = min(case.layer.head, 16), min(case.layer.heads, 2)
        width = heads * head if case.layer.sticks else min(case.layer.width, 48)
        layer = replace(case.layer, width=width, head=head, heads=heads)
        tokens, past = min(case.tokens, 9), min(case.past, 11)
        return replace(
            check,
            case=replace(case, layer=layer, batch=min(case.batch, 4), tokens=tokens, past=past),
            extent=min(check.extent, 24),
        )

    def test_every_check_holds_for_the_reference_itself(self):
        for check in map(self.small, checks.all_checks() + checks.large_checks()):
            for kind in ("f32", "bf16"):
                found = checks.run_check(HostKernels(), check, kind, 7)
                self.assertEqual(found["problems"], [], f"{check.name} {kind}")
                self.assertEqual(found["swapped"], 0)

    def test_the_largest_tiles_are_among_the_first_checks_of_every_path(self):
        every = checks.all_checks() + checks.large_checks() + checks.tile_checks()
        for path, expected in [("native", every), ("sm80", checks.all_checks() + checks.tile_checks())]:
            found = checks.checks_of(path)
            self.assertEqual(sorted(map(repr, found)), sorted(map(repr, expected)))
            early = [one for one in found[:8] if one.multiprocessors == 1 or one in checks.large_checks()]
            self.assertEqual(len(early), 4 if path == "native" else 2)
        self.assertEqual(checks.checks_of("wgmma"), checks.large_checks())

    def test_no_check_begins_behind_the_end(self):
        """The end is a time of day, so that a second start has no more of it than the first."""
        lines, kernels = [], mock.Mock(**{"facts.return_value": {}})
        report = SimpleNamespace(line=lambda **values: lines.append(values))
        options = SimpleNamespace(path="wgmma", kinds=["f16", "bf16"], start=3, until=0.0)
        with (
            mock.patch.object(child, "import_torch"),
            mock.patch.object(child, "kernels_of", return_value=kernels),
            mock.patch.object(checks, "run_check", return_value={"problems": []}),
        ):
            child.check(options, report)
            self.assertEqual(lines[-1], {"unfinished": 2 * len(checks.large_checks()) - 3})
            child.check(SimpleNamespace(**{**vars(options), "until": float("inf")}), report)
        self.assertEqual(lines[-1], {"finished": True})

    def test_wrong_results_are_found(self):
        check = self.small(checks.all_checks()[3])

        def off(made):
            made["output"].mul_(1.1)

        def unwritten(made):
            made["output"].view(-1)[0] = float("nan")

        def other_expert(made):
            made["topk_indices"][0, 0, 0] = (made["topk_indices"][0, 0, 0] + 1) % 8

        def garbage(made):
            made["topk_indices"].fill_(-1)

        count = itertools.count(1)

        def wavering(made):
            made["topk_weights"].add_(1e-6 * next(count))

        for spoil, text in [
            (off, "`output` is off by"),
            (unwritten, "`output` is off by inf"),
            (other_expert, "other experts"),
            (garbage, "never written"),
            (wavering, "another content of the workspace"),
        ]:
            with mock.patch.object(HostPlan, "spoil", staticmethod(spoil)):
                small = self.small(checks.all_checks()[11]) if spoil is other_expert else check
                problems = checks.run_check(HostKernels(), small, "f32", 3)["problems"]
            self.assertTrue(any(text in problem for problem in problems), (text, problems))

    def test_every_kind_of_timed_case_runs_to_its_row(self):
        ceilings = roofline.Ceilings(1e12, {128: 1e12}, 1e12)
        rows, originals = [], [cases.TIMED[index] for index in (0, 3, 5, 7, 8, 9)]
        for original in originals:
            case = cases.tiny(original, past=7)
            case = replace(case, layer=replace(case.layer, width=64, head=16))
            with mock.patch.object(bench, "ROUNDS", 2), mock.patch.object(cases, "WGMMA_ROWS", 3):
                found = bench.run_case(case, OURS, ceilings, 1000, 5, 60.0)
            failed = {
                name for name in found["notes"].get("failed", {}) if HAS_TRANSFORMERS or not name.startswith("hf-")
            }
            self.assertEqual(failed, set(), (case.name, found["notes"]))
            self.assertEqual(found["notes"].get("wrong", {}), {}, case.name)
            self.assertLessEqual(
                {cases.OURS, cases.WARM, cases.SERIAL, cases.MHA, cases.DENSE, cases.GROUPED}, set(found["times"])
            )
            self.assertEqual({cases.PRESENT, cases.IN_PLACE} <= set(found["times"]), case.decode)
            self.assertEqual(cases.WITHOUT_WGMMA in found["times"], case.rows > 3)
            rows.append({"index": 0, "name": original.name, "found": found})
        text = table.render({"stages": {"times": rows}})
        self.assertEqual(
            sum(line.startswith(tuple(one.name + "  " for one in originals)) for line in text.splitlines()),
            len(originals),
        )

    def test_rivals_that_are_not_asked_for_are_neither_timed_nor_failures(self):
        case = replace(cases.tiny(cases.TIMED[0]), targets={})
        with mock.patch.object(bench, "ROUNDS", 2):
            found = bench.run_case(case, OURS, None, 1000, 5, 60.0, without=[cases.MHA])
        self.assertTrue({cases.OURS, cases.DENSE} <= set(found["times"]))
        self.assertNotIn(cases.MHA, {**found["times"], **found["notes"].get("failed", {})})

    def test_warpgroup_products_that_broke_are_not_timed(self):
        case = replace(cases.tiny(cases.TIMED[0]), targets={})
        run = bench.CaseRun(case, OURS._replace(without_wgmma=None), 1000, 5)
        with mock.patch.object(cases, "WGMMA_ROWS", 3):
            run.add_ours()
        self.assertEqual([one.name for one in run.contestants], [cases.OURS, cases.WARM, cases.SERIAL])

    def test_what_ours_are_beside_may_fail_without_them(self):
        case, serial = replace(cases.tiny(cases.TIMED[0]), targets={}), HostKernels()
        run = bench.CaseRun(case, OURS._replace(serial=serial), 1000, 5)
        with mock.patch.object(serial, "plan", side_effect=RuntimeError("no such kernel")):
            run.add_ours()
        self.assertEqual([one.name for one in run.contestants], [cases.OURS, cases.WARM])
        self.assertEqual(run.notes["failed"], {cases.SERIAL: "RuntimeError: no such kernel"})

    def test_the_pause_outlasts_the_enqueueing_of_a_replay(self):
        clock = itertools.count(0.0, 0.003)
        slept = []
        with (
            mock.patch.object(timing.time, "perf_counter", lambda: next(clock)),
            mock.patch.object(torch.cuda, "_sleep", slept.append),
        ):
            contestant = timing.Contestant("x", [lambda: None], graph=True)
            contestant.prepare()
            contestant.sample()
        self.assertEqual(slept, [12_000_000])
        self.assertEqual(timing.pause_cycles(1e-6), timing.PAUSE)

    def test_what_one_rival_cannot_compile_does_not_keep_others_from_it(self):
        case, made = cases.tiny(cases.TIMED[0]), []
        plain = bench.rivals_of

        def watched(*arguments):
            def maker(name, make):
                def watch(backend, options):
                    made.append((name, backend))
                    if (name, backend) == (cases.DENSE, "cudnn"):
                        raise RuntimeError("no such engine")
                    return make(backend, options)

                return watch

            return {name: maker(name, make) for name, make in plain(*arguments).items()}

        with mock.patch.object(bench, "rivals_of", watched):
            found = bench.warm_up(case, 3)
        wanted = {
            (cases.DENSE, "flash"),
            (cases.DENSE, "cudnn"),
            (cases.GROUPED, None),
            (cases.UPSTREAM_COMPILED, None),
        }
        self.assertEqual(set(made), wanted)
        self.assertEqual(found, {"not_compiled": [f"{cases.DENSE}, cudnn: RuntimeError: no such engine"]})

    def test_a_rival_that_fails_is_a_line_and_not_the_end(self):
        case = replace(cases.tiny(cases.TIMED[0]), targets={})
        run = bench.CaseRun(case, OURS, 1000, 5)

        def broken(*_):
            raise RuntimeError("no such kernel\nmore")

        run.add_rival("x", broken)
        self.assertEqual(run.notes["failed"], {"x": "RuntimeError: no such kernel"})


if __name__ == "__main__":
    unittest.main()
