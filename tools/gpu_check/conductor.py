"""The whole run: stages as processes, each with a limit, and results on disk after every one of them."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import cases, pieces, table

#: Seconds of the whole run, and shares of it.
BUDGET = 540.0
CHECK_SHARE = 0.30
SANITIZE_SECONDS = 110.0

#: Code paths and element types of one process each: the driver compiles the PTX of the older paths when it loads it.
CHECKS = [
    ("native", "f32,tf32,f16,bf16"),
    ("wgmma", "f16,bf16"),
    ("sm80", "f32,tf32"),
    ("sm80", "f16"),
    ("sm80", "bf16"),
    ("sm75", "f16"),
    ("sm70", "f16"),
    ("sm70", "f32"),
]
#: What each tool of the sanitizer looks at: of `sanitize.KINDS`.
TOOLS = {
    "memcheck": "wgmma-f16,tf32,f16,f32,wgmma-bf16,bf16",
    "racecheck": "f16,wgmma-f16,elementwise-wgmma-f16,f32",
    "initcheck": "f16,wgmma-f16",
    "synccheck": "f16,wgmma-f16",
}
RESTARTS = 6

#: Barriers in shared memory (`mbarrier`) that the sanitizer may follow in a block: compilers do not count those of inline
#: PTX. Which of ours it follows, `barriers` asks.
BARRIERS = 64

#: Processes that compile the rivals.
WARMERS = 5

#: Seconds without a line after which a stage hangs: until it begins its first case, and from then on. Importing torch
#: and loading PTX take less than the one, a case less than the other; `warm` and `times` compile rivals in theirs.
QUIET = {
    "probe": (90.0, 30.0),
    "check": (90.0, 40.0),
    "ceilings": (60.0, 60.0),
    "warm": (150.0, 150.0),
    "times": (150.0, 150.0),
}

#: Seconds between two writings of what stages have found until then: a run that is ended from outside loses no more.
SAVE_SECONDS = 5.0

#: Seconds that a killed process is waited for; one whose kernel hangs may stay in the driver.
DEATH = 10.0

#: Share of the time of the checks after which the sanitizers and the rivals' compilers begin beside them at the latest:
#: until then, or until they have ended, the checks of the GPU's own kernels have processor and GPU before these.
HEAD_START = 0.28

#: Seconds in front of the end of the checks from which on none is begun.
LAST_CASE = 20.0

#: Set to 0, no kernel begins before the one in front of it has ended (custom_ops/cuda/driver).
OVERLAP = "MOA_CUDA_OVERLAP"

#: Set to 0, warpgroup products are not timed.
WGMMA = "MOA_CUDA_WGMMA"


class Stage:
    """A child that is started again behind whatever ended it."""

    def __init__(self, run, name, stage, *options, limit):
        self.run, self.name, self.limit, self.quiet = run, name, limit, QUIET[stage]
        self.command = [sys.executable, "-m", "gpu_check.child", stage, "--kit", str(run.kit), *options]
        #: The probe is one case, which another start would begin with again.
        self.restarts = 0 if stage == "probe" else RESTARTS
        self.records, self.lost, self.starts, self.broke = [], [], 0, False
        self.process, self.ended = None, False
        self.start()

    def start(self, first=0):
        self.report = self.run.work / f"{self.name}-{self.starts}.jsonl"
        self.starts += 1
        command = [*self.command, "--report", str(self.report), "--start", str(first)]
        self.heard, self.begun = (time.monotonic(), 0), False
        self.process = self.run.popen(command, self.name)

    def poll(self):
        """True once there is nothing more to wait for."""
        if self.ended:
            return True
        now = time.monotonic()
        size = self.report.stat().st_size if self.report.exists() else 0
        if size != self.heard[1]:
            self.heard = (now, size)
            self.begun = self.begun or any("begin" in record for record in read_lines(self.report))
        late, hangs = now > self.limit, now - self.heard[0] > self.quiet[self.begun]
        code = kill(self.process) if late or hangs else self.process.poll()
        if code is None:
            return False
        self._collect(code, late, hangs)
        return self.ended

    def seen(self):
        """What it has found until now."""
        found = self.records if self.ended else self.records + read_lines(self.report)
        return [record for record in found if "begin" not in record]

    def _collect(self, code, late, hangs):
        fresh = read_lines(self.report)
        self.records += fresh
        begun = [record["begin"] for record in fresh if "begin" in record]
        done = {
            record["index"]
            for record in fresh
            if "index" in record and not record.get("failed", "").startswith("the GPU")
        }
        self.ended = code == 0 or late or not begun or self.starts > self.restarts
        if code == 0:
            return
        last = next((record for record in reversed(fresh) if "begin" in record), None)
        what = "ran out of time" if late else "hung" if hangs else f"ended with code {code}"
        place = f" in `{last['name']}`" if last and last["begin"] not in done else ""
        words = tail(self.run.work / f"{self.name}.log").strip().splitlines()
        why = f": {words[-1].strip()[:200]}" if words and not late else ""
        self.lost.append(f"{self.name} {what}{place}{why}")
        self.broke |= not late
        if not self.ended:
            self.start(max(begun) + 1)


class Sanitizer:
    """One tool of compute-sanitizer over the small calls."""

    def __init__(self, run, tool, kinds, limit):
        self.tool, self.limit, self.result = tool, limit, None
        program = find_tool("compute-sanitizer")
        if program is None:
            self.result = {"tool": tool, "skipped": "compute-sanitizer is not installed"}
            return
        self.text = run.work / f"{tool}.log"
        command = [program, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        command += ["--num-cuda-barriers", str(BARRIERS)] if tool in ("racecheck", "synccheck") else []
        command += [sys.executable]
        command += ["-m", "gpu_check.sanitize", "--kit", str(run.kit), "--kinds", kinds]
        command += ["--no-poison"] if tool == "initcheck" else []
        self.process = run.popen(command, tool)

    def poll(self):
        if self.result is not None:
            return True
        late = time.monotonic() > self.limit
        code = kill(self.process) if late else self.process.poll()
        if code is None:
            return False
        self.result = {"tool": self.tool, **judge_sanitizer(self.text.read_text(errors="replace"), code, late)}
        return True


def kill(process):
    """Ends a process if it still runs, with all that it started: its exit code, -9 where it does not die in time.

    A sanitizer is not the process that uses the GPU; that one would go on beside what is timed.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(DEATH)
    except subprocess.TimeoutExpired:
        return -9


