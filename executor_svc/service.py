"""The executor's loop: read what has come, have a step run with one plan of each session, answer.

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
from executor_svc.plan_checks import Limits
from executor_svc.process import leave_after
from executor_svc.recording import make_recorder
from executor_svc.router import Router, Sent
from executor_svc.sessions import Sessions
from executor_svc.settings import ExecutorSettings
from executor_svc.step_counts import StepCounts
from executor_svc.step_cycle import StepCycle
from executor_svc.stepper import RunnerFailed, Stepper
from executor_svc.tokenizer_sender import TokenizerSender
from executor_svc.turn_watch import TurnWatch
from paged.v1 import executor_pb2

if TYPE_CHECKING:
    from executor_svc.step_traces import StepTraces

MAX_EPOCHS_WITHOUT_STEP = 5  # more than a scheduler tries with one request
_MESSAGES_PER_TURN = 256
PROBE_S = 0.25  # longest wait for a message, too
LONG_GATHER_S = 0.001  # in which others may have the processor
LAST_WORDS_S = 5.0  # to write a recording, and to log, where the process must end
STEPS_OF_A_RECALL = 2  # besides those under way: the next plan returns what is asked for; and one to spare

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
        self._steps_of_a_recall = settings.plans_in_flight + STEPS_OF_A_RECALL
        self._clock = clock  # of silence and of what is overdue
        batch = ResidentBatch(ownership, limits)
        stepper = Stepper(batch, model.runner)
        self._recorder = make_recorder(settings, model, batch, ownership, self._identity)
        self._watch = TurnWatch(settings.step_timeout_s, self._on_stuck)
        self._sessions = Sessions(
            batch=batch,
            lender=Lender(ownership),
            stepper=stepper,
            plans_in_flight=settings.plans_in_flight,
            send=self._send,
            attached=self._attached,
            recorder=self._recorder,
            timeout_s=settings.session_timeout_s,
        )
        self._tokenizer = TokenizerSender(model.bundle, router)
        self._garbage = GarbageCount()
        self._gathering = Gathering()
        self._steps = StepCycle(
            batch=batch,
            sessions=self._sessions,
            stepper=stepper,
            recorder=self._recorder,
            gathering=self._gathering,
            clock=clock,
            worst_step_s=model.warm_up_ms / 1e3,
            traces=traces,
        )
        self._recall_timeout_s = settings.recall_timeout_s
        self._shutdown_grace_s = settings.shutdown_grace_s
        self._session_timeout_s = settings.session_timeout_s
        self._executor_id = secrets.token_hex(8)
        self._next_probe = 0.0

    @property
    def counts(self) -> StepCounts:
        return self._steps.counts

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
        self._watch.begin(self._steps.worst_step_s)
        try:
            self._steps.end()
            self._sessions.shut_down(self._clock())
        except RunnerFailed:
            _log.exception("runner_failed", epoch=self._sessions.epoch)
        finally:
            self._watch.end()
        _log.info("stopped")
        return 0

    def turn(self) -> bool:
        """Once around the loop: the step that is under way ends, or messages are waited for; a step begins; sessions
        are seen to. False if the runner cannot go on."""
        self._watch.begin(self._steps.worst_step_s)
        try:
            self._turn()
        except RunnerFailed as failure:
            _log.exception("runner_failed", epoch=self._sessions.epoch, reason=str(failure.__cause__ or failure))
            self._recorder.write(str(failure))
            return self._begin_new_epoch(str(failure))
        finally:
            self._watch.end()
        return True

    def _turn(self) -> None:
        if self._steps.is_under_way:
            self._steps.finish()
            self._steps.answer_the_late()
            if not self._sessions.all_have_plans():
                self._take_messages()
            self._steps.answer_who_may_wait()
        # Read before judging silence: after a long step, or a stop of the process, heartbeats wait in the socket.
        was_at_hand = self._sessions.have_plans()  # a plan, when the device had done all it had
        all_read = self._wait_for_messages()
        if self._sessions.have_plans():
            gathered = self._gather()
            self._steps.begin(self._steps.idle_since if was_at_hand and not gathered else time.perf_counter())
            all_read = self._take_messages()
        if self._tokenizer.busy():
            self._tokenizer.send_some()
        now = self._clock()
        if all_read and now >= self._next_probe:
            self._next_probe = now + PROBE_S
            self._sessions.probe(now, self._recall_timeout_s + self._steps_of_a_recall * self._steps.worst_step_s)
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

    def _on_stuck(self, spent_s: float) -> None:
        """On the thread that watches: the service's does not come back."""
        event, what = (
            ("step_stuck", "step") if self._steps.is_in_runner else ("turn_stuck", "turn of the loop, not its step,")
        )

        def last_words() -> None:
            _log.error(event, seconds=round(spent_s, 1), epoch=self._sessions.epoch)
            self._recorder.write(f"a {what} has not ended in {spent_s:.1f} s", wait=True)

        leave_after(last_words, 1, LAST_WORDS_S)

    def _begin_new_epoch(self, reason: str) -> bool:
        """False where the runner has failed too often, or cannot begin anew."""
        self._steps.abandon()
        try:
            self._sessions.end_epoch(reason, self._clock())
        except RunnerFailed as failure:
            _log.error("runner_cannot_reset", reason=str(failure.__cause__ or failure))
            return False
        if self._steps.epochs_without_step >= MAX_EPOCHS_WITHOUT_STEP:
            _log.error("giving_up", epochs_without_step=self._steps.epochs_without_step)
            return False
        return True

    def _identity(self) -> tuple[str, int]:
        return self._executor_id, self._sessions.epoch

    def _attached(self) -> executor_pb2.Attached:
        return executor_pb2.Attached(
            executor_id=self._executor_id,
            model=self._model.facts,
            tokenizer_hash=self._tokenizer.bundle_hash,
            worst_step_ms=max(1, round(self._steps.worst_step_s * 1e3)),
            session_timeout_ms=max(1, round(self._session_timeout_s * 1e3)),
        )

    def _send(self, peer: bytes, message: executor_pb2.ToScheduler) -> Sent:
        return self._router.send(peer, message.SerializeToString())
