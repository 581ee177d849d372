"""TensorRT engines on the GPU: built, proved, timed beside TensorRT's own build of the same models, loaded again.

    python3 -m gpu_check.tensorrt_stage --kit KIT --pieces PIECES --out OUT [--models base_layer] [--budget 540]

A step that fails is written down with the end of what it said, and the rest goes on; what depends on it is skipped. Writes
OUT/tensorrt.json, with the reports of `verify` and `bench`, and OUT/tensorrt.txt.
"""

import argparse
import json
import lzma
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import pieces

#: The plan of each model that is run by itself, sizes of its open dimensions, which hold every case of `verify` (80 tokens on
#: either side, and as many in a cache), and the points that are timed.
MODELS = {
    "base_layer": {"plan": "model.plan", "dims": ["batch=1:1:8", "sequence=1:128:2048"], "points": [["1", "128"], ["8", "128"], ["1", "2048"]]},
    "masked_lm": {"plan": "model.plan", "dims": ["batch=1:1:8", "sequence=1:32:128"], "points": [["1", "32"], ["8", "128"]]},
    "number_words": {
        "plan": "encoder_model.plan",
        "dims": ["batch=1:1:8", "source=1:16:80", "sequence=1:1:80", "past_sequence=0:16:80"],
        "points": [["1", "16"], ["8", "16"]],
    },
}
FORMS = ["fused", "standard"]
DTYPES = ["fp32", "fp16"]

#: Of what a step said, this much is kept.
KEPT = 4000

#: Seconds that one step may take: a build that hangs leaves time for the others.
LONGEST = 240.0

#: What all other steps need.
FIRST = "unpack"


class Stage:
    """Steps, in order, each a process; `ok` says how each ended."""

    def __init__(self, out, environment, deadline):
        self.out, self.environment, self.deadline = out, environment, deadline
        self.steps, self.ok = [], {}

    def run(self, name, command, needs=(), expected=0, says=None, report=None):
        """A process that ends with the code `expected` and says `says`; it may write a `report`, which is kept."""
        command = [str(word) for word in command]

        def body(left):
            if report is None:
                return self.process(command, left, expected, says)
            report.unlink(missing_ok=True)
            return {**self.process(command, left, expected, says), "report": read_json(report)}

        return self.step(name, needs, body, command)

    def step(self, name, needs, body, command=()):
        """`body`, of the seconds that are left, says how it ended; it is not called where something that it needs is not there."""
        missing = [need for need in (FIRST, *needs) if not self.ok.get(need, need == name)]
        left = self.deadline - time.monotonic()
        why = f"{missing[0]} has not passed" if missing else "the time is over" if left < 5 else None
        step = {"name": name, "command": list(command)}
        step |= {"state": "skipped", "why": why} if why else body(min(left, LONGEST))
        self.ok[name] = step["state"] == "passed"
        self.steps.append(step)
        print(f"{step['state']:8} {name} {step.get('seconds', '')} {step.get('why', '')}".rstrip(), flush=True)
        self.write()
        return self.ok[name]

    def process(self, command, left, expected, says):
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=left
            )
            code, text = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as error:
            code, text = "time", (error.stdout or b"").decode(errors="replace")
        except OSError as error:
            code, text = "start", str(error)
        found = {"code": code, "seconds": round(time.monotonic() - start, 2), "said": text[-KEPT:]}
        if code == "time":
            return {"state": "failed", "why": f"ended after {left:.0f} s: {reason(text)[:200]}".rstrip(": "), **found}
        if code != expected:
            return {"state": "failed", "why": f"code {code}: {reason(text)[:200]}", **found}
        if says is not None and says not in text:
            return {"state": "failed", "why": f"does not say {says!r}", **found}
        return {"state": "passed", **found}

    def write(self):
        counts = {state: sum(step["state"] == state for step in self.steps) for state in ("passed", "failed", "skipped")}
        found = {"gpu": self.gpu(), "counts": counts, "steps": self.steps}
        lines = [f"{step['state']:8} {step['name']:44} {step.get('seconds', ''):>8}  {step.get('why', '')}" for step in self.steps]
        lines = [f"GPU: {found['gpu'] or 'not told'}", *lines, json.dumps(counts), ""]
        for name, text in (("tensorrt.json", json.dumps(found, indent=1)), ("tensorrt.txt", "\n".join(lines))):
            fresh = self.out / f"{name}.tmp"
            fresh.write_text(text)
            fresh.replace(self.out / name)

    def gpu(self):
        """The GPU that `moa-export ops` names."""
        said = next((step.get("said", "") for step in self.steps if step["name"] == "ops"), "")
        found = re.search(r"^GPU +(.+)", said, re.MULTILINE)
        return found and found[1]


