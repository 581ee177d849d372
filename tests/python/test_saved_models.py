"""What ONNX Runtime saves after optimising is still verified: with the library our operators stay, without it their
bodies take their place, and the experts that they choose are seen where the export names them."""

import pathlib
import subprocess
import tempfile
import unittest

import exports
import onnxruntime

LEVELS = onnxruntime.GraphOptimizationLevel


def verify(model, name):
    command = [exports.setting("MOA_EXPORT"), "verify", model, "--checkpoint", exports.checkpoint(name)]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


class SavedModelsTest(unittest.TestCase):
    def save(self, source, level, library):
        """The model `source` as a session with or without the operator library saves it, in a folder of its own."""
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(pathlib.Path(holder.name) / "model.onnx")
        if library:
            options.register_custom_ops_library(exports.setting("MOA_ORT_LIBRARY"))
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
        return holder.name

    def test_saved_with_the_library_or_in_standard_operators_they_are_verified(self):
        for name in ("mlm", "jetmoe/bf16"):
            for form, library in (("function", True), ("fused", True), ("standard", False), ("standard", True)):
                for level in (LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_EXTENDED):
                    with self.subTest(name=name, form=form, library=library, level=level):
                        source = exports.export(name, form) / "model.onnx"
                        result = verify(self.save(source, level, library), name)
                        self.assertEqual((result.returncode, result.stderr), (0, ""), result.stdout)
                        self.assertIn("constants equal the checkpoint bit for bit", result.stdout)
                        self.assertIn("is NOT what the checkpoint gives", result.stdout)
                        self.assertIn("\nverified on ", result.stdout)

    def test_saved_without_the_library_they_show_no_experts(self):
        source = exports.export("mlm", "function") / "model.onnx"
        result = verify(self.save(source, LEVELS.ORT_ENABLE_BASIC, False), "mlm")
        self.assertEqual((result.returncode, result.stdout), (4, ""), result.stderr)
        self.assertIn("does not show which experts the module", result.stderr)
        self.assertIn("export with --router-outputs", result.stderr)


if __name__ == "__main__":
    unittest.main()
