"""The small table that a run ends with."""

from . import cases

NOT_MEASURED = "not measured"

#: About the path for compute capability 7.0 on whatever device it runs.
VOLTA = "sm70 f16: newer GPUs do mma.m8n8k4 in software; this shows indices and layouts, not Volta's own instruction"

#: Rivals with their columns.
SHORT = {
    cases.MHA: "mha=",
    cases.BLOCK: "mha512",
    cases.UPSTREAM: "upstr",
    cases.UPSTREAM_COMPILED: "upstr-c",
    cases.HF_EAGER: "hf",
    cases.HF_SDPA: "hf-sdpa",
    cases.DENSE: "dense-c",
    cases.GROUPED: "triton",
}
RIVALS = list(SHORT)

#: Ours in other circumstances, in microseconds.
OWN = {
    cases.WARM: "warm",
    cases.SERIAL: "serial",
    cases.WITHOUT_WGMMA: "no wgmma",
    cases.PRESENT: "+present",
    cases.IN_PLACE: "in place",
}
HEADER = ["bf16, graph, cold cache", "moa us", "iqr", *OWN.values(), "% floor", "regime", *SHORT.values()]


def grid(header, rows):
    """Columns as wide as their widest cell, the first to the left, the others to the right."""
    widths = [max(len(str(row[place])) for row in [header, *rows]) for place in range(len(header))]

    def line(row):
        cells = [
            str(cell).ljust(width) if place == 0 else str(cell).rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def scaled(value, factor, digits):
    """A figure in another unit, or that it was not measured."""
    return f"{value * factor:.{digits}f}" if value else NOT_MEASURED


def microseconds(seconds):
    return f"{seconds * 1e6:.1f}"


def verdict(ratio, target):
    """`*` where the goal is met, `+` where the gate is, `!` where a gate is missed, nothing where none is set."""
    if target is None:
        return ""
    if target.goal is not None and ratio >= target.goal:
        return "*"
    if target.gate is None:
        return "" if target.goal is None else "-"
    return "+" if ratio >= target.gate else "!"


def found_times(results):
    """What was found about each timed case, by name."""
    records = results.get("stages", {}).get("times", [])
    return {record["name"]: record["found"] for record in records if record.get("found")}


def time_rows(results):
    """One row for each timed case: our time, its share of the floor, and each rival's time over ours."""
    found, rows, missed, met = found_times(results), [], [], []
    for case in cases.TIMED:
        one = found.get(case.name)
        own = one and one["times"].get(cases.OURS)
        if not own:
            rows.append([case.name, NOT_MEASURED, *[""] * (len(HEADER) - 2)])
            missed += [f"{case.name} {rival}: {NOT_MEASURED}" for rival, target in case.targets.items() if target.gate]
            continue
        wrong = "?" if cases.OURS in one["notes"].get("wrong", {}) else ""
        share = one["floor"] and one["floor"] / own["median"]
        row = [case.name, microseconds(own["median"]) + wrong, microseconds(own["iqr"])]
        row += [microseconds(one["times"][name]["median"]) if name in one["times"] else "" for name in OWN]
        row += [f"{100 * share:.0f}" if share else "", one["notes"].get("moa", {}).get("regime", "")]
        for rival in RIVALS:
            other = one["times"].get(rival)
            target = case.targets.get(rival)
            if other is None:
                row.append("")
                if target and target.gate:
                    missed.append(f"{case.name} {rival}: {NOT_MEASURED}")
                continue
            ratio = other["median"] / own["median"]
            mark = "?" if wrong else verdict(ratio, target)
            row.append(f"{ratio:.2f}{mark}")
            if target and target.gate:
                line = f"{case.name} {rival}: {ratio:.2f}, gate {target.gate}, goal {target.goal or '-'}"
                (met if mark in "+*" and mark else missed).append(line)
        if case.floor_gate and not share:
            missed.append(f"{case.name}, share of the floor: {NOT_MEASURED}")
        elif case.floor_gate:
            line = f"{case.name}: {100 * share:.0f} % of the floor, gate {100 * case.floor_gate:.0f} %"
            (met if share >= case.floor_gate and not wrong else missed).append(line)
        rows.append(row)
    return rows, met, missed


def check_rows(results):
    """One row for each path and element type: checks that held, that did not, and that did not run."""
    rows = []
    for stage, records in results.get("stages", {}).items():
        if not stage.startswith("check-"):
            continue
        kinds = {}
        for record in records:
            if "index" not in record:
                continue
            kind = record["name"].split(":")[0]
            entry = kinds.setdefault(kind, {"held": 0, "wrong": 0, "unsupported": 0, "worst": 0.0})
            if "found" in record:
                problems = record["found"].get("problems")
                entry["wrong" if problems else "held"] += 1
                errors = record["found"].get("errors", {})
                entry["worst"] = max(entry["worst"], errors.get("output", 0.0))
            else:
                entry["unsupported" if "(unsupported)" in record["failed"] else "wrong"] += 1
        for kind, entry in kinds.items():
            worst = f"{entry['worst']:.1e}"
            rows.append([kind, entry["held"], entry["wrong"], entry["unsupported"], worst])
    return rows


def check_note(rows):
    """What a row of the checks does not show, as a list of at most one line."""
    return [VOLTA] if any(row[0] == "sm70 f16" for row in rows) else []


def problems(results, most=14):
    """The first problems in words, and how many there are."""
    lines = []
    for stage, records in results.get("stages", {}).items():
        for record in records:
            if "failed" in record:
                lines.append(f"{record.get('name', stage)}: {record['failed']}")
            found = record.get("found")
            lines += [
                f"{record['name']}: {text}" for text in (found.get("problems") or [] if isinstance(found, dict) else [])
            ]
            if isinstance(found, dict):
                for what in ("wrong", "failed"):
                    notes = found.get("notes", {}).get(what, {})
                    lines += [f"{record['name']}, {who}: {text}" for who, text in notes.items()]
            if "problem" in record:
                lines.append(f"{record['tool']}: {record['problem']}")
    lines += results.get("lost", [])
    shown = [line.replace("\n", " ")[:200] for line in lines[:most]]
    return shown + ([f"… and {len(lines) - most} more in results.json"] if len(lines) > most else [])


#: Its hazards are told and fail nothing: it does not follow barriers at which one lane arrives for its warp, which
#: `barriers` shows.
UNSURE = "racecheck"


def is_wrong(results, stages):
    """Whether something of ours is wrong, or a stage that was asked for found nothing."""
    rows, found = check_rows(results), results.get("stages", {})
    if results["lost"] or any(row[2] or (row[3] and row[0].startswith("native")) for row in rows):
        return True
    tools = [record for record in found.get("sanitize", []) if record["tool"] != UNSURE]
    times = [record for record in found.get("times", []) if "index" in record]
    sessions = results.get("onnxruntime") or {}
    records = sessions.get("records", [])
    nothing = {"check": not rows, "sanitize": not tools, "times": not times}
    return (
        any(nothing.get(stage) for stage in stages)
        or any("problem" in record for record in tools)
        or any("found" not in record or is_ours_wrong(record["found"]) for record in times)
        or any("found" not in record or record.get("problems") for record in records)
    )


def is_ours_wrong(found):
    """Whether a timed case has a wrong or failed contestant of ours."""
    names = [name for what in ("wrong", "failed") for name in found.get("notes", {}).get(what, {})]
    return any(name == cases.OURS or name in OWN for name in names)


def gpu_line(results):
    """The GPU that the stages ran on, else the first that nvidia-smi names."""
    machine, device = results.get("machine", {}), results.get("device") or {}
    facts = [device.get("name") or machine.get("gpu") or NOT_MEASURED]
    if device:
        facts.append(f"{device['multiprocessors']} multiprocessors, {device['memory_bytes'] / 2**30:.1f} GiB")
        facts.append(f"L2 {scaled(device.get('l2_bytes'), 2**-20, 0)} MiB")
    limit = machine.get("power.limit")
    facts += [f"limit {limit}"] if limit else []
    return f"GPU: {', '.join(facts)}, driver {machine.get('driver_version', '?')}"


def render(results):
    """All of it as text."""
    parts = [gpu_line(results)]
    ceilings = results.get("ceilings")
    if ceilings:
        rates = (ceilings["attention_flops"] or {}).items()
        attention = ", ".join(f"D {head}: {scaled(rate, 1e-12, 0)}" for head, rate in rates)
        parts.append(
            f"ceilings: product {scaled(ceilings['product_flops'], 1e-12, 0)} TFLOP/s, attention "
            f"{attention or NOT_MEASURED} TFLOP/s, copy {scaled(ceilings['copy_bytes'], 1e-12, 2)} TB/s, gap "
            f"{scaled(ceilings['launch_gap'], 1e6, 2)} us"
        )
    else:
        parts.append(f"ceilings: {NOT_MEASURED}")
    checks = check_rows(results)
    parts.append(
        grid(["checks", "held", "wrong", "unsupported", "worst"], checks) if checks else f"checks: {NOT_MEASURED}"
    )
    parts += check_note(checks)
    for record in results.get("stages", {}).get("sanitize", []):
        state = record.get("problem") or record.get("skipped") or record.get("unfinished") or record.get("summary")
        parts.append(f"{record['tool']}: {state}")
    lines = problems(results)
    if lines:
        parts.append("problems:\n  " + "\n  ".join(lines))
    rows, met, missed = time_rows(results)
    parts.append(grid(HEADER, rows))
    parts.append("ratio = rival / moa; * goal met, + gate met, ! gate missed, - goal missed, ? wrong result")
    parts.append(", ".join(f"{short} {name}" for name, short in SHORT.items()))
    other = results.get("onnxruntime", {})
    parts.append(f"ONNX Runtime CUDA: {other.get('skipped') or other_summary(other)}")
    unmeasured = [line for line in missed if line.endswith(NOT_MEASURED)]
    slow = [line for line in missed if line not in unmeasured]
    parts.append(f"gates met: {len(met)}, missed: {len(slow)}, {NOT_MEASURED}: {len(unmeasured)}")
    parts += [f"  met     {line}" for line in met] + [f"  missed  {line}" for line in slow]
    parts += [f"  {line}" for line in unmeasured]
    return "\n".join(parts) + "\n"


def other_summary(other):
    records = other.get("records", [])
    if not records:
        return NOT_MEASURED
    return "; ".join(
        f"{record['name']}: {record.get('text') or record.get('failed')}" for record in records if "name" in record
    )
