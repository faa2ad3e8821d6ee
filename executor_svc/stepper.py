"""Runs one step: the row changes of each plan, then all scheduled tokens at once."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from executor_svc.applied_plan import AppliedPlan, Forks
from executor_svc.batch import ResidentBatch
from executor_svc.step import Int32s, PendingStep, Runner, StepOutput
from executor_svc.step_builder import merge_steps

_NOTHING = StepOutput(np.empty(0, np.int32))
_T = TypeVar("_T")


class RunnerFailed(Exception):
    """The runner raised: KV memory is lost, and with it the epoch. The cause is chained."""


class LaunchedPlans:
    """The step of some plans. `overlaps`: the device computes it by itself."""

    def __init__(self, pending: PendingStep | None, *, overlaps: bool) -> None:
        self._pending = pending
        self.overlaps = overlaps and pending is not None

    def result(self) -> StepOutput:
        """Wait for it; once. Raises RunnerFailed."""
        return _NOTHING if self._pending is None else _guarded(self._pending.result)


class Stepper:
    """The only caller of the runner. Every exception of the runner comes out as RunnerFailed."""

    def __init__(self, batch: ResidentBatch, runner: Runner) -> None:
        self._batch = batch
        self._runner = runner

    def launch(self, plans: list[AppliedPlan]) -> LaunchedPlans:
        """Plans of different sessions, applied to the batch already. Without work for the model no step is run."""
        return LaunchedPlans(_guarded(lambda: self._launch(plans)), overlaps=self._runner.overlaps)

    def run(self, plans: list[AppliedPlan]) -> StepOutput:
        """Launch them and wait for what comes of it."""
        return self.launch(plans).result()

    def end_rows(self, rows: Int32s) -> None:
        if len(rows):
            _guarded(lambda: self._runner.end_rows(rows))

    def reset(self) -> None:
        _guarded(self._runner.reset)

    def _launch(self, plans: list[AppliedPlan]) -> PendingStep | None:
        for plan in plans:
            changes = plan.changes
            self._fork(changes.forks)
            if len(changes.ended):
                self._runner.end_rows(changes.ended)
            if changes.starts:
                self._runner.start_rows(changes.starts)
            self._fork(changes.joined)
        steps = [plan.step for plan in plans if plan.needs_step]
        return self._runner.launch(merge_steps(steps)) if steps else None

    def _fork(self, forks: Forks) -> None:
        if len(forks.children):
            self._runner.fork_rows(forks.parents, forks.children, forks.sampling, forks.tokens)


def _guarded(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except Exception as error:
        raise RunnerFailed(f"{type(error).__name__} in the runner") from error
