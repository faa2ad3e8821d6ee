"""What an executor lends, and to whom: every block and every row has one owner, or none."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s
from paged.v1 import executor_pb2

NOBODY = 0  # sessions count from 1
EXECUTOR = -1  # owner of block 0: padding rows write there


@dataclass(frozen=True, slots=True)
class Lease:
    """What one session may use. `block_ids` and `row_ids` are int32 and ascending."""

    block_ids: Int32s
    row_ids: Int32s
    tokens_per_step: int
    plans_in_flight: int

    def to_proto(self) -> executor_pb2.Lease:
        return executor_pb2.Lease(
            block_ids=self.block_ids.astype("<i4").tobytes(),
            row_ids=self.row_ids.astype("<i4").tobytes(),
            tokens_per_step=self.tokens_per_step,
            plans_in_flight=self.plans_in_flight,
        )


class Ownership:
    """Session number of each block's and each row's owner: int64 columns, changed here alone."""

    def __init__(self, num_rows: int, num_blocks: int) -> None:
        self.of_row: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.of_block: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.clear()

    def clear(self) -> None:
        """Nothing is lent."""
        self.of_row[:] = NOBODY
        self.of_block[:] = NOBODY
        self.of_block[0] = EXECUTOR

    def lend(self, session: int, lease: Lease) -> None:
        self.of_row[lease.row_ids] = session
        self.of_block[lease.block_ids] = session

    def take_back(self, session: int) -> None:
        """Whatever the session holds is nobody's."""
        self.of_row[self.of_row == session] = NOBODY
        self.of_block[self.of_block == session] = NOBODY

    def free_rows(self) -> Int32s:
        return np.flatnonzero(self.of_row == NOBODY).astype(np.int32)

    def free_blocks(self) -> Int32s:
        return np.flatnonzero(self.of_block == NOBODY).astype(np.int32)


@dataclass(frozen=True, slots=True)
class WholeLease:
    """The lease of a lone scheduler: all or nothing."""

    tokens_per_step: int
    plans_in_flight: int

    def grant(self, ownership: Ownership) -> Lease | None:
        """Everything, or None where somebody holds a part of it already."""
        rows, blocks = ownership.free_rows(), ownership.free_blocks()
        if len(rows) < len(ownership.of_row) or len(blocks) < len(ownership.of_block) - 1:
            return None
        return Lease(blocks, rows, self.tokens_per_step, self.plans_in_flight)
