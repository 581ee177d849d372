"""The torch half of tools/gpu_check on the CPU: its f64 reference, and the rivals at a small size."""

import importlib.util
import os
import subprocess
import sys
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
from operator_reference import REFERENCES

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tools"))

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    from gpu_check import bench, cases, compare, feeds, reference, roofline
    from gpu_check.rivals import rivals_of
    from gpu_check.rivals.grouped import GroupedExperts, plan


#: Triton's interpreter is chosen when the kernel is declared, hence in a process of its own.
INTERPRETED = """
import torch
from test_gpu_check_rivals import plain_grouped
from gpu_check.rivals import grouped
worst = 0.0
sizes = [(37, 3, 5, 64, 128, 3), (200, 2, 4, 48, 64, 1), (130, 1, 3, 64, 192, 1)]
for tokens, slots, experts, inner, columns, divide in sizes:
    chosen = torch.stack([torch.randperm(experts)[:slots] for _ in range(tokens)])
    pairs, bounds = grouped.plan(chosen, experts)
    rows = torch.randn(tokens * slots // divide, inner)
    weight = torch.randn(experts, inner, columns)
    both = [product(rows, weight, pairs, bounds, divide) for product in (grouped.grouped_product, plain_grouped)]
    worst = max(worst, (both[0] - both[1]).abs().max().item())
print(worst)
"""


def as_numpy(tensors):
    return {
        name: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
        for name, tensor in tensors.items()
    }


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Reference(unittest.TestCase):
    def assert_same(self, operator, made):
        attributes, given, _ = made
        found = reference.OPERATORS[operator](attributes, given)
        expected = REFERENCES[operator](attributes, as_numpy(given))
        for name, value in expected.items():
            if name == "topk_indices":
                skipped = found["skipped"].numpy()
                np.testing.assert_array_equal(found[name].numpy()[~skipped], value[~skipped])
            else:
                np.testing.assert_allclose(found[name].numpy(), value, rtol=1e-9, atol=1e-9, err_msg=name)

    def test_rows_meet_the_matrices_of_their_experts(self):
        """Beside one product for each row and slot; with experts that nobody chose, and without any row."""
        source = torch.Generator().manual_seed(5)
        for count, slots, experts, used in [(23, 2, 7, 7), (9, 3, 8, 4), (1, 1, 4, 4), (0, 2, 3, 3)]:
            chosen = [torch.randperm(used, generator=source)[:slots] for _ in range(count)]
            indices = torch.cat(chosen or [torch.empty(0, dtype=torch.int64)]).reshape(count, slots)
            weight = torch.randn(experts, 6, 5, generator=source)
            for rows in (torch.randn(count, 6, generator=source), torch.randn(count, slots, 6, generator=source)):
                rows = rows.double()
                found = reference.by_expert(rows, indices, weight)
                self.assertEqual(found.shape, (count, slots, 5))
                for row in range(count):
                    for slot in range(slots):
                        given = rows[row] if rows.dim() == 2 else rows[row, slot]
                        torch.testing.assert_close(found[row, slot], given @ weight[indices[row, slot]].double())

    def test_the_experts_of_a_whole_batch_are_taken_at_once(self):
        case = replace(cases.tiny(cases.Case(cases.BASE, 1, 8)), batch=5)
        attributes, given, _ = feeds.self_attention(feeds.Source(1, "cpu"), case, torch.float32, pads="mixed")
        with mock.patch.object(reference, "by_expert", side_effect=reference.by_expert) as product:
            reference.self_attention(attributes, given)
        self.assertEqual(product.call_count, 2)

    def test_self_attention_equals_the_plain_loops(self):
        for seed, (case, pads) in enumerate(
            [
                (cases.tiny(cases.Case(cases.BASE, 1, 8)), "mixed"),
                (cases.tiny(cases.Case(cases.BIG, 1, 8, causal=True)), "ragged"),
                (cases.tiny(cases.Case(cases.JETMOE, 1, 8, causal=True)), "none"),
                (cases.tiny(cases.Case(cases.JETMOE, 1, 1, past=9, causal=True), past=5), "ragged"),
            ]
        ):
            source = feeds.Source(seed, "cpu")
            made = feeds.self_attention(
                source, case, torch.float32, pads=pads, routing=["even", "idle", "same"][seed % 3]
            )
            self.assert_same("MoASelfAttention", made)

    def test_cross_attention_equals_the_plain_loops(self):
        case = cases.tiny(cases.Case(cases.BASE, 4, 5))
        self.assert_same(
            "MoACrossAttention", feeds.cross_attention(feeds.Source(1, "cpu"), case, torch.float32, 7, "mixed")
        )

    def test_feed_forward_equals_the_plain_loops(self):
        for seed, (activation, gated) in enumerate([("relu", False), ("gelu", True), ("silu", True)]):
            case = cases.tiny(cases.Case(cases.JETMOE, 2, 5))
            made = feeds.feed_forward(feeds.Source(seed, "cpu"), case, torch.float32, 12, activation, gated)
            self.assert_same("MoEFeedForward", made)

    def test_given_experts_are_kept(self):
        case = cases.tiny(cases.Case(cases.JETMOE, 2, 5))
        attributes, given, _ = feeds.self_attention(feeds.Source(3, "cpu"), case, torch.float32)
        free = reference.self_attention(attributes, given)
        turned = reference.self_attention(attributes, given, indices=free["topk_indices"].flip(-1))
        torch.testing.assert_close(turned["output"], free["output"], rtol=1e-12, atol=1e-12)
        other = reference.self_attention(attributes, given, indices=(free["topk_indices"] + 1) % 8)
        self.assertGreater((other["output"] - free["output"]).abs().max().item(), 1e-3)


