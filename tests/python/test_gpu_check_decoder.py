"""Other ways to find positions compute what the export does, and the run that builds them, without TensorRT."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import exports
from gpu_check import decoder_positions as positions

#: Plays moa-export: copies an export that lies in EXPORT, builds what has no slice behind the count, and proves anything.
PROGRAM = """#!{python}
import os, pathlib, shutil, sys
import onnx
words = sys.argv[1:]
after = lambda word: words[words.index(word) + 1]
if words[0] == "ops":
    print("GPU           NVIDIA X, compute capability 9.0")
elif words[0] == "build":
    nodes = onnx.load(words[1]).graph.node
    if "past_sequence=0:16:80" in words and any(n.op_type == "Slice" and "decoder/Where_2" in n.input for n in nodes):
        sys.exit("error[MOA-E0630]: no implementation")
    open(after("-o"), "w").write("a plan")
elif words[0] == "verify":
    open(after("--json"), "w").write("{{}}")
else:
    shutil.copytree(os.environ["EXPORT"], after("-o"), dirs_exist_ok=True)
"""


def decoder():
    """The folder of the bundled translator in the fused form, which no runtime but ours needs to run here."""
    folder = exports.folder("decoder-positions")
    if not folder.exists():
        command = [exports.setting("MOA_EXPORT"), exports.DATA / "nmt", "-o", folder, "--form", "fused"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


class Ways(unittest.TestCase):
    def outputs(self, model):
        onnx.checker.check_model(model)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found = []
        for past, new in [(0, 5), (7, 3), (9, 1)]:
            draw = np.random.default_rng(past)
            mask, ids = draw.integers(0, 2, (3, past + new)), draw.integers(4, 100, (3, new))
            found += session.run(None, {"attention_mask": mask, "input_ids": ids})
        return found

    def test_all_ways_find_the_same_positions(self):
        model = onnx.load(decoder() / "decoder_model.onnx")
        expected = self.outputs(positions.cut(model))
        self.assertGreater(len(positions.WAYS), 5)
        for name in positions.WAYS:
            rewritten = positions.rewritten(model, name)
            onnx.checker.check_model(rewritten)
            self.assertEqual(name == "as_exported", rewritten.graph.node == model.graph.node, name)
            for found, wanted in zip(self.outputs(positions.cut(rewritten)), expected, strict=True):
                np.testing.assert_array_equal(found, wanted, name)

    def test_a_graph_of_other_nodes_is_refused(self):
        model = onnx.load(decoder() / "decoder_model.onnx")
        with self.assertRaisesRegex(ValueError, "has not all of decoder/Slice, other"):
            positions.replace(model.graph, [positions.SLICE, "other"], [])


class Run(unittest.TestCase):
    def test_what_was_built_whole_is_proved(self):
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            kit, libraries = place / "kit", place / "place" / "tensorrt"
            libraries.mkdir(parents=True)
            (kit / "checkpoints" / "number_words").mkdir(parents=True)
            program = kit / "moa-export"
            program.write_text(PROGRAM.format(python=sys.executable))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            command = [sys.executable, "-m", "gpu_check.tensorrt_decoder", "--kit", kit, "--pieces", place, "--out", place / "out"]
            places = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
            variables = os.environ | {"PYTHONPATH": places, "EXPORT": str(decoder())}
            done = subprocess.run(
                [*command, "--place", place / "place"], env=variables, capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            steps = {step["name"]: step["state"] for step in json.loads((place / "out/tensorrt.json").read_text())["steps"]}
            proved = {step.removeprefix("verify ") for step in steps if step.startswith("verify")}
            self.assertEqual(proved, {"picked", "new_tokens_alone", "rows_cut_off"})
            self.assertEqual(steps["build as_exported decoder"], "failed")
            self.assertEqual(steps["build known_end part"], "failed")
            self.assertEqual(steps["build filled decoder"], "passed")


if __name__ == "__main__":
    unittest.main()
