"""One timed case: our kernels and their rivals in one process, each checked before it is timed."""

import time
from typing import NamedTuple

import torch

from . import cases, feeds, reference, roofline
from .compare import TOLERANCE, relative
from .ours import Call
from .rivals import rivals_of
from .timing import Contestant, host_seconds, race

ELEMENT = "bf16"
ROUNDS = 15

#: Rivals round where our kernels do not, and their routing may differ on near-ties.
RIVAL_TOLERANCE = 5 * TOLERANCE[ELEMENT]

COMPILE = {"dynamic": False}


class Ours(NamedTuple):
    """Our kernels as they come, without overlap of one with the next, and without warpgroup products, None where none are used."""

    kernels: object
    serial: object
    without_wgmma: object


def tensor_bytes(held):
    """Bytes of a tensor, of a module's parameters, or of all that a dictionary, list or tuple holds."""
    if isinstance(held, torch.Tensor):
        return held.numel() * held.element_size()
    if isinstance(held, torch.nn.Module):
        held = list(held.parameters())
    parts = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else ()
    return sum(map(tensor_bytes, parts))


def copies_of(case, held, l2_bytes):
    """Copies of the inputs `held` that must take turns; a call may read the weights of chosen experts alone."""
    return roofline.copies_for_cold_cache(min(tensor_bytes(held), roofline.moa_work(case).bytes), l2_bytes)


class CaseRun:
    """All contestants of one case."""

    def __init__(self, case, kernels, l2_bytes, seed):
        self.case, self.l2_bytes = case, l2_bytes
        self.ours = kernels
        source = feeds.Source(seed, feeds.DEVICE)
        dtype = feeds.DTYPES[ELEMENT]
        self.attributes, self.feeds, _ = feeds.self_attention(source, case, dtype, present=False)
        self.expected = reference.self_attention(self.attributes, self.feeds)["output"]
        self.notes, self.errors, self.contestants, self.calls = {}, {}, [], []

    def copies(self, held):
        return copies_of(self.case, held, self.l2_bytes)

    def add_ours(self):
        """Our kernels over copies of all inputs; and, where a cache grows, again with the whole new cache written, and
        with caches that grow in place."""
        plans = {cases.OURS: (self.ours.kernels, ["output"]), cases.SERIAL: (self.ours.serial, ["output"])}
        if self.ours.without_wgmma is not None and self.case.rows > cases.WGMMA_ROWS:
            plans[cases.WITHOUT_WGMMA] = (self.ours.without_wgmma, ["output"])
        if self.case.past:
            plans[cases.PRESENT] = (self.ours.kernels, ["output", "present_key", "present_value"])
        copies = [self.feeds]
        copies += [self._copy() for _ in range(self.copies(self.feeds) - 1)]
        for name, (kernels, wanted) in plans.items():
            try:
                self._add_own(name, kernels, wanted, copies)
            except Exception as error:  # noqa: BLE001 — what ours are beside may fail without them.
                if name == cases.OURS:
                    raise
                self._note_failure(name, error)
        if self.case.past:
            try:
                self._add_in_place(copies)
            except Exception as error:  # noqa: BLE001
                self._note_failure(cases.IN_PLACE, error)

    def _add_in_place(self, copies):
        """A call writes the same rows again and again: of a cache that is read to its end, the time is the same."""
        grown = [feeds.with_room(copy, self.case.tokens) for copy in copies]
        self._add_own(cases.IN_PLACE, self.ours.kernels, ["output", "present_key", "present_value"], grown)

    def _add_own(self, name, kernels, wanted, copies):
        shared = name == cases.IN_PLACE
        call = Call(kernels, "MoASelfAttention", self.attributes, ELEMENT, copies[0], wanted, shared=shared)
        self.calls.append(call)
        runs = [call.bind(copy) for copy in copies]
        runs[-1]()
        torch.cuda.synchronize()
        self._judge(name, call.outputs["output"], TOLERANCE[ELEMENT])
        self._add(Contestant(name, runs, graph=True))
        if name == cases.OURS:
            self.notes["moa"] = {
                "regime": call.plan.regime,
                "launches": call.plan.launches,
                "workspace_bytes": call.plan.workspace_bytes,
                "copies": len(copies),
            }
            host, eager = host_seconds(runs[0])
            self.notes["moa"] |= {"host_seconds": host, "eager_seconds": eager}
            self._add(Contestant(cases.WARM, runs[:1], graph=True))

    def _note_failure(self, name, error):
        """One contestant's failure is a line in the table, and the end only where it cost the GPU."""
        text = str(error).strip().splitlines()
        self.notes.setdefault("failed", {})[name] = f"{type(error).__name__}: {text[0] if text else ''}"[:300]
        torch.cuda.synchronize()

    def _copy(self):
        return {name: tensor.clone() for name, tensor in self.feeds.items()}

    def _add(self, contestant):
        contestant.prepare()
        self.contestants.append(contestant)

    def _judge(self, name, output, limit):
        error = relative(output, self.expected)
        self.errors[name] = error
        if not error <= limit:
            self.notes.setdefault("wrong", {})[name] = f"off by {error:.2e}, {limit:.0e} is allowed"

    def add_rival(self, name, make):
        """One rival on its best back end of SDPA."""
        torch._dynamo.utils.counters.clear()
        try:
            with torch.no_grad():
                rival = self._best(make)
                states = [rival.load(self.feeds)]
                states += [rival.load(self.feeds) for _ in range(self.copies(states[0]) - 1)]
                runs = [lambda state=state: rival.run(state) for state in states]
                output = runs[-1]()
                torch.cuda.synchronize()
                if rival.exact:
                    self._judge(name, output, RIVAL_TOLERANCE)
                self._add(Contestant(name, runs, rival.graph))
                self.notes.setdefault("rivals", {})[name] = {
                    "backend": getattr(rival, "backend", None),
                    "copies": len(states),
                    "graph": rival.graph,
                    "graph_breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
                }
        except Exception as error:  # noqa: BLE001
            self._note_failure(name, error)

    def _best(self, make):
        """The rival on whichever of flash and cuDNN is faster here, compiled afterwards where it compiles."""
        plain = make(None, None)
        if not hasattr(plain, "backend"):
            return make(None, COMPILE)
        best = (float("inf"), None)
        for backend in ("flash", "cudnn"):
            trial = make(backend, None)
            state = trial.load(self.feeds)
            try:
                contestant = Contestant(backend, [lambda trial=trial, state=state: trial.run(state)], graph=True)
                contestant.prepare()
                best = min(best, (min(contestant.sample() for _ in range(3)), backend))
            except RuntimeError:
                torch.cuda.synchronize()
        return make(best[1], COMPILE)

    def result(self, ceilings):
        work, rival = roofline.moa_work(self.case), roofline.mha_work(self.case)
        head = self.case.layer.head
        return {
            "case": self.case.name,
            "times": {contestant.name: contestant.summary().to_json() for contestant in self.contestants},
            "errors": self.errors,
            "notes": self.notes,
            "floor": ceilings and work.floor(ceilings, head),
            "mha_floor": ceilings and rival.floor(ceilings, head),
            "mha_width": cases.equal_mac_width(self.case),
        }

    def close(self):
        for call in self.calls:
            call.close()


