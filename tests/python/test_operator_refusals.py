"""What the operator library refuses although ONNX Runtime hands it over, through real sessions."""

import pathlib
import subprocess
import sys
import unittest

import numpy as np

from test_operator_library import compute, model_bytes, self_case, session

# One layer with so many experts that the router of some thousand tokens wants more memory than the process may have.
WANT_OF_MEMORY = """
import resource
import numpy as np
from test_operator_library import model_bytes, session

def feeds(tokens, experts=1 << 16):
    weights = {"router_weight": (1, experts), "input_weight": (experts, 1, 1), "output_weight": (experts, 1, 1)}
    shapes = {"hidden_states": (1, tokens, 1), **weights}
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()}

attributes = {"top_k": 1, "gate_mode": "topk_softmax", "activation": "relu", "gated": 0}
layer = session(model_bytes("MoEFeedForward", attributes, feeds(1), ["output"]))
run = lambda tokens: layer.run(None, feeds(tokens))[0].ravel().tolist()
before = run(3)
resource.setrlimit(resource.RLIMIT_AS, (1 << 33, resource.RLIM_INFINITY))
try:
    run(1 << 15)
except Exception as error:
    print(error)
assert run(3) == before == [1, 1, 1], before
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

    def test_want_of_memory_ends_the_call_and_not_the_process(self):
        here = pathlib.Path(__file__).parent
        ended = subprocess.run([sys.executable, "-c", WANT_OF_MEMORY], cwd=here, capture_output=True, text=True, check=False)
        self.assertEqual(ended.returncode, 0, ended.stderr)
        self.assertRegex(ended.stdout, "MoEFeedForward node `.*`: no memory for [0-9]{11} bytes")


if __name__ == "__main__":
    unittest.main()