def read_json(path):
    """What a file of JSON holds; None where there is none, or half of one."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def reason(text):
    """The line of `text` that says why a program failed: its error, what stopped it, or its last line."""
    lines = text.strip().splitlines() or [""]
    return next((line.strip() for line in lines if line.lstrip().startswith(("error[", "stopped:"))), lines[-1])


#: What engines cannot be had without.
LIBRARIES = ["libnvinfer.so.8", "libnvonnxparser.so.8"]


def unpack(wheel_pieces, place):
    """TensorRT's libraries, out of the wheel's pieces; the folder is there whole or not at all."""
    libraries = place / "tensorrt"
    if libraries.exists():
        return libraries
    with tempfile.TemporaryDirectory(dir=place, prefix="unpacking-") as folder:
        pieces.unpack(wheel_pieces, folder)
        missing = [name for name in LIBRARIES if not Path(folder, "tensorrt", name).exists()]
        if missing:
            raise ValueError(f"{wheel_pieces} lacks {', '.join(missing)}")
        Path(folder, "tensorrt").rename(libraries)
    return libraries


def unpack_all(kit, wheel_pieces, place):
    """The first step: TensorRT and the program; how it ended."""
    start = time.monotonic()
    try:
        unpack(wheel_pieces, place)
        unpacked(kit, place)
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        return {"state": "failed", "why": f"{type(error).__name__}: {error}"}
    return {"state": "passed", "seconds": round(time.monotonic() - start, 2)}


def unpacked(kit, place):
    """The program, which the folder holds as `moa-export.xz`."""
    packed, program = kit / "moa-export.xz", program_of(kit, place)
    if packed.exists():
        program.write_bytes(lzma.decompress(packed.read_bytes()))
        program.chmod(0o755)
    return program


def program_of(kit, place):
    """Where the program is once it is unpacked."""
    return (place if (kit / "moa-export.xz").exists() else kit) / "moa-export"


def environment(kit, place):
    found, libraries = dict(os.environ), place / "tensorrt"
    folders = [str(kit / "stand_ins"), str(libraries), found.get("LD_LIBRARY_PATH", "")]
    found["LD_LIBRARY_PATH"] = ":".join(filter(None, folders))
    found["TENSORRT_ROOT"] = str(libraries)
    found["XDG_CACHE_HOME"] = str(place / "cache")
    found["MOA_TENSORRT_LIBRARY"] = str(kit / "libmoa_tensorrt.so")
    found["MOA_CUDA_LIBRARY"] = str(kit / "libmoa_cuda.so")
    found["MOA_CUDA_KERNELS"] = str(kit / "kernels.bin")
    return found


def dims(model):
    return [word for dim in MODELS[model]["dims"] for word in ("--dim", dim)]


def build_and_verify(stage, program, kit, work, model, dtype, form):
    """Exports, builds and proves one form; returns the place of the export."""
    label = f"{model} {dtype} {form}"
    checkpoint, out = kit / "checkpoints" / model, work / f"{model}-{dtype}-{form}"
    plan = work / f"{model}-{dtype}-{form}-plan"
    stage.run(f"export {label}", [program, checkpoint, "-o", out, "--form", form, "--dtype", dtype, "--force"])
    command = [program, "build", out, "-o", plan, *dims(model), "--timing-cache", work / "timings", "--force", "--json"]
    stage.run(f"build {label}", command, needs=[f"export {label}"])
    report = work / "report.json"
    command = [program, "verify", out, "--checkpoint", checkpoint, "--backends", "tensorrt", "--plan", plan, "--json", report, "--force"]
    stage.run(f"verify {label}", command, needs=[f"build {label}"], report=report)
    return out, plan


def time_forms(stage, program, work, model, dtype, places):
    """Our plugin beside TensorRT's own build of the standard form, in one process; a form by itself where the other has no engine."""
    built = [form for form in FORMS if stage.ok.get(f"build {model} {dtype} {form}")]
    for batch, tokens in MODELS[model]["points"]:
        for forms in [FORMS, *([form] for form in built if len(built) < len(FORMS))]:
            name = " ".join([f"bench {model} {dtype} {batch}x{tokens}", *(f"{form} alone" for form in forms if forms != FORMS)])
            report = work / "report.json"
            size = ["--batch", batch, "--seq", tokens, "--seconds", "5", "--no-operators"]
            models = [places[form][0] for form in forms]
            command = [program, "bench", *models, "--backends", "tensorrt", *size, "--json", report, "--force"]
            stage.run(name, command, needs=[f"build {model} {dtype} {form}" for form in forms], report=report)


#: Starts a program that finds no TensorRT.
WITHOUT = "import os, sys; os.environ.update(TENSORRT_ROOT='/nowhere'); os.execv(sys.argv[1], sys.argv[1:])"


def refuse_without_tensorrt(stage, program, work, model, dtype, place):
    """A build where TENSORRT_ROOT has none ends with one line and code 6; the model is read before, so it must be there."""
    label = f"{model} {dtype} fused"
    command = [sys.executable, "-c", WITHOUT, program, "build", place[0], "-o", work / "none", *dims(model), "--no-cache", "--force"]
    needs = [f"export {label}"]
    stage.run(f"refuse a missing TensorRT {label}", command, needs, expected=6, says="set TENSORRT_ROOT")


