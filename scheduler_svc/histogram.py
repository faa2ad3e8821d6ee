"""Counts of values by size."""

from array import array
from bisect import bisect_left
from collections.abc import MutableSequence, Sequence


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of all above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts: MutableSequence[int] = array("q", [0]) * (len(self.bounds) + 1)
        self.sum = 0.0

    @classmethod
    def geometric(cls, least: float, most: float, factor: float) -> "Histogram":
        """Bounds from `least` up, each `factor` times the one before, until `most` is passed."""
        bounds = [least]
        while bounds[-1] < most:
            bounds.append(bounds[-1] * factor)
        return cls(bounds)

    def add(self, value: float, count: int = 1) -> None:
        """So many values of this size."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count
