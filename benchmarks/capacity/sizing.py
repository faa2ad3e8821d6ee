"""Arithmetic of steady loads: how many sequences run, how long steps take, and how many schedulers that keeps busy.

With R sequences running, a step computes a token of each and as many tokens of prompts as come meanwhile, so it takes
T = fixed + R x, and a sequence that gets O tokens runs for O T. Requests that come at rate r keep R = r O T running.
"""

import math
from dataclasses import dataclass

from benchmarks.capacity.costs import TaskCosts, Work
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import BLOCK_SIZE, Room
from benchmarks.claims.requests import Mix

WATERMARK = 0.05  # of blocks, that admission keeps free
BUSY = 0.7  # of its event loop's time, up to which a scheduler is loaded


class TooFast(Exception):
    """No number of schedulers will do."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means over requests; `held` over the tokens of outputs: how many tokens a sequence has as it runs."""

    prompt: float
    output: float
    held: float

    @classmethod
    def of(cls, mix: Mix) -> "Lengths":
        total = sum(num_output for _, num_output in mix.lengths)
        held = sum(num_output * (num_prompt + num_output / 2) for num_prompt, num_output in mix.lengths)
        return cls(mix.mean_prompt, mix.mean_output, held / total)


@dataclass(frozen=True, slots=True)
class Steady:
    """An executor that serves `rate` requests a second."""

    rate: float
    running: float
    step_s: float
    work: Work  # of its schedulers in a second, where there is one

    @property
    def tokens_s(self) -> float:
        return self.work.tokens


def row_s(latency: StepLatency, lengths: Lengths) -> float:
    """What each running sequence adds to a step."""
    num_tokens = 1 + lengths.prompt / lengths.output
    return latency.step_s(num_tokens, lengths.held) - latency.step_s(0, 0)


def most_running(room: Room, lengths: Lengths) -> float:
    blocks_each = lengths.held / BLOCK_SIZE + 0.5
    return min(room.max_rows, room.num_blocks * (1 - WATERMARK) / blocks_each)


def with_running(latency: StepLatency, lengths: Lengths, running: float) -> Steady:
    step_s = latency.step_s(0, 0) + running * row_s(latency, lengths)
    rate = running / (lengths.output * step_s)
    tokens_s = rate * lengths.output
    return Steady(rate, running, step_s, Work(rate, rate * lengths.prompt, 1 / step_s, tokens_s, tokens_s))


def at_rate(latency: StepLatency, lengths: Lengths, rate: float) -> Steady:
    """Raises ValueError where the executor can't keep up however many run."""
    spare = 1 - rate * lengths.output * row_s(latency, lengths)
    if spare <= 0:
        raise ValueError(
            f"rate {rate:g}/s: the rows alone take {1 - spare:.2f} of the executor's time, must be below 1"
        )
    return with_running(latency, lengths, rate * lengths.output * latency.step_s(0, 0) / spare)


def loop_share(costs: TaskCosts, steady: Steady, schedulers: int = 1, executors: int = 1) -> float:
    """Of each event loop's time, in a cell: each scheduler takes part in every step of each executor, and in its share
    of all else."""
    steps = Work(steps=steady.work.steps)
    return executors * (costs.of(steps) + (costs.of(steady.work) - costs.of(steps)) / schedulers)


@dataclass(frozen=True, slots=True)
class Cell:
    """Schedulers that are attached to the same executors. One of the two numbers is 1."""

    schedulers: int
    executors: int

    def __str__(self) -> str:
        return f"{self.schedulers} : {self.executors}"


def cell_for(costs: TaskCosts, steady: Steady, busy: float = BUSY) -> Cell:
    """The fewest schedulers for an executor, or the most executors for a scheduler, with no loop busier than that.
    Raises TooFast."""
    alone = loop_share(costs, steady)
    if alone <= busy:
        return Cell(1, max(math.floor(busy / alone), 1))
    for_plans = costs.of(Work(steps=steady.work.steps))
    if for_plans >= busy:
        raise TooFast(
            f"steps of {1e3 * steady.step_s:.2f} ms: plans alone take {for_plans:.2f} of every scheduler's event loop, "
            f"must be below {busy:g}"
        )
    return Cell(math.ceil((alone - for_plans) / (busy - for_plans)), 1)
