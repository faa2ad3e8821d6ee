"""The executor's loop: read what has come, run a step with one plan of each session, answer.

One thread and one socket. Only `_turn` waits for messages, where there is nothing to do, and `_gather` for a moment.
"""

import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import structlog
from google.protobuf.message import DecodeError

from executor_svc.batch import ResidentBatch
from executor_svc.garbage import GarbageCount
from executor_svc.gathering import Gathering
from executor_svc.leases import Ownership
from executor_svc.lending import Lender
from executor_svc.loaded import LoadedModel
from executor_svc.plan import PlanViolation
from executor_svc.plan_checks import Limits
from executor_svc.process import leave_after
from executor_svc.recording import Taken, make_recorder
from executor_svc.results import fill_results
from executor_svc.router import Router, Sent
from executor_svc.sessions import Session, Sessions
from executor_svc.settings import ExecutorSettings
from executor_svc.step_counts import StepCounts
from executor_svc.stepper import RunnerFailed, Stepper
from executor_svc.tokenizer_sender import TokenizerSender
from executor_svc.turn_watch import TurnWatch
from paged.v1 import executor_pb2

if TYPE_CHECKING:
    from executor_svc.step_traces import StepTraces

MAX_EPOCHS_WITHOUT_STEP = 5  # more than a scheduler tries with one request
_MESSAGES_PER_TURN = 256
ANNOUNCE_S = 0.005  # for a message to leave the process before a step that may be its last one
PROBE_S = 0.25  # longest wait for a message, too
LONG_GATHER_S = 0.001  # in which others may have the processor
LAST_WORDS_S = 5.0  # to write a recording, and to log, where the process must end
STEPS_OF_A_RECALL = 4  # two plans were under way, the next returns what is asked for; and one to spare

_log = structlog.get_logger()


class StopFlag(Protocol):
    """Whether the process has been asked to stop."""

    requested: bool


