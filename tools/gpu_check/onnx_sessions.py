"""The operator in ONNX Runtime's CUDA provider: its result beside the same layer in standard operators, and its time
beside that and beside `MultiHeadAttention` of equal work. Needs a wheel of onnxruntime-gpu in the kit.

Each layer is a process of its own: what costs it the use of the GPU costs no other layer."""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
import zipfile
from pathlib import Path

from . import stats

#: Calls of a contestant in a row, and how often all contestants take turns.
RUNS, ROUNDS = 100, 5

#: Seconds that one layer may take.
LONGEST = 120.0

TOLERANCE = {"f32": 1e-4, "f16": 4e-3}

#: width, k, experts, head, heads, batch, tokens, past, jetmoe
LAYERS = {
    "base 1x128": (512, 8, 8, 128, 1, 1, 128, 0),
    "base 16x128": (512, 8, 8, 128, 1, 16, 128, 0),
    "base decode 8, past 127": (512, 8, 8, 128, 1, 8, 1, 127),
    "big 1x128": (512, 16, 32, 256, 1, 1, 128, 0),
    "jetmoe decode 1, past 511": (2048, 2, 8, 128, 16, 1, 1, 511, True),
}
#: Standard graphs whose shapes depend on values, which CUDA graphs do not replay: one that was captured read illegal memory.
DATA_SHAPED = {"grouped", "chosen"}

SMALL = {"small": (512, 8, 8, 128, 1, 1, 16, 0), "small decode": (256, 8, 8, 64, 1, 2, 1, 7)}


def install(kit, site):
    """Unpacks the wheel of the kit, or its pieces."""
    from . import pieces

    folder = Path(kit, "onnxruntime")
    if (folder / pieces.MANIFEST).exists():
        pieces.unpack(folder, site)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)


def to_half(model, whole):
    """The model in f16; initializers in `whole` and what is no f32 stay."""
    import onnx
    from onnx import TensorProto, numpy_helper

    model = onnx.load_from_string(model)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in whole:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float16"), tensor.name))
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model.SerializeToString()


class Bound:
    """A session with inputs and outputs in fixed places on the device, so that it can be captured into a graph."""

    def __init__(self, ort, model, feeds, library, provider, graph):
        options = ort.SessionOptions()
        cuda = "CUDA" in provider
        if library:
            options.register_custom_ops_library(str(library))
            # Our operator must be on the GPU; of standard ones, ONNX Runtime may keep some on the CPU.
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1" if cuda else "0")
        settings = {"enable_cuda_graph": "1" if graph else "0", "use_tf32": "0"} if cuda else {}
        self.graph = graph and cuda
        self.session = ort.InferenceSession(model, options, providers=[(provider, settings)])
        if self.session.get_providers()[0] != provider:
            raise RuntimeError(f"ONNX Runtime falls back to {self.session.get_providers()[0]}")
        self.binding, device = self.session.io_binding(), "cuda" if cuda else "cpu"
        for name, value in feeds.items():
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value, device, 0))
        self.outputs = []
        for output in self.session.get_outputs():
            kind = {"tensor(float)": "float32", "tensor(float16)": "float16"}[output.type]
            value = ort.OrtValue.ortvalue_from_shape_and_type(output.shape, kind, device, 0)
            self.binding.bind_ortvalue_output(output.name, value)
            self.outputs.append(value)

    @classmethod
    def make(cls, *arguments, captures):
        """With a CUDA graph where the runtime can capture one and `captures` allows it, else without."""
        try:
            bound = cls(*arguments, graph=captures)
            for _ in range(3):
                bound.run()
            return bound
        except Exception:  # noqa: BLE001
            if not captures:
                raise
            return cls(*arguments, graph=False)

    def run(self):
        self.session.run_with_iobinding(self.binding)

    def seconds(self):
        """One call, the mean of many in a row."""
        self.run()
        self.binding.synchronize_outputs()
        start = time.perf_counter()
        for _ in range(RUNS):
            self.run()
        self.binding.synchronize_outputs()
        return (time.perf_counter() - start) / RUNS

    def first(self):
        self.run()
        self.binding.synchronize_outputs()
        return self.outputs[0].numpy()


def contestants_of(shape, library):
    """Name, model, inputs, library and whether it may be captured into a CUDA graph."""
    import cpu_operator_graphs as graphs
    import numpy as np

    weights, feeds = graphs.make_weights(shape), graphs.make_feeds(shape)
    own, standard = graphs.operator(shape, weights, feeds), graphs.standard_graphs(shape, weights, feeds)
    half = {key: value.astype(np.float16) for key, value in feeds.items()}
    dense = graphs.mha_feeds(shape, feeds)
    half_dense = {key: value.astype(np.float16) for key, value in dense.items()}
    # The constants of the operator's graph in order: mask, router, weights, then the rotary caches.
    whole = {"constant_2", "constant_6", "constant_7"}
    yield "operator f32", own, feeds, library, True
    for kind, model in standard.items():
        yield f"standard {kind} f32", model, feeds, None, kind not in DATA_SHAPED
    yield "operator f16", to_half(own, whole), half, library, True
    mha = to_half(graphs.mha(shape, weights, feeds | dense), set())
    yield "MultiHeadAttention f16", mha, half_dense, None, True


