"""The simulated model's KV memory: a token id in every slot, read back block by block through block tables."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.simulated.text import UInt64s, powers
from executor_svc.step import Int32s

UNWRITTEN = -1
_ENTRIES_AT_ONCE = 1 << 20  # bounds the memory of one gather


class UnwrittenSlot(Exception):
    """A context was read whose slot nobody has written. `row` counts from 0 in the rows that were asked for."""

    def __init__(self, row: int, position: int, slot: int) -> None:
        super().__init__(f"slot {slot} of position {position} was never written")
        self.row = row


class SlotMemory:
    """Ids in `num_blocks` blocks of `block_size` slots.

    The sum of id times power within a block is kept until the block is written again: a context of full blocks then
    costs one entry a block. The sums are made of nothing but the slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._ids = np.full((num_blocks, block_size), UNWRITTEN, np.int32)
        self._slots = self._ids.reshape(-1)
        self._sums = np.zeros(num_blocks, np.uint64)
        self._unsummed = np.ones(num_blocks, np.bool_)
        self._powers_in_block = powers(block_size)
        self._powers_of_blocks = powers(1, block_size)

    def clear(self) -> None:
        self._slots[:] = UNWRITTEN
        self._unsummed[:] = True

    def copy(self, sources: Int32s, destinations: Int32s) -> None:
        """All at once: what a block held before is what is copied."""
        self._ids[destinations] = self._ids[sources]
        self._unsummed[destinations] = True

    def write(self, slots: NDArray[np.int64], ids: Int32s) -> None:
        self._slots[slots] = ids
        self._unsummed[slots // self._block_size] = True

    def contexts(self, tables: Int32s, lengths: Int32s) -> UInt64s:
        """Sum of id times power of position, over positions 0 .. length - 1 of each row: [num_rows].

        `tables` is [num_rows, width]. Raises UnwrittenSlot.
        """
        width = tables.shape[1]
        if width >= len(self._powers_of_blocks):
            self._powers_of_blocks = powers(2 * width + 1, self._block_size)
        contexts = np.empty(len(tables), np.uint64)
        at_once = max(1, _ENTRIES_AT_ONCE // max(1, width))
        for begin in range(0, len(tables), at_once):
            part = slice(begin, begin + at_once)
            try:
                contexts[part] = self._contexts(tables[part], lengths[part])
            except UnwrittenSlot as error:
                error.row += begin
                raise
        return contexts

    def _contexts(self, tables: Int32s, lengths: Int32s) -> UInt64s:
        width = tables.shape[1]
        num_full = lengths // self._block_size
        all_see = int(num_full.min())  # blocks that are full for every row
        seen = np.arange(all_see, width, dtype=np.int32) < num_full[:, None]
        unsummed = self._unsummed.take(tables)
        unsummed[:, all_see:] &= seen
        if unsummed.any():
            self._sum(tables, unsummed)
        sums = self._sums.take(tables)
        sums[:, all_see:] *= seen
        contexts = np.einsum("ij,j->i", sums, self._powers_of_blocks[:width])
        return contexts + self._partial_blocks(tables, lengths, num_full)

    def _partial_blocks(self, tables: Int32s, lengths: Int32s, num_full: Int32s) -> UInt64s:
        """What the last, partly filled block of each row adds; 0 for a row without one."""
        last = np.minimum(num_full, tables.shape[1] - 1)
        blocks = tables.reshape(-1).take(np.arange(len(tables)) * tables.shape[1] + last)
        ids = self._ids.take(blocks, axis=0)
        ids *= np.arange(self._block_size, dtype=np.int32) < (lengths - num_full * self._block_size)[:, None]
        if ids.min() < 0:
            row, offset = np.argwhere(ids < 0)[0].tolist()
            position = int(num_full[row]) * self._block_size + offset
            raise UnwrittenSlot(row, position, int(blocks[row]) * self._block_size + offset)
        sums = np.einsum("ij,j->i", ids.astype(np.uint64), self._powers_in_block)
        return sums * self._powers_of_blocks.take(num_full)

    def _sum(self, tables: Int32s, wanted: NDArray[np.bool_]) -> None:
        blocks = tables[wanted]
        ids = self._ids.take(blocks, axis=0)
        if ids.min() < 0:
            at, offset = np.argwhere(ids < 0)[0].tolist()
            row, entry = np.argwhere(wanted)[at].tolist()
            raise UnwrittenSlot(row, entry * self._block_size + offset, int(blocks[at]) * self._block_size + offset)
        self._sums[blocks] = np.einsum("ij,j->i", ids.astype(np.uint64), self._powers_in_block)
        self._unsummed[blocks] = False
