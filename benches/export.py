#!/usr/bin/env python3
"""Time and memory of an export beside `cp` of the same bytes on the same disk.

A checkpoint of the shapes of jetmoe/jetmoe-8b is synthesised, then exports of it and copies of what the export wrote take
turns. Both start with nothing of their source in the page cache, and both end when their files are on the disk: the
export flushes each file itself, the copy is followed by a flush of each file, which is part of its time.
Python's standard library is enough; Linux only, for peak memory and the page cache.
"""

import argparse
import json
import os
import pathlib
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MIB = 1 << 20
BOUND_RATIO = 1.5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="layers of the checkpoint; 24 is the whole model (17 GB)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target/measure-export", help="removed at the end")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/moa-export")
    parser.add_argument("--json", type=pathlib.Path, help="where every figure is kept")
    parser.add_argument("options", nargs="*", help="options of the export, after --")
    return parser.parse_args()


def timed(command):
    """Seconds, peak resident bytes and exit status of a program."""
    start = time.perf_counter()
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit(f"error: `{' '.join(map(str, command))}` failed ({child.returncode})")
    return {"seconds": time.perf_counter() - start, "peak": usage.ru_maxrss * 1024,
            "cpu": usage.ru_utime + usage.ru_stime}


def files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file())


def flush(folder):
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def forget(folder):
    """Removes the files of a folder from the page cache."""
    flush(folder)
    for path in files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)


def export(options, checkpoint, out):
    remove(out)
    forget(checkpoint)
    return timed([options.program, checkpoint, "-o", out, *options.options])


def copy(source, out):
    remove(out)
    forget(source)
    start = time.perf_counter()
    result = timed(["cp", "-r", source, out])
    flush(out)
    return {"seconds": time.perf_counter() - start, "unflushed": result["seconds"], "cpu": result["cpu"]}


def largest_tensor(checkpoint):
    sizes = []
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        sizes += [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()]
    return max(sizes), sum(sizes)


def measure(options):
    checkpoint, out, other = (options.folder / name for name in ["checkpoint", "export", "copy"])
    subprocess.run(["cargo", "xtask", "synthesize", "jetmoe-8b", "-o", str(checkpoint),
                    "--layers", str(options.layers), "--seed", str(options.seed)], check=True, cwd=ROOT)
    largest, stored = largest_tensor(checkpoint)
    export(options, checkpoint, out)
    written = sum(path.stat().st_size for path in files(out))
    kept = options.folder / "source"
    out.rename(kept)
    order, exports, copies = random.Random(options.seed), [], []
    for _ in range(options.rounds):
        turns = [lambda: exports.append(export(options, checkpoint, out)), lambda: copies.append(copy(kept, other))]
        order.shuffle(turns)
        for turn in turns:
            turn()
            remove(out)
            remove(other)
    return {
        "layers": options.layers, "options": options.options, "stored_bytes": stored, "written_bytes": written,
        "largest_tensor_bytes": largest, "peak_bound_bytes": 2 * largest + 256 * MIB, "exports": exports, "copies": copies,
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                    "system": platform.platform(), "load": os.getloadavg()},
    }


def summary(result):
    middle = lambda runs, key: statistics.median(run[key] for run in runs)
    least = lambda runs, key: min(run[key] for run in runs)
    exports, copies = result["exports"], result["copies"]
    result["ratio_of_medians"] = middle(exports, "seconds") / middle(copies, "seconds")
    result["ratio_of_minima"] = least(exports, "seconds") / least(copies, "seconds")
    result["ratio_to_unflushed_copy"] = middle(exports, "seconds") / middle(copies, "unflushed")
    result["peak_bytes"] = max(run["peak"] for run in exports)
    written = result["written_bytes"]
    print(f"{result['layers']} layers, {result['stored_bytes'] / 1e9:.2f} GB -> {written / 1e9:.2f} GB")
    for name, runs in [("export", exports), ("cp + flush", copies)]:
        seconds = middle(runs, "seconds")
        print(f"  {name:10}  median {seconds:6.2f} s, least {least(runs, 'seconds'):6.2f} s, "
              f"{written / seconds / 1e9:.2f} GB/s, processor {middle(runs, 'cpu'):.2f} s")
    print(f"  ratio       {result['ratio_of_medians']:.2f} of medians, {result['ratio_of_minima']:.2f} of minima, "
          f"bound {BOUND_RATIO}; {result['ratio_to_unflushed_copy']:.2f} to cp before its flush")
    print(f"  peak        {result['peak_bytes'] / MIB:.0f} MiB, bound {result['peak_bound_bytes'] / MIB:.0f} MiB")
    return result["ratio_of_medians"] <= BOUND_RATIO and result["peak_bytes"] <= result["peak_bound_bytes"]


def main():
    options = arguments()
    options.folder = options.folder.resolve()
    if options.folder.exists():
        sys.exit(f"error: {options.folder} exists already")
    try:
        result = measure(options)
    finally:
        remove(options.folder)
    kept = summary(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