def attempt(found, who, body):
    """What `body` gives; where it raises, that is what is found of `who`."""
    try:
        return body()
    except Exception as error:  # noqa: BLE001 — one session that fails is a finding.
        found[who] = {"failed": (str(error).splitlines() or [repr(error)])[0][:300]}
        return None


def time_in_turns(bounds, found):
    """Median and interquartile range of each contestant, all of which take turns."""
    times = {who: [] for who in bounds}
    for _ in range(ROUNDS):
        for who, bound in bounds.items():
            if who not in found and (seconds := attempt(found, who, bound.seconds)) is not None:
                times[who].append(seconds)
    for who, bound in bounds.items():
        if who not in found:
            first, median, third = (stats.quantile(times[who], share) for share in (0.25, 0.5, 0.75))
            found[who] = {"seconds": median, "iqr": third - first, "graph": bound.graph}


def compare_layer(ort, name, sizes, library, provider):
    """One layer: lines of what was found."""
    import cpu_operator_graphs as graphs
    import numpy as np

    bounds, results, found, names = {}, {}, {}, []
    for who, model, given, needed, captures in contestants_of(graphs.Shape(*sizes), library):
        names.append(who)
        bound = attempt(found, who, lambda: Bound.make(ort, model, given, needed, provider, captures=captures))
        result = bound and attempt(found, who, bound.first)
        if result is not None:
            bounds[who], results[who] = bound, result.astype(np.float64)
    time_in_turns(bounds, found)
    found = {who: found[who] for who in names}
    expected = next((results[who] for who in results if who.startswith("standard")), None)
    problems = []
    for kind, limit in TOLERANCE.items():
        value = results.get(f"operator {kind}")
        if value is None or expected is None:
            problems.append(f"{kind} not compared")
            continue
        error = float(np.linalg.norm(value - expected) / np.linalg.norm(expected))
        found[f"operator {kind}"]["error"] = error
        if not error <= limit:
            problems.append(f"{kind} is off by {error:.1e}")
    return {"name": name, "found": found, "problems": problems, "text": line_of(found, problems)}


def line_of(found, problems):
    parts = []
    for who, one in found.items():
        graph = "" if one.get("graph") else " without a graph"
        parts.append(f"{who} {one['seconds'] * 1e6:.0f} us{graph}" if "seconds" in one else f"{who} failed")
    return ", ".join(parts) + (f"; PROBLEMS: {'; '.join(problems)}" if problems else "")


def note(report, record):
    with open(report, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def run_layer(options, name):
    """One layer in this process; whether it was compared."""
    try:
        import onnxruntime as ort

        if hasattr(ort, "preload_dlls") and "CUDA" in options.provider:
            ort.preload_dlls()
        sizes = {**LAYERS, **SMALL}[name]
        record = compare_layer(ort, name, sizes, Path(options.kit, "libmoa_ort.so"), options.provider)
    except Exception:  # noqa: BLE001
        record = {"name": name, "failed": traceback.format_exc()[-600:]}
    note(options.report, record)
    return "found" in record


def run_layers(names, command, report):
    """Each layer in a process, `command` and its name; whether any was compared."""
    codes = []
    for name in names:
        try:
            codes.append(subprocess.run([*command, name], timeout=LONGEST, check=False).returncode)
        except subprocess.TimeoutExpired:
            codes.append("time")
        # Codes 0 and 1 are those of a process that has noted what it found.
        if codes[-1] not in (0, 1):
            why = f"ended after {LONGEST:.0f} s" if codes[-1] == "time" else f"ended with code {codes[-1]}"
            note(report, {"name": name, "failed": why})
    return 0 in codes


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kit", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--provider", default="CUDAExecutionProvider")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--layer", help="this layer alone, in this process")
    options = parser.parse_args()
    kit = Path(options.kit)
    site = kit / "work" / "onnxruntime-site"
    if "CUDA" in options.provider:
        sys.path.insert(0, str(site))
        os.environ["MOA_CUDA_KERNELS"] = str(kit / "kernels.bin")
    if options.layer:
        compared = run_layer(options, options.layer)
        sys.stdout.flush()
        sys.stderr.flush()
        # Without what a runtime does at its end, which may stop a process whose GPU is lost.
        os._exit(not compared)
    if "CUDA" in options.provider:
        install(kit, site)
    command = [sys.executable, "-m", "gpu_check.onnx_sessions", *sys.argv[1:], "--layer"]
    return not run_layers(SMALL if options.small else LAYERS, command, options.report)


if __name__ == "__main__":
    sys.exit(main())
