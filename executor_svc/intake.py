"""Takes the plans of one session, in their order, into the resident batch."""

from executor_svc.applied_plan import NO_CHANGES, AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.decode_run import DecodeRun
from executor_svc.plan import read_plan
from executor_svc.step import Step
from paged.v1 import executor_pb2


class Intake:
    """Dies with its session."""

    def __init__(self, batch: ResidentBatch, session: int) -> None:
        self._batch = batch
        self._session = session
        self._last_rows = b""
        self._last_step: Step | None = None  # of a plan that the batch has applied
        self._run: DecodeRun | None = None

    def take(self, plan: executor_pb2.StepPlan) -> AppliedPlan:
        """Raises PlanViolation, and then nothing has changed."""
        run = self._run or self._begin_run(plan)
        if run is not None:
            if run.repeats(plan):
                self._run = run
                return AppliedPlan(NO_CHANGES, run.next_step(plan))
            run.settle()
            self._run = None
        applied = self._batch.apply(read_plan(plan), self._session)
        self._last_rows, self._last_step = plan.scheduled_rows, applied.step
        return applied

    def settle(self) -> None:
        """Have the batch know what has become of the rows; the next plan is looked at as if it were another's."""
        if self._run is not None:
            self._run.settle()
        self._run, self._last_step = None, None

    def prepare(self) -> None:
        """Do ahead what can be done before the next plan comes."""
        if self._run is not None:
            self._run.prepare()

    def _begin_run(self, plan: executor_pb2.StepPlan) -> DecodeRun | None:
        """If the plan names the rows of the one before, and these can go on decoding."""
        step = self._last_step
        if step is None or plan.mask_rows or plan.scheduled_rows != self._last_rows:
            return None
        if not DecodeRun.may_follow(self._batch, step):
            return None
        return DecodeRun(self._batch, self._session, step)
