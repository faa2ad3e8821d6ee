"""Keeps the core and one executor together: attach, plan while there is room, apply, and begin anew after a loss."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import structlog
import zmq

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.audit import AuditFailure, audit_idle
from scheduler_svc.core.beams import MissingCandidates
from scheduler_svc.core.plan import Lease, Plan
from scheduler_svc.core.results import Applied, ResultMismatch
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.lead import Lead
from scheduler_svc.link.codec import MalformedMessage, decode_lease_change, decode_result
from scheduler_svc.link.session import ExecutorSession, LinkOptions, SessionLost
from scheduler_svc.step_counts import StepCounts

MIN_PAUSE_S = 0.05  # between a loss and the next attempt; doubled with each loss without a token between
MAX_PAUSE_S = 5.0
FIRST_REMINDER_S = 2.0
REMINDER_S = 30.0
# A plan is held back for so long at most, and looked at again so often, while answers are late.
MAX_HOLD_S = 0.05
HOLD_S = 0.002
MIN_BEAT_S = 0.02  # whatever an executor says of its patience
LEFT = "nothing is left for it to do"

log = structlog.get_logger()


class Listener(Protocol):
    """What drivers tell, on the event loop."""

    def attached_executors(self) -> list[str]:
        """Ids of the executors that have a session with any driver."""

    def on_session(self, driver: "Driver", attached: pb.Attached) -> None:
        """A session has begun. Raises SessionLost if it must not be used."""

    async def on_attached(self, driver: "Driver", session: ExecutorSession, hopeless: list[Sequence]) -> None:
        """Plans go on from now; `hopeless` have ended because they can never fit the lease. Raises SessionLost if the
        executor cannot be worked with."""

    def on_plan(self) -> None:
        """A plan is about to be made."""

    def is_late(self) -> bool:
        """Whether answers leave so late that the next plan had better be made later."""

    def on_tokens(self, applied: Applied) -> None:
        """A result was taken in, and the next plan is made right after this."""

    def on_applied(self, applied: Applied) -> None:
        """A result was taken in, and the next plan has been sent."""

    def on_lost(self, driver: "Driver", ran: list[Sequence], *, alone: bool) -> None:
        """The session is over; `ran` wait to be computed anew. `alone`: the executor was lost in the step of an
        exclusive plan, as far as is known."""


@dataclass(frozen=True, slots=True)
class LossLimit:
    """After `most` losses of an executor within `window_s` it is left alone until there were fewer."""

    most: int
    window_s: float


DEFAULT_LOSS_LIMIT = LossLimit(20, 60.0)


class Driver:
    """Owns the session. `run` until cancelled; `wake` after each submit or cancel. `scheduler` is the core's side of
    it."""

    def __init__(
        self,
        scheduler: Scheduler,
        options: LinkOptions,
        idle_plan_s: float,
        listener: Listener,
        loss_limit: LossLimit = DEFAULT_LOSS_LIMIT,
    ) -> None:
        self.scheduler = scheduler
        self.endpoint = options.endpoint
        self.is_found = True  # whether its address is still one of an executor
        self.attached: pb.Attached | None = None  # what the executor has said last, kept when it is lost
        self.lease: Lease | None = None  # of the last session, at its begin; kept, too
        self._options = options
        self._idle_plan_s = idle_plan_s
        self._listener = listener
        self._session: ExecutorSession | None = None
        self._lead = Lead()
        self._wake_scheduled = False
        self._held: asyncio.TimerHandle | None = None  # for a plan that is held back
        self._was_busy = False
        self._moved_on = False  # whether any sequence got a token in this session
        self._last_failure = ""
        self._loss_limit = loss_limit
        self._last_losses: deque[float] = deque(maxlen=loss_limit.most)  # when they were
        self.num_losses = 0
        self.fastest_step_us: int | None = None  # of those that gave a token
        self.num_steps = self.step_us = self.wait_us = 0  # as results tell of them
        self.counts = StepCounts()
        self.num_sessions = 0
        self.lost_at: float | None = time.monotonic()  # None while a session is going on

    @property
    def is_attached(self) -> bool:
        return self._session is not None

    @property
    def is_leaving(self) -> bool:
        """Whether its executor has been told to stop, and goes on only for what it computes already."""
        return self._session is not None and self._session.is_leaving

    @property
    def is_stalled(self) -> bool:
        """Whether its executor has given no result for suspiciously long."""
        return self._session is not None and self._session.is_stalled

    def leave(self) -> bool:
        """End the session with an executor that is leaving, unless it computes something still. Returns whether."""
        session, state = self._session, self.scheduler.state
        if session is None or state.num_running or state.in_flight or len(state.queue):
            return False
        session.say_goodbye()
        session.end(LEFT)
        return True

    @property
    def lost_s(self) -> float:
        """How long it has had no session."""
        return 0.0 if self.lost_at is None else time.monotonic() - self.lost_at

    async def run(self, context: zmq.Context) -> None:
        pause_s = MIN_PAUSE_S
        while True:
            reason = await self._one_session(context)
            pause_s = MIN_PAUSE_S if self._moved_on else min(2 * pause_s, MAX_PAUSE_S)
            self._moved_on = False
            await asyncio.sleep(max(MAX_PAUSE_S if reason.refused else pause_s, self._barred_s()))

    def _barred_s(self) -> float:
        """For how long another session must not begin: an executor that is lost again and again is nobody's help."""
        limit, losses = self._loss_limit, self._last_losses
        left_s = losses[0] + limit.window_s - time.monotonic() if len(losses) == limit.most else 0.0
        if left_s <= 0:
            return 0.0
        log.error("executor_barred", endpoint=self.endpoint, losses=limit.most, seconds=round(left_s, 1))
        return left_s

    def wake(self) -> None:
        """Plan soon, if there is room. Any number of calls in one turn of the event loop cost one."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            asyncio.get_running_loop().call_soon(self._on_wake)

    async def _one_session(self, context: zmq.Context) -> SessionLost:
        """Attach, and serve until the session ends; returns why."""
        try:
            session = ExecutorSession(context, self._options)
        except SessionLost as reason:
            self._note_failure(reason)
            return reason
        reminder = asyncio.create_task(self._remind())
        try:
            attached, lease = await session.attach(self._listener.attached_executors())
            self._listener.on_session(self, attached)
        except SessionLost as reason:
            self._note_failure(reason)
            session.say_goodbye()
            session.close()
            return reason
        except asyncio.CancelledError:
            session.close()
            raise
        finally:
            reminder.cancel()
        return await self._serve(session, attached, lease)

    def _note_failure(self, reason: SessionLost) -> None:
        """Once, as long as it stays the same: another try is made every few seconds."""
        if str(reason) != self._last_failure:
            log.warning("attach_failed", endpoint=self.endpoint, reason=str(reason))
            self._last_failure = str(reason)

    async def _serve(self, session: ExecutorSession, attached: pb.Attached, lease: Lease) -> SessionLost:
        session.on_result = self._on_result
        hopeless = self.scheduler.attach(lease)
        self._session, self.lost_at, self._last_failure = session, None, ""
        self._lead = Lead()
        self.attached, self.lease = attached, lease
        self.num_sessions += 1
        session.follow_lease(self._on_lease_change)
        log.info("attached", executor=attached.executor_id, epoch=attached.epoch, blocks=len(lease.block_ids))
        self.wake()
        beat = asyncio.create_task(self._beat(session, attached.session_timeout_ms / 1000))
        try:
            await self._listener.on_attached(self, session, hopeless)
            reason = await asyncio.shield(session.lost)  # cancelled with us, it could not say goodbye
        except SessionLost as lost:
            reason = lost
        except asyncio.CancelledError:
            session.say_goodbye()
            raise
        finally:
            beat.cancel()
            session.close()
            self._session = None
        self._end_session(session, reason)
        return reason

    def _end_session(self, session: ExecutorSession, reason: SessionLost) -> None:
        """Whatever has ended the session: all that ran waits again. Nothing else handles a loss."""
        self.lost_at = time.monotonic()
        ran = self.scheduler.detach()
        self.counts.note_loss(len(ran))
        waiting = self.scheduler.state.num_waiting
        if session.is_leaving:
            log.info("executor_left", endpoint=self.endpoint, reason=str(reason), running=len(ran), waiting=waiting)
            self._listener.on_lost(self, [], alone=False)  # it was told to stop, by nothing that ran
            return
        self.num_losses += 1
        self._last_losses.append(self.lost_at)
        log.warning("executor_lost", endpoint=self.endpoint, reason=str(reason), running=len(ran), waiting=waiting)
        self._listener.on_lost(self, ran, alone=session.is_computed_alone)

    async def _remind(self) -> None:
        """Say now and then what is waited for: nobody may be there, or another scheduler may hold the lease."""
        wait_s = FIRST_REMINDER_S
        while True:
            await asyncio.sleep(wait_s)
            log.info("waiting_for_executor", endpoint=self.endpoint)
            wait_s = REMINDER_S

    async def _beat(self, session: ExecutorSession, session_timeout_s: float) -> None:
        """An empty plan now and then tells the executor that an idle scheduler lives."""
        interval_s = self._idle_plan_s
        if session_timeout_s > 0:
            interval_s = min(interval_s, max(session_timeout_s / 3, MIN_BEAT_S))
        while True:
            await asyncio.sleep(interval_s / 4)
            if session.idle_s >= interval_s and self._has_room():
                self._plan(session, even_if_empty=True)

    def _on_wake(self) -> None:
        self._wake_scheduled = False
        self._pump()

    def _pump(self) -> None:
        session = self._session
        while session is not None and self._has_room() and not self._holds(session) and self._plan(session):
            pass

    def _holds(self, session: ExecutorSession) -> bool:
        """Whether the next plan is made later: tokens that would only wait for their messages are not computed yet."""
        if not self._listener.is_late() or session.idle_s >= MAX_HOLD_S:
            return False
        if self._held is None:
            self._held = asyncio.get_running_loop().call_later(HOLD_S, self._on_held)
        return True

    def _on_held(self) -> None:
        self._held = None
        self._pump()

    def _has_room(self) -> bool:
        state = self.scheduler.state
        tokens_are_awaited = bool(state.columns.num_masked or state.groups)
        now, most = time.perf_counter(), state.lease.plans_in_flight
        return len(state.in_flight) < self._lead.num_plans(most, now, tokens_are_awaited=tokens_are_awaited)

    def _plan(self, session: ExecutorSession, *, even_if_empty: bool = False) -> bool:
        try:
            self._listener.on_plan()
            plan = self.scheduler.plan(even_if_empty=even_if_empty)
            if plan is not None:
                self._lead.note_plan(plan.step, len(self.scheduler.state.in_flight) - 1)
                self.counts.note_plan(plan, session.send(plan))
                self._note_started(plan)
        except Exception as error:  # a fault of ours must not leave the callers hanging
            log.exception("plan_failed")
            session.end(f"plan failed: {type(error).__name__}")
            return False
        if plan is None:
            self._check_idle(session)
            return False
        self._was_busy |= len(plan.rows) > 0
        return True

    def _note_started(self, plan: Plan) -> None:
        """Requests that have waited until now."""
        now = time.perf_counter() if plan.started else 0.0
        for started in plan.started:
            sequence = self.scheduler.state.sequence_in(started.row)
            handle = sequence if sequence.group is None else sequence.group.handle
            if handle.owner is not None and handle.owner.admitted_at is None:
                handle.owner.admitted_at = now

    def _on_result(self, message: pb.StepResult) -> None:
        session = self._session
        if session is None:
            return
        try:
            record = self.scheduler.state.in_flight[0]
            wanted: list[int | None] = []
            if message.logprob_ids:
                wanted = [sequence.sampling.logprobs for sequence in record.sequences]
            scored = [(s.count, s.sequence.sampling.prompt_logprobs or 0) for s in record.scored]
            applied = self.scheduler.apply(decode_result(message, wanted, scored))
            self._listener.on_tokens(applied)
        except (MalformedMessage, MissingCandidates, ResultMismatch) as error:
            session.end(f"a result that cannot be: {error}")
            return
        except Exception as error:  # as in _plan
            log.exception("result_failed", step=message.step)
            session.end(f"result failed: {type(error).__name__}")
            return
        self.num_steps += 1
        self.step_us += message.step_us
        if message.sampled_ids and (self.fastest_step_us is None or message.step_us < self.fastest_step_us):
            self.fastest_step_us = message.step_us
        self.wait_us += message.wait_us
        self._moved_on |= bool(applied.updated)
        self._lead.note_result(message, time.perf_counter())
        self._pump()
        self.counts.note_result(applied, session.last_message_bytes, time.perf_counter())
        self._listener.on_applied(applied)

    def _on_lease_change(self, message: pb.LeaseChange) -> None:
        """What has been granted is used from the next plan on, and what was recalled goes back with it."""
        session = self._session
        if session is None:
            return
        try:
            change = decode_lease_change(message)
            self.scheduler.change_lease(change)
            self.counts.granted_blocks += len(change.granted_blocks)
        except (MalformedMessage, ValueError) as error:
            session.end(f"a change of the lease that cannot be: {error}")
            return
        except Exception as error:  # as in _plan
            log.exception("lease_change_failed")
            session.end(f"change of the lease failed: {type(error).__name__}")
            return
        self.wake()

    def _check_idle(self, session: ExecutorSession) -> None:
        """When the last request is gone, no block may be in use. If one is, begin anew rather than lose it."""
        if self._was_busy and not (self.scheduler.state.num_running or self.scheduler.state.in_flight):
            self._was_busy = False
            try:
                audit_idle(self.scheduler.state)
            except AuditFailure as failure:
                log.error("audit_failed", rule=str(failure))
                session.end("the bookkeeping contradicts itself")