#: What a run may do, in this order.
STAGES = ["check", "sanitize", "ceilings", "times", "onnxruntime"]


def judge_sanitizer(text, code, late):
    """What the output of one tool says."""
    lines = text.splitlines()
    summary = next((line.strip("= ") for line in reversed(lines) if "SUMMARY" in line), None)
    calls = [json.loads(line) for line in lines if line.startswith('{"call"')]
    found = {"calls": len(calls), "summary": summary, "errors": [call["error"] for call in calls]}
    if "Device not supported" in text or "not supported on this" in text:
        return {**found, "skipped": "compute-sanitizer refuses this device"}
    if late:
        return {**found, "unfinished": f"stopped after {len(calls)} calls"}
    if code == 9 or (summary and counted(summary) != 0):
        first = next((line.strip("= ") for line in lines if line.startswith("=========") and "COMPUTE" not in line), "")
        return {**found, "problem": f"{summary}; first: {first}"}
    if code or not summary:
        return {**found, "problem": f"ended with code {code}: {lines[-1] if lines else ''}"[:300]}
    return found


def counted(summary):
    """Errors or hazards of the summary of a tool; None where it names no number."""
    found = re.search(r"(\d+) (?:error|hazard)", summary)
    return int(found.group(1)) if found else None


def find_tool(name):
    """A program of the CUDA toolkit, wherever it is kept."""
    kept = [*Path("/usr/local").glob(f"cuda*/bin/{name}"), *Path("/usr/local").glob(f"cuda*/compute-sanitizer/{name}")]
    return shutil.which(name) or next((str(place) for place in sorted(kept, reverse=True)), None)


def has_problems(record):
    """Whether a stage found something wrong with a result."""
    found = record.get("found")
    return isinstance(found, dict) and bool(found.get("problems"))


