"""What a replay has shown: how its results differ from the recorded ones, and how long steps took."""

from dataclasses import dataclass, field
from statistics import median

import numpy as np

from executor_svc.replay.player import Played
from paged.v1 import executor_pb2

LOGPROB_TOLERANCE = 0.05  # nats; K/V that were computed in other steps differ in their last bits
_IDS = ("sampled_ids", "logprob_ids", "logprob_ranks", "prompt_logprob_ids", "prompt_logprob_ranks")
_VALUES = ("logprobs", "prompt_logprobs")


@dataclass
class Comparison:
    """`with_values`: ids and log-probabilities are compared; else only how many there are."""

    with_values: bool
    steps: int = 0
    plans: int = 0
    tokens: int = 0  # sampled
    differing: int = 0  # entries of results that are not as recorded
    first_difference: str = ""
    recorded_us: list[int] = field(default_factory=list)
    replayed_us: list[int] = field(default_factory=list)

    def note(self, played: Played, took_us: int) -> None:
        self.steps += 1
        self.plans += len(played.plans)
        self.tokens += sum(len(result.sampled_ids) // 4 for result in played.results)
        if not played.recorded:
            return
        self.recorded_us.append(played.recorded[0].step_us)
        self.replayed_us.append(took_us)
        for plan, recorded, result in zip(played.plans, played.recorded, played.results, strict=True):
            if count := self._differing(recorded, result):
                self.differing += count
                place = f"step {played.step}, plan {plan.step} of session {plan.session}"
                self.first_difference = self.first_difference or place

    def _differing(self, recorded: executor_pb2.StepResult, result: executor_pb2.StepResult) -> int:
        found = 0
        for column in (*_IDS, *_VALUES):
            before, now = getattr(recorded, column), getattr(result, column)
            if len(before) != len(now):
                found += 1
            elif self.with_values:
                found += _differing_values(before, now) if column in _VALUES else _differing_ids(before, now)
        return found

    def summary(self) -> dict[str, object]:
        """Times are medians."""
        return {
            "steps": self.steps,
            "plans": self.plans,
            "tokens": self.tokens,
            "compared": "values" if self.with_values else "lengths",
            "differing": self.differing,
            "first_difference": self.first_difference or None,
            "recorded_us": median(self.recorded_us) if self.recorded_us else None,
            "replayed_us": median(self.replayed_us) if self.replayed_us else None,
        }


def _differing_ids(before: bytes, now: bytes) -> int:
    return int((np.frombuffer(before, "<i4") != np.frombuffer(now, "<i4")).sum())


def _differing_values(before: bytes, now: bytes) -> int:
    close = np.isclose(
        np.frombuffer(before, "<f4"), np.frombuffer(now, "<f4"), rtol=0, atol=LOGPROB_TOLERANCE, equal_nan=True
    )
    return int((~close).sum())
