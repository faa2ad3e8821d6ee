"""The simulated model's KV memory: a token id in every slot, read back block by block through block tables."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.simulated.text import UInt64s, powers
from executor_svc.step import Int32s


class UnwrittenSlot(Exception):
    """A context was read whose slot nobody has written. `row` counts from 0 in the rows that were asked for."""

    def __init__(self, row: int, position: int, slot: int) -> None:
        super().__init__(f"slot {slot} of position {position} was never written")
        self.row = row


class SlotMemory:
    """Ids in `num_blocks` blocks of `block_size` slots. To write the first slot of a block once more begins the block
    anew: whatever else it held is gone.

    Slots hold id + 1, or 0 where nothing was written. For each block two sums over its written slots are kept up to
    date: of values times the powers of their places, so that a context costs one entry a block, and of these powers
    alone, which tells what slots they are.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = np.zeros((num_blocks, block_size), np.int32)
        self._slots = self._blocks.reshape(-1)
        self._sums = np.zeros(num_blocks, np.uint64)
        self._written = np.zeros(num_blocks, np.uint64)
        self._powers_in_block = powers(block_size)
        # Beside a number of another type they would be rounded.
        self._first_written = np.concatenate([np.zeros(1, np.uint64), self._powers_in_block.cumsum()])
        self._powers_of_blocks = powers(1, block_size)

    def clear(self) -> None:
        for column in (self._blocks, self._sums, self._written):
            column[:] = 0

    def copy(self, sources: Int32s, destinations: Int32s) -> None:
        """All at once: what a block held before is what is copied."""
        for column in (self._blocks, self._sums, self._written):
            column[destinations] = column[sources]

    def write(self, slots: NDArray[np.int64], ids: Int32s) -> None:
        """No slot may be there twice: the sum of its block would be of both ids."""
        blocks, places = np.divmod(slots, self._block_size)
        overwritten = self._slots.take(slots)
        if np.count_nonzero(overwritten):
            self._make_room(slots[overwritten > 0])
        values = ids + 1
        self._slots[slots] = values
        powers_of_places = self._powers_in_block.take(places)
        np.add.at(self._sums, blocks, np.multiply(values, powers_of_places, dtype=np.uint64, casting="unsafe"))
        np.add.at(self._written, blocks, powers_of_places)

    def _make_room(self, slots: NDArray[np.int64]) -> None:
        """Nothing is in these slots any more, nor in a block that begins anew."""
        blocks = slots // self._block_size
        self._slots[slots] = 0
        self._blocks[blocks[slots % self._block_size == 0]] = 0
        touched = self._blocks.take(blocks, axis=0).astype(np.uint64)
        self._sums[blocks] = touched @ self._powers_in_block
        self._written[blocks] = (touched > 0) @ self._powers_in_block

    def whole_contexts(self, tables: Int32s) -> UInt64s:
        """`contexts` of all that the tables' blocks hold. Nobody looks whether a slot was left out."""
        return self._sums.take(tables).dot(self._powers(tables.shape[1]))

    def contexts(self, tables: Int32s, lengths: Int32s) -> UInt64s:
        """Sum of id + 1 times power of position, over positions 0 .. length - 1 of each row: [num_rows].

        `tables` is [num_rows, width]. Raises UnwrittenSlot.
        """
        begins = np.arange(tables.shape[1], dtype=np.int32) * self._block_size
        wanted = (lengths[:, None] - begins).clip(0, self._block_size)
        sums = self._sums.take(tables)
        sums[wanted == 0] = 0
        contexts = sums @ self._powers(tables.shape[1])
        as_wanted = (self._written.take(tables) == self._first_written.take(wanted)) | (wanted == 0)
        for row in (~as_wanted.all(axis=1)).nonzero()[0].tolist():
            contexts[row] = self._context(row, tables[row], int(lengths[row]))
        return contexts

    def last_ids(self, table: Int32s, length: int, count: int) -> list[int]:
        """The ids in a row's last `count` positions, or in all where there are fewer."""
        positions = np.arange(max(0, length - count), length)
        slots = table[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size
        ids: list[int] = (self._slots[slots] - 1).tolist()
        return ids

    def _context(self, row: int, table: Int32s, length: int) -> np.uint64:
        """One row's, slot by slot."""
        values = self._blocks.take(table, axis=0).reshape(-1)[:length]
        if not values.all():
            position = int(values.argmin())
            slot = int(table[position // self._block_size]) * self._block_size + position % self._block_size
            raise UnwrittenSlot(row, position, slot)
        return np.uint64(values.astype(np.uint64) @ powers(length))

    def _powers(self, width: int) -> UInt64s:
        """Of the first positions of so many blocks."""
        if width > len(self._powers_of_blocks):
            self._powers_of_blocks = powers(2 * width, self._block_size)
        return self._powers_of_blocks[:width]
