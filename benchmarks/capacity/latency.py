"""How long an executor's step takes: a sum of three parts."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from benchmarks.claims.paper import StepWork
from benchmarks.fitting import fitted


@dataclass(frozen=True, slots=True)
class StepLatency:
    """Of a step: fixed, for each token that it computes, and for each token of context that its rows see."""

    fixed_us: float
    per_token_us: float = 0.0
    per_context_token_ns: float = 0.0

    def step_s(self, num_tokens: float, num_context: float) -> float:
        return (self.fixed_us + self.per_token_us * num_tokens + self.per_context_token_ns * num_context / 1e3) / 1e6

    def flags(self) -> list[str]:
        """With which `paged-executor --simulate` takes as long, but for what its own work takes."""
        return [
            *("--simulate-fixed-us", f"{self.fixed_us:.3f}", "--simulate-per-token-us", f"{self.per_token_us:.4f}"),
            *("--simulate-per-context-token-ns", f"{self.per_context_token_ns:.4f}"),
        ]

    @classmethod
    def of_steps(cls, works: list[StepWork], seconds: list[float]) -> Self:
        """By least squares of relative errors."""
        amounts = np.array([(1, work.num_tokens, work.num_context) for work in works], float)
        fixed, per_token, per_context = fitted(amounts, np.array(seconds)).tolist()
        return cls(1e6 * fixed, 1e6 * per_token, 1e9 * per_context)
