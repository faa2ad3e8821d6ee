"""A step of the simulated device: it has an effect when it must have one, and its result at its time."""

import time
from collections.abc import Callable

from executor_svc.step import StepOutput


class LaunchedStep:
    """`compute` is called once: before the result, or before anything that is asked of the device meanwhile."""

    def __init__(self, compute: Callable[[], StepOutput], end: float) -> None:
        """`end` is of `time.perf_counter()`; no result is there before it."""
        self._compute = compute
        self._end = end
        self._output: StepOutput | None = None

    def compute(self) -> StepOutput:
        if self._output is None:
            self._output = self._compute()
        return self._output

    def result(self) -> StepOutput:
        output = self.compute()
        _wait_until(self._end)
        return output


def _wait_until(moment: float) -> None:
    """Sleep up to a moment of perf_counter; the last stretch, at most a fifth of a millisecond, is waited out awake."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 2e-4:
            time.sleep(left - 1e-4)
