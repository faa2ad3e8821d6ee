"""The rules for a plan's schedule, all at once: this is the hot path of every decode step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan import PlanViolation
from executor_svc.plan_checks import Limits
from executor_svc.step import Int32s


@dataclass(slots=True)
class Schedule:
    """Columns over the scheduled rows; `tokens` add up to no more than the lease has.

    A row computes positions `first` to `end` (exclusive) of the `exist` tokens that it has, `known` of them from its
    start on, in `slots` slots.
    """

    rows: Int32s
    tokens: Int32s
    samples: NDArray[np.bool_]
    foreign: NDArray[np.bool_]  # not in the session's lease
    repeated: NDArray[np.bool_]  # scheduled again further on
    dead: NDArray[np.bool_]
    first: Int32s
    end: Int32s
    known: Int32s
    exist: Int32s
    slots: Int32s

    def check(self, limits: Limits) -> None:
        """Raises PlanViolation for one of the rows that break a rule."""
        longest = limits.max_model_len
        broken = self.foreign | self.repeated | self.dead | (self.tokens < 1)
        broken |= (self.end > self.exist) | (self.end > self.slots)
        # A token that is sampled takes one more position.
        broken |= (self.samples & (self.end < self.exist)) | (self.exist + self.samples > longest)
        switch = limits.rope_switch_len
        if switch:
            broken |= (self.known <= switch) & (self.end > switch)
        if broken.any():
            self._refuse(int(broken.argmax()), longest, switch)

    def _refuse(self, at: int, longest: int, switch: int) -> None:
        row, tokens, end, exist = self.rows[at], self.tokens[at], self.end[at], self.exist[at]
        if self.foreign[at]:
            raise PlanViolation("scheduled_rows", f"id {row}", "is not in this session's lease")
        if self.repeated[at]:
            raise PlanViolation("scheduled_rows", f"row {row} twice", "may be there once")
        if self.dead[at]:
            raise PlanViolation("scheduled_rows", f"row {row}", "is not live")
        if tokens < 1:
            raise PlanViolation("scheduled_tokens", f"{tokens} for row {row}", "at least 1")
        if end < exist and self.samples[at]:
            found = f"row {row} samples at position {end - 1}"
            raise PlanViolation("scheduled_samples", found, f"{exist} tokens exist: only the last may sample")
        if switch and self.known[at] <= switch < end:
            found = f"{tokens} for row {row}, from position {self.first[at]}"
            limit = f"must end by {switch}: past that length keys change, and the row started with {self.known[at]} ids"
            raise PlanViolation("scheduled_tokens", found, limit)
        most = min(exist, self.slots[at], longest - self.samples[at])
        found = f"{tokens} for row {row}, from position {self.first[at]}"
        limit = f"must end by {most}: {exist} tokens exist, {self.slots[at]} slots, model's length {longest}"
        raise PlanViolation("scheduled_tokens", found, limit)
