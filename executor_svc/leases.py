"""What an executor lends, and to whom: every block and every row has one owner, or none."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s

NOBODY = 0  # sessions count from 1
EXECUTOR = -1  # owner of block 0: padding rows write there


class Amounts(NamedTuple):
    """How much of each thing that is lent; `tokens` are those of a step."""

    blocks: int
    rows: int
    tokens: int


NOTHING = Amounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Lease:
    """What is lent, or returned, at once. `block_ids` and `row_ids` are int32."""

    block_ids: Int32s
    row_ids: Int32s
    tokens_per_step: int


class Ownership:
    """Session number of each block's and each row's owner: int64 columns, changed here alone; and how much each session
    has of everything."""

    def __init__(self, num_rows: int, num_blocks: int, tokens_per_step: int) -> None:
        self.of_row: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.of_block: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.most = Amounts(num_blocks - 1, num_rows, tokens_per_step)  # that one session can have
        self._held: dict[int, Amounts] = {}
        self.clear()

    @property
    def free(self) -> Amounts:
        held = self._held.values()
        return Amounts(*(most - sum(part) for most, *part in zip(self.most, *held, strict=True)))

    def held_by(self, session: int) -> Amounts:
        return self._held.get(session, NOTHING)

    def owns_blocks(self, session: int, blocks: Int32s) -> bool:
        """Whether every one of these ids, whatever they are, is of a block of this session."""
        try:
            return bool((self.of_block.take(blocks.view(np.uint32)) == session).all())  # a negative id is a huge one
        except IndexError:
            return False

    def clear(self) -> None:
        """Nothing is lent."""
        self.of_row[:] = NOBODY
        self.of_block[:] = NOBODY
        self.of_block[0] = EXECUTOR
        self._held.clear()

    def choose(self, amounts: Amounts) -> Lease:
        """So much of what is nobody's, lowest ids first."""
        blocks = np.flatnonzero(self.of_block == NOBODY)[: amounts.blocks]
        rows = np.flatnonzero(self.of_row == NOBODY)[: amounts.rows]
        return Lease(blocks.astype(np.int32), rows.astype(np.int32), amounts.tokens)

    def lend(self, session: int, lease: Lease) -> None:
        """What was nobody's is the session's, with all that it has."""
        self.of_row[lease.row_ids] = session
        self.of_block[lease.block_ids] = session
        self._add(session, len(lease.block_ids), len(lease.row_ids), lease.tokens_per_step)

    def give_back(self, session: int, returned: Lease) -> None:
        """What was the session's is nobody's."""
        self.of_row[returned.row_ids] = NOBODY
        self.of_block[returned.block_ids] = NOBODY
        self._add(session, -len(returned.block_ids), -len(returned.row_ids), -returned.tokens_per_step)

    def take_back(self, session: int) -> None:
        """Whatever the session has is nobody's."""
        self.of_row[self.of_row == session] = NOBODY
        self.of_block[self.of_block == session] = NOBODY
        self._held.pop(session, None)

    def _add(self, session: int, blocks: int, rows: int, tokens: int) -> None:
        held = self.held_by(session)
        self._held[session] = Amounts(held.blocks + blocks, held.rows + rows, held.tokens + tokens)