def plain_grouped(rows, weight, pairs, bounds, divide):
    """What the Triton kernel computes, from the same plan."""
    out = torch.empty(pairs.numel(), weight.shape[-1], dtype=rows.dtype)
    for expert in range(weight.shape[0]):
        mine = pairs[bounds[expert] : bounds[expert + 1]].long()
        out[mine] = rows[mine // divide] @ weight[expert]
    return out


def source_of_shapes():
    """A source of tensors without data."""
    source = mock.Mock(device="meta")
    source.normal = lambda *shape, deviation=1.0, dtype=None: torch.empty(shape, dtype=dtype, device="meta")
    return source


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Memory(unittest.TestCase):
    L2_BYTES = 50 << 20

    def test_copies_of_inputs_fit_and_leave_the_cache_cold(self):
        for case in cases.TIMED:
            attributes, given, _ = feeds.self_attention(source_of_shapes(), case, torch.bfloat16, present=False)
            held = {cases.OURS: given}
            for name, make in rivals_of(case, attributes, torch.bfloat16).items():
                try:
                    held[name] = make(None, None).load(given)
                except (ImportError, RuntimeError) as error:
                    self.assertRegex(str(error), "transformers|Triton", name)
            for name, state in held.items():
                copies, size = bench.copies_of(case, state, self.L2_BYTES), bench.tensor_bytes(state)
                self.assertLess(copies * size, 4 << 30, f"{name} on {case.name}")
                self.assertGreaterEqual(copies * size, 3 * self.L2_BYTES, f"{name} on {case.name}")
            read = bench.copies_of(case, given, self.L2_BYTES) * roofline.moa_work(case).bytes
            self.assertGreaterEqual(read, 3 * self.L2_BYTES, case.name)

    def test_bytes_are_counted_wherever_they_are_held(self):
        one = torch.empty(3, dtype=torch.float32)
        held = {"a": one, "b": None, "c": (one, [one]), "d": torch.nn.Linear(2, 5), "e": {"f": one}}
        self.assertEqual(bench.tensor_bytes(held), 4 * (4 * 3 + 2 * 5 + 5))


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Rivals(unittest.TestCase):
    CASES = [
        ("BASE", 8, 0, False),
        ("BASE", 8, 0, True),
        ("BASE", 1, 9, True),
        ("BIG", 8, 0, False),
        ("BIG", 1, 9, True),
        ("JETMOE", 8, 0, True),
        ("JETMOE", 1, 9, True),
    ]

    def test_rivals_that_claim_the_layer_compute_it(self):
        seen = set()
        for layer, tokens, past, causal in self.CASES:
            case = cases.tiny(cases.Case(getattr(cases, layer), 2, tokens, past, causal), past=past)
            attributes, given, _ = feeds.self_attention(feeds.Source(tokens, "cpu"), case, torch.float32)
            expected = reference.self_attention(attributes, given)["output"]
            makers = rivals_of(case, attributes, torch.float32)
            makers[cases.GROUPED] = lambda *_: GroupedExperts(case, attributes, product=plain_grouped)
            for name, make in makers.items():
                try:
                    rival = make(None, None)
                except ImportError:
                    continue
                state = rival.load(given)
                found = rival.run(state)
                self.assertEqual(found.shape[:2], (case.batch, case.tokens))
                if rival.exact:
                    error = compare.relative(found.double(), expected)
                    self.assertLess(error, 2e-5, f"{name} on {case.name}")
                    seen.add(name)
                    again = rival.run(state)
                    torch.testing.assert_close(again, found, rtol=0, atol=0)
        wanted = {cases.DENSE, cases.UPSTREAM, cases.GROUPED}
        if importlib.util.find_spec("transformers"):
            wanted |= {cases.HF_EAGER, cases.HF_SDPA}
        self.assertLessEqual(wanted, seen)

    @unittest.skipUnless(importlib.util.find_spec("triton"), "Triton is not installed")
    def test_the_triton_kernel_computes_the_grouped_product(self):
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            [sys.executable, "-c", INTERPRETED], env=environment, cwd=HERE, capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(float(done.stdout), 1e-4)

    def test_the_plan_of_the_grouped_rival_lists_every_pair_once(self):
        chosen = torch.tensor([[3, 0], [0, 1], [3, 1]])
        pairs, bounds = plan(chosen, 5)
        self.assertEqual(pairs.tolist(), [1, 2, 3, 5, 0, 4])
        self.assertEqual(bounds.tolist(), [0, 2, 4, 4, 6, 6])


if __name__ == "__main__":
    unittest.main()
