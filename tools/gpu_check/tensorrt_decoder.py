"""Which way to find the positions of new tokens TensorRT builds the translation model's decoder with.

    python3 -m gpu_check.tensorrt_decoder --kit KIT --pieces PIECES --out OUT [--budget 150]

For each way of `decoder_positions` the part that finds positions and the whole decoder are built, all beside each other, and
the decoder as it is for caches that are never empty; what was built whole is proved by `verify`. Writes OUT/tensorrt.json
and OUT/tensorrt.txt, as `tensorrt_stage` does.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import onnx

from . import decoder_positions as positions
from .tensorrt_stage import BUILDERS, FIRST, Stage, environment, program_of, unpack_all

MODEL, DECODER = "number_words", "decoder_model.onnx"
#: Sizes of open dimensions, which hold every case of `verify`; the part that finds positions reads no source.
SIZES = ["batch=1:1:8", "sequence=1:1:80", "past_sequence=0:16:80"]
FILLED = ["batch=1:1:8", "sequence=1:1:80", "past_sequence=1:16:80"]
SOURCE = ["source=1:16:80"]


def dims(sizes):
    return [word for size in sizes for word in ("--dim", size)]


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
    with ThreadPoolExecutor(max(2, round(BUILDERS * (os.cpu_count() or 1)))) as pool:
        calls = [pool.submit(decoder.build, f"{way} part", decoder.work / f"{way}.part.onnx", SIZES) for way in folders]
        calls += [pool.submit(decoder.whole, *one) for one in folders.items()]
        calls.append(pool.submit(decoder.build, "filled decoder", decoder.export / DECODER, FILLED + SOURCE))
    for error in filter(None, (call.exception() for call in calls)):
        decoder.stage.step(f"job {error!r}", [], lambda _: {"state": "failed", "why": "it was not done"})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "moa-tensorrt", help="where libraries and plans stay")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds, unpacking included")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    work = options.place / "decoder"
    for folder in (options.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(options.out, environment(options.kit, options.place), deadline)
    stage.step(FIRST, [], lambda _: unpack_all(options.kit, options.pieces, options.place))
    program = program_of(options.kit, options.place)
    stage.run("ops", [program, "ops"], says="compute capability")
    all_steps(Decoder(stage, program, options.kit / "checkpoints" / MODEL, work))
    print(f"{options.out}/tensorrt.txt")
    sys.exit(not any(state == "passed" for name, state in stage.states.items() if name.startswith("verify")))


if __name__ == "__main__":
    main()
