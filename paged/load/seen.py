"""What callers have seen of a load within a window."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

REFUSED = "RESOURCE_EXHAUSTED"
PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Seen:
    """Of requests that were sent in the window, followed for as long as whoever measures waits for them:

    `sent`, `finished`, `unfinished` as yet; `ttft_s` from when a request was due to its first token, `latency_s` to its
    end, `per_token_s` from its first token to its last, by the tokens that came after the first. `errors`, counts of
    codes.

    Of all streams, within its `seconds`: `tokens`, `messages` (each may bring several tokens), `gaps_s` between a
    stream's messages, and `tokens_by_second`. `unsent`: arrivals that found as many streams open as there may be.
    `earlier_errors`: of requests that were sent before it and failed in it.
    """

    seconds: float = 0.0
    sent: int = 0
    unsent: int = 0
    finished: int = 0
    unfinished: int = 0
    tokens: int = 0
    messages: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    earlier_errors: dict[str, int] = field(default_factory=dict)
    tokens_by_second: list[int] = field(default_factory=list)

    @property
    def refused(self) -> int:
        return self.errors.get(REFUSED, 0)

    @property
    def failed(self) -> dict[str, int]:
        """Errors that are no refusals, most frequent first."""
        others = ((code, count) for code, count in self.errors.items() if code != REFUSED)
        return dict(sorted(others, key=lambda error: -error[1]))

    def count_tokens(self, num_tokens: int, second: int) -> None:
        """Of one message, that came in this second of the window."""
        self.tokens += num_tokens
        self.messages += 1
        if second >= len(self.tokens_by_second):
            self.tokens_by_second.extend([0] * (second + 1 - len(self.tokens_by_second)))
        self.tokens_by_second[second] += num_tokens


def percentiles_ms(seconds: Sequence[float], of: Iterable[int] = PERCENTILES) -> dict[str, float]:
    """In milliseconds, on the line between the two values next to each; empty where there is nothing."""
    if not seconds:
        return {}
    ranked = sorted(seconds)
    return {f"p{percent}": round(1e3 * _at(ranked, percent / 100), 1) for percent in of}


def spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and the largest, in milliseconds; empty where there is nothing."""
    if not seconds:
        return {}
    mean, most = math.fsum(seconds) / len(seconds), max(seconds)
    return {"mean": round(1e3 * mean, 1), **percentiles_ms(seconds), "max": round(1e3 * most, 1)}


def _at(ranked: Sequence[float], share: float) -> float:
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (place - below) * (ranked[above] - ranked[below])
