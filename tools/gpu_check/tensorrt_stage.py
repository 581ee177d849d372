"""TensorRT engines on the GPU: built, proved, timed beside TensorRT's own build of the same models, loaded again.

    python3 -m gpu_check.tensorrt_stage --kit KIT --pieces PIECES --out OUT [--models base_layer] [--budget 540]

Engines are built beside each other, in the order of what is worth most; then, alone, each point is timed. A step that fails is
written down with the end of what it said, and the rest goes on; what depends on it is skipped. Writes OUT/tensorrt.json, with
the reports of `verify` and `bench`, and OUT/tensorrt.txt.
"""

import argparse
import json
import lzma
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import pieces, tensors
from .arguments import words
from .programs import ended, is_signal, reason

#: The plan of each model that is run by itself, sizes of its open dimensions, which hold every case of `verify` (200 tokens on
#: either side, and as many in a cache), and the points that are timed.
MODELS = {
    "base_layer": {
        "plan": "model.plan",
        "dims": ["batch=1:1:8", "sequence=1:128:2048"],
        "points": [["1", "128"], ["8", "128"], ["1", "2048"]],
    },
    "masked_lm": {"plan": "model.plan", "dims": ["batch=1:1:8", "sequence=1:32:200"], "points": [["1", "32"], ["8", "128"]]},
    "number_words": {
        "plan": "encoder_model.plan",
        "dims": ["batch=1:1:8", "source=1:16:200", "sequence=1:1:200", "past_sequence=0:16:200"],
        "points": [["1", "16"], ["8", "16"]],
    },
    # One graph of an export, which is neither proved nor timed without the other: its outputs are held beside ONNX Runtime's.
    "encoder": {"of": "number_words", "plan": "encoder_model.plan", "dims": ["batch=1:1:8", "source=1:16:200"], "points": []},
}

#: How far outputs may lie from those of ONNX Runtime, over the largest of them.
FAR = {"fp32": 1e-4, "fp16": 4e-3}
FORMS = ["fused", "standard"]
DTYPES = ["fp32", "fp16"]

#: The points that come before all others.
FIRST_POINTS = [
    ("base_layer", "fp32", "1", "128"),
    ("base_layer", "fp16", "1", "128"),
    ("base_layer", "fp16", "8", "128"),
    ("masked_lm", "fp32", "8", "128"),
    ("base_layer", "fp16", "1", "2048"),
    ("number_words", "fp32", "8", "16"),
]

#: Of what a step said, this much is kept, and of what it said once more behind a signal.
KEPT, TRACED = 4000, 4000

#: What TensorRT says where it builds no engine since a layer has no implementation, and in its log of each that it left out.
NOT_IMPLEMENTED, LEFT_OUT = "Could not find any implementation", "Skipping tactic"

#: Seconds that one step may take: a build that hangs leaves time for the others.
LONGEST = 240.0

#: Seconds that a program may take once more, with its log and then under a debugger.
TRACING = 90.0

#: Where CUDA's programs lie, beside the PATH.
TOOLKIT = "/usr/local/cuda/bin"

#: How much of all seconds the engines may take; the rest is for what is timed.
BUILDING = 0.6

#: Programs that build at once, for each processor: one takes 4.5 GB, and more than one thread now and then.
BUILDERS = 0.75

#: What all other steps need.
FIRST = "unpack"


