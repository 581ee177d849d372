"""Times of one call: CUDA-graph replays or plain calls, contestants in turns, caches cold."""

import time

import torch

from .stats import summarize

#: Cycles of the pause in front of each replay, at least, and how much longer than the host takes to enqueue the replay.
PAUSE, PAUSE_SHARE = 200_000, 2.0

#: Cycles that a multiprocessor makes in a second, at most.
CLOCK = 2e9

#: Calls of one replay: enough for `REPLAY_SECONDS` of short calls, within limits; of long ones for `LONG_SECONDS`.
REPLAY_SECONDS, LONG_SECONDS = 0.004, 0.02
LEAST_CALLS, MOST_CALLS = 20, 400
LONG_CALL = 1e-3


def calls_of_a_replay(seconds, copies):
    """A multiple of `copies`, for calls of about `seconds`."""
    if seconds < LONG_CALL:
        wanted = min(MOST_CALLS, max(LEAST_CALLS, int(REPLAY_SECONDS / seconds)))
    else:
        wanted = max(3, int(LONG_SECONDS / seconds))
    return -(-max(wanted, copies) // copies) * copies


def pause_cycles(seconds):
    """Cycles for which the device waits while the host enqueues for `seconds`, so that no time of the host is measured."""
    return max(PAUSE, int(PAUSE_SHARE * seconds * CLOCK))


class Contestant:
    """`calls[r]` puts one call on copy r of the inputs on the current stream."""

    def __init__(self, name, calls, graph):
        self.name, self.calls, self.in_graph = name, calls, graph
        self.graph, self.instances, self.pause = None, 0, PAUSE
        self.passes = ([], [])

    def warm_up(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in self.calls[:2]:
                call()
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()

    def rough_seconds(self):
        """One call, roughly, by the clock of the host."""
        start = time.perf_counter()
        for index in range(3):
            self.calls[index % len(self.calls)]()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 3

    def prepare(self):
        """Captures so many calls that one replay takes milliseconds and every copy has its turn."""
        self.warm_up()
        seconds = self.rough_seconds()
        if not self.in_graph:
            self.instances = min(LEAST_CALLS, max(3, int(LONG_SECONDS / seconds)))
            return
        self.instances = calls_of_a_replay(seconds, len(self.calls))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._calls()
        self.graph.replay()
        torch.cuda.synchronize()
        self.pause = pause_cycles(max(self._enqueue_seconds() for _ in range(3)))

    def _enqueue_seconds(self):
        """What one replay, of many kernels, costs the host."""
        start = time.perf_counter()
        self.graph.replay()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        return seconds

    def _calls(self):
        for index in range(self.instances):
            self.calls[index % len(self.calls)]()

    def sample(self):
        """Seconds of one call, over one replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.graph is not None:
            torch.cuda._sleep(self.pause)
        start.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._calls()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self.instances

    def summary(self):
        return summarize(*self.passes)


def race(contestants, rounds, deadline):
    """Two passes of `rounds` samples of each contestant, in turns that begin with another one each time."""
    for which in (0, 1):
        for turn in range(rounds):
            for place in range(len(contestants)):
                contestant = contestants[(turn + place) % len(contestants)]
                contestant.passes[which].append(contestant.sample())
            if time.monotonic() > deadline and turn >= 2:
                break


def host_seconds(call, count=200):
    """What one call costs the host, which does not wait for the device, and one call end to end without a graph."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    enqueued = time.perf_counter()
    torch.cuda.synchronize()
    return (enqueued - start) / count, (time.perf_counter() - start) / count
