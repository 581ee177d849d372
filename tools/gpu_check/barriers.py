"""What racecheck reports of small programs whose warps meet at a barrier in shared memory (`mbarrier`), as those of attention
by warpgroups do: of one that has a race it must report it, and of those that have none nothing, or it does not follow them.

    python3 -m gpu_check.barriers --out barriers.json

Needs `compute-sanitizer` and cupy, which compiles the programs.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

#: Whether each program has a race.
PROGRAMS = {
    "every_lane_arrives": False,
    "one_lane_arrives_behind_writes": False,
    "one_lane_arrives_behind_reads": False,
    "copies_arrive": False,
    "nobody_waits": True,
}

#: Of two warps one writes `value` and the other reads it, on both sides of the barrier.
SOURCE = r"""
#define SHARED(at) ((unsigned)__cvta_generic_to_shared(at))

__device__ void arrive(unsigned long long *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SHARED(barrier)) : "memory");
}

__device__ void wait(unsigned long long *barrier) {
    unsigned ended;
    do {
        asm volatile("{\n.reg .pred ended;\nmbarrier.try_wait.parity.shared::cta.b64 ended, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, ended;\n}" : "=r"(ended) : "r"(SHARED(barrier)) : "memory");
    } while (!ended);
}

#define PROGRAM(name, arrivals, FIRST, SECOND) \
    extern "C" __global__ void name(const int *in, int *out) { \
        __shared__ __align__(16) int value[128]; \
        __shared__ unsigned long long barrier; \
        const int lane = threadIdx.x % 32; \
        value[threadIdx.x] = value[64 + threadIdx.x] = -1; \
        if (threadIdx.x == 0) { \
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SHARED(&barrier)), "r"(arrivals) : "memory"); \
        } \
        __syncthreads(); \
        if (threadIdx.x < 32) { \
            FIRST \
        } else { \
            SECOND \
        } \
    }

#define WRITE value[lane] = in[lane];
#define READ out[lane] = value[31 - lane];
#define ONE_LANE __syncwarp(); if (lane == 0) { arrive(&barrier); }

PROGRAM(every_lane_arrives, 32, WRITE arrive(&barrier);, wait(&barrier); READ)
PROGRAM(one_lane_arrives_behind_writes, 1, WRITE ONE_LANE, wait(&barrier); READ)
PROGRAM(one_lane_arrives_behind_reads, 1, READ ONE_LANE, wait(&barrier); WRITE)
PROGRAM(copies_arrive, 32,
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [%2];"
                     ::"r"(SHARED(value + 4 * lane)), "l"(in + 4 * lane), "r"(SHARED(&barrier)) : "memory");,
        wait(&barrier); READ)
PROGRAM(nobody_waits, 32, WRITE arrive(&barrier);, READ)
"""

#: Seconds that all programs may take.
LONGEST = 60.0


def inside():
    """The programs themselves, in a process that compute-sanitizer watches."""
    import cupy

    module = cupy.RawModule(code=SOURCE)
    given, found = cupy.arange(128, dtype=cupy.int32), cupy.zeros(32, dtype=cupy.int32)
    for name in PROGRAMS:
        module.get_function(name)((1,), (64,), (given, found))
        cupy.cuda.get_current_stream().synchronize()


def reported(text):
    """How many races racecheck names in each program."""
    found = dict.fromkeys(PROGRAMS, 0)
    for name in re.findall(r"Race reported between \w+ access at (\w+)\+", text):
        found[name] = found.get(name, 0) + 1
    return found


def verdict(races):
    """What follows from that: a line for each program, and whether the tool follows all of them."""
    lines, follows = [], True
    for name, has_race in PROGRAMS.items():
        is_right = (races[name] > 0) == has_race
        follows = follows and is_right
        said = f"{races[name]} races reported, {'one is there' if has_race else 'none is there'}"
        lines.append(f"{name:32} {said}{'' if is_right else ': the tool is wrong'}")
    return lines, follows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    return inside() if options.out is None else watch(options.out)


def watch(out):
    """Runs `inside` under racecheck, and writes and prints what it reported."""
    from .conductor import BARRIERS, find_tool

    command = [find_tool("compute-sanitizer") or "compute-sanitizer", "--tool", "racecheck", "--num-cuda-barriers", str(BARRIERS)]
    try:
        done = subprocess.run([*command, sys.executable, "-m", "gpu_check.barriers"], capture_output=True, text=True, timeout=LONGEST)
        text, ended = done.stdout + done.stderr, "RACECHECK SUMMARY" in done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        text, ended = str(error), False
    races = reported(text)
    lines, follows = verdict(races)
    found = {"ended": ended, "races": races, "follows": ended and follows, "said": text[-4000:]}
    out.write_text(json.dumps(found, indent=1))
    print("\n".join(lines) if ended else f"nothing was checked: {text[-1000:]}")
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