class Stage:
    """Steps, each a process, in the order in which they ended; `states` says how. Threads may take steps at once."""

    def __init__(self, out, environment, deadline):
        self.out, self.environment, self.deadline = out, environment, deadline
        self.steps, self.states = [], {}
        self.door, self.tracing = threading.RLock(), threading.Lock()

    def passed(self, name):
        return self.states.get(name) == "passed"

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
        missing = [need for need in (FIRST, *needs) if need != name and not self.passed(need)]
        left = self.deadline - time.monotonic()
        why = f"{missing[0]} has not passed" if missing else "the time is over" if left < 5 else None
        step = {"name": name, "command": list(command)}
        step |= {"state": "skipped", "why": why} if why else body(min(left, LONGEST))
        with self.door:
            self.states[name] = step["state"]
            self.steps.append(step)
            print(f"{step['state']:8} {name} {step.get('seconds', '')} {step.get('why', '')}".rstrip(), flush=True)
            self.write()
        return self.passed(name)

    def process(self, command, left, expected, says):
        start = time.monotonic()
        code, text = ended(command, self.environment, left)
        found = {"code": code, "seconds": round(time.monotonic() - start, 2), "said": text[-KEPT:]}
        if code == "time":
            return {"state": "failed", "why": f"ended after {left:.0f} s: {reason(text)[:200]}".rstrip(": "), **found}
        if code != expected:
            if is_signal(code):
                found["backtrace"] = self.backtrace(command, left - found["seconds"])
            elif NOT_IMPLEMENTED in text:
                found["tactics"] = self.left_out(command, left - found["seconds"])
            return {"state": "failed", "why": f"code {code}: {reason(text)[:200]}".rstrip(": "), **found}
        if says is not None and says not in text:
            return {"state": "failed", "why": f"does not say {says!r}", **found}
        return {"state": "passed", **found}

    def backtrace(self, command, left):
        """What TensorRT's log and a debugger say where a program ends by a signal again; debuggers of one GPU shut each other out."""
        places = f"{self.environment.get('PATH', '')}:{TOOLKIT}"
        debugger = shutil.which("cuda-gdb", path=places) or shutil.which("gdb", path=places)
        words = [debugger, "-batch", "-ex", "run", "-ex", "bt 20", "-ex", "quit", "--args", *command]
        if not self.tracing.acquire(blocking=False):
            return "another program was traced at that time"
        try:
            environment, deadline = {**self.environment, "MOA_TENSORRT_LOG": "4"}, time.monotonic() + min(left, TRACING)
            # Without a debugger first: under one, loading TensorRT alone may take all of the time.
            said = [ended(one, environment, max(1.0, deadline - time.monotonic()))[1] for one in (command, words) if one[0]]
            return "\n".join(text[-TRACED:] for text in said)
        finally:
            self.tracing.release()

    def left_out(self, command, left):
        """Why TensorRT left out every implementation of a layer, by its log of the same program again; one at a time."""
        if not self.tracing.acquire(blocking=False):
            return "another program was traced at that time"
        try:
            text = ended(command, {**self.environment, "MOA_TENSORRT_LOG": "4"}, max(1.0, min(left, TRACING)))[1]
            return "\n".join(dict.fromkeys(line for line in text.splitlines() if LEFT_OUT in line))[:TRACED]
        finally:
            self.tracing.release()

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


def dims(sizes):
    return [word for size in sizes for word in ("--dim", size)]


def beside_each_other(calls):
    """Makes all calls, a function and its arguments each, as many at once as builds may run; the errors that they raise."""
    with ThreadPoolExecutor(max(2, round(BUILDERS * (os.cpu_count() or 1)))) as pool:
        made = [pool.submit(*call) for call in calls]
    return [error for error in (call.exception() for call in made) if error]


def tell(stage, errors):
    for error in errors:
        stage.step(f"job {error!r}", [], lambda _: {"state": "failed", "why": "it was not done"})


