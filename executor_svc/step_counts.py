"""What an executor counts of its steps: a few numbers a step, whether anybody reads them or not."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from executor_svc.applied_plan import AppliedPlan

STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MERGED = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


@dataclass(slots=True)
class Counted:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count is of all above."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class StepCounts:
    """Since the process began. The phases of a step follow one another: idle (nothing was there to be computed, or it
    was waited for a moment), reading plans and taking them in, computing, answering. What is answered while the device
    computes the next step is no phase: nothing waits for it."""

    steps: int = 0
    plans: int = 0
    tokens: int = 0
    rows: int = 0
    copied_blocks: int = 0
    runner_failures: int = 0
    idle_s: float = 0.0
    take_in_s: float = 0.0
    compute_s: float = 0.0
    answer_s: float = 0.0
    step_s: Counted = field(default_factory=lambda: Counted(STEP_S))
    merged_plans: Counted = field(default_factory=lambda: Counted(MERGED))

    def note_step(
        self, plans: list[AppliedPlan], begin: float, taken_in: float, computed: float, end: float, idle_since: float
    ) -> None:
        """Moments in seconds of one clock; at `end` the device could have begun the next step. Plans without work for
        the model are a sign of life, and no step."""
        self.plans += len(plans)
        working = [plan.step for plan in plans if plan.needs_step]
        if not working:
            return
        self.steps += 1
        for step in working:
            self.tokens += len(step.token_ids)
            self.rows += len(step.rows)
            self.copied_blocks += len(step.copy_sources)
        self.idle_s += begin - idle_since
        self.take_in_s += taken_in - begin
        self.compute_s += computed - taken_in
        self.answer_s += end - computed
        self.step_s.add(end - begin)
        self.merged_plans.add(len(working))
