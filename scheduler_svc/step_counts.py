"""What is counted of the steps of one executor: once a plan, once a result, never a token at a time."""

from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.plan import Plan
from scheduler_svc.core.results import Applied
from scheduler_svc.histogram import Histogram

MESSAGE_BYTES = tuple(256.0 * 4**i for i in range(10))
STEP_TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_LAST_COPIES = 256
INTERVAL_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)


@dataclass(slots=True)
class StepCounts:
    """Of all sessions so far."""

    joined: int = 0
    forks: int = 0
    copies: int = 0
    last_copies: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_LAST_COPIES))  # blocks that they wrote
    returned_blocks: int = 0
    granted_blocks: int = 0
    lost_sequences: int = 0
    plan_bytes: Histogram = field(default_factory=lambda: Histogram(MESSAGE_BYTES))
    result_bytes: Histogram = field(default_factory=lambda: Histogram(MESSAGE_BYTES))
    scheduled_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))
    token_interval_s: Histogram = field(default_factory=lambda: Histogram(INTERVAL_S))
    _last_at: float = 0.0  # when tokens came last
    _num_going_on: int = 0  # sequences that had one then and were to get another one

    def note_plan(self, plan: Plan, num_bytes: int) -> None:
        self.plan_bytes.add(num_bytes)
        if len(plan.rows):
            self.scheduled_tokens.add(int(plan.num_tokens.sum()))
        self.joined += len(plan.joined)
        self.forks += len(plan.forks)
        self.copies += len(plan.copies.rows)
        self.last_copies.extend(plan.copies.destinations)
        self.returned_blocks += len(plan.returned.blocks)

    def note_result(self, applied: Applied, num_bytes: int, now: float) -> None:
        """`now` in seconds of one clock. An interval counts for as many as got a token at both of its ends: whoever ran
        at the first and not at the second is taken for one of those who did, so it is off while many are preempted."""
        self.result_bytes.add(num_bytes)
        num_updated = len(applied.updated)
        if num_updated:
            if count := min(self._num_going_on, num_updated):
                self.token_interval_s.add(now - self._last_at, count)
            self._last_at, self._num_going_on = now, max(0, num_updated - len(applied.ended))

    def note_loss(self, num_sequences: int) -> None:
        self.lost_sequences += num_sequences
        self._num_going_on = 0
