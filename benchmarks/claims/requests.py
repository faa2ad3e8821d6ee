"""What is asked for: requests of the lengths of a mix, or of a trace, and when they come."""

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Protocol

from paged.load.lengths import MIXES, log_normal_length
from scheduler_svc.core.sequence import Sampling, Sequence

NUM_DRAWN = 20_000
APART = 1009  # requests between the beginnings of two seeds
LOWEST_ID = 10  # ids below it are often special


class TraceError(Exception):
    """A trace file that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Tokens of prompt and output, request by request; they begin again after the last."""

    name: str
    lengths: tuple[tuple[int, int], ...]

    @property
    def mean_prompt(self) -> float:
        return sum(num_prompt for num_prompt, _ in self.lengths) / len(self.lengths)

    @property
    def mean_output(self) -> float:
        return sum(num_output for _, num_output in self.lengths) / len(self.lengths)


def drawn_mix(name: str, longest: int) -> Mix:
    """One of MIXES, no sequence longer than `longest`."""
    chance = random.Random(0)
    mean_prompt, mean_output = MIXES[name]
    drawn = []
    for _ in range(NUM_DRAWN):
        num_prompt = log_normal_length(mean_prompt, chance, longest // 2)
        drawn.append((num_prompt, log_normal_length(mean_output, chance, longest - num_prompt)))
    return Mix(name, tuple(drawn))


def trace_mix(path: Path, longest: int) -> Mix:
    """From a CSV file with the columns prompt_tokens and output_tokens, in order; cut as drawn ones are. Raises
    TraceError."""
    lengths: list[tuple[int, int]] = []
    try:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                num_prompt, num_output = int(row["prompt_tokens"]), int(row["output_tokens"])
                if min(num_prompt, num_output) < 1:
                    raise TraceError(
                        f"{path}: row {len(lengths) + 1}: {num_prompt} and {num_output}, must be 1 or more"
                    )
                num_prompt = min(num_prompt, longest // 2)
                lengths.append((num_prompt, min(num_output, longest - num_prompt)))
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise TraceError(f"{path}: row {len(lengths) + 1}: no numbers prompt_tokens and output_tokens") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not lengths:
        raise TraceError(f"{path}: no requests; must have at least one")
    return Mix("trace", tuple(lengths))


@dataclass(slots=True)
class Timing:
    """Of one request, in seconds; `last` is when it got its latest token. The driver notes when it first got a row."""

    arrived: float
    last: float | None = None
    admitted_at: float | None = None


class Source:
    """The requests of a mix, one after another, with prompts of random ids. End tokens end nothing. Those of another
    seed begin elsewhere in the mix."""

    def __init__(self, mix: Mix, vocab_size: int, seed: int = 0) -> None:
        begin = seed * APART % len(mix.lengths)
        self._lengths = cycle(mix.lengths[begin:] + mix.lengths[:begin])
        self._ids = range(min(LOWEST_ID, vocab_size - 1), vocab_size)
        self._chance = random.Random(seed)
        self._count = 0

    def next(self, now: float) -> Sequence:
        num_prompt, num_output = next(self._lengths)
        self._count += 1
        prompt = self._chance.choices(self._ids, k=num_prompt)
        greedy = Sampling(temperature=0)
        return Sequence(f"r{self._count}", prompt, num_output, greedy, owner=Timing(now))


class Arrivals(Protocol):
    """Who comes when, on any clock in seconds."""

    def due(self, now: float, num_waiting: int) -> Iterator[Sequence]:
        """Those that have come by now and were not given out before; so many wait already."""

    def next_at(self) -> float | None:
        """When the next one comes; None if that depends on who waits."""


class Backlog:
    """Always so many wait, whatever is served: saturation."""

    def __init__(self, source: Source, depth: int) -> None:
        self._source, self._depth = source, depth

    def due(self, now: float, num_waiting: int) -> Iterator[Sequence]:
        for _ in range(self._depth - num_waiting):
            yield self._source.next(now)

    def next_at(self) -> float | None:
        return None


class Poisson:
    """`rate` requests a second on average, each independent of the others."""

    def __init__(self, source: Source, rate: float, seed: int = 0, *, begin: float = 0.0) -> None:
        self._source, self._rate = source, rate
        self._chance = random.Random(seed)
        self._next_at = begin + self._chance.expovariate(rate)

    def due(self, now: float, num_waiting: int) -> Iterator[Sequence]:
        while self._next_at <= now:
            yield self._source.next(self._next_at)
            self._next_at += self._chance.expovariate(self._rate)

    def next_at(self) -> float | None:
        return self._next_at
