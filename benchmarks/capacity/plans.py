"""The questions that sizing asks, answered by arithmetic for shape and by simulation for latency."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.capacity.costs import SchedulerCosts
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Room
from benchmarks.capacity.simulation import Fleet, Outcome, Simulation
from benchmarks.capacity.sizing import (
    Cell,
    Lengths,
    Steady,
    TooFast,
    at_rate,
    cell_for,
    loop_share,
    most_running,
    with_running,
)
from benchmarks.claims.requests import Mix

LOAD = 0.85  # of the most that an executor could serve
LOADS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # that are tried for a bound of the time to first token
SETTLE_S, WINDOW_S = 1.0, 6.0
FLEET_WINDOW_S = 2.0
NUM_REQUESTS = 600  # at least, that come to all cells together
MAX_EXECUTORS = 8  # of a cell that stands for larger ones

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """An executor of one kind, and what is asked of it."""

    latency: StepLatency
    mix: Mix
    room: Room

    @property
    def lengths(self) -> Lengths:
        return Lengths.of(self.mix)

    @property
    def highest(self) -> Steady:
        """With all rows or blocks taken."""
        return with_running(self.latency, self.lengths, most_running(self.room, self.lengths))


def simulated(
    kind: Kind, costs: SchedulerCosts, cell: Cell, rate: float, cells: int, window_s: float = WINDOW_S, seed: int = 0
) -> Outcome:
    """Of so many cells, each of whose executors is asked `rate` requests a second; from a steady state on."""
    fleet = Fleet(kind.latency, costs.loop, kind.room, cell.schedulers, cell.executors, cells)
    num_executors = cells * cell.executors
    simulation = Simulation(fleet, kind.mix, rate * num_executors, seed)
    simulation.begin_with(round(at_rate(kind.latency, kind.lengths, rate).running * num_executors))
    simulation.come()
    simulation.clock.run_until(SETTLE_S)
    return simulation.window(window_s)


def for_an_executor(kind: Kind, costs: SchedulerCosts, load: float = LOAD) -> Figures:
    """How many schedulers one executor of this kind needs at that share of its most, or the other way around."""
    steady = at_rate(kind.latency, kind.lengths, load * kind.highest.rate)
    told: Figures = {
        "fixed_ms": round(kind.latency.fixed_us / 1e3, 2),
        "mix": kind.mix.name,
        "running": round(steady.running),
        "step_ms": round(1e3 * steady.step_s, 1),
        "requests_s": round(steady.rate, 2),
        "tokens_s": round(steady.tokens_s),
        "loop_share_of_one": round(loop_share(costs.loop, steady), 3),
    }
    try:
        cell = cell_for(costs.loop, steady)
    except TooFast as reason:
        return {**told, "cell": None, "why": str(reason)}
    # More executors for a scheduler than that are not simulated: its loop's share says the rest.
    looked_at = replace(cell, executors=min(cell.executors, MAX_EXECUTORS))
    outcome = _of_some(kind, costs, looked_at, steady.rate)
    seen = _seen(outcome, costs, 1 / (looked_at.executors * _cells(looked_at, steady.rate)))
    return {**told, "cell": {"schedulers": cell.schedulers, "executors": cell.executors}, **seen}


def _of_some(kind: Kind, costs: SchedulerCosts, cell: Cell, rate: float) -> Outcome:
    """Of as many cells as it takes for percentiles."""
    return simulated(kind, costs, cell, rate, _cells(cell, rate))


def _cells(cell: Cell, rate: float) -> int:
    return math.ceil(NUM_REQUESTS / (rate * cell.executors * WINDOW_S))


def highest_rate(kind: Kind, costs: SchedulerCosts, cell: Cell, ttft_p99_s: float) -> float | None:
    """The most requests a second and executor, of those tried, whose time to first token stays below that bound."""
    best = None
    for load in LOADS:
        rate = load * kind.highest.rate
        if np.percentile(_of_some(kind, costs, cell, rate).ttft_s, 99) > ttft_p99_s:
            break
        best = rate
    return best


def for_a_rate(kind: Kind, costs: SchedulerCosts, rates: list[float], ttft_p99_s: float) -> list[Figures]:
    """How many executors and schedulers so many requests a second take; each fleet is simulated whole. Empty where
    even a lightly loaded executor is too late."""
    cell = cell_for(costs.loop, kind.highest)
    each = highest_rate(kind, costs, cell, ttft_p99_s)
    if each is None:
        return []
    fleets = []
    for rate in rates:
        cells = math.ceil(rate / (each * cell.executors))
        outcome = simulated(kind, costs, cell, rate / (cells * cell.executors), cells, FLEET_WINDOW_S)
        numbers = {"rate": rate, "executors": cells * cell.executors, "schedulers": cells * cell.schedulers}
        fleets.append(
            {**numbers, "load": round(rate / (cells * cell.executors * kind.highest.rate), 2), **_seen(outcome, costs)}
        )
    return fleets


def _seen(outcome: Outcome, costs: SchedulerCosts, part: float = 1.0) -> Figures:
    """Tokens and cores of that part of what was simulated."""
    return {
        "simulated_tokens_s": round(part * outcome.tokens_s),
        "ttft_ms": _percentiles(outcome.ttft_s),
        "itl_ms": _percentiles(outcome.gaps_s),
        "loop_share": round(outcome.loop_share, 3),
        "executor_share": round(outcome.executor_share, 3),
        "scheduler_cores": round(part * costs.process.of(outcome.work) / outcome.seconds, 2),
    }


def _percentiles(seconds: list[float]) -> Figures:
    """In ms."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return {"p50": round(1e3 * float(p50), 1), "p99": round(1e3 * float(p99), 1)}
