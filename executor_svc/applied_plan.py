"""What a plan comes to once the resident batch has taken it."""

from dataclasses import dataclass

import numpy as np

from executor_svc.step import Int32s, RowStart, Step
from paged.v1 import executor_pb2

_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Forks:
    """Rows that begin as copies of others; `sampling` is the children's own. `tokens`, if there, are what the children
    go on with in place of the token that their parents sampled last."""

    parents: Int32s
    children: Int32s
    sampling: list[executor_pb2.RowSampling]
    tokens: Int32s | None = None


NO_FORKS = Forks(_NO_ROWS, _NO_ROWS, [])


@dataclass(slots=True)
class RowChanges:
    """Rows that a runner must be told of before the step, in the order of the fields."""

    forks: Forks
    ended: Int32s
    starts: list[RowStart]
    joined: Forks


NO_CHANGES = RowChanges(NO_FORKS, _NO_ROWS, [], NO_FORKS)


@dataclass(slots=True)
class AppliedPlan:
    """What a plan asks of the runner: row changes, then the work. `step` is without rows where there is none."""

    changes: RowChanges
    step: Step

    @property
    def needs_step(self) -> bool:
        return bool(len(self.step.rows) or len(self.step.copy_sources))
