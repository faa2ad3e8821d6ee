"""What a scheduler's work costs, each piece of it: seconds of its event loop, of its process, and bytes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from benchmarks.fitting import fitted


@dataclass(frozen=True, slots=True)
class Work:
    """Of one scheduler, or of several together. `steps`: results taken in, each with the plan that follows it."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    steps: float = 0.0
    messages: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self.amounts, other.amounts, strict=True)))

    @property
    def amounts(self) -> tuple[float, float, float, float, float]:
        return self.requests, self.prompt_tokens, self.steps, self.messages, self.tokens


@dataclass(frozen=True, slots=True)
class TaskCosts:
    """Seconds for each: a request from its coming to its end, a token of its prompt, a step, a message to a client, a
    token in one (its part of planning included)."""

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    step_s: float = 0.0
    message_s: float = 0.0
    token_s: float = 0.0

    def of(self, work: Work) -> float:
        values = (self.request_s, self.prompt_token_s, self.step_s, self.message_s, self.token_s)
        return sum(cost * amount for cost, amount in zip(values, work.amounts, strict=True))

    @classmethod
    def fitted(cls, works: Iterable[Work], seconds: Iterable[float]) -> Self:
        amounts = np.array([work.amounts for work in works])
        return cls(*fitted(amounts, np.array(list(seconds))).tolist())


@dataclass(frozen=True, slots=True)
class SchedulerCosts:
    """`loop` is what one thread must do, and so what limits a scheduler; `process` adds gRPC's own threads, and so is
    what cores are needed for."""

    loop: TaskCosts
    process: TaskCosts
    idle_bytes: float
    stream_bytes: float  # of each open stream
