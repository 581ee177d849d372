"""Which way to find the positions of new tokens TensorRT builds the translation model's decoder with.

    python3 -m gpu_check.tensorrt_decoder --kit KIT --pieces PIECES --out OUT [--budget 150]

For each way of `decoder_positions` the part that finds positions and the whole decoder are built, all beside each other, and
the decoder as it is for caches that are never empty; what was built whole is proved by `verify`. Writes OUT/tensorrt.json
and OUT/tensorrt.txt, as `tensorrt_stage` does.
"""

import shutil
import sys

import onnx

from . import decoder_positions as positions
from .tensorrt_stage import begun, beside_each_other, dims, options_of, program_of, tell

MODEL, DECODER = "number_words", "decoder_model.onnx"
#: Sizes of open dimensions, which hold every case of `verify`; the part that finds positions reads no source.
SIZES = ["batch=1:1:8", "sequence=1:1:80", "past_sequence=0:16:80"]
FILLED = ["batch=1:1:8", "sequence=1:1:80", "past_sequence=1:16:80"]
SOURCE = ["source=1:16:80"]


class Decoder:
    """The steps of one run; `work` is its folder."""

    def __init__(self, stage, program, checkpoint, work):
        self.stage, self.program, self.checkpoint, self.work = stage, program, checkpoint, work
        self.export = work / "export"

    def exported(self):
        command = [self.program, self.checkpoint, "-o", self.export, "--form", "fused", "--force"]
        return self.stage.run("export", command)

    def written(self, way):
        """A folder like that of the export, with the decoder rewritten, and the part of it beside that."""
        folder = self.work / way
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.export, folder)
        model = positions.rewritten(onnx.load(folder / DECODER), way)
        onnx.save(model, folder / DECODER)
        onnx.save(positions.cut(model), self.work / f"{way}.part.onnx")
        return folder

    def build(self, name, source, sizes):
        plan = self.work / f"{name.replace(' ', '-')}.plan"
        command = [self.program, "build", source, "-o", plan, *dims(sizes), "--force", "--no-cache"]
        return self.stage.run(f"build {name}", command, needs=["export"])

    def whole(self, way, folder):
        """Builds a decoder, and proves it where it was built."""
        if not self.build(f"{way} decoder", folder / DECODER, SIZES + SOURCE):
            return
        report = self.work / f"{way}.json"
        command = [self.program, "verify", folder, "--checkpoint", self.checkpoint, "--backends", "tensorrt"]
        self.stage.run(f"verify {way}", [*command, "--json", report, "--force"], report=report)


def all_steps(decoder):
    if not decoder.exported():
        return
    folders = {way: decoder.written(way) for way in positions.WAYS}
    calls = [(decoder.build, f"{way} part", decoder.work / f"{way}.part.onnx", SIZES) for way in folders]
    calls += [(decoder.whole, *one) for one in folders.items()]
    calls.append((decoder.build, "filled decoder", decoder.export / DECODER, FILLED + SOURCE))
    tell(decoder.stage, beside_each_other(calls))


def main():
    options = options_of(__doc__, 150.0).parse_args()
    stage, work = begun(options, "decoder")
    program = program_of(options.kit, options.place)
    all_steps(Decoder(stage, program, options.kit / "checkpoints" / MODEL, work))
    print(f"{options.out}/tensorrt.txt")
    sys.exit(not any(state == "passed" for name, state in stage.states.items() if name.startswith("verify")))


if __name__ == "__main__":
    main()
