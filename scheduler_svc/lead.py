"""How many plans are sent ahead of their results.

Two, as a rule: a request that comes then waits for the step that is computed and the one behind it. From a result to
the plan after the next there is a step's time, though, and where steps take few milliseconds and processors are few
that is not always enough. So while the executor has lately had to wait for the plan of a short step, there are as many
ahead as the lease allows. Of long ones there are never more than two: one more would have a request wait for long.
"""

from paged.v1 import executor_pb2 as pb

USUAL_PLANS = 2
SHORT_STEP_US = 8_000
LATE_SHARE = 1 / 8  # of a step's time, that the executor has had nothing to do before it
STAYS_S = 2.0  # since a plan was late


class Lead:
    """Of one session."""

    def __init__(self) -> None:
        self._first_step = -1  # the last one that was planned when no result was awaited
        self._ends_at = 0.0

    def note_plan(self, step: int, num_in_flight: int) -> None:
        """`num_in_flight` others wait for their results."""
        if not num_in_flight:
            self._first_step = step

    def note_result(self, result: pb.StepResult, now: float) -> None:
        """`now` in seconds of one clock."""
        was_late = result.wait_us > LATE_SHARE * result.step_us and result.step_us <= SHORT_STEP_US
        if was_late and result.step != self._first_step:  # before a first one there was nothing to compute
            self._ends_at = now + STAYS_S

    def num_plans(self, most: int, now: float, *, tokens_are_awaited: bool) -> int:
        """That may be in flight where a lease allows so many. `tokens_are_awaited`: some sequences are planned again
        only when their last token is known, as under a grammar. With more in flight they would get one less often."""
        return most if now < self._ends_at and not tokens_are_awaited else min(USUAL_PLANS, most)
