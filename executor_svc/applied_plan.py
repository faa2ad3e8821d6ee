"""What a plan comes to once the resident batch has taken it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s, RowStart
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """What a plan asks of the runner: row changes in their order, then the work.

    Row i of the schedule computes its tokens from position `first_positions[i]` up to `ends[i]`, exclusive; the ids of
    those before `num_known[i]` came with the row's start.
    """

    fork_parents: Int32s
    fork_children: Int32s
    fork_sampling: list[executor_pb2.RowSampling]
    ended_rows: Int32s
    starts: list[RowStart]
    copy_sources: Int32s
    copy_destinations: Int32s
    rows: Int32s
    first_positions: Int32s
    ends: Int32s
    num_known: Int32s
    samples: NDArray[np.bool_]

    @property
    def needs_step(self) -> bool:
        return bool(len(self.rows) or len(self.copy_sources))
