"""What Nsight Compute counts of each of our kernels, in the timed cases: time, memory and tensor pipes.

    python3 -m gpu_check.counters --kit KIT --out counters.json [--no-wgmma] [--cases 0,1,2]

Kernels run one at a time with the caches flushed, so that their sum is more than the time of a call. Needs `ncu`, which is
given `--clock-control none`: clocks are left as they are.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
from pathlib import Path

from .cases import TIMED

METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes_read.sum": "dram_read",
    "dram__bytes_write.sum": "dram_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_pct",
    "lts__t_sectors_op_read.sum": "l2_sectors_read",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed": "tensor_pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_pct",
    "launch__grid_size": "blocks",
    "launch__registers_per_thread": "registers",
}
MARK = "case "


def inside(options):
    """The calls themselves, in a process that ncu watches: one line for each case, then one profiled call."""
    import torch

    from . import feeds
    from .child import kernels_of
    from .ours import Call

    kernels = kernels_of(options, "native" if options.no_wgmma else "wgmma")
    kernels.load("bf16")
    for place in options.cases:
        case = TIMED[place]
        attributes, given, _ = feeds.self_attention(
            feeds.Source(place, feeds.DEVICE), case, feeds.DTYPES["bf16"], present=False
        )
        call = Call(kernels, "MoASelfAttention", attributes, "bf16", given, ["output"])
        run = call.bind(given)
        run()
        torch.cuda.synchronize()
        print(MARK + json.dumps({"name": case.name, "launches": call.plan.launches}), flush=True)
        torch.cuda.profiler.start()
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        call.close()
        del given, run, call
        torch.cuda.empty_cache()


def parse(text):
    """Cases with their kernels, from what the watched process and ncu wrote."""
    lines = text.splitlines()
    found = [{**json.loads(line[len(MARK) :]), "kernels": []} for line in lines if line.startswith(MARK)]
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return found
    kernels = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        kernel = kernels.setdefault(int(row["ID"]), {"name": row["Kernel Name"]})
        if row["Metric Name"] in METRICS:
            kernel[METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", "") or "nan")
    rest = [kernels[place] for place in sorted(kernels)]
    for case in found:
        case["kernels"], rest = rest[: case["launches"]], rest[case["launches"] :]
    return found


def table(found):
    """A line for each kernel."""
    lines = []
    for case in found:
        lines.append(case["name"])
        for one in case["kernels"]:
            moved = (one.get("dram_read", 0) + one.get("dram_written", 0)) / max(one.get("ns", 1), 1)
            numbers = f"{one.get('ns', 0) / 1e3:9.1f} us {moved:7.0f} GB/s tensor {one.get('tensor_pct', 0):5.1f} %"
            numbers += f" warps {one.get('warps_pct', 0):5.1f} % blocks {one.get('blocks', 0):7.0f}"
            lines.append(f"  {one['name']:44} {numbers} registers {one.get('registers', 0):4.0f}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-wgmma", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="after which it is ended")
    parser.add_argument("--cases", type=lambda text: [int(word) for word in text.split(",")], default=None)
    options = parser.parse_args()
    options.cases = options.cases or list(range(len(TIMED)))
    if options.out is None:
        return inside(options)
    return watch(options)


def watch(options):
    """Runs `inside` under ncu, and writes and prints what it counted."""
    from .conductor import find_tool

    command = [find_tool("ncu") or "ncu", "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--kernel-name", "regex:^moa_", "--metrics", ",".join(METRICS)]
    command += [sys.executable, "-m", "gpu_check.counters", "--kit", options.kit]
    command += ["--cases", ",".join(map(str, options.cases)), *(["--no-wgmma"] if options.no_wgmma else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds)
        text, why = done.stdout, done.stderr[-2000:]
    except (OSError, subprocess.TimeoutExpired) as error:
        text, why = (getattr(error, "stdout", None) or b"").decode(errors="replace"), str(error)
    found = parse(text)
    counted = any(case["kernels"] for case in found)
    options.out.write_text(json.dumps({"cases": found, "said": "" if counted else why or text[-2000:]}, indent=1))
    print(table(found) if counted else f"nothing was counted: {why or text[-2000:]}")
    return 0 if counted else 1


if __name__ == "__main__":
    sys.exit(main())
