"""What the operator should reach, and the most that the highest rates of a run allow.

    python3 benches/cpu_operator_goals.py [--limits LIMITS.json]... [--together] benches/results/FILE.json ...

prints runs of `cpu_operator.py` as tables: median / least of ours in ms; for each rival the ratio of medians / of the
fastest calls, and the most that the run's rates or the fastest call of ours allow; shares of sgemm's rate and of the plain read. Goals
that were met are bold, those that the run's own rates forbid are struck through; with `--limits` those too that the operator's blocks and
exponentials forbid at their best, which `cargo bench -p moa-kernels --features measure --bench limits -- --json LIMITS.json` measures;
of several such files the least of each shape counts, and a run's rates of products count no more where they know tiles.

`--together` prints one table of all runs: the least and the largest median of ours, of the ratios of medians and of the
most, and in how many runs a goal was met and how many forbid it. It is bold where all met it, and struck through where
all forbid it.
"""

import argparse
import itertools
import json
import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Goals:
    """Least rival / ours for each rival; `ceiling` is the least share of sgemm's rate, `bandwidth` of the plain read."""

    mha: float
    standard: float
    eager: float
    ceiling: float | None = None
    bandwidth: float | None = None


GOALS = {
    "E8-1x128": Goals(1.0, 1.5, 8, ceiling=0.85),
    "E32-1x128": Goals(1.0, 1.45, 4, ceiling=0.85),
    "E32-8x128": Goals(1.1, 1.45, 4, ceiling=0.85),
    "E8-1x2048": Goals(1.2, 2, 4, ceiling=0.75),
    "E8-1x10": Goals(1.0, 1.6, 9),
    "E32-1x1-past128": Goals(1.0, 3, 15),
    "jetmoe-1x1-past512": Goals(1.0, 3, 3, bandwidth=0.75),
}
# The operator once more, where past and present are one buffer each: its rivals have to copy them.
IN_PLACE = "ours, in place"
KINDS = ("median", "min")
# An f32 product that keeps f32's accuracy takes so many products of bf16.
PRODUCTS = 6


def floor(result, fastest):
    """The ms of one call at the highest rates that anything reached in this run; `fastest` are the least ms by contender.

    A call of the runtime that computes nothing, and after it either all multiply-accumulates or all weights and cache,
    whichever takes longer; or the operator's own fastest call, where that is less.
    """
    rates = {"sgemm": result["sgemm_macs"] / fastest["sgemm"]}
    if "bf16" in fastest:
        rates["bf16 products"] = result["bf16_macs"] / fastest["bf16"] / PRODUCTS
    name, rate = max(rates.items(), key=lambda one: one[1])
    parts = {name: result["macs"] / rate, "read": result["weight_bytes"] / result["read_bytes_per_ms"]}
    bound = max(parts, key=parts.get)
    least, bound = min((fastest["empty"] + parts[bound], bound), (fastest["ours"], "ours"))
    return {"ms": least, "bound": bound, "empty_ms": fastest["empty"], "parts_ms": parts}


def verdicts(name, result):
    """For each goal: what it is, what was found, and the most that the floor allows."""
    goals, times = GOALS[name], result["times"]
    yield from against(goals, result, times["ours"], result["ratios"], "")
    if "ratios_in_place" in result:
        yield from against(goals, result, times[IN_PLACE], result["ratios_in_place"], ", in place")


def against(goals, result, ours, ratios, how):
    """The goals as calls reach them that take the times `ours`. What a call of ours took at best forbids nothing."""
    times, least = result["times"], min(result["floor"]["ms"], ours["min_ms"])
    forbids = result["floor"]["bound"] != "ours" and least == result["floor"]["ms"]
    best = min((ratio["median"], rival) for rival, ratio in ratios.items() if rival.startswith("standard:"))[1]
    for rival, goal in (("mha", goals.mha), (best, goals.standard), ("eager", goals.eager)):
        if rival in times:
            most = times[rival]["min_ms"] / least
            yield verdict(rival + how, ratios[rival]["median"], ratios[rival]["min"], goal, most, forbids)
    if goals.ceiling:
        yield verdict("of sgemm" + how, *(of_sgemm(result, ours, kind) for kind in KINDS), goals.ceiling, None)
    if goals.bandwidth:
        shares = (read_ms(result, kind) / ours[f"{kind}_ms"] for kind in KINDS)
        yield verdict("of the read" + how, *shares, goals.bandwidth, None)


def read_ms(result, kind):
    """The time in which a plain loop reads as many bytes in this run: what its bursts took at their median, or the least."""
    if kind == "median" and "read" in result["times"]:
        return result["times"]["read"]["median_ms"]
    return result["weight_bytes"] / result["read_bytes_per_ms"]


def of_sgemm(result, ours, kind):
    """The rate of multiply-accumulates as a share of sgemm's, both at their median or least time."""
    return result["macs"] / ours[f"{kind}_ms"] / (result["sgemm_macs"] / result["times"]["sgemm"][f"{kind}_ms"])


def verdict(what, median, fastest, goal, most, forbids=False):
    if median >= goal:
        word = "met"
    elif forbids and most < goal:
        word = "out of reach"
    else:
        word = "missed"
    return {"what": what, "median": median, "min": fastest, "goal": goal, "most": most, "verdict": word}


HEAD = (
    "| shape | ours, ms | (a) MHA | (b) best standard graph | (c) eager | of sgemm or the read |",
    "|---|---|---|---|---|---|",
)
# What a row adds to the name of its shape, and where its times and ratios stand.
WAYS = (("", "ours", "ratios"), (", in place", IN_PLACE, "ratios_in_place"))
MARKS = {"met": "**", "out of reach": "~~", "missed": ""}