def run_case(case, kernels, ceilings, l2_bytes, seed, seconds, without=()):
    """Everything about one case within about `seconds`; rivals that no time is left for are named as such.

    Without `ceilings` there are no floors. `kernels` are `Ours`; rivals in `without` are not timed.
    """
    torch._dynamo.reset()
    begin = time.monotonic()
    run = CaseRun(case, kernels, l2_bytes, seed)
    try:
        run.add_ours()
        for name, make in rivals_of(case, run.attributes, feeds.DTYPES[ELEMENT]).items():
            if name in without:
                continue
            if time.monotonic() - begin > 0.7 * seconds:
                run.notes.setdefault("failed", {})[name] = "no time was left"
                continue
            run.add_rival(name, make)
        race(run.contestants, ROUNDS, begin + seconds)
        return {**run.result(ceilings), "seconds": time.monotonic() - begin}
    finally:
        run.close()


def warm_up(case, seed, without=()):
    """Compiles what the case will compile, into the cache on disk that every process shares; says what it could not."""
    torch._dynamo.reset()
    dtype = feeds.DTYPES[ELEMENT]
    attributes, given, _ = feeds.self_attention(feeds.Source(seed, feeds.DEVICE), case, dtype, present=False)
    # The dense rival runs on whichever back end of SDPA is faster, which is not known yet.
    backends = {cases.DENSE: ("flash", "cudnn"), cases.UPSTREAM_COMPILED: (None,), cases.GROUPED: (None,)}
    missing = []
    for name, make in rivals_of(case, attributes, dtype).items():
        if name in without:
            continue
        for backend in backends.get(name, ()):
            try:
                with torch.no_grad():
                    rival = make(backend, COMPILE)
                    rival.run(rival.load(given))
            except Exception as error:  # noqa: BLE001 — what one rival lacks is no reason not to compile the others.
                text = str(error).strip().splitlines()
                missing.append(f"{name}, {backend}: {type(error).__name__}: {text[0] if text else ''}"[:300])
            torch.cuda.synchronize()
    return {"not_compiled": missing}
