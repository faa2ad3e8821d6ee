"""Counts of values by size."""

from bisect import bisect_left


class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of all above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, least: float, most: float, factor: float) -> None:
        """Bounds from `least` up, each `factor` times the one before, until `most` is passed."""
        self.bounds = [least]
        while self.bounds[-1] < most:
            self.bounds.append(self.bounds[-1] * factor)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
