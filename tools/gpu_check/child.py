"""One stage in a process of its own, which writes a line of JSON for everything that it begins and finds.

A kernel that reads where it may not ends its process's use of the GPU; the parent starts the stage again behind it.
"""

import argparse
import json
import os
import secrets
import sys
import time
import traceback
from pathlib import Path
from unittest import mock

PATHS = {"native": None, "wgmma": None, "sm80": (8, 0), "sm75": (7, 5), "sm70": (7, 0)}


class Report:
    """Lines of JSON, each on disk before the next thing begins."""

    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8")

    def line(self, **values):
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()


def import_torch(report):
    """Says when it begins and when it is done: on a fresh machine it may take longer than all else that says nothing."""
    report.line(step="torch is imported")
    import torch

    from . import feeds

    torch.cuda.init()
    torch.zeros(1, device=feeds.DEVICE)
    found = torch.cuda.get_device_properties(feeds.DEVICE)
    device = {"name": found.name, "memory_bytes": found.total_memory, "multiprocessors": found.multi_processor_count}
    report.line(step="torch has a context", device={**device, "l2_bytes": getattr(found, "L2_cache_size", None)})


def kernels_of(options, path="native"):
    """The kernels of torch's context."""
    import torch

    from . import abi, feeds

    torch.set_grad_enabled(False)
    torch.cuda.init()
    torch.zeros(1, device=feeds.DEVICE)
    library = abi.Library(Path(options.kit, "libmoa_cuda.so"))
    with mock.patch.dict(os.environ, {"MOA_CUDA_WGMMA": "1" if path == "wgmma" else "0"}):
        return abi.Kernels(library, Path(options.kit, "kernels.bin").read_bytes(), path=PATHS[path])


def guarded(report, index, name, work):
    """Runs one piece of work; False where the GPU cannot be used any more by this process."""
    import torch

    report.line(begin=index, name=name)
    start = time.monotonic()
    try:
        found = work()
        report.line(index=index, name=name, seconds=time.monotonic() - start, found=found)
    except Exception as error:  # noqa: BLE001 — everything that fails is a finding.
        text = "".join(traceback.format_exception_only(error)).strip()[:600]
        report.line(index=index, name=name, failed=text, trace=traceback.format_exc()[-1500:])
    try:
        torch.cuda.synchronize()
        # Processes beside this one use the same memory.
        torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001
        report.line(index=index, name=name, failed=f"the GPU is lost: {str(error).splitlines()[0]}")
        return False
    return True


def probe(options, report):
    """The versions of what the other stages need, and one small call on the GPU's own kernels."""
    import importlib.metadata

    software = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "numpy", "transformers", "onnxruntime-gpu"):
        try:
            software[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            software[name] = None
    report.line(software=software)
    import_torch(report)
    from .checks import all_checks, run_check

    kernels = kernels_of(options)
    kernels.load("f16")
    guarded(report, 0, "probe f16", lambda: run_check(kernels, all_checks()[0], "f16", 1))


def check(options, report):
    """Every check with every element type, on one code path."""
    import_torch(report)
    from .checks import KINDS, checks_of, fault_checks, run_check

    start = time.monotonic()
    kernels = kernels_of(options, options.path)
    for element in sorted({KINDS[kind][0] for kind in options.kinds}):
        kernels.load(element)
        report.line(step=f"{element} is loaded", load_seconds=time.monotonic() - start)
    report.line(facts=kernels.facts(), load_seconds=time.monotonic() - start)
    # Kinds take turns, so that every one has been through the first checks when time runs out.
    work = [(case, kind) for case in checks_of(options.path) for kind in options.kinds]
    for index, (case, kind) in enumerate(work):
        if index < options.start:
            continue
        if time.time() > options.until:
            report.line(unfinished=len(work) - index)
            return
        seed = secrets.randbits(32)
        name = f"{options.path} {kind}: {case.name} (seed {seed})"
        if not guarded(
            report, index, name, lambda case=case, kind=kind, seed=seed: run_check(kernels, case, kind, seed)
        ):
            os._exit(3)
    if options.path == "native":
        guarded(report, len(work), "native f16: faults", lambda: {"problems": fault_checks(kernels)})
    report.line(finished=True)


def ceilings(options, report):
    import_torch(report)
    from .ceilings import measure

    guarded(report, 0, "ceilings", measure)


def times(options, report):
    """The timed cases whose numbers are given."""
    import_torch(report)
    import torch

    from .bench import Ours, run_case
    from .cases import TIMED
    from .roofline import Ceilings

    path = "native" if options.no_wgmma else "wgmma"
    kernels = kernels_of(options, path)
    with mock.patch.dict(os.environ, {"MOA_CUDA_OVERLAP": "0"}):
        serial = kernels_of(options, path)
    ours = Ours(kernels, serial, None if options.no_wgmma else kernels_of(options))
    for one in filter(None, ours):
        one.load("bf16")
    found = Ceilings.read(options.ceilings)
    l2_bytes = kernels.facts()["l2_bytes"]
    torch.manual_seed(secrets.randbits(32))
    for place in range(options.start, len(options.cases)):
        case = TIMED[options.cases[place]]
        left = options.until - time.time()
        waiting = len(options.cases) - place
        if left < 6:
            report.line(index=place, name=case.name, failed="no time was left")
            continue
        seconds = min(45.0, max(8.0, 1.4 * left / waiting))
        work = lambda case=case, seconds=seconds: run_case(  # noqa: E731
            case, ours, found, l2_bytes, secrets.randbits(32), min(seconds, left), options.without
        )
        if not guarded(report, place, case.name, work):
            os._exit(3)
    report.line(finished=True)


def warm(options, report):
    import_torch(report)
    import torch

    from .bench import warm_up
    from .cases import TIMED

    torch.set_grad_enabled(False)
    for place in range(options.start, len(options.cases)):
        case = TIMED[options.cases[place]]
        if not guarded(report, place, f"compile {case.name}", lambda case=case, place=place: warm_up(case, place, options.without)):
            os._exit(3)
    report.line(finished=True)


STAGES = {"probe": probe, "check": check, "ceilings": ceilings, "times": times, "warm": warm}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--kit", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--path", choices=PATHS, default="native")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["f32", "tf32", "f16", "bf16"])
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--until", type=float, default=float("inf"), help="when to begin nothing more, as time.time()")
    parser.add_argument("--ceilings")
    parser.add_argument("--no-wgmma", action="store_true")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[])
    parser.add_argument("--cases", type=lambda text: [int(word) for word in text.split(",")], default=[])
    options = parser.parse_args()
    STAGES[options.stage](options, Report(options.report))


if __name__ == "__main__":
    sys.exit(main())