class Job:
    """What one model in one type needs: programs, and places that no other job writes to."""

    def __init__(self, stage, program, kit, work, model, dtype):
        self.stage, self.program, self.model, self.dtype = stage, program, model, dtype
        of = MODELS[model].get("of")
        self.checkpoint, self.work = kit / "checkpoints" / (of or model), work
        self.graph = Path(MODELS[model]["plan"]).stem if of else None

    def export_of(self, form):
        return self.work / f"{self.model}-{self.dtype}-{form}"

    def plan_of(self, form):
        return self.work / f"{self.model}-{self.dtype}-{form}-plan"

    def built(self, form):
        """What an engine is built of, and where it goes: an export and a folder, or one graph and its plan."""
        export, plan = self.export_of(form), self.plan_of(form)
        if self.graph is None:
            return export, plan
        plan.mkdir(exist_ok=True)
        return export / f"{self.graph}.onnx", plan / MODELS[self.model]["plan"]

    def files(self, *words):
        """A folder of the job's own."""
        place = self.work / "-".join([self.model, self.dtype, *words, "files"])
        place.mkdir(exist_ok=True)
        return place

    def export(self, form):
        command = [self.program, self.checkpoint, "-o", self.export_of(form), "--form", form, "--dtype", self.dtype, "--force"]
        self.stage.run(f"export {self.model} {self.dtype} {form}", command)

    def prove(self, form):
        """Builds one form and proves it; of the fused one, what it refuses and that it can be loaded again."""
        label, files = f"{self.model} {self.dtype} {form}", self.files(form)
        source, target = self.built(form)
        command = [self.program, "build", source, "-o", target, *dims(MODELS[self.model]["dims"]), "--timing-cache", files / "timings"]
        self.stage.run(f"build {label}", [*command, "--force", "--json"], needs=[f"export {label}"])
        if self.graph is None:
            report = files / "report.json"
            command = [self.program, "verify", source, "--checkpoint", self.checkpoint, "--backends", "tensorrt", "--plan", target]
            command += ["--json", report, "--force"]
            self.stage.run(f"verify {label}", command, needs=[f"build {label}"], report=report)
        else:
            self.compare(form, label, files)
        if form == "fused":
            for step in (reload, refuse_without_tensorrt, refuse_a_cut_plan, refuse_other_shapes):
                step(self.stage, self.program, files, self.model, self.dtype, (source, self.plan_of(form)))

    def compare(self, form, label, files):
        """The outputs of one graph beside those of the standard form in ONNX Runtime."""
        inputs, outputs, expected = (files / f"compared-{name}.safetensors" for name in ("in", "out", "expected"))
        write_inputs(inputs, self.model, self.dtype)
        words = ["--inputs", inputs, "--outputs", outputs, "--force"]
        self.stage.run(f"run {label}", [self.program, "run", self.built(form)[1], *words], needs=[f"build {label}"])
        words = ["--inputs", inputs, "--outputs", expected, "--force", "--backend", "ort-function"]
        command = [self.program, "run", self.export_of("standard") / f"{self.graph}.onnx", *words]
        beside = f"run {label} in ONNX Runtime"
        self.stage.run(beside, command, needs=[f"export {self.model} {self.dtype} standard"])

        def body(_):
            far = tensors.furthest(tensors.read(outputs), tensors.read(expected))
            state = "passed" if far <= FAR[self.dtype] else "failed"
            return {"state": state, "why": f"{far:.1e} from ONNX Runtime, {FAR[self.dtype]:.0e} is allowed"}

        self.stage.step(f"compare {label}", [f"run {label}", beside], body)

    def bench(self, forms, point, files, seconds):
        """The words that time `forms` at one point."""
        batch, tokens = point
        size = ["--batch", batch, "--seq", tokens, "--seconds", seconds, "--warm-up", seconds, "--no-operators"]
        models = [self.export_of(form) for form in forms]
        # What computes something else is timed too, and the report says so: `verify` is the step that fails.
        size += ["--allow-failed-parity", "--json", files / "report.json", "--force"]
        return [self.program, "bench", *models, "--backends", "tensorrt", *size]

    def engines_name(self, form, point):
        return f"engines {self.model} {self.dtype} {'x'.join(point)} {form}"

    def engines(self, form, point):
        """Has the cache hold what `time` will load: a bench that times next to nothing."""
        command = self.bench([form], point, self.files(form, *point), "0.1")
        self.stage.run(self.engines_name(form, point), command, needs=[f"export {self.model} {self.dtype} {form}"])

    def time(self, point):
        """Our plugin beside TensorRT's own build of the standard form, in one process; where one fails, the other by itself."""
        broken = [form for form in FORMS if self.stage.states.get(self.engines_name(form, point)) == "failed"]
        for forms in [FORMS, *([form] for form in FORMS if broken and form not in broken)]:
            alone = [f"{form} alone" for form in forms if forms != FORMS]
            files = self.files(*point)
            needs = [f"export {self.model} {self.dtype} {form}" for form in forms]
            needs += [self.engines_name(form, point) for form in forms if form in broken]
            name = " ".join([f"bench {self.model} {self.dtype} {'x'.join(point)}", *alone])
            self.stage.run(name, self.bench(forms, point, files, "2"), needs=needs, report=files / "report.json")