def table(name, results):
    """Lines of Markdown."""
    yield f"{name}:\n"
    yield from HEAD
    for shape, result in results.items():
        for how, ours, ratios in WAYS:
            if times := result["times"].get(ours):
                cells = [cell(goal) for goal in against(GOALS[shape], result, times, result[ratios], "")]
                ms = " / ".join(f"{times[f'{kind}_ms']:#.3g}".rstrip(".") for kind in KINDS)
                yield row(shape + how, ms, cells)


def cell(goal):
    if goal["most"] is None:
        text = f"{100 * goal['median']:.0f} / {100 * goal['min']:.0f} %"
    else:
        text = f"{goal['median']:.2f} / {goal['min']:.2f}, {goal['most']:.2f}"
    mark = MARKS[goal["verdict"]]
    _, _, graph = goal["what"].partition("standard:")
    return f"{mark}{text}{mark} {graph}".rstrip()


def together(runs):
    """Lines of Markdown: one table of the results of several runs."""
    yield f"{len(runs)} runs:\n"
    yield from HEAD
    for shape in dict.fromkeys(itertools.chain(*runs)):
        of_shape = [run[shape] for run in runs if shape in run]
        for how, ours, ratios in WAYS:
            if results := [own for own in of_shape if ours in own["times"]]:
                found = [list(against(GOALS[shape], own, own["times"][ours], own[ratios], "")) for own in results]
                cells = [joint_cell(list(goals)) for goals in zip(*found, strict=True)]
                ms = span([own["times"][ours]["median_ms"] for own in results], "#.3g")
                yield row(shape + how, ms, cells)


def span(values, kind):
    """The least and the largest value."""
    ends = [format(value, kind).rstrip(".") for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def joint_cell(goals):
    """One goal in several runs."""
    medians, most = [goal["median"] for goal in goals], [goal["most"] for goal in goals]
    if None in most:
        text = span([100 * median for median in medians], ".0f") + " %"
    else:
        text = f"{span(medians, '.2f')}, {span(most, '.2f')}"
    words = [goal["verdict"] for goal in goals]
    mark = MARKS[words[0]] if len(set(words)) == 1 else ""
    parts = [goal["what"].partition("standard:")[2] for goal in goals]
    graphs = " or ".join(dict.fromkeys(filter(None, parts)))
    counts = [f"{word} in {words.count(word)}" for word in ("met", "out of reach") if not mark and word in words]
    return ", ".join([f"{mark}{text}{mark} {graphs}".rstrip(), *counts])


def row(shape, ms, cells):
    return f"| {shape} | {ms} | " + " | ".join(cells + ["-"] * (4 - len(cells))) + " |"


def least_work(limits):
    """By shape, the ms that one thread which is alone needs at least, the least of all files, and whether it may use tiles.

    Products in blocks whose operands are near, then exponentials; or reading, where that takes longer.
    """
    work = {}
    for limit in limits:
        if limit["threads"] == 1:
            for shape, least in limit["least_ms"].items():
                ms = max(least["blocks"] + least["exponentials"], least["read"] or 0.0)
                work[shape] = min(work.get(shape, (ms,))[0], ms), least.get("tiles", False)
    return work


def counted_apart(runs):
    """A shape of which runs count other bytes, if there is one."""
    counted = {}
    for shape, result in itertools.chain(*(run["results"].items() for run in runs)):
        if counted.setdefault(shape, result["weight_bytes"]) != result["weight_bytes"]:
            return shape
    return None


def raise_floors(run, work):
    """Raises the floor of each shape to its least work and a call of the runtime that computes nothing, where that is more.

    Blocks and exponentials are the operator's own at their best, so that this bounds its code and not all code. Tiles
    multiply faster than anything that a run has timed, so that the run's own rates of products bound no shape that may
    use them.
    """
    for shape in run["results"].keys() & work.keys():
        floor, (ms, on_tiles) = run["results"][shape]["floor"], work[shape]
        if on_tiles:
            floor.update(ms=floor["empty_ms"] + floor["parts_ms"]["read"], bound="read")
        least = floor["empty_ms"] + ms / run["machine"]["threads"]
        if least > floor["ms"]:
            floor.update(ms=least, bound="limits")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=pathlib.Path, metavar="LIMITS.json", action="append", default=[])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("runs", type=pathlib.Path, nargs="+", metavar="FILE.json")
    args = parser.parse_args()
    limits = [limit for path in args.limits for limit in json.loads(path.read_text())["limits"]]
    runs = {path.name: json.loads(path.read_text()) for path in args.runs}
    values = {name: run["machine"].get("values", "fp32") for name, run in runs.items()}
    if limits and set(values.values()) != {"fp32"}:
        parser.error("--limits: its reads are of four bytes a weight, and a run has weights that two bytes hold")
    if args.together and len(set(values.values())) > 1:
        parser.error(f"--together: the runs have values of {', '.join(f'{kind} ({name})' for name, kind in values.items())}")
    if args.together and (shape := counted_apart(runs.values())):
        parser.error(f"--together: the runs count other bytes of {shape}, whose weights are packed or counted in other ways")
    work = least_work(limits)
    for run in runs.values():
        raise_floors(run, work)
    tables = {name: run["results"] for name, run in runs.items()}
    texts = [together(list(tables.values()))] if args.together else [table(*one) for one in tables.items()]
    for text in texts:
        print("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
