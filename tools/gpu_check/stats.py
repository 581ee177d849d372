"""Medians, quartiles and noise of repeated timings."""

from dataclasses import asdict, dataclass


def quantile(values, share):
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Summary:
    """Seconds of one call over all repetitions."""

    median: float
    iqr: float
    count: int
    #: Medians of the first and of the second half of the run, which stand apart by what the run cannot resolve.
    halves: tuple

    @property
    def noise(self):
        """Relative distance of the two halves."""
        return abs(self.halves[0] - self.halves[1]) / self.median

    def to_json(self):
        return {**asdict(self), "halves": list(self.halves), "noise": self.noise}


def summarize(first, second):
    """Summary of the timings of two passes, in seconds."""
    both = [*first, *second]
    halves = (quantile(first or both, 0.5), quantile(second or both, 0.5))
    return Summary(quantile(both, 0.5), quantile(both, 0.75) - quantile(both, 0.25), len(both), halves)
