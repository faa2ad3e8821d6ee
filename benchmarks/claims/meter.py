"""Tokens and times, from when they are looked at."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import quantiles

from benchmarks.claims.requests import Timing
from scheduler_svc.core.results import Applied
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class Meter:
    """What results bring from `begin` on. Time to first token is that of requests that came since."""

    began: float = 0.0
    now: float = 0.0
    tokens: int = 0
    ended: int = 0
    first_tokens_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def begin(self, now: float) -> None:
        self.began = self.now = now
        self.tokens = self.ended = 0
        self.first_tokens_s, self.gaps_s = [], []

    def take(self, applied: Applied, now: float) -> None:
        self.now = now
        self.tokens += len(applied.updated)
        self.ended += len(applied.ended)
        for sequence in applied.updated:
            timing = sequence.owner
            if not isinstance(timing, Timing):
                continue
            if timing.last is not None:
                self.gaps_s.append(now - timing.last)
            elif timing.arrived >= self.began:
                self.first_tokens_s.append(now - timing.arrived)
            timing.last = now

    def take_waiting(self, sequences: Iterable[Sequence]) -> None:
        """Those that came and have no token yet count with the time that they have waited."""
        for sequence in sequences:
            timing = sequence.owner
            if isinstance(timing, Timing) and timing.last is None and timing.arrived >= self.began:
                self.first_tokens_s.append(self.now - timing.arrived)

    @property
    def seconds(self) -> float:
        return self.now - self.began

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


def percentile(values: list[float], percent: int) -> float | None:
    """None of nothing."""
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]