#: Starts a program that finds no TensorRT.
WITHOUT = "import os, sys; os.environ.update(TENSORRT_ROOT='/nowhere'); os.execv(sys.argv[1], sys.argv[1:])"


def refuse_without_tensorrt(stage, program, work, model, dtype, place):
    """A build where TENSORRT_ROOT has none ends with one line and code 6; the model is read before, so it must be there."""
    label = f"{model} {dtype} fused"
    command = [sys.executable, "-c", WITHOUT, program, "build", place[0], "-o", work / "none", *dims(MODELS[model]["dims"])]
    command += ["--no-cache", "--force"]
    needs = [f"export {label}"]
    stage.run(f"refuse a missing TensorRT {label}", command, needs, expected=6, says="TENSORRT_ROOT=/nowhere is not there")


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


def reload(stage, program, work, model, dtype, place):
    """The same plan in two new processes: equal outputs, bit by bit."""
    label = f"{model} {dtype} fused"
    plan = plan_of(model, place)
    inputs = work / "in.safetensors"
    write_inputs(inputs, model, dtype)
    results = [work / f"out-{turn}.safetensors" for turn in range(2)]
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
    mask = ("I64", shape[:2], [1] * math.prod(shape[:2]))
    tensors.write(path, {name: (kind, shape, values), "attention_mask": mask})


def points_of(models, dtypes):
    """Model, type and size of all points, those that are worth most first."""
    every = [(model, dtype, *point) for model in models for dtype in dtypes for point in MODELS[model]["points"]]
    return sorted(every, key=lambda point: FIRST_POINTS.index(point) if point in FIRST_POINTS else len(FIRST_POINTS))


def all_steps(stage, options, work):
    """All steps behind the first two: exports, then engines beside each other, then what is timed."""
    program, end = program_of(options.kit, options.place), stage.deadline
    points = points_of(options.models, options.dtypes)
    untimed = [(model, dtype) for model in options.models for dtype in options.dtypes if not MODELS[model]["points"]]
    keys = dict.fromkeys([*untimed, *(point[:2] for point in points)])
    jobs = {key: Job(stage, program, options.kit, work, *key) for key in keys}
    for job in jobs.values():
        for form in FORMS:
            job.export(form)
    now = time.monotonic()
    stage.deadline = now + BUILDING * (end - now)
    proved, calls = set(), []
    calls += [(jobs[key].prove, form) for key in untimed for form in FORMS]
    for *key, batch, tokens in points:
        job = jobs[tuple(key)]
        calls += [(job.prove, form) for form in FORMS if job not in proved]
        calls += [(job.engines, form, [batch, tokens]) for form in FORMS]
        proved.add(job)
    errors = beside_each_other(calls)
    stage.deadline = end
    tell(stage, errors)
    for *key, batch, tokens in points:
        jobs[tuple(key)].time([batch, tokens])


def options_of(description, budget):
    """A parser of what every run of TensorRT is told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path, required=True)
    parser.add_argument("--pieces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()) / "moa-tensorrt", help="where libraries and plans stay")
    parser.add_argument("--budget", type=float, default=budget, help="seconds, unpacking included")
    return parser


def begun(options, work):
    """A stage whose first steps are done, and its folder of this name."""
    deadline, work = time.monotonic() + options.budget, options.place / work
    for folder in (options.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    stage = Stage(options.out, environment(options.kit, options.place), deadline)
    stage.step(FIRST, [], lambda _: unpack_all(options.kit, options.pieces, options.place))
    stage.run("ops", [program_of(options.kit, options.place), "ops"], says="compute capability")
    return stage, work


def main():
    parser = options_of(__doc__, 540.0)
    parser.add_argument("--models", type=words(MODELS), default=list(MODELS))
    parser.add_argument("--dtypes", type=words(DTYPES), default=DTYPES)
    options = parser.parse_args()
    stage, work = begun(options, "work")
    all_steps(stage, options, work)
    print(f"{options.out}/tensorrt.txt")
    states = [step["state"] for step in stage.steps]
    sys.exit("failed" in states or "passed" not in states)


if __name__ == "__main__":
    main()
