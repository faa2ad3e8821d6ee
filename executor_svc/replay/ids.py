"""Where a replay's token ids come from: the recording, or chance where it has none."""

from typing import Protocol

import numpy as np

from paged.v1 import executor_pb2


class Ids(Protocol):
    def fill(self, plan: executor_pb2.StepPlan) -> None:
        """Put ids where the plan has only places for them."""

    def fill_started(self, started: executor_pb2.StartedRow) -> None:
        """The same for one row."""


class RecordedIds:
    """All are there."""

    def fill(self, plan: executor_pb2.StepPlan) -> None: ...
    def fill_started(self, started: executor_pb2.StartedRow) -> None: ...


class RandomIds:
    """As many as there were, below `vocab_size`, the same in each replay."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._chance = np.random.default_rng(seed)

    def fill(self, plan: executor_pb2.StepPlan) -> None:
        for started in plan.started:
            self.fill_started(started)
        plan.fork_tokens = self._as_many(plan.fork_tokens)

    def fill_started(self, started: executor_pb2.StartedRow) -> None:
        started.token_ids = self._as_many(started.token_ids)

    def _as_many(self, column: bytes) -> bytes:
        return self._chance.integers(self._vocab_size, size=len(column) // 4, dtype=np.int32).astype("<i4").tobytes()
