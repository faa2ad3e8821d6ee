"""Runs one step: the row changes of each plan, then all scheduled tokens at once."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.step import Int32s, Runner, StepOutput
from executor_svc.step_builder import build_step

_NOTHING = StepOutput(np.empty(0, np.int32))
_T = TypeVar("_T")


class RunnerFailed(Exception):
    """The runner raised: KV memory is lost, and with it the epoch. The cause is chained."""


class Stepper:
    """The only caller of the runner. Every exception of the runner comes out as RunnerFailed."""

    def __init__(self, batch: ResidentBatch, runner: Runner) -> None:
        self._batch = batch
        self._runner = runner

    def run(self, plans: list[AppliedPlan]) -> StepOutput:
        """Plans of different sessions, applied to the batch already. Without work for the model no step is run."""
        return self._guarded(lambda: self._run(plans))

    def end_rows(self, rows: Int32s) -> None:
        if len(rows):
            self._guarded(lambda: self._runner.end_rows(rows))

    def reset(self) -> None:
        self._guarded(self._runner.reset)

    def _run(self, plans: list[AppliedPlan]) -> StepOutput:
        for plan in plans:
            if len(plan.fork_children):
                self._runner.fork_rows(plan.fork_parents, plan.fork_children, plan.fork_sampling)
            if len(plan.ended_rows):
                self._runner.end_rows(plan.ended_rows)
            if plan.starts:
                self._runner.start_rows(plan.starts)
        working = [plan for plan in plans if plan.needs_step]
        return self._runner.run(build_step(self._batch, working)) if working else _NOTHING

    def _guarded(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except Exception as error:
            raise RunnerFailed(f"{type(error).__name__} in the runner") from error
