"""Allocators of runs: consecutive blocks, as a cache without block tables needs them for each sequence.

Both hand out runs of `range(num_blocks)`. `Buddy` is what the PagedAttention paper gives its baselines: a run is cut
out of powers of two, and takes all of the smallest one that holds it. `FirstFit` takes no more than was asked for, at
the lowest place where there is room; nothing contiguous wastes less within a run.
"""

from typing import Protocol


class Runs(Protocol):
    """`num_free` counts the blocks that no run holds, wherever they lie."""

    num_free: int

    def has_room(self, count: int) -> bool:
        """Whether there is a place for a run of so many blocks."""

    def take(self, count: int) -> int:
        """The first block of a new run, for which there is room."""

    def give_back(self, first: int) -> None:
        """The run that begins there is free."""


class Buddy:
    """Free pieces of 2^k blocks at multiples of 2^k; two halves that are both free become one again."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self._free: list[set[int]] = [set() for _ in range(num_blocks.bit_length())]
        self._taken: dict[int, int] = {}  # order of the piece that begins there
        first = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._free[order].add(first)
                first += 1 << order

    def has_room(self, count: int) -> bool:
        return any(self._free[_order(count) :])

    def take(self, count: int) -> int:
        order = wanted = _order(count)
        while not self._free[order]:
            order += 1
        first = min(self._free[order])
        self._free[order].remove(first)
        while order > wanted:
            order -= 1
            self._free[order].add(first + (1 << order))
        self._taken[first] = wanted
        self.num_free -= 1 << wanted
        return first

    def give_back(self, first: int) -> None:
        order = self._taken.pop(first)
        self.num_free += 1 << order
        while order + 1 < len(self._free) and (buddy := first ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            first &= ~(1 << order)
            order += 1
        self._free[order].add(first)


class FirstFit:
    """The free runs, as their ends by their beginnings; neighbours are one."""

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks
        self._free = {0: num_blocks}
        self._taken: dict[int, int] = {}

    def has_room(self, count: int) -> bool:
        return any(end - first >= count for first, end in self._free.items())

    def take(self, count: int) -> int:
        first = min(first for first, end in self._free.items() if end - first >= count)
        end = self._free.pop(first)
        if first + count < end:
            self._free[first + count] = end
        self._taken[first] = first + count
        self.num_free -= count
        return first

    def give_back(self, first: int) -> None:
        end = self._taken.pop(first)
        self.num_free += end - first
        end = self._free.pop(end, end)
        before = next((begin for begin, its_end in self._free.items() if its_end == first), first)
        self._free[before] = end


def _order(count: int) -> int:
    """Of the smallest power of two that holds so many."""
    return (count - 1).bit_length()
