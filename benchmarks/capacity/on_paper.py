"""A scheduler and an executor on a clock of their own: the real core; what they do takes what was measured."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from benchmarks.capacity.costs import TaskCosts, Work
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import BLOCK_SIZE, Room
from benchmarks.claims.paper import StepWork, paper_lease
from benchmarks.claims.requests import Timing
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.plan import Amounts, LeaseChange, Plan, Result
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.rests import Rests

PLANS_IN_FLIGHT = 2
SLICE_S = 5e-4  # of messages that are looked at together; in service results come between any two
LINK_S = 1e-4  # from one service to another
VOCAB_SIZE = 32_000
NO_LIMIT = 1 << 20  # tokens of a step


class Clock:
    """Things happen at their times, those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num_asked = 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_asked += 1
        heapq.heappush(self._due, (self.now + seconds, self._num_asked, action))

    def run_until(self, end: float) -> None:
        """And those of exactly that time."""
        while self._due and self._due[0][0] <= end:
            self.now, _, action = heapq.heappop(self._due)
            action()
        if end < float("inf"):
            self.now = end


@dataclass(slots=True)
class Tally:
    """What clients have seen since the window began; times in seconds."""

    began: float = 0.0
    came: int = 0
    ended: int = 0
    tokens: int = 0
    messages: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def take(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A message has gone out."""
        timing = sequence.owner
        assert isinstance(timing, Timing)
        self.tokens += num_tokens
        self.messages += 1
        if timing.last is not None:
            self.gaps_s.append(now - timing.last)
        elif timing.arrived >= self.began:
            self.ttft_s.append(now - timing.arrived)
        timing.last = now
        self.ended += sequence.state is State.ENDED


class ExecutorOnPaper:
    """One step after another, each of one plan of each session that has one waiting."""

    def __init__(self, clock: Clock, latency: StepLatency) -> None:
        self._clock, self._latency = clock, latency
        self._waiting: dict[Session, deque[tuple[Plan, StepWork]]] = {}
        self._is_busy = False
        self._ends_at = 0.0
        self._taken_s = 0.0
        self.num_steps = 0

    @property
    def busy_s(self) -> float:
        """Of steps, until now."""
        return self._taken_s - max(self._ends_at - self._clock.now, 0.0)

    def take(self, session: "Session", plan: Plan, work: StepWork) -> None:
        self._waiting.setdefault(session, deque()).append((plan, work))
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        merged = [(session, *plans.popleft()) for session, plans in self._waiting.items() if plans]
        self._is_busy = bool(merged)
        if not merged:
            return
        num_tokens = sum(work.num_tokens for _, _, work in merged)
        num_context = sum(work.num_context for _, _, work in merged)
        took = self._latency.step_s(num_tokens, num_context) if num_tokens else 0.0
        self._taken_s += took
        self._ends_at = self._clock.now + took
        self.num_steps += num_tokens > 0

        def end() -> None:
            for session, plan, work in merged:
                result = Result(plan.step, np.zeros(work.num_samples, np.int32))
                self._clock.after(LINK_S, partial(session.on_result, result))
            self._begin()

        self._clock.after(took, end)


class Session:
    """A scheduler's core for one executor, and the plans between them."""

    def __init__(self, clock: Clock, loop: "LoopOnPaper", executor: ExecutorOnPaper, room: Room, share: int) -> None:
        self._clock, self._loop, self._executor = clock, loop, executor
        self.core = Scheduler(prefix_caching=False)
        self._share = Amounts(room.num_blocks // share, room.max_rows // share, room.tokens_per_step // share)
        lease = paper_lease(*self._share, BLOCK_SIZE, VOCAB_SIZE)
        self.core.attach(replace(lease, most_lent=self._share._replace(tokens=NO_LIMIT)))

    def begin_with(self, sequences: list[Sequence]) -> None:
        """They run already, as far as there is room for them: prompts were computed before the clock began, in steps
        without a limit."""
        core = self.core
        core.change_lease(LeaseChange(granted_tokens=NO_LIMIT - self._share.tokens))
        for sequence in sequences:
            core.submit(sequence)
        while any(sequence.state is State.WAITING for sequence in sequences) and (plan := core.plan()) is not None:
            if not len(plan.rows):
                break
            core.apply(Result(plan.step, np.zeros(int(plan.samples.sum()), np.int32)))
        core.change_lease(LeaseChange(keep=self._share))
        self._plan()

    def submit(self, sequence: Sequence) -> None:
        self.core.submit(sequence)
        self._plan()

    def on_result(self, result: Result) -> None:
        self._loop.take_result(lambda: self._apply(result))

    def _apply(self, result: Result) -> None:
        applied = self.core.apply(result)
        self._plan()
        self._loop.deliver(applied.updated)

    def _plan(self) -> None:
        while len(self.core.state.in_flight) < PLANS_IN_FLIGHT and (plan := self.core.plan()) is not None:
            work = StepWork.of(plan, self.core.state)
            self._clock.after(LINK_S, partial(self._executor.take, self, plan, work))


@dataclass(slots=True)
class Unsent:
    """Tokens that wait for their stream."""

    since: float
    num_tokens: int = 0


class LoopOnPaper:
    """A scheduler's event loop."""

    def __init__(self, clock: Clock, costs: TaskCosts, tally: Tally) -> None:
        self._clock, self._costs, self._tally = clock, costs, tally
        self.sessions: list[Session] = []
        self._placement = Placement()
        self._results: deque[Callable[[], None]] = deque()
        self._requests: deque[Sequence] = deque()
        self._unsent: dict[Sequence, Unsent] = {}  # longest waiting first
        self._resting: dict[Sequence, int] = {}  # tokens that have come since the last message
        self._rests, self._rest_s, self._num_streams = Rests(), 0.0, 0
        self._is_busy = False
        self.busy_s = 0.0
        self.work = Work()

    def take_result(self, apply: Callable[[], None]) -> None:
        self._results.append(apply)
        self._go_on()

    def take_request(self, sequence: Sequence) -> None:
        self._requests.append(sequence)
        self._go_on()

    def place(self, sequence: Sequence) -> None:
        scheduler = self._placement.choose(sequence, [session.core for session in self.sessions])
        next(session for session in self.sessions if session.core is scheduler).submit(sequence)

    def deliver(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence in self._resting and sequence.state is not State.ENDED:
                self._resting[sequence] += 1
            else:
                unsent = self._unsent.setdefault(sequence, Unsent(self._clock.now))
                unsent.num_tokens += self._resting.pop(sequence, 0) + 1
        self._num_streams = len(self._unsent) + len(self._resting)
        self._rest_s = self._rests.rest_s(self._num_streams)
        self._go_on()

    def _rest(self, sequence: Sequence) -> None:
        """As in `scheduler_svc.delivery`: what comes after a message waits, unless it is the end."""
        if self._rest_s and sequence.state is not State.ENDED:
            unsent = self._unsent.pop(sequence, None)
            self._resting[sequence] = unsent.num_tokens if unsent is not None else 0
            self._clock.after(self._rest_s, partial(self._end_rest, sequence))

    def _end_rest(self, sequence: Sequence) -> None:
        if num_tokens := self._resting.pop(sequence, 0):
            self._unsent[sequence] = Unsent(self._clock.now, num_tokens)
            self._go_on()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        if self._results:
            self._work_on(Work(steps=1), self._results.popleft())
        elif self._requests:
            sequence = self._requests.popleft()
            work = Work(requests=1, prompt_tokens=sequence.num_prompt)
            self._work_on(work, lambda: self.place(sequence))
        elif self._unsent:
            self._send_slice()

    def _send_slice(self) -> None:
        slice_s, sent = 0.0, []
        for sequence, unsent in self._unsent.items():
            slice_s += self._costs.message_s + self._costs.token_s * unsent.num_tokens
            sent.append((sequence, unsent.num_tokens, self._clock.now + slice_s))
            if slice_s >= SLICE_S:
                break
        for sequence, _, _ in sent:
            self._rests.note_wait(self._clock.now - self._unsent.pop(sequence).since, self._num_streams)

        def out() -> None:
            for sequence, num_tokens, at in sent:
                self._tally.take(sequence, num_tokens, at)
                self._rest(sequence)

        self._work_on(Work(messages=len(sent), tokens=sum(num_tokens for _, num_tokens, _ in sent)), out)

    def _work_on(self, work: Work, then: Callable[[], None]) -> None:
        took = self._costs.of(work)
        self.work += work
        self.busy_s += took
        self._is_busy = True

        def done() -> None:
            self._is_busy = False
            then()
            self._go_on()

        self._clock.after(took, done)
