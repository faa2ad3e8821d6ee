"""The simulation against what it stands for: the same load on real processes of this machine, and on paper."""

from typing import Any

import numpy as np

from benchmarks.capacity.costs import SchedulerCosts
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.measuring import Say
from benchmarks.capacity.observed import Observed, Room, System
from benchmarks.capacity.simulation import Fleet, Outcome, Simulation
from benchmarks.capacity.steps import measured
from benchmarks.claims.requests import Mix

LATENCY = StepLatency(10_000, 20, 50)
RATE, SETTLE_S, WINDOW_S = 60.0, 4.0, 8.0
NUM_SCHEDULERS = (1, 2)

Figures = dict[str, Any]


async def validated(costs: SchedulerCosts, mix: Mix, say: Say, rate: float = RATE) -> list[Figures]:
    """For each number of schedulers of one executor: figures of both, and simulated over real. Raises ServiceFailed,
    ServingFailed and ObservationFailed."""
    # A simulated step takes a little longer than it is told to, by what the executor does besides.
    latency = (await measured(["--simulate", *LATENCY.flags()])).latency
    points = []
    for num_schedulers in NUM_SCHEDULERS:
        async with System.started(LATENCY, Room(), num_schedulers) as system:
            real = await system.observe(rate, list(mix.lengths), SETTLE_S, WINDOW_S)
        fleet = Fleet(latency, costs.loop, schedulers=num_schedulers)
        simulation = Simulation(fleet, mix, rate)
        simulation.come()
        simulation.clock.run_until(SETTLE_S)
        points.append(compared(num_schedulers, real, simulation.window(WINDOW_S), costs))
        ratios = ", ".join(f"{name} {ratio}" for name, ratio in points[-1]["ratio"].items())
        say(f"{num_schedulers} : 1, simulated over real: {ratios}")
    return points


def compared(num_schedulers: int, real: Observed, paper: Outcome, costs: SchedulerCosts) -> Figures:
    seconds = real.seen.seconds
    both = {
        "tokens_s": (real.seen.tokens / seconds, paper.tokens_s),
        "ttft_p50_ms": _percentiles(50, real.seen.ttft_s, paper.ttft_s),
        "ttft_p99_ms": _percentiles(99, real.seen.ttft_s, paper.ttft_s),
        "itl_p50_ms": _percentiles(50, real.seen.gaps_s, paper.gaps_s),
        "itl_p99_ms": _percentiles(99, real.seen.gaps_s, paper.gaps_s),
        "loop_share": (real.loop_s / seconds / num_schedulers, paper.loop_share),
        "cores": (real.process_s / seconds, costs.process.of(paper.work) / paper.seconds),
    }
    return {
        "schedulers": num_schedulers,
        "real": {name: round(found, 3) for name, (found, _) in both.items()},
        "simulated": {name: round(found, 3) for name, (_, found) in both.items()},
        "ratio": {name: round(simulated / found, 2) for name, (found, simulated) in both.items()},
    }


def _percentiles(percent: int, real_s: list[float], paper_s: list[float]) -> tuple[float, float]:
    return 1e3 * float(np.percentile(real_s, percent)), 1e3 * float(np.percentile(paper_s, percent))
