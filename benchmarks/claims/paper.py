"""The core alone, driven as a service drives it, with tokens that mean nothing: exact bookkeeping, and much faster than
a model. Its clock goes on by what each step would take a model that was measured, or by one for each step."""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.claims.meter import Meter
from benchmarks.claims.requests import Arrivals
from benchmarks.claims.watched import WatchedScheduler
from benchmarks.fitting import fitted
from scheduler_svc.core.plan import Lease, Plan, Result
from scheduler_svc.core.state import CoreState, Counters


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the time of a step depends on: tokens that it computes, those that it samples, and tokens of context."""

    num_tokens: int
    num_samples: int
    num_context: int

    @classmethod
    def of(cls, plan: Plan, state: CoreState) -> "StepWork":
        """Of a plan that was just made."""
        context = int(state.columns.num_computed[plan.rows].sum())
        return cls(int(plan.num_tokens.sum()), int(plan.samples.sum()), context)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, as a sum."""

    step_s: float = 1.0
    token_s: float = 0.0
    sample_s: float = 0.0
    context_s: float = 0.0

    def of(self, work: StepWork) -> float:
        return (
            self.step_s
            + self.token_s * work.num_tokens
            + self.sample_s * work.num_samples
            + self.context_s * work.num_context
        )

    @classmethod
    def fitted(cls, works: list[StepWork], seconds: list[float]) -> "StepCosts":
        """By least squares of relative errors; no part is below 0."""
        columns = np.array([(1, work.num_tokens, work.num_samples, work.num_context) for work in works], float)
        return cls(*fitted(columns, np.array(seconds)).tolist())


class Paper:
    """One scheduler and its executor on paper, from the moment that it attaches."""

    def __init__(
        self, scheduler: WatchedScheduler, lease: Lease, arrivals: Arrivals, costs: StepCosts | None = None
    ) -> None:
        self.scheduler = scheduler
        self.meter = Meter()
        self.now = 0.0
        self.num_computed = 0  # tokens, as often as they were
        self._arrivals = arrivals
        self._costs = costs or StepCosts()
        self._in_flight: deque[tuple[Plan, StepWork]] = deque()
        self._chance = np.random.default_rng(0)
        self._vocab_size = lease.vocab_size
        self._before = Counters()
        scheduler.attach(lease)

    def step(self) -> bool:
        """The oldest plan's result comes. False when nothing is left to do."""
        scheduler = self.scheduler
        while len(self._in_flight) < scheduler.state.lease.plans_in_flight:
            for sequence in self._arrivals.due(self.now, scheduler.state.num_waiting):
                scheduler.submit(sequence)
            plan = scheduler.plan()
            if plan is None:
                break
            work = StepWork.of(plan, scheduler.state)
            self.num_computed += work.num_tokens
            self._in_flight.append((plan, work))
        if not self._in_flight:
            next_at = self._arrivals.next_at()
            if next_at is None:
                return False
            self.now = max(self.now, next_at)
            return True
        plan, work = self._in_flight.popleft()
        self.now += self._costs.of(work) if work.num_tokens else 0.0
        tokens = self._chance.integers(0, self._vocab_size, work.num_samples, np.int32)
        self.meter.take(scheduler.apply(Result(plan.step, tokens)), self.now)
        return True

    def begin(self) -> None:
        """A window begins."""
        self.meter.begin(self.now)
        self.num_computed = 0
        self._before = replace(self.scheduler.state.counters)

    @property
    def num_preempted(self) -> int:
        return self.scheduler.state.counters.preemptions - self._before.preemptions

    @property
    def num_needed(self) -> int:
        """Tokens that had to be computed once: prompts of those that got in, and outputs."""
        now, before = self.scheduler.state.counters, self._before
        return now.prompt_tokens + now.generated_tokens - before.prompt_tokens - before.generated_tokens

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run_until(self, now: float) -> None:
        while self.now < now and self.step():
            pass

    def end(self) -> None:
        """As if the executor were lost: what ran waits, to be computed anew by another one."""
        self.scheduler.detach()
        self._in_flight.clear()


def paper_lease(num_blocks: int, num_rows: int, tokens_per_step: int, block_size: int, vocab_size: int) -> Lease:
    """Of blocks 1 to `num_blocks`, with two plans in flight."""
    blocks, rows = list(range(1, num_blocks + 1)), list(range(num_rows))
    return Lease(blocks, rows, tokens_per_step, block_size, vocab_size=vocab_size)
