"""TensorRT engines on the GPU: built, proved, timed beside TensorRT's own build of the same models, loaded again.

    python3 -m gpu_check.tensorrt_stage --kit KIT --pieces PIECES --out OUT [--models base_layer] [--budget 540]

A step that fails is written down with the end of what it said, and the rest goes on; what depends on it is skipped. Writes
OUT/tensorrt.json and OUT/tensorrt.txt.
"""

import argparse
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from . import pieces

#: Sizes of each model's open dimensions, which hold every case of `verify` (80 tokens on either side, and as many in a cache),
#: and the points that are timed.
MODELS = {
    "base_layer": {"dims": ["batch=1:1:8", "sequence=1:128:2048"], "points": [["1", "128"], ["8", "128"], ["1", "2048"]]},
    "masked_lm": {"dims": ["batch=1:1:8", "sequence=1:32:128"], "points": [["1", "32"], ["8", "128"]]},
    "number_words": {
        "dims": ["batch=1:1:8", "source=1:16:80", "sequence=1:1:80", "past_sequence=0:16:80"],
        "points": [["1", "16"], ["8", "16"]],
    },
}
FORMS = ["fused", "standard"]
DTYPES = ["fp32", "fp16"]

#: Of what a step said, this much is kept.
KEPT = 4000


class Stage:
    """Steps, in order, each a process; `ok` says how each ended."""

    def __init__(self, out, environment, deadline):
        self.out, self.environment, self.deadline = out, environment, deadline
        self.steps, self.ok = [], {}

    def run(self, name, command, needs=(), expected=0, says=None):
        missing = [need for need in needs if not self.ok.get(need)]
        left = self.deadline - time.monotonic()
        why = f"{missing[0]} failed" if missing else "the time is over" if left < 5 else None
        step = {"name": name, "command": [str(word) for word in command]}
        if why:
            step |= {"state": "skipped", "why": why}
        else:
            step |= self.process(step["command"], left, expected, says)
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
        if code != expected:
            return {"state": "failed", "why": f"code {code}: {reason(text)[:200]}", **found}
        if says is not None and says not in text:
            return {"state": "failed", "why": f"does not say {says!r}", **found}
        return {"state": "passed", **found}

    def write(self):
        counts = {state: sum(step["state"] == state for step in self.steps) for state in ("passed", "failed", "skipped")}
        (self.out / "tensorrt.json").write_text(json.dumps({"counts": counts, "steps": self.steps}, indent=1))
        lines = [f"{step['state']:8} {step['name']:44} {step.get('seconds', ''):>8}  {step.get('why', '')}" for step in self.steps]
        (self.out / "tensorrt.txt").write_text("\n".join([*lines, json.dumps(counts), ""]))


def reason(text):
    """The line of `text` that says why a program failed: its error, what stopped it, or its last line."""
    lines = text.strip().splitlines() or [""]
    return next((line.strip() for line in lines if line.lstrip().startswith(("error[", "stopped:"))), lines[-1])


def unpack(wheel_pieces, place):
    """TensorRT's libraries under `place`; what is there already stays."""
    libraries = place / "tensorrt"
    if not (libraries / "libnvinfer.so.8").exists():
        wheel = pieces.join(wheel_pieces, place)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place, [name for name in archive.namelist() if ".so" in name])
        wheel.unlink()
    return libraries


def unpacked(kit, place):
    """The program, which the folder holds as `moa-export.xz`."""
    packed, program = kit / "moa-export.xz", place / "moa-export"
    if not packed.exists():
        return kit / "moa-export"
    program.write_bytes(lzma.decompress(packed.read_bytes()))
    program.chmod(0o755)
    return program


