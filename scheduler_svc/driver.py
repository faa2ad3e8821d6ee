"""Keeps the core and one executor together: attach, plan while there is room, apply, and begin anew after a loss."""

import asyncio
import time
from typing import Protocol

import structlog
import zmq

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.audit import AuditFailure, audit_idle
from scheduler_svc.core.plan import Lease
from scheduler_svc.core.results import Applied
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.link.codec import decode_lease_change, decode_result
from scheduler_svc.link.session import ExecutorSession, LinkOptions, SessionLost

MIN_PAUSE_S = 0.05  # between a loss and the next attempt; doubled with each loss without a token between
MAX_PAUSE_S = 5.0
FIRST_REMINDER_S = 2.0
REMINDER_S = 30.0

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

    def on_tokens(self, applied: Applied) -> None:
        """A result was taken in, and the next plan is made right after this."""

    def on_applied(self, applied: Applied) -> None:
        """A result was taken in, and the next plan has been sent."""

    def on_lost(self, driver: "Driver", ran: list[Sequence], *, alone: bool) -> None:
        """The session is over; `ran` wait to be computed anew. `alone`: the executor was lost in the step of an
        exclusive plan, as far as is known."""


class Driver:
    """Owns the session. `run` until cancelled; `wake` after each submit or cancel. `scheduler` is the core's side of
    it."""

    def __init__(self, scheduler: Scheduler, options: LinkOptions, idle_plan_s: float, listener: Listener) -> None:
        self.scheduler = scheduler
        self.endpoint = options.endpoint
        self.is_found = True  # whether its address is still one of an executor
        self.attached: pb.Attached | None = None  # what the executor has said last, kept when it is lost
        self._options = options
        self._idle_plan_s = idle_plan_s
        self._listener = listener
        self._session: ExecutorSession | None = None
        self._wake_scheduled = False
        self._was_busy = False
        self._moved_on = False  # whether any sequence got a token in this session
        self._last_failure = ""
        self.num_losses = 0
        self.num_steps = self.step_us = self.wait_us = 0  # as results tell of them
        self.lost_at: float | None = time.monotonic()  # None while a session is going on

    @property
    def is_attached(self) -> bool:
        return self._session is not None

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
            await asyncio.sleep(MAX_PAUSE_S if reason.refused else pause_s)

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
        self._session, self.lost_at, self.attached, self._last_failure = session, None, attached, ""
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
        self._end_session(reason, session.is_computed_alone)
        return reason

    def _end_session(self, reason: SessionLost, alone: bool) -> None:
        """Whatever has ended the session: all that ran waits again. Nothing else handles a loss."""
        self.lost_at = time.monotonic()
        self.num_losses += 1
        ran = self.scheduler.detach()
        waiting = self.scheduler.state.num_waiting
        log.warning("executor_lost", endpoint=self.endpoint, reason=str(reason), running=len(ran), waiting=waiting)
        self._listener.on_lost(self, ran, alone=alone)

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
            interval_s = min(interval_s, session_timeout_s / 3)
        while True:
            await asyncio.sleep(interval_s / 4)
            if session.idle_s >= interval_s and self._has_room():
                self._plan(session, even_if_empty=True)

    def _on_wake(self) -> None:
        self._wake_scheduled = False
        self._pump()

    def _pump(self) -> None:
        session = self._session
        while session is not None and self._has_room() and self._plan(session):
            pass

    def _has_room(self) -> bool:
        return len(self.scheduler.state.in_flight) < self.scheduler.state.lease.plans_in_flight

    def _plan(self, session: ExecutorSession, *, even_if_empty: bool = False) -> bool:
        try:
            plan = self.scheduler.plan(even_if_empty=even_if_empty)
            if plan is not None:
                session.send(plan)
        except Exception as error:  # a fault of ours must not leave the callers hanging
            log.exception("plan_failed")
            session.end(f"plan failed: {type(error).__name__}")
            return False
        if plan is None:
            self._check_idle(session)
            return False
        self._was_busy |= len(plan.rows) > 0
        return True

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
        except Exception as error:  # as in _plan
            log.exception("result_failed", step=message.step)
            session.end(f"result failed: {type(error).__name__}")
            return
        self.num_steps += 1
        self.step_us += message.step_us
        self.wait_us += message.wait_us
        self._moved_on |= bool(applied.updated)
        self._pump()
        self._listener.on_applied(applied)

    def _on_lease_change(self, message: pb.LeaseChange) -> None:
        """What has been granted is used from the next plan on, and what was recalled goes back with it."""
        session = self._session
        if session is None:
            return
        try:
            self.scheduler.change_lease(decode_lease_change(message))
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
