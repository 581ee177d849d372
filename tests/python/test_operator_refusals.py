"""What the operator library refuses although ONNX Runtime hands it over, through real sessions."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

import numpy as np

from test_operator_library import compute, model_bytes, self_case, session

LINUX = unittest.skipUnless(os.path.exists("/proc/self/statm"), "the size of a process is read where Linux says it")

# Which part of a call runs short follows from how much memory there is: each step of a sweep grants some MB more.
SWEEP = """
import resource
import numpy as np
from test_operator_library import model_bytes, session

def sweep(rooms, call):
    for room in rooms:
        with open("/proc/self/statm") as sizes:
            held = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + (room << 20), resource.RLIM_INFINITY))
        try:
            call()
        except Exception as error:
            print(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""

# Three of four tokens are routed, each to 16 experts.
CALLS = """
def feeds(tokens, keys):
    weights = {"router_weight": (1, 16), "query_weight": (16, 1, 16), "output_weight": (16, 16, 1)}
    shapes = {"hidden_states": (1, tokens, 1), "key": (1, 1, keys, 16), "value": (1, 1, keys, 16), **weights}
    masks = {"key_mask": np.ones((1, keys), np.int32), "query_mask": np.arange(tokens, dtype=np.int32)[None] % 4}
    return {**{name: np.ones(shape, np.float32) for name, shape in shapes.items()}, **masks}

attributes = {"top_k": 16, "gate_mode": "topk_softmax", "kv_num_heads": 1, "scale": 0.25, "skip_padded_queries": 1}
layer = session(model_bytes("MoACrossAttention", attributes, feeds(1, 1), ["output"]))
run = lambda given: layer.run(None, given)[0].ravel().tolist()
before = run(feeds(4, 2))
for given, most in ((feeds(1 << 17, 1), 100), (feeds(2, 1 << 19), 6)):
    sweep(range(2, most, 3), lambda: run(given))
assert run(feeds(4, 2)) == before == [0, 16, 16, 16], before
"""

# Every weight is a bf16. The model is read into less memory than is taken beside it.
SESSIONS = """
import os, tempfile
import onnx

hidden = 1 << 15
shapes = {"router_weight": (64, 1), "input_weight": (1, 64, hidden), "output_weight": (1, hidden, 64)}
feeds = {name: np.ones(shape, np.float32) for name, shape in {"hidden_states": (1, 1, 64), **shapes}.items()}
attributes = {"top_k": 1, "gate_mode": "topk_softmax", "activation": "relu", "gated": 0}
model = onnx.load_from_string(model_bytes("MoEFeedForward", attributes, feeds, ["output"], constants=list(shapes)))
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "model.onnx")
    onnx.save(model, path, save_as_external_data=True, location="weights")
    sweep(range(4, 40), lambda: session(path))
    layer = session(path)
assert layer.run(None, {"hidden_states": feeds["hidden_states"]})[0].ravel().tolist() == [64 * hidden] * 64
"""


class OperatorRefusals(unittest.TestCase):
    def test_tensors_that_are_not_aligned_are_refused(self):
        operator, attributes, feeds = self_case(5)

        def moved(values):
            return np.frombuffer(b"\0" + values.tobytes(), np.uint8)[1:].view(values.dtype).reshape(values.shape)

        for name, size in (("hidden_states", 4), ("attention_mask", 4), ("query_weight", 4)):
            with self.assertRaisesRegex(Exception, f"input `{name}` begins at an address that is no multiple .* {size} bytes"):
                compute(operator, attributes, {**feeds, name: moved(feeds[name])})
        model = session(model_bytes(operator, attributes, feeds, ["output"]))
        binding = model.io_binding()
        for name, value in feeds.items():
            binding.bind_cpu_input(name, value)
        room = np.zeros(feeds["hidden_states"].nbytes + 8, np.uint8)
        start = room.ctypes.data + 1
        binding.bind_output("output", "cpu", 0, np.float32, list(feeds["hidden_states"].shape), start)
        with self.assertRaisesRegex(Exception, "output `output` begins at an address"):
            model.run_with_iobinding(binding)

    def test_a_node_that_was_prepared_for_tensorrt_is_refused(self):
        operator, attributes, feeds = self_case(6)
        for present, refused in ((0b111111, False), (0, False), (0b110111111, True)):
            model = model_bytes(operator, {**attributes, "present_inputs": present}, feeds)
            if refused:
                with self.assertRaisesRegex(Exception, "prepared for TensorRT, which moves its inputs"):
                    session(model)
            else:
                session(model)

    def test_attributes_of_other_types_are_refused(self):
        operator, attributes, feeds = self_case(6)
        integers, texts = [4.0, "4", [4], [4.0], ["4"]], [1, 1.0, [1], ["1"]]
        for name, kind, values in (
            ("accuracy_level", "INT", integers),
            ("present_inputs", "INT", integers),
            ("plugin_version", "STRING", texts),
        ):
            for value in values:
                with self.assertRaisesRegex(Exception, f"attribute `{name}` must be of type {kind}"):
                    session(model_bytes(operator, {**attributes, name: value}, feeds))

    def said_for_want_of_memory(self, script, operator):
        """For how many bytes there was none; the process gives back what it frees, so that all steps begin alike."""
        here, environment = pathlib.Path(__file__).parent, {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", SWEEP + script]
        ended = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        sizes = re.findall(f"{operator} node `the_node`: no memory for ([0-9]+) bytes", ended.stdout)
        return {int(size) for size in sizes}

    @LINUX
    def test_want_of_memory_ends_the_call_and_not_the_process(self):
        found = self.said_for_want_of_memory(CALLS, "MoACrossAttention")
        pairs, keys = 16 << 17, 1 << 19
        experts, weights, order, places = 8 * pairs, 4 * pairs, 8 * pairs * 3 // 4, 8 * keys
        self.assertLessEqual({experts, weights, order, places}, found)

    @LINUX
    def test_want_of_memory_ends_the_session_and_not_the_process(self):
        found = self.said_for_want_of_memory(SESSIONS, "MoEFeedForward")
        narrowed = 2 * (64 << 15)
        self.assertIn(narrowed, found)
        self.assertTrue(any(narrowed < size < narrowed + 128 for size in found), "packed weights in lines of a cache")



if __name__ == "__main__":
    unittest.main()
