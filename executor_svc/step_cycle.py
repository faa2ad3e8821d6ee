"""The life of a step: plans are taken in, their step is launched, its outcome is waited for, results leave.

There is one step at a time. Where the device computes by itself, the next one begins as soon as its plans have been
taken in, and the results of the last leave meanwhile:

    device   ── step N ──┐            ┌── step N+1 ───────────────────┐            ┌── N+2 ─
    host     ············│ take in N+1│ results of N, messages ·······│ take in N+2│ results of N+1

Whoever has no plan at hand gets its result before that, since it may wait for it; and so does whoever had none at the
end of one of the last steps. With two plans in flight a scheduler has a step's time for its next one if it hears of a
step when the next has begun, and more if it hears of it at once. Where the host computes, all results leave at once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import structlog

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.gathering import Gathering
from executor_svc.plan import PlanViolation
from executor_svc.recording import Recorder, Taken
from executor_svc.results import asked_logprobs, fill_results
from executor_svc.session import Session
from executor_svc.sessions import Sessions
from executor_svc.step import Int32s
from executor_svc.step_counts import StepCounts
from executor_svc.stepper import LaunchedPlans, Stepper
from paged.v1 import executor_pb2

if TYPE_CHECKING:
    from executor_svc.step_traces import StepTraces

STEPS_IN_TIME = 32  # in a row, until results may be held
ANNOUNCE_S = 0.005  # for a message to leave the process before a step that may be its last one

_T = TypeVar("_T")
_log = structlog.get_logger()


@dataclass(slots=True)
class _Step:
    """Moments are of `time.perf_counter()`: since when the device had nothing to do, when nothing was waited for any
    more, when plans were taken in, and when the outcome was there."""

    issued: list[tuple[Session, Taken]]
    asked: list[Int32s]
    launched: LaunchedPlans
    idle_since: float
    begin: float
    taken_in: float
    computed: float = 0.0

    @property
    def plans(self) -> list[AppliedPlan]:
        return [taken.applied for _, taken in self.issued]

    @property
    def is_exclusive(self) -> bool:
        return self.issued[0][1].plan.exclusive


class StepCycle:
    """`begin` a step, `finish` it if it is still under way then, `answer`."""

    def __init__(
        self,
        *,
        batch: ResidentBatch,
        sessions: Sessions,
        stepper: Stepper,
        recorder: Recorder,
        gathering: Gathering,
        clock: Callable[[], float],
        worst_step_s: float,
        traces: "StepTraces | None",
    ) -> None:
        self._batch = batch
        self._sessions = sessions
        self._stepper = stepper
        self._recorder = recorder
        self._gathering = gathering
        self._clock = clock
        self._traces = traces
        self._launched: _Step | None = None
        self._finished: _Step | None = None  # whose results wait
        self.idle_since = time.perf_counter()  # the device has had nothing to do, nor the host for it
        self.worst_step_s = worst_step_s
        self.epochs_without_step = 0
        self.is_in_runner = False
        self.counts = StepCounts()

    @property
    def is_under_way(self) -> bool:
        """Whether the device computes."""
        return self._launched is not None

    def begin(self, begin: float) -> None:
        """Take in a plan of each session that has any, and launch their step; `begin` is when nothing was waited for
        any more. Raises RunnerFailed."""
        if self._sessions.have_exclusive_plans():
            self.answer()  # the next step may be the last thing that this process does
            begin = max(begin, self.idle_since)
        self._recorder.before_step(self._sessions.settle)
        issued = self._issue_all()
        if issued:
            self._launch(issued, begin)
        self.answer()
        if self._launched is None:
            self.idle_since = time.perf_counter()
        elif not self._launched.launched.overlaps:
            self.end()
        for session, _ in issued:
            session.intake.prepare()

    def finish(self) -> None:
        """Wait for the step that is under way; its results are the sessions' then. Raises RunnerFailed."""
        step = self._launched
        if step is None:
            return
        output = self._in_runner(step.launched.result)
        self._launched, self._finished = None, step
        step.computed = time.perf_counter()
        messages = [executor_pb2.ToScheduler() for _ in step.issued]
        results = [message.result for message in messages]
        fill_results(step.plans, step.asked, output, results)
        self._recorder.end(output, results)
        took_s = time.perf_counter() - step.begin
        for (session, taken), message in zip(step.issued, messages, strict=True):
            if session in self._sessions:
                self._complete(message.result, taken, took_s, step.begin - step.idle_since)
                session.result = message
        computed = [session.number for session, taken in step.issued if taken.applied.needs_step]
        if computed:
            self._gathering.note_step(computed, took_s)
            self.worst_step_s = max(self.worst_step_s, took_s)
            self.epochs_without_step = 0
        self.idle_since = time.perf_counter()

    def answer_the_late(self) -> None:
        """When a step has ended: those whose plans have not come in time lately. Raises RunnerFailed."""
        late = [session for session in self._answered() if session.num_in_time < STEPS_IN_TIME]
        if late:
            self._answer_some(late)
            self.idle_since = time.perf_counter()

    def answer_who_may_wait(self) -> None:
        """Before the next step is begun, once the messages have been read that had come before this one ended: those
        who have no plan at hand. Raises RunnerFailed."""
        answered = self._answered()
        waiting = [session for session in answered if not session.plans]
        for session in answered:
            session.num_in_time = session.num_in_time + 1 if session.plans else 0
        if self._finished is not None and (self._finished.is_exclusive or not self._sessions.have_plans()):
            self.answer()
        elif waiting:
            self._answer_some(waiting)

    def answer(self) -> None:
        """Results that wait leave. Raises RunnerFailed."""
        step = self._finished
        if step is None:
            return
        self._answer_some(self._answered())
        self._finished = None
        if self._launched is None:
            self.idle_since = time.perf_counter()
        self._note(step)

    def end(self) -> None:
        """Finish and answer, with no step to follow. Raises RunnerFailed."""
        self.finish()
        self.answer()

    def abandon(self) -> None:
        """The runner has failed: nothing is under way."""
        self.epochs_without_step += 1
        self.counts.runner_failures += 1
        if self._finished is not None:
            self._note(self._finished)
        self._launched = self._finished = None

    def _answered(self) -> list[Session]:
        """Those whose step has ended."""
        return [] if self._finished is None else [session for session, _ in self._finished.issued]

    def _answer_some(self, sessions: list[Session]) -> None:
        self._sessions.rebalance(self._clock())  # what is granted is known when the next plan is made
        for session in sessions:
            self._sessions.answer(session, self._clock())

    def _launch(self, issued: list[tuple[Session, Taken]], begin: float) -> None:
        self._recorder.begin([taken for _, taken in issued])
        plans = [taken.applied for _, taken in issued]
        taken_in_at = time.perf_counter()
        launched = self._in_runner(lambda: self._stepper.launch(plans))
        asked = asked_logprobs(self._batch, plans)
        self._launched = _Step(issued, asked, launched, self.idle_since, begin, taken_in_at)

    def _issue_all(self) -> list[tuple[Session, Taken]]:
        """One plan of each session that has any, or an exclusive one alone."""
        issued: list[tuple[Session, Taken]] = []
        for session in self._sessions.for_next_step():
            plan = session.plans.popleft()
            taken = self._issue(session, plan)
            if taken is not None:
                issued.append((session, taken))
                if plan.exclusive:
                    self._sessions.announce(session)
                    time.sleep(ANNOUNCE_S)
                    break
        return issued

    def _issue(self, session: Session, plan: executor_pb2.StepPlan) -> Taken | None:
        """Take the plan into the batch; None where it broke a rule, and the session is over."""
        now = self._clock()
        try:
            applied = session.intake.take(plan)
            self._sessions.note_lease(session, plan, now)
        except PlanViolation as violation:
            self._recorder.refused(plan, str(violation))
            self._sessions.end(session, str(violation), now, step=plan.step)
            return None
        except Exception as error:  # noqa: BLE001 - a plan must not be able to end more than its session
            _log.exception("plan_not_taken", session=session.number)
            self._recorder.refused(plan, type(error).__name__)
            self._sessions.end(session, f"{type(error).__name__} over the plan", now, step=plan.step)
            return None
        session.issued_step = plan.step
        session.last_heard = now  # it waits for the result, and has no reason to speak
        return Taken(session.number, plan, applied)

    def _complete(self, result: executor_pb2.StepResult, taken: Taken, took_s: float, waited_s: float) -> None:
        result.step_us, result.wait_us = _micros(took_s), _micros(waited_s)
        result.epoch = self._sessions.epoch
        result.session = taken.session
        result.step = taken.plan.step

    def _note(self, step: _Step) -> None:
        """That it is over, and that its results have left."""
        self.counts.note_step(step.plans, step.begin, step.taken_in, step.computed, self.idle_since, step.idle_since)
        if self._traces is not None:
            told = [(session.number, taken.plan) for session, taken in step.issued]
            self._traces.note_step(told, step.begin, step.taken_in, step.computed, time.perf_counter())

    def _in_runner(self, call: Callable[[], _T]) -> _T:
        self.is_in_runner = True
        try:
            return call()
        finally:
            self.is_in_runner = False


def _micros(seconds: float) -> int:
    return min(int(seconds * 1e6), 0xFFFFFFFF)