def environment(kit, libraries, place):
    found = dict(os.environ)
    folders = [str(libraries), str(kit / "stand_ins"), found.get("LD_LIBRARY_PATH", "")]
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
    report = stage.out / f"verify-{model}-{dtype}-{form}.json"
    command = [program, "verify", out, "--checkpoint", checkpoint, "--backends", "tensorrt", "--plan", plan, "--json", report, "--force"]
    stage.run(f"verify {label}", command, needs=[f"build {label}"])
    return out, plan


def time_forms(stage, program, work, model, dtype, places):
    """Our plugin beside TensorRT's own build of the standard form, in one process."""
    needs = [f"build {model} {dtype} {form}" for form in FORMS]
    for batch, tokens in MODELS[model]["points"]:
        name = f"bench {model} {dtype} {batch}x{tokens}"
        report = stage.out / f"{name.replace(' ', '-')}.json"
        size = ["--batch", batch, "--seq", tokens, "--seconds", "5", "--no-operators"]
        models = [places[form][0] for form in FORMS]
        command = [program, "bench", *models, "--backends", "tensorrt", *size, "--json", report, "--force"]
        stage.run(name, command, needs=needs)


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
    plan = plan_of(place)
    if plan is None:
        return
    cut = work / "cut.plan"
    cut.write_bytes(plan.read_bytes()[: plan.stat().st_size // 2])
    inputs, outputs = work / "in.safetensors", work / "out.safetensors"
    command = [program, "run", cut, "--inputs", inputs, "--outputs", outputs, "--trust-plan"]
    # `run` reads its inputs first, so they must be there.
    if inputs.exists():
        stage.run(f"refuse a cut plan {label}", command, needs=[f"build {label}"], expected=3, says="error[")


def refuse_other_shapes(stage, program, work, model, dtype, place):
    """More rows than the plan was built for end with one line and code 3."""
    label = f"{model} {dtype} fused"
    plan = plan_of(place)
    if plan is None:
        return
    inputs = work / "nine.safetensors"
    write_inputs(inputs, model, dtype, rows=9)
    command = [program, "run", plan, "--inputs", inputs, "--outputs", work / "nine-out.safetensors", "--force"]
    says = "the range that the engine was built for"
    stage.run(f"refuse other shapes {label}", command, needs=[f"build {label}"], expected=3, says=says)


def plan_of(place):
    """The plan that is run by itself: the whole model, or the encoder; None where there is none."""
    _, folder = place
    plans = [folder / name for name in ("model.plan", "encoder_model.plan")]
    return next((plan for plan in plans if plan.exists()), None)


def reload(stage, program, kit, work, model, dtype, place):
    """The same plan in two new processes: equal outputs, bit by bit."""
    label = f"{model} {dtype} fused"
    plan = plan_of(place)
    if plan is None:
        return
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
    import numpy

    random = numpy.random.default_rng(5)
    if model == "base_layer":
        tensors = {"query": random.standard_normal((rows, 128, 512)).astype("float16" if dtype == "fp16" else "float32")}
    else:
        tensors = {"input_ids": random.integers(4, 16, (rows, 32))}
    tensors["attention_mask"] = numpy.ones(next(iter(tensors.values())).shape[:2], numpy.int64)
    names = {"float32": "F32", "float16": "F16", "int64": "I64"}
    header, content = {}, b""
    for name, values in tensors.items():
        begin, content = len(content), content + values.tobytes()
        header[name] = {"dtype": names[values.dtype.name], "shape": list(values.shape), "data_offsets": [begin, len(content)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "moa-tensorrt", help="where libraries and plans stay")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds, unpacking included")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    for folder in (options.out, options.place):
        folder.mkdir(parents=True, exist_ok=True)
    libraries = unpack(options.pieces, options.place)
    work = options.place / "work"
    work.mkdir(exist_ok=True)
    stage = Stage(options.out, environment(options.kit, libraries, options.place), deadline)
    program = unpacked(options.kit, options.place)
    stage.run("ops", [program, "ops"], says="compute capability")
    for model in options.models.split(","):
        for dtype in options.dtypes.split(","):
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
