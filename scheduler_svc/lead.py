"""How many plans are sent ahead of their results.

One fewer than the lease allows, two as a rule: a request that comes then waits for the step that is computed and the
one behind it. From a result to the plan after the next there is a step's time, though, and where steps take few
milliseconds and processors are few that is not always enough. So while the executor has lately had to wait for plans of
short steps there is one more. Before a long one a request would wait for too long.
"""

from collections import deque

from paged.v1 import executor_pb2 as pb

USUAL_PLANS = 2
SHORT_STEP_US = 8_000
LATE_SHARE = 1 / 8  # of a step's time, that the executor has had nothing to do before it
LATE_STEPS, WITHIN_S = 4, 2.0  # fewer are an accident
STAYS_S = 2.0


class Lead:
    """Of one session."""

    def __init__(self) -> None:
        self._first_step = -1  # the last one that was planned when no result was awaited
        self._late_at: deque[float] = deque(maxlen=LATE_STEPS)
        self._ends_at = 0.0

    def note_plan(self, step: int, num_in_flight: int) -> None:
        """`num_in_flight` others wait for their results."""
        if not num_in_flight:
            self._first_step = step

    def note_result(self, result: pb.StepResult, now: float) -> None:
        """`now` in seconds of one clock."""
        was_late = result.wait_us > LATE_SHARE * result.step_us and result.step_us <= SHORT_STEP_US
        if not was_late or result.step == self._first_step:  # before a first one there was nothing to compute
            return
        self._late_at.append(now)
        if len(self._late_at) == LATE_STEPS and now - self._late_at[0] <= WITHIN_S:
            self._ends_at = now + STAYS_S

    def num_plans(self, most: int, now: float, *, tokens_are_awaited: bool) -> int:
        """That may be in flight where a lease allows so many. `tokens_are_awaited`: some sequences are planned again
        only when their last token is known, as under a grammar. With more in flight they would get one less often."""
        has_one_more = now < self._ends_at and not tokens_are_awaited
        return most if has_one_more else max(most - 1, min(USUAL_PLANS, most))