class Service:
    """Serves one loaded model on one socket until it is stopped, or the model fails for good."""

    def __init__(
        self,
        settings: ExecutorSettings,
        model: LoadedModel,
        router: Router,
        stop: StopFlag,
        clock: Callable[[], float] = time.monotonic,
        traces: "StepTraces | None" = None,
    ) -> None:
        ownership = Ownership(settings.max_rows, model.num_blocks, settings.tokens_per_step)
        limits = Limits(
            model.facts.vocab_size, model.facts.max_model_len, model.facts.block_size, model.facts.rope_switch_len
        )
        self.ownership = ownership  # for reading
        self._model = model
        self._router = router
        self._stop = stop
        self._clock = clock  # of silence and of what is overdue
        self._batch = ResidentBatch(ownership, limits)
        self._stepper = Stepper(self._batch, model.runner)
        self._recorder = make_recorder(settings, model, self._batch, ownership, self._identity)
        self._watch = TurnWatch(settings.step_timeout_s, self._on_stuck)
        self._is_in_step = False
        self._sessions = Sessions(
            batch=self._batch,
            lender=Lender(ownership),
            stepper=self._stepper,
            plans_in_flight=settings.plans_in_flight,
            send=self._send,
            attached=self._attached,
            recorder=self._recorder,
            timeout_s=settings.session_timeout_s,
        )
        self._tokenizer = TokenizerSender(model.bundle, router)
        self._traces = traces
        self._garbage = GarbageCount()
        self._gathering = Gathering()
        self._recall_timeout_s = settings.recall_timeout_s
        self._shutdown_grace_s = settings.shutdown_grace_s
        self._session_timeout_s = settings.session_timeout_s
        self._executor_id = secrets.token_hex(8)
        self._worst_step_s = model.warm_up_ms / 1e3
        self._epochs_without_step = 0
        self._next_probe = 0.0
        self._idle_since = time.perf_counter()
        self.counts = StepCounts()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        """Schedulers that wait for a first lease."""
        return self._sessions.num_waiting

    def run(self) -> int:
        """Returns the process's exit code: 0 when asked to stop, 1 when the runner cannot go on. Ends the process where
        a turn does not end."""
        self._watch.start()
        try:
            return self._run()
        finally:
            self._recorder.finish(LAST_WORDS_S)

    def _run(self) -> int:
        while not self._stop.requested:
            if not self.turn():
                return 1
        _log.info("stopping", sessions=len(self._sessions))
        self._sessions.leave(self._shutdown_grace_s)
        end = self._clock() + self._shutdown_grace_s
        while len(self._sessions) and self._clock() < end:
            if not self.turn():
                return 1
        self._watch.begin(self._worst_step_s)
        try:
            self._sessions.shut_down(self._clock())
        except RunnerFailed:
            _log.exception("runner_failed", epoch=self._sessions.epoch)
        finally:
            self._watch.end()
        _log.info("stopped")
        return 0

    def turn(self) -> bool:
        """Once around the loop: wait for messages, run a step, see to sessions. False if the runner cannot go on."""
        self._watch.begin(self._worst_step_s)
        try:
            self._turn()
        except RunnerFailed as failure:
            self._is_in_step = False
            _log.exception("runner_failed", epoch=self._sessions.epoch, reason=str(failure.__cause__ or failure))
            self._recorder.write(str(failure))
            return self._begin_new_epoch(str(failure))
        finally:
            self._watch.end()
        return True

    def _turn(self) -> None:
        # Read before judging silence: after a long step, or a stop of the process, heartbeats wait in the socket.
        was_at_hand = self._sessions.have_plans()  # a plan, when the last step's result was sent
        all_read = self._wait_for_messages()
        if self._sessions.have_plans():
            gathered = self._gather()
            self._step(self._idle_since if was_at_hand and not gathered else time.perf_counter())
            all_read = self._take_messages()
        if self._tokenizer.busy():
            self._tokenizer.send_some()
        now = self._clock()
        if all_read and now >= self._next_probe:
            self._next_probe = now + PROBE_S
            self._sessions.probe(now, self._recall_timeout_s + STEPS_OF_A_RECALL * self._worst_step_s)
        self._sessions.rebalance(now)

    def _wait_for_messages(self) -> bool:
        """Take a message, waiting for it where there is nothing else to do; and the others that have come, unless every
        session's plan is at hand: then the next step is not kept waiting. Returns whether none is left."""
        busy = self._sessions.have_plans() or self._tokenizer.busy()
        received = self._router.receive(wait=not busy)
        if received is None:
            return True
        self._handle(*received, self._clock())
        return not self._sessions.all_have_plans() and self._take_messages()

    def _gather(self) -> bool:
        """Wait a moment for the plans of sessions that take part in the steps. Returns whether any was waited for."""
        missing = self._sessions.without_plans()
        allowance_s = self._gathering.allowance_s(missing) if missing else 0.0
        if not allowance_s:
            return False
        begin = now = time.perf_counter()
        while now - begin < allowance_s:
            received = self._router.receive(wait=False)
            if received is not None:
                self._handle(*received, self._clock())
                if not self._gathering.allowance_s(self._sessions.without_plans()):
                    break
            elif allowance_s > LONG_GATHER_S:
                time.sleep(LONG_GATHER_S / 10)
            now = time.perf_counter()
        self._gathering.note_wait(time.perf_counter() - begin)
        return True

    def _take_messages(self) -> bool:
        """Handle the messages that have come. Returns whether none is left."""
        now = self._clock()
        for _ in range(_MESSAGES_PER_TURN):
            received = self._router.receive(wait=False)
            if received is None:
                return True
            self._handle(*received, now)
        return False

    def _handle(self, peer: bytes, payload: bytes | None, now: float) -> None:
        try:
            message = executor_pb2.ToExecutor.FromString(payload or b"")
        except DecodeError:
            self._garbage.drop(peer, len(payload or b""), now)
            return
        kind = message.WhichOneof("message")
        if kind == "plan":
            self._sessions.receive(peer, message.plan, now)
        elif kind == "attach":
            self._attach(peer, message.attach, now)
        elif kind == "detach":
            self._sessions.detach(peer, message.detach, now)
        elif kind == "get_tokenizer":
            if not self._tokenizer.ask(peer):
                reason = "too many schedulers are being sent the tokenizer; ask again"
                fault = executor_pb2.Fault(scope=executor_pb2.Fault.SCOPE_SESSION, reason=reason)
                self._send(peer, executor_pb2.ToScheduler(fault=fault))
        else:
            self._garbage.drop(peer, None if payload is None else len(payload), now)

    def _attach(self, peer: bytes, request: executor_pb2.Attach, now: float) -> None:
        if self._executor_id in request.attached_executors:
            reason = f"executor {self._executor_id} is attached already, by another address"
            fault = executor_pb2.Fault(scope=executor_pb2.Fault.SCOPE_REFUSED, reason=reason)
            self._send(peer, executor_pb2.ToScheduler(fault=fault))
            return
        self._sessions.attach(peer, request, now)

    def _step(self, begin: float) -> None:
        """`begin` is when nothing was waited for any more."""
        self._recorder.before_step(self._sessions.settle)
        issued = self._issue_all()
        if not issued:
            self._idle_since = time.perf_counter()
            return
        plans = [taken.applied for _, taken in issued]
        self._recorder.begin([taken for _, taken in issued])
        self._is_in_step = True
        taken_in_at = time.perf_counter()
        output = self._stepper.run(plans)
        computed_at = time.perf_counter()
        self._is_in_step = False
        messages = [executor_pb2.ToScheduler() for _ in plans]
        results = [message.result for message in messages]
        fill_results(self._batch, plans, output, results)
        self._recorder.end(output, results)
        took_s = time.perf_counter() - begin
        wait_us = _micros(begin - self._idle_since)
        computed = [session.number for session, taken in issued if taken.applied.needs_step]
        if computed:
            self._gathering.note_step(computed, took_s)
        self._sessions.rebalance(self._clock())
        for (session, _), message in zip(issued, messages, strict=True):
            self._answer(session, message, step_us=_micros(took_s), wait_us=wait_us)
        if computed:
            self._worst_step_s = max(self._worst_step_s, took_s)
            self._epochs_without_step = 0
        self.counts.note_step(plans, begin, taken_in_at, computed_at, time.perf_counter(), self._idle_since)
        if self._traces is not None:
            told = [(session.number, taken.plan) for session, taken in issued]
            self._traces.note_step(told, begin, taken_in_at, computed_at, time.perf_counter())
        for session, _ in issued:
            session.intake.prepare()
        self._idle_since = time.perf_counter()

    def _issue_all(self) -> list[tuple[Session, Taken]]:
        """One plan of each session that has any, or an exclusive one alone."""
        issued: list[tuple[Session, Taken]] = []
        for session in self._sessions.for_next_step():
            plan = session.plans.popleft()
            taken = self._issue(session, plan)
            if taken is not None:
                issued.append((session, taken))
                if plan.exclusive:
                    self._announce(session)
                    break
        return issued

    def _issue(self, session: Session, plan: executor_pb2.StepPlan) -> Taken | None:
        """Take the plan into the batch; None where it broke a rule, and the session is over."""
        try:
            applied = session.intake.take(plan)
            self._sessions.note_lease(session, plan, self._clock())
        except PlanViolation as violation:
            self._recorder.refused(plan, str(violation))
            self._sessions.end(session, str(violation), self._clock(), step=plan.step)
            return None
        except Exception as error:  # noqa: BLE001 - a plan must not be able to end more than its session
            _log.exception("plan_not_taken", session=session.number)
            self._recorder.refused(plan, type(error).__name__)
            self._sessions.end(session, f"{type(error).__name__} over the plan", self._clock(), step=plan.step)
            return None
        session.issued_step = plan.step
        return Taken(session.number, plan, applied)

    def _announce(self, session: Session) -> None:
        """If the step that follows takes the process down, the scheduler knows whose it was."""
        begun = executor_pb2.Begun(epoch=self._sessions.epoch, session=session.number, step=session.issued_step)
        self._send(session.peer, executor_pb2.ToScheduler(begun=begun))
        time.sleep(ANNOUNCE_S)

    def _answer(self, session: Session, message: executor_pb2.ToScheduler, *, step_us: int, wait_us: int) -> None:
        result = message.result
        result.step_us, result.wait_us = step_us, wait_us
        result.epoch = self._sessions.epoch
        result.session = session.number
        result.step = session.issued_step
        sent = self._send(session.peer, message)
        now = self._clock()
        session.last_heard = now  # while it waited for this result it had no reason to speak
        if sent is not Sent.QUEUED:
            self._sessions.end(session, sent.value, now, tell=False)

    def _on_stuck(self, spent_s: float) -> None:
        """On the thread that watches: the service's does not come back."""
        event, what = ("step_stuck", "step") if self._is_in_step else ("turn_stuck", "turn of the loop, not its step,")

        def last_words() -> None:
            _log.error(event, seconds=round(spent_s, 1), epoch=self._sessions.epoch)
            self._recorder.write(f"a {what} has not ended in {spent_s:.1f} s", wait=True)

        leave_after(last_words, 1, LAST_WORDS_S)

    def _begin_new_epoch(self, reason: str) -> bool:
        """False where the runner has failed too often, or cannot begin anew."""
        self._epochs_without_step += 1
        self.counts.runner_failures += 1
        try:
            self._sessions.end_epoch(reason, self._clock())
        except RunnerFailed as failure:
            _log.error("runner_cannot_reset", reason=str(failure.__cause__ or failure))
            return False
        if self._epochs_without_step >= MAX_EPOCHS_WITHOUT_STEP:
            _log.error("giving_up", epochs_without_step=self._epochs_without_step)
            return False
        return True

    def _identity(self) -> tuple[str, int]:
        return self._executor_id, self._sessions.epoch

    def _attached(self) -> executor_pb2.Attached:
        return executor_pb2.Attached(
            executor_id=self._executor_id,
            model=self._model.facts,
            tokenizer_hash=self._tokenizer.bundle_hash,
            worst_step_ms=max(1, round(self._worst_step_s * 1e3)),
            session_timeout_ms=max(1, round(self._session_timeout_s * 1e3)),
        )

    def _send(self, peer: bytes, message: executor_pb2.ToScheduler) -> Sent:
        return self._router.send(peer, message.SerializeToString())


def _micros(seconds: float) -> int:
    return min(int(seconds * 1e6), 0xFFFFFFFF)
