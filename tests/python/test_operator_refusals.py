"""What the operator library refuses although ONNX Runtime hands it over, through real sessions."""

import unittest

import numpy as np

from test_operator_library import compute, model_bytes, self_case, session


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


if __name__ == "__main__":
    unittest.main()
