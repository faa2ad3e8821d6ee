"""The running sequences as numpy columns indexed by row, so that a decode step is a handful of array operations."""

import numpy as np

from scheduler_svc.core.sequence import Sequence

NO_TOKEN = -1
NEVER_PUBLISHED = 1 << 40  # as a number of blocks that have been
NARROWEST, KEPT_BYTES = 8, 1 << 20  # block table: entries of a row, and what is kept of it while no row runs


class SequenceColumns:
    """What plan() and apply() need of each running sequence. Only the scheduler writes here.

    Of the sequence in a row, `num_tokens` are known (prompt and output) and `in_flight` more are planned to be sampled;
    at `max_total` of them it leaves; the K/V of its first `num_computed` positions is written once all plans sent
    so far have run; `num_published` blocks were offered to the prefix cache; `end_ids` is padded with NO_TOKEN.
    `awaits_mask`: its next token may not be planned yet, because what it may be depends on one that is not known;
    `shares_tail`: others may hold the block of the next position, too; `tenancy` is a number that no two tenancies of a
    row share, 0 while the row is free; it grows with the order of admission; `rank_place` and `rank_number` are its
    rank's.
    """

    def __init__(self, row_ids: list[int], block_size: int, most_rows: int = 0) -> None:
        """Rows to come have ids below `most_rows`."""
        size = max(most_rows, max(row_ids, default=-1) + 1)
        self.block_size = block_size
        self.num_tokens = np.zeros(size, np.int64)
        self.num_computed = np.zeros(size, np.int64)
        self.in_flight = np.zeros(size, np.int64)
        self.max_total = np.zeros(size, np.int64)
        self.num_blocks = np.zeros(size, np.int64)
        self.num_published = np.zeros(size, np.int64)
        self.tenancy = np.zeros(size, np.int64)
        self.rank_place = np.zeros(size, np.float64)
        self.rank_number = np.zeros(size, np.int64)
        self.shares_tail = np.zeros(size, np.bool_)
        self.num_sharing = 0  # rows with shares_tail
        self.awaits_mask = np.zeros(size, np.bool_)
        self.num_masked = 0  # rows of masked sequences
        self.end_ids = np.full((size, 2), NO_TOKEN, np.int32)
        self.block_table = np.zeros((size, NARROWEST), np.int32)
        self.sequence: list[Sequence | None] = [None] * size
        self.num_running = 0
        self._free: list[int] = []
        self._leased: set[int] = set()
        self.lend(row_ids)
        self._last_tenancy = 0
        self._running: np.ndarray | None = None  # cache of running_rows()

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def lend(self, rows: list[int]) -> None:
        """These rows are leased, too. Raises ValueError if one is already, or cannot be."""
        if len(set(rows)) != len(rows) or not self._leased.isdisjoint(rows):
            raise ValueError(f"a row of these {len(rows)} is there twice, or leased already")
        if max(rows, default=0) >= len(self.tenancy) > 0:
            raise ValueError(f"row {max(rows)} is leased; the largest lease has rows below {len(self.tenancy)}")
        self._leased.update(rows)
        self._free[:0] = reversed(rows)

    def take_back(self, count: int) -> list[int]:
        """So many free rows, the highest, are leased no more. There must be as many."""
        taken = sorted(self._free)[len(self._free) - count :]
        self._leased.difference_update(taken)
        self._free = [row for row in self._free if row in self._leased]
        return taken

    def running_rows(self) -> np.ndarray:
        """int64 [num_running]: the rows in order of admission."""
        if self._running is None:
            rows = np.flatnonzero(self.tenancy)
            self._running = rows[np.argsort(self.tenancy[rows])]
        return self._running

    def first_running(self) -> Sequence | None:
        """Of those that run, by their ranks; of samples of one request any."""
        rows = self.running_rows()
        if not len(rows):
            return None
        places = self.rank_place[rows]
        rows = rows[places == places.min()]
        return self.sequence[rows[self.rank_number[rows].argmin()]]

    def reserve(self, count: int) -> list[tuple[int, int]]:
        """Take free rows for sequences that will enter in them, with the order of admission of now."""
        return [self._place() for _ in range(count)]

    def give_back(self, places: list[tuple[int, int]]) -> None:
        """Nobody will enter in these reserved rows."""
        self._free.extend(row for row, _ in reversed(places))

    def enter(
        self,
        sequence: Sequence,
        blocks: list[int],
        num_computed: int,
        max_total: int,
        place: tuple[int, int] | None = None,
    ) -> int:
        """Give the sequence a free row, or the reserved place, and the row these blocks. Returns the row."""
        row, tenancy = place or self._place()
        self.tenancy[row] = tenancy
        self.rank_place[row], self.rank_number[row] = sequence.rank.place, sequence.rank.number
        self.sequence[row] = sequence
        self.num_tokens[row] = len(sequence.token_ids)
        self.num_computed[row] = num_computed
        self.in_flight[row] = 0
        self.max_total[row] = max_total
        self.num_published[row] = NEVER_PUBLISHED if sequence.bypass_cache else num_computed // self.block_size
        self.end_ids = _widened(self.end_ids, len(sequence.end_token_ids), NO_TOKEN)
        self.end_ids[row] = NO_TOKEN
        self.end_ids[row, : len(sequence.end_token_ids)] = sequence.end_token_ids
        self.awaits_mask[row] = sequence.needs_mask
        self.num_masked += sequence.masked
        self.num_blocks[row] = 0
        self._append(row, blocks)
        self.num_running += 1
        self._running = None
        return row

    def leave(self, row: int) -> list[int]:
        """Free the row; returns the blocks of its table."""
        table, sequence = self.table(row), self.sequence[row]
        self.set_sharing(row, False)
        self.num_masked -= sequence is not None and sequence.masked
        self.tenancy[row] = 0
        self.num_blocks[row] = 0
        self.sequence[row] = None
        self._free.append(row)
        self.num_running -= 1
        self._running = None
        if len(self._free) == len(self._leased) and self.block_table.nbytes > KEPT_BYTES:
            self.block_table = np.zeros((len(self.tenancy), NARROWEST), np.int32)
        return table

    def table(self, row: int) -> list[int]:
        return self.block_table[row, : self.num_blocks[row]].tolist()

    def set_table(self, row: int, blocks: list[int]) -> None:
        """The row has these blocks instead of its own."""
        self.num_blocks[row] = 0
        self._append(row, blocks)

    def set_sharing(self, row: int, shares: bool) -> None:
        self.num_sharing += int(shares) - int(self.shares_tail[row])
        self.shares_tail[row] = shares

    def append_blocks(self, rows: np.ndarray, blocks: list[int]) -> None:
        """One more block at the end of each of these rows' tables."""
        counts = self.num_blocks[rows]
        self.block_table = _widened(self.block_table, int(counts.max(initial=0)) + 1, 0)
        self.block_table[rows, counts] = blocks
        self.num_blocks[rows] = counts + 1

    def _place(self) -> tuple[int, int]:
        self._last_tenancy += 1
        return self._free.pop(), self._last_tenancy

    def _append(self, row: int, blocks: list[int]) -> None:
        self.block_table = _widened(self.block_table, len(blocks), 0)
        self.block_table[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)


def _widened(columns: np.ndarray, width: int, fill: int) -> np.ndarray:
    """The same rows with at least `width` entries each; grows by doubling."""
    if width <= columns.shape[1]:
        return columns
    wider = np.full((columns.shape[0], max(width, 2 * columns.shape[1])), fill, columns.dtype)
    wider[:, : columns.shape[1]] = columns
    return wider