def read_lines(path):
    """The whole lines of a file of JSON lines."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


class Run:
    """One run of everything."""

    def __init__(self, kit, out, budget=BUDGET, stages=None, check_share=CHECK_SHARE, without=""):
        self.kit, self.out = Path(kit).resolve(), Path(out).resolve()
        self.begin, self.budget, self.check_share = time.monotonic(), budget, check_share
        self.without = without
        self.stages = stages or STAGES
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = self.kit / "work"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.results, self.started = {"stages": {}, "lost": []}, []
        #: Whether warpgroup products are timed: not once they have cost a check its process or its result.
        self.wgmma = os.environ.get(WGMMA) != "0"
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.kit), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            # `WARMERS` processes compile at a time, beside all checks.
            "TORCHINDUCTOR_COMPILE_THREADS": "3",
            "HF_HUB_OFFLINE": "1",
        }

    def popen(self, command, name):
        """A process, with a group of its own, whose output goes to a log of that name."""
        with open(self.work / f"{name}.log", "a", encoding="utf-8") as log:
            place = {"cwd": self.kit, "env": self.environment, "preexec_fn": os.setpgrp}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **place)
        self.started.append(process)
        return process

    def left(self):
        return self.budget - (time.monotonic() - self.begin)

    def say(self, text):
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def save(self):
        """Results and table, whole or not at all."""
        for name, text in (("results.json", json.dumps(self.results, indent=1)), ("table.txt", self.rendered())):
            fresh = self.out / f"{name}.tmp"
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(self.out / name)
        self.keep_logs()

    def rendered(self):
        """The table; what keeps it from being made is no reason to lose the results."""
        try:
            return table.render(self.results)
        except Exception as error:  # noqa: BLE001
            return f"there is no table: {type(error).__name__}: {error}\n"

    def everything(self):
        """All stages; an interrupt ends what they started."""
        try:
            self._everything()
        finally:
            for process in self.started:
                kill(process)

    def _everything(self):
        self.results["machine"] = machine_facts()
        self.say("machine: " + str(self.results["machine"].get("gpu")))
        for stage in (self.probe, self.checks, self.ceilings, self.times, self.onnxruntime):
            try:
                stage()
            except Exception as error:  # noqa: BLE001 — what goes wrong in one stage is not the end of the others.
                self.results["lost"].append(f"{stage.__name__}: {type(error).__name__}: {error}")
            self.save()
        self.results["machine_after"] = machine_facts()
        self.results["seconds"] = time.monotonic() - self.begin
        self.save()

    def probe(self):
        """One small call first, and where it fails only because kernels overlap, no overlap for the rest of the run."""
        if not {"check", "times"} & set(self.stages):
            return
        begun, first = self._probe("probe")
        if not begun:
            # Nothing was launched: a slow start, say, which tells nothing about overlap.
            begun, first = self._probe("probe-again")
        if not first or not begun:
            return
        self.environment[OVERLAP] = "0"
        if self._probe("probe-no-overlap")[1]:
            del self.environment[OVERLAP]
            return
        self.results["lost"].append(f"kernels that overlap fail, so that the rest runs with {OVERLAP}=0: {first}")

    def _probe(self, name):
        """Whether the first call was begun, and what is wrong with it; None where nothing is."""
        stage = Stage(self, name, "probe", limit=time.monotonic() + min(90.0, self.left()))
        self.wait([stage])
        software = next((record["software"] for record in stage.records if "software" in record), None)
        self.results["software"] = software or self.results.get("software")
        begun = any("begin" in record for record in stage.records)
        record = next((one for one in stage.records if "index" in one), {"failed": "nothing was reported"})
        return begun, record.get("failed") or "; ".join(record["found"]["problems"]) or None

    def checks(self):
        """Checks on every path; beside them, once the GPU's own have had a start, what `_beside` says."""
        begin = time.monotonic()
        limit = begin + min(self.check_share * self.budget, self.left())
        running = self._paths(limit) if "check" in self.stages else []

        def beside():
            native = any(one.name.startswith("check-native") and not one.ended for one in running)
            due = time.monotonic() >= begin + HEAD_START * (limit - begin)
            return self._beside(limit) if due or not native else None

        self.wait(running, beside)

    def _paths(self, limit):
        """The checks of every path."""
        until, stages = str(time.time() + limit - time.monotonic() - LAST_CASE), []
        for path, kinds in CHECKS:
            options = ("--path", path, "--kinds", kinds, "--until", until)
            stages.append(Stage(self, f"check-{path}-{kinds.split(',')[0]}", "check", *options, limit=limit))
        return stages

    def _beside(self, limit):
        """The sanitizers, and compilation for later."""
        running = []
        if "sanitize" in self.stages:
            until = min(limit, time.monotonic() + SANITIZE_SECONDS)
            running += [Sanitizer(self, tool, kinds, until) for tool, kinds in TOOLS.items()]
        if "times" in self.stages:
            for part in range(WARMERS):
                mine = ",".join(str(index) for index in range(part, len(cases.TIMED), WARMERS))
                options = ("--cases", mine, "--without", self.without)
                running.append(Stage(self, f"warm-{part}", "warm", *options, limit=limit))
        return running

    def wait(self, running, more=None):
        """Until all have ended, with those that `more` gives: None where it is to be asked again."""
        waiting, saved = list(running), time.monotonic()
        while waiting or more:
            if more and (late := more()) is not None:
                waiting, more = waiting + late, None
            time.sleep(0.2)
            if time.monotonic() - saved >= SAVE_SECONDS:
                self.save_seen(waiting)
                saved = time.monotonic()
            for one in [one for one in waiting if one.poll()]:
                waiting.remove(one)
                self.collect(one)
                self.save()

    def save_seen(self, waiting):
        for one in waiting:
            if isinstance(one, Stage):
                self.results["stages"][one.name] = one.seen()
        self.save()

    def collect(self, one):
        if isinstance(one, Sanitizer):
            self.results["stages"].setdefault("sanitize", []).append(one.result)
            self.say(
                f"{one.tool}: {one.result.get('problem') or one.result.get('skipped') or one.result.get('summary')}"
            )
            return
        self.results["stages"][one.name] = one.seen()
        left = sum(record.get("unfinished", 0) for record in one.records)
        one.lost += [f"{one.name}: no time was left for {left} of its checks"] if left else []
        self.results["lost"] += one.lost
        failed = sum(1 for record in one.records if "failed" in record)
        wrong = sum(1 for record in one.records if has_problems(record))
        if self.wgmma and one.name.startswith("check-wgmma") and (one.broke or failed or wrong):
            self.wgmma = False
            self.results["lost"].append("warpgroup products broke a check, and are not timed")
        device = next((record["device"] for record in one.records if "device" in record), None)
        self.results["device"] = device or self.results.get("device")
        last = f"; {one.lost[-1]}" if one.lost else ""
        self.say(f"{one.name}: {len(one.records)} records, {failed} failed, {wrong} wrong{last}")

    def ceilings(self):
        if "ceilings" not in self.stages:
            return
        stage = Stage(self, "ceilings", "ceilings", limit=time.monotonic() + min(60.0, self.left()))
        self.wait([stage])
        found = next((record["found"] for record in stage.records if "found" in record), None)
        if found:
            self.results["ceilings"] = found
            (self.work / "ceilings.json").write_text(json.dumps(found))

    def times(self):
        if "times" not in self.stages:
            return
        reserve = 12.0 + (70.0 if "onnxruntime" in self.stages and has_onnxruntime(self.kit) else 0.0)
        seconds = self.left() - reserve
        options = ["--ceilings", str(self.work / "ceilings.json"), "--until", str(time.time() + seconds)]
        options += ["--cases", ",".join(str(index) for index in range(len(cases.TIMED)))]
        options += ["--without", self.without]
        if not self.wgmma:
            options.append("--no-wgmma")
        self.wait([Stage(self, "times", "times", *options, limit=time.monotonic() + seconds + 8.0)])

    def onnxruntime(self):
        if "onnxruntime" not in self.stages:
            return
        if not has_onnxruntime(self.kit):
            reason = "not measured: the kit holds no ONNX Runtime with CUDA (see tools/gpu_check/README.md)"
            self.results["onnxruntime"] = {"skipped": reason}
            return
        report, log = self.work / "onnxruntime.jsonl", self.work / "onnxruntime.log"
        limit, saved = time.monotonic() + max(5.0, self.left() - 6.0), time.monotonic()
        command = [sys.executable, "-m", "gpu_check.onnx_sessions", "--kit", str(self.kit), "--report", str(report)]
        process = self.popen(command, "onnxruntime")
        while process.poll() is None and time.monotonic() < limit:
            time.sleep(0.2)
            if time.monotonic() - saved >= SAVE_SECONDS:
                self.results["onnxruntime"] = {"records": read_lines(report)}
                self.save()
                saved = time.monotonic()
        code = process.poll()
        if code is None:
            kill(process)
            self.results["lost"].append("onnxruntime ran out of time")
        elif code:
            words = tail(log).strip().splitlines()
            self.results["lost"].append(f"onnxruntime ended with code {code}{': ' + words[-1][:200] if words else ''}")
        self.results["onnxruntime"] = {"records": read_lines(report), "log": tail(log)}

    def keep_logs(self):
        """The logs of all stages in one file, each cut to its end."""
        parts = [f"==== {path.name}\n{tail(path, 60_000)}" for path in sorted(self.work.glob("*.log"))]
        (self.out / "log.txt").write_text("\n".join(parts), encoding="utf-8")


def tail(path, size=4000):
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")[-size:]
    except OSError:
        return ""


def has_onnxruntime(kit):
    return any(Path(kit, "onnxruntime").glob("*.whl")) or Path(kit, "onnxruntime", pieces.MANIFEST).exists()


def machine_facts():
    """What nvidia-smi says; nothing of it is ever changed."""
    fields = ["name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"]
    fields += ["temperature.gpu", "power.draw", "power.limit"]
    try:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return {"gpu": None, "why": str(error)}
    values = [value.strip() for value in line.split(",")]
    return {"gpu": values[0], **dict(zip(fields[1:], values[1:]))}
