"""Key/value caches that are written where they are read: one buffer, bound as past and present."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

from exports import export, read_json, run, session, setting

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "greedy_generate.py"
sys.path.insert(0, str(SCRIPT.parent))

from greedy_generate import Generator, present

MODELS = ["jetmoe/bf16", "jetmoe/sharded", "molm/mlp", "molm/linear"]
PROMPTS = [[5, 9, 11, 3], [7, 8, 50, 40], [3, 3, 4, 60]]
JUNK = np.float32(np.nan)


def past_inputs(running):
    return [value for value in running.get_inputs() if value.name.startswith("past_key_values.")]


def kind(value):
    return np.float16 if value.type == "tensor(float16)" else np.float32


def feeds_of(running, ids, done):
    total = done + ids.shape[1]
    positions = np.broadcast_to(np.arange(done, total), ids.shape).copy()
    feeds = {"input_ids": ids, "attention_mask": np.ones((len(ids), total), np.int64), "position_ids": positions}
    known = {value.name for value in running.get_inputs()}
    return {name: value for name, value in feeds.items() if name in known}


def empty(running, rows):
    shapes = {value.name: ((rows, value.shape[1], 0, value.shape[3]), kind(value)) for value in past_inputs(running)}
    return {name: np.zeros(*shape) for name, shape in shapes.items()}


def copying(running, prompts, count):
    """Greedy tokens, and the logits and caches of each step, with caches that grow."""
    ids, done = np.array(prompts, np.int64), 0
    caches, tokens, steps = empty(running, len(prompts)), [], []
    for _ in range(count):
        outputs = run(running, {**feeds_of(running, ids, done), **caches})
        caches = {name: outputs[present(name)] for name in caches}
        done += ids.shape[1]
        ids = outputs["logits"][:, -1:].argmax(-1)
        tokens.append(ids)
        steps.append((outputs["logits"], caches))
    return np.concatenate(tokens, axis=1).tolist(), steps


def with_room(cache, rows, junk=JUNK):
    """A cache in a buffer of `rows` tokens, of which the others are `junk`."""
    b, g, p, d = cache.shape
    buffer = np.full((b, g, rows, d), junk, cache.dtype)
    buffer[:, :, :p] = cache
    return buffer


def step_in_place(running, feeds, buffers, apart=()):
    """One step on `buffers`, which are changed; those of `apart` get a present of their own. Logits and presents."""
    binding = running.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    presents = {}
    for name, buffer in buffers.items():
        target = np.full_like(buffer, JUNK) if name in apart else buffer
        presents[name] = target
        binding.bind_input(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
        binding.bind_output(present(name), "cpu", 0, target.dtype.type, target.shape, target.ctypes.data)
    binding.bind_output("logits")
    running.run_with_iobinding(binding)
    return binding.get_outputs()[len(buffers)].numpy(), presents


class SharedCache(unittest.TestCase):
    def test_tokens_are_those_of_the_copying_loop(self):
        for name in MODELS:
            for options in [(), ("--dtype", "fp16"), ("--last-logits",)]:
                with self.subTest(model=name, options=options):
                    model = export(name, "function", *options) / "model.onnx"
                    expected, _ = copying(session(model, True), PROMPTS, 24)
                    self.assertEqual(Generator(model, setting("MOA_ORT_LIBRARY"), 2).generate(PROMPTS, 24), expected)

    def test_tokens_are_upstreams(self):
        for name in MODELS:
            generator = Generator(export(name, "fused") / "model.onnx", setting("MOA_ORT_LIBRARY"), 2)
            for single in read_json(f"{name}/goldens.json")["generate"]["singles"]:
                expected = single["new_tokens"]
                # A padding token's embedding is zero: after it every router is a tie, which upstream breaks in no stated order.
                expected = expected[: expected.index(0) + 1] if 0 in expected else expected
                self.assertEqual(generator.generate([single["prompt"]], len(expected)), [expected])

    def test_every_bit_is_that_of_the_copying_loop_and_nothing_else_is_written(self):
        for name, options in [(MODELS[0], ()), (MODELS[1], ("--dtype", "fp16"))]:
            running = session(export(name, "function", *options) / "model.onnx", True)
            _, steps = copying(running, PROMPTS, 3)
            ids, done = np.array(PROMPTS, np.int64), 0
            before = empty(running, len(PROMPTS))
            for logits, after in steps:
                for room in (0, 5):
                    with self.subTest(model=name, done=done, room=room):
                        total = done + ids.shape[1]
                        buffers = {key: with_room(value, total + room) for key, value in before.items()}
                        found, presents = step_in_place(running, feeds_of(running, ids, done), buffers)
                        np.testing.assert_array_equal(found, logits)
                        for key, value in presents.items():
                            np.testing.assert_array_equal(value, with_room(after[key], total + room, JUNK))
                done, before = done + ids.shape[1], after
                ids = logits[:, -1:].argmax(-1)

    def test_a_mask_that_was_not_extended_is_refused(self):
        """A past of exact length and a mask without the new token, or with nothing but it; one present alone elsewhere."""
        running = session(export(MODELS[0], "function") / "model.onnx", True)
        (first, caches), *_ = copying(running, PROMPTS, 2)[1]
        feeds = feeds_of(running, first[:, -1:].argmax(-1), 4)
        for columns in (4, 1):
            short = {**feeds, "attention_mask": feeds["attention_mask"][:, :columns]}
            with self.subTest(columns=columns), self.assertRaises(Exception) as caught:
                run(running, {**short, **caches})
            self.assertIn(f"attention_mask has {columns} columns, expected 5: 4 of the past", str(caught.exception))
        buffers = {name: with_room(value, 9) for name, value in caches.items()}
        for apart in [tuple(buffers)[:1], tuple(buffers)[1:2]]:
            with self.subTest(apart=apart), self.assertRaises(Exception) as caught:
                step_in_place(running, feeds, buffers, apart)
            self.assertIn("bound to one buffer each", str(caught.exception))

    def test_an_encoder_decoder_writes_its_caches_in_place(self):
        folder = export("nmt", "function")
        encoder, decoder = (session(folder / f"{part}_model.onnx", True) for part in ("encoder", "decoder"))
        source = np.array([[5, 6, 7, 2], [9, 8, 2, 1]], np.int64)
        mask = (source != 1).astype(np.int64)
        memory = run(encoder, {"input_ids": source, "attention_mask": mask})
        cross = {key.replace("present", "past_key_values"): value for key, value in memory.items() if "present" in key}
        caches = [value for value in past_inputs(decoder) if ".decoder." in value.name]
        grown = {value.name: np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32) for value in caches}
        buffers = {name: with_room(value, 6) for name, value in grown.items()}
        ids = np.array([[2], [2]], np.int64)
        for done in range(6):
            feeds = {"encoder_attention_mask": mask, **cross, **feeds_of(decoder, ids, done)}
            expected = run(decoder, {**feeds, **grown})
            grown = {name: expected[present(name)] for name in grown}
            logits, _ = step_in_place(decoder, feeds, buffers)
            np.testing.assert_array_equal(logits, expected["logits"])
            ids = logits[:, -1:].argmax(-1)
        for name, value in grown.items():
            np.testing.assert_array_equal(buffers[name], value)

    def test_a_full_buffer_is_refused(self):
        running = session(export(MODELS[0], "function") / "model.onnx", True)
        buffers = {name: np.zeros((3, value.shape[1], 4, value.shape[3]), np.float32)
                   for name, value in empty(running, 3).items()}
        with self.assertRaises(Exception) as caught:
            step_in_place(running, feeds_of(running, np.array(PROMPTS, np.int64)[:, :3], 2), buffers)
        self.assertIn("attention_mask", str(caught.exception))

    def test_a_present_elsewhere_in_the_memory_of_a_past_is_refused(self):
        """The memory of another cache, and that of its own, one head further on."""
        running = session(export(MODELS[0], "function") / "model.onnx", True)
        names = [value.name for value in past_inputs(running)]
        for other, word in [(names[1], "`past_value`"), (names[0], "`past_key`")]:
            with self.subTest(other=other):
                memory = {name: np.zeros((4, *value.shape[1:2], 8, value.shape[3]), np.float32)
                          for name, value in empty(running, 3).items()}
                binding = running.io_binding()
                for name, value in feeds_of(running, np.array(PROMPTS, np.int64), 0).items():
                    binding.bind_cpu_input(name, value)
                for name, value in memory.items():
                    value = value[:3]
                    binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
                target = memory[other][int(other == names[0]) :][:3]
                for name in ["logits", *map(present, names)]:
                    binding.bind_output(name)
                binding.bind_output(present(names[0]), "cpu", 0, np.float32, target.shape, target.ctypes.data)
                with self.assertRaises(Exception) as caught:
                    running.run_with_iobinding(binding)
                for part in ("`present_key`", word):
                    self.assertIn(part, str(caught.exception))

    def test_bodies_refuse_a_buffer_with_room(self):
        """Also one token with a mask of one column, which would be spread over all keys."""
        for form in ["function", "standard"]:
            running = session(export(MODELS[0], form) / "model.onnx", False)
            for tokens, rows, total in [(1, 8, 1), (4, 8, 4), (1, 8, 8), (1, 0, 2)]:
                with self.subTest(form=form, tokens=tokens, rows=rows, total=total):
                    feeds = feeds_of(running, np.full((2, tokens), 5), total - tokens)
                    caches = {name: with_room(value, rows, 0) for name, value in empty(running, 2).items()}
                    with self.assertRaises(Exception) as caught:
                        run(running, {**feeds, **caches})
                    self.assertIn("reshape", str(caught.exception))

    def test_the_example_prints_tokens(self):
        folder = export(MODELS[0], "function")
        expected, _ = copying(session(folder / "model.onnx", True), [[5, 9, 11]], 6)
        command = [sys.executable, str(SCRIPT), str(folder), "--library", setting("MOA_ORT_LIBRARY")]
        done = subprocess.run([*command, "--max-new", "6", "5", "9", "11"], capture_output=True, text=True)
        self.assertEqual((done.stderr, done.stdout.split()), ("", [str(token) for token in expected[0]]))
        missing = subprocess.run([*command[:-1], "no.so", "5"], capture_output=True, text=True)
        self.assertEqual(missing.returncode, 2)
        self.assertIn("no.so is not there", missing.stderr)

    def test_the_example_finds_the_library_of_the_package(self):
        folder = export(MODELS[0], "function")
        with tempfile.TemporaryDirectory() as place:
            command = [sys.executable, str(SCRIPT), str(folder), "--max-new", "1", "5"]

            def started():
                places = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
                return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places})

            package = pathlib.Path(place) / "moa_export.py"
            package.write_text("raise ImportError")
            self.assertIn("name the operator library with --library", started().stderr)
            package.write_text(f"def library():\n    return {setting('MOA_ORT_LIBRARY')!r}\n")
            done = started()
            self.assertEqual((done.returncode, done.stderr, len(done.stdout.split())), (0, "", 1))


if __name__ == "__main__":
    unittest.main()
