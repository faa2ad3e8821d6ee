"""Fleets of schedulers and executors on one clock.

A cell is a number of schedulers each of which is attached to each of a number of executors; cells have nothing in
common but the clients, whose requests go to any scheduler. Within a cell, an executor lends equal shares, and a
scheduler's event loop does one thing at a time: results and the plans that follow them first, then new requests, then
messages in slices. Admission, blocks, budgets, preemption, coalescing and merging are those of the services; leases do
not move, prefixes are not shared, and waiting requests stay where they are.
"""

import random
from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.capacity.costs import TaskCosts, Work
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Room
from benchmarks.capacity.on_paper import VOCAB_SIZE, Clock, ExecutorOnPaper, LoopOnPaper, Session, Tally
from benchmarks.claims.requests import Mix, Source, Timing
from scheduler_svc.core.sequence import Sampling, Sequence

BEFORE = -1.0  # when those came that ran at the beginning


@dataclass(frozen=True, slots=True)
class Fleet:
    """Cells that are all alike, of `schedulers` schedulers and `executors` executors each."""

    latency: StepLatency
    costs: TaskCosts
    room: Room = field(default_factory=Room)
    schedulers: int = 1
    executors: int = 1
    cells: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a window. Shares are of one event loop's time, and of one executor's; `work` is of all schedulers."""

    seconds: float
    requests_s: float
    tokens_s: float
    tokens_per_message: float
    ttft_s: list[float]
    gaps_s: list[float]
    loop_share: float
    executor_share: float
    steps_s: float  # of one executor
    work: Work


class Simulation:
    """A fleet, and requests of a mix that come to it: `rate` a second in all."""

    def __init__(self, fleet: Fleet, mix: Mix, rate: float, seed: int = 0) -> None:
        self.clock, self.tally = Clock(), Tally()
        self._mix, self._rate = mix, rate
        self._source = Source(mix, VOCAB_SIZE, seed)
        self._chance = random.Random(seed)
        self._num_to_come: float = float("inf")
        self.loops: list[LoopOnPaper] = []
        self.executors: list[ExecutorOnPaper] = []
        for _ in range(fleet.cells):
            executors = [ExecutorOnPaper(self.clock, fleet.latency) for _ in range(fleet.executors)]
            self.executors += executors
            for _ in range(fleet.schedulers):
                loop = LoopOnPaper(self.clock, fleet.costs, self.tally)
                loop.sessions = [
                    Session(self.clock, loop, executor, fleet.room, fleet.schedulers) for executor in executors
                ]
                self.loops.append(loop)

    def begin_with(self, num_running: int) -> None:
        """So many requests run already, each at any place of its output, as one would find them at any moment."""
        totals = list(accumulate(num_output for _, num_output in self._mix.lengths))
        sessions = [session for loop in self.loops for session in loop.sessions]
        self._chance.shuffle(sessions)  # those that get one more are anywhere
        running: list[list[Sequence]] = [[] for _ in sessions]
        for i in range(num_running):
            num_prompt, num_output = self._mix.lengths[bisect(totals, self._chance.randrange(totals[-1]))]
            num_done = self._chance.randrange(num_output)
            prompt, to_come = [0] * (num_prompt + num_done), num_output - num_done
            sequence = Sequence(f"b{i}", prompt, to_come, Sampling(temperature=0), owner=Timing(BEFORE))
            running[i % len(sessions)].append(sequence)
        for session, sequences in zip(sessions, running, strict=True):
            session.begin_with(sequences)

    def come(self, count: float = float("inf")) -> None:
        """So many requests come from now on."""
        self._num_to_come = count
        self._next()

    def _next(self) -> None:
        if self._num_to_come > 0:
            self._num_to_come -= 1
            self.clock.after(self._chance.expovariate(self._rate), self._arrive)

    def _arrive(self) -> None:
        self.tally.came += 1
        self._chance.choice(self.loops).take_request(self._source.next(self.clock.now))
        self._next()

    def window(self, seconds: float) -> Outcome:
        """What happens in so many seconds from now."""
        tally, began = self.tally, self.clock.now
        tally.began, tally.came, tally.ended, tally.tokens, tally.messages = began, 0, 0, 0, 0
        tally.ttft_s, tally.gaps_s = [], []
        loop_s, executor_s = self._busy_s()
        num_steps = self._num_steps()
        for loop in self.loops:
            loop.work = Work()
        self.clock.run_until(began + seconds)
        loops_s, executors_s = self._busy_s()
        return Outcome(
            seconds=seconds,
            requests_s=tally.came / seconds,
            tokens_s=tally.tokens / seconds,
            tokens_per_message=tally.tokens / max(tally.messages, 1),
            ttft_s=tally.ttft_s,
            gaps_s=tally.gaps_s,
            loop_share=(loops_s - loop_s) / seconds / len(self.loops),
            executor_share=(executors_s - executor_s) / seconds / len(self.executors),
            steps_s=(self._num_steps() - num_steps) / seconds / len(self.executors),
            work=sum((loop.work for loop in self.loops), Work()),
        )

    def _busy_s(self) -> tuple[float, float]:
        return sum(loop.busy_s for loop in self.loops), sum(executor.busy_s for executor in self.executors)

    def _num_steps(self) -> int:
        return sum(executor.num_steps for executor in self.executors)