def refuse_a_cut_plan(stage, program, work, model, dtype, place):
    """A plan that was cut off ends with one line and code 3."""
    label = f"{model} {dtype} fused"
    plan = plan_of(model, place)
    cut, inputs, outputs = work / "cut.plan", work / "cut.safetensors", work / "cut-out.safetensors"
    # `run` reads its inputs first, so they must be there.
    write_inputs(inputs, model, dtype)
    if plan.is_file():
        cut.write_bytes(plan.read_bytes()[: plan.stat().st_size // 2])
    command = [program, "run", cut, "--inputs", inputs, "--outputs", outputs, "--trust-plan", "--force"]
    stage.run(f"refuse a cut plan {label}", command, needs=[f"build {label}"], expected=3, says="error[")


def refuse_other_shapes(stage, program, work, model, dtype, place):
    """More rows than the plan was built for end with one line and code 3."""
    label = f"{model} {dtype} fused"
    plan = plan_of(model, place)
    inputs = work / "nine.safetensors"
    write_inputs(inputs, model, dtype, rows=9)
    command = [program, "run", plan, "--inputs", inputs, "--outputs", work / "nine-out.safetensors", "--force"]
    says = "the range that the engine was built for"
    stage.run(f"refuse other shapes {label}", command, needs=[f"build {label}"], expected=3, says=says)


def plan_of(model, place):
    """The plan that is run by itself: the whole model, or the encoder."""
    return place[1] / MODELS[model]["plan"]


def reload(stage, program, kit, work, model, dtype, place):
    """The same plan in two new processes: equal outputs, bit by bit."""
    label = f"{model} {dtype} fused"
    plan = plan_of(model, place)
    inputs = work / "in.safetensors"
    write_inputs(inputs, model, dtype)
    results = [work / f"{model}-{dtype}-{turn}.safetensors" for turn in range(2)]
    for turn, result in enumerate(results):
        command = [program, "run", plan, "--inputs", inputs, "--outputs", result, "--force"]
        stage.run(f"run {label} in process {turn}", command, needs=[f"build {label}"])
    check = "import sys; a, b = (open(name, 'rb').read() for name in sys.argv[1:]); sys.exit(a != b)"
    names = [f"run {label} in process {turn}" for turn in range(2)]
    stage.run(f"equal outputs {label}", [sys.executable, "-c", check, *results], needs=names)


def write_inputs(path, model, dtype, rows=2):
    """Hidden states, or token ids, and a mask of ones, as a safetensors file."""
    draw = random.Random(5)
    if model == "base_layer":
        name, kind, shape = "query", "F16" if dtype == "fp16" else "F32", [rows, 128, 512]
        values = [draw.gauss(0, 1) for _ in range(math.prod(shape))]
    else:
        name, kind, shape = "input_ids", "I64", [rows, 32]
        values = [draw.randrange(4, 16) for _ in range(math.prod(shape))]
    tensors = {name: (kind, shape, values), "attention_mask": ("I64", shape[:2], [1] * math.prod(shape[:2]))}
    letters = {"F32": "f", "F16": "e", "I64": "q"}
    header, content = {}, b""
    for name, (kind, shape, values) in tensors.items():
        begin, content = len(content), content + struct.pack(f"<{len(values)}{letters[kind]}", *values)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def words(known):
    """Reads names of `known` with commas between them."""

    def read(text):
        if unknown := [word for word in text.split(",") if word not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return text.split(",")

    return read


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "moa-tensorrt", help="where libraries and plans stay")
    parser.add_argument("--models", type=words(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", type=words(DTYPES), default=DTYPES)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds, unpacking included")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    for folder in (options.out, options.place):
        folder.mkdir(parents=True, exist_ok=True)
    work = options.place / "work"
    work.mkdir(exist_ok=True)
    stage = Stage(options.out, environment(options.kit, options.place), deadline)
    stage.step(FIRST, [], lambda _: unpack_all(options.kit, options.pieces, options.place))
    program = program_of(options.kit, options.place)
    stage.run("ops", [program, "ops"], says="compute capability")
    for model in options.models:
        for dtype in options.dtypes:
            places = {form: build_and_verify(stage, program, options.kit, work, model, dtype, form) for form in FORMS}
            time_forms(stage, program, work, model, dtype, places)
            reload(stage, program, options.kit, work, model, dtype, places["fused"])
            refuse_without_tensorrt(stage, program, work, model, dtype, places["fused"])
            refuse_a_cut_plan(stage, program, work, model, dtype, places["fused"])
            refuse_other_shapes(stage, program, work, model, dtype, places["fused"])
    print(f"{options.out}/tensorrt.txt")
    sys.exit(any(step["state"] == "failed" for step in stage.steps))


if __name__ == "__main__":
    main()
