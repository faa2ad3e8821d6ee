"""Sessions: who is attached, what was lent to whom, and the two ways in which it all ends."""

import time
from collections import OrderedDict
from collections.abc import Callable

import structlog

from executor_svc import lease_messages
from executor_svc.batch import ResidentBatch
from executor_svc.intake import Intake
from executor_svc.leases import Lease
from executor_svc.lending import Lender
from executor_svc.recording import NO_RECORDER, Recorder
from executor_svc.router import Sent
from executor_svc.session import Session
from executor_svc.stepper import Stepper
from executor_svc.turns import Turns
from paged.v1 import executor_pb2

PROTOCOL_VERSION = 1
MAX_WAITING = 64
HOLDER_PROBE_S = 0.02  # a flood of Attach must not become one of probes
MAX_SCHEDULER_ID_BYTES = 256
SHUTTING_DOWN = "shutting down"

Fault = executor_pb2.Fault
_PROBE = executor_pb2.ToScheduler()  # says nothing: what counts is whether there is still a peer to take it
_log = structlog.get_logger()


class Sessions:
    """All sessions of an epoch, and the schedulers that wait for a lease.

    `send` queues a message for a peer; `attached` fills in what every Attached says of the executor.
    """

    def __init__(
        self,
        *,
        batch: ResidentBatch,
        lender: Lender,
        stepper: Stepper,
        plans_in_flight: int,
        send: Callable[[bytes, executor_pb2.ToScheduler], Sent],
        attached: Callable[[], executor_pb2.Attached],
        timeout_s: float,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        self._batch = batch
        self._lender = lender
        self._stepper = stepper
        self._plans_in_flight = plans_in_flight
        self._send = send
        self._attached = attached
        self._timeout_s = timeout_s
        self._recorder = recorder
        self._next_holder_probe = 0.0
        # Nanoseconds since 1970: no two processes ever count the same epochs.
        self.epoch = time.time_ns()
        self._last_number = 0
        self._turns = Turns()
        self._is_leaving = False
        self._by_peer: OrderedDict[bytes, Session] = OrderedDict()  # in the order of their turns
        self._waiting: OrderedDict[str, bytes] = OrderedDict()  # scheduler_id to peer, in order of asking

    def __len__(self) -> int:
        return len(self._by_peer)

    def __contains__(self, session: Session) -> bool:
        """Whether it goes on."""
        return self._by_peer.get(session.peer) is session

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def for_next_step(self) -> list[Session]:
        """Those whose first plan is in the next step; who is first in it is last in those after."""
        sessions = self._turns.next_step(self._by_peer.values())
        if sessions:
            self._by_peer.move_to_end(sessions[0].peer)
        return sessions

    def all_have_plans(self) -> bool:
        return bool(self._by_peer) and all(session.plans for session in self._by_peer.values())

    def without_plans(self) -> list[int]:
        """Numbers of the sessions of which no plan is at hand."""
        return [session.number for session in self._by_peer.values() if not session.plans]

    def have_plans(self) -> bool:
        return any(session.plans for session in self._by_peer.values())

    def have_exclusive_plans(self) -> bool:
        """Whether any is next in its session."""
        return any(session.plans and session.plans[0].exclusive for session in self._by_peer.values())

    def answer(self, session: Session, now: float) -> None:
        """Send the result that waits for it, if one does. Raises RunnerFailed."""
        if session.result is None:
            return
        sent = self._send_result(session)
        session.last_heard = now  # while it waited for this result it had no reason to speak
        if sent is not Sent.QUEUED:
            self.end(session, sent.value, now, tell=False)

    def announce(self, session: Session) -> None:
        """If the step that follows takes the process down, the scheduler knows whose it was."""
        begun = executor_pb2.Begun(epoch=self.epoch, session=session.number, step=session.issued_step)
        self._send(session.peer, executor_pb2.ToScheduler(begun=begun))

    def settle(self) -> None:
        """The batch is told of all that was taken."""
        for session in self._by_peer.values():
            session.intake.settle()

    def attach(self, peer: bytes, request: executor_pb2.Attach, now: float) -> None:
        """Answer an Attach, now or when a lease is free. Raises RunnerFailed."""
        if request.protocol_version != PROTOCOL_VERSION:
            reason = f"protocol_version {request.protocol_version} is not spoken here, only {PROTOCOL_VERSION}"
            self._fault(peer, Fault.SCOPE_REFUSED, reason)
            return
        if not 0 < len(request.scheduler_id.encode()) <= MAX_SCHEDULER_ID_BYTES:
            reason = f"scheduler_id must have 1 to {MAX_SCHEDULER_ID_BYTES} bytes"
            self._fault(peer, Fault.SCOPE_REFUSED, reason)
            return
        if self._is_leaving:
            self._fault(peer, Fault.SCOPE_SESSION, SHUTTING_DOWN)
            return
        self._forget_waiting(peer)
        self._waiting.pop(request.scheduler_id, None)
        if len(self._waiting) >= MAX_WAITING:
            self._probe_waiting()
        if len(self._waiting) >= MAX_WAITING:
            self._fault(peer, Fault.SCOPE_SESSION, f"{MAX_WAITING} schedulers wait for a lease already; try again")
            return
        self._waiting[request.scheduler_id] = peer
        for session in list(self._by_peer.values()):
            if session.scheduler_id == request.scheduler_id or session.peer == peer:
                # It had its turn already: what it gives back is for itself.
                self._waiting.move_to_end(request.scheduler_id, last=False)
                self.end(session, "the scheduler has attached anew", now)
        self._admit_waiting(now)
        self._lender.is_settled = False  # those who wait for a first lease may be others now
        self._probe_holders(now)

    def detach(self, peer: bytes, request: executor_pb2.Detach, now: float) -> None:
        """Raises RunnerFailed."""
        self._forget_waiting(peer)
        session = self._by_peer.get(peer)
        if session is not None and session.number == request.session:
            self.end(session, "detached", now, tell=False)

    def receive(self, peer: bytes, plan: executor_pb2.StepPlan, now: float) -> None:
        """Queue a plan, or end the session it does not fit. Raises RunnerFailed."""
        session = self._by_peer.get(peer)
        if session is None:
            reason = "no session; attach first"
            self._fault(peer, Fault.SCOPE_SESSION, reason, session=plan.session, step=plan.step)
            return
        session.last_heard = now
        problem = self._misfit(session, plan)
        if problem:
            self.end(session, problem, now, step=plan.step)
            return
        session.next_step += 1
        session.plans.append(plan)

    def note_lease(self, session: Session, plan: executor_pb2.StepPlan, now: float) -> None:
        """What a plan that the batch has taken says of the session's lease. Raises PlanViolation."""
        if lease_messages.returns_anything(plan):
            returned = lease_messages.read_returned(plan, self._lender.held_by(session.number))
            self._batch.check_returned(returned, session.number)
            self._lender.give_back(session.number, returned)
        if plan.HasField("demand"):
            wants, least = lease_messages.read_demand(plan.demand, self._lender.most)
            self._lender.note_demand(session.number, wants, least, plan.demand.claim, now)

    def rebalance(self, now: float) -> None:
        """Let in who waits; tell sessions what they are granted and what they are to return. Raises RunnerFailed."""
        while not self._lender.is_settled:
            self._admit_waiting(now)
            sessions = {session.number: session for session in self._by_peer.values()}
            for change in self._lender.rebalance(now, len(self._waiting)):
                message = executor_pb2.ToScheduler(lease_change=lease_messages.lease_change(change, self.epoch))
                sent = self._send(sessions[change.session].peer, message)
                if sent is not Sent.QUEUED:
                    self.end(sessions[change.session], sent.value, now, tell=False)

    def probe(self, now: float, recall_s: float) -> None:
        """End sessions whose scheduler is gone or silent, or keeps for longer than `recall_s` what it is to return;
        forget who has stopped waiting. Raises RunnerFailed."""
        self._probe_waiting()
        self._probe_holders(now)
        overdue = self._lender.overdue(now, recall_s)
        for session in list(self._by_peer.values()):
            if session.number in overdue:
                self.end(session, f"a recall was not served for more than {recall_s:g} s", now)
                continue
            silent_s = now - session.last_heard
            if silent_s > self._timeout_s and not session.plans:
                self.end(session, f"silent for more than {self._timeout_s:g} s", now)
        self._lender.is_settled = False  # demands that have fallen count after a while

    def _probe_waiting(self) -> None:
        for scheduler_id, peer in list(self._waiting.items()):
            if self._send(peer, _PROBE) is Sent.GONE:
                del self._waiting[scheduler_id]

    def _probe_holders(self, now: float) -> None:
        """While others could use their leases, make sure that they are there; not more often than it takes to know."""
        if len(self._by_peer) + len(self._waiting) < 2 or now < self._next_holder_probe:
            return
        self._next_holder_probe = now + HOLDER_PROBE_S
        for session in list(self._by_peer.values()):
            if self._send(session.peer, _PROBE) is Sent.GONE:
                self.end(session, Sent.GONE.value, now, tell=False)

    def end(self, session: Session, reason: str, now: float, *, step: int | None = None, tell: bool = True) -> None:
        """The one way in which a session ends: plans dropped, rows ended, lease free, next one in. Raises RunnerFailed.

        `step` is the plan's that is to blame; `tell` sends the scheduler a Fault.
        """
        if self._by_peer.pop(session.peer, None) is None:
            return
        session.plans.clear()
        self._send_result(session)  # what has been computed is told first
        rows = self._batch.end_rows_of(session.number)
        self._recorder.session_ended(session.number)
        self._lender.close(session.number)
        step = session.issued_step if step is None else step
        _log.info("session_ended", session=session.number, scheduler=session.scheduler_id, step=step, reason=reason)
        if tell:
            self._fault(session.peer, Fault.SCOPE_SESSION, reason, session=session.number, step=step)
        self._stepper.end_rows(rows)
        self._admit_waiting(now)

    def end_epoch(self, reason: str, now: float) -> None:
        """The one way in which an epoch ends: every session with it, KV memory anew. Raises RunnerFailed."""
        ended = list(self._by_peer.values())
        for session in ended:
            self._send_result(session)
            self._fault(session.peer, Fault.SCOPE_EPOCH, reason, session=session.number, step=session.issued_step)
        _log.warning("epoch_ended", epoch=self.epoch, sessions=len(ended), reason=reason)
        self._by_peer.clear()
        self._batch.clear()
        self._lender.clear()
        self.epoch += 1
        self._stepper.reset()
        self._recorder.epoch_ended()
        self._admit_waiting(now)

    def leave(self, grace_s: float) -> None:
        """Let nobody in from now on, and have those who are here go elsewhere within this time."""
        self._is_leaving = True
        for peer in self._waiting.values():
            self._fault(peer, Fault.SCOPE_SESSION, SHUTTING_DOWN)
        self._waiting.clear()
        for session in self._by_peer.values():
            leaving = executor_pb2.Leaving(epoch=self.epoch, session=session.number, grace_ms=round(grace_s * 1e3))
            self._send(session.peer, executor_pb2.ToScheduler(leaving=leaving))

    def shut_down(self, now: float) -> None:
        """End all sessions. Raises RunnerFailed."""
        for session in list(self._by_peer.values()):
            self.end(session, SHUTTING_DOWN, now)

    def _send_result(self, session: Session) -> Sent:
        message, session.result = session.result, None
        return Sent.QUEUED if message is None else self._send(session.peer, message)

    def _misfit(self, session: Session, plan: executor_pb2.StepPlan) -> str | None:
        if plan.epoch != self.epoch:
            return f"epoch: {plan.epoch}; this one is {self.epoch}"
        if plan.session != session.number:
            return f"session: {plan.session}; this one is {session.number}"
        if plan.step != session.next_step:
            return f"step: {plan.step}; expected {session.next_step}"
        if len(session.plans) >= self._plans_in_flight:
            return f"plans in flight: more than the lease's {self._plans_in_flight}"
        return None

    def _admit_waiting(self, now: float) -> None:
        while self._waiting:
            lease = self._lender.first_lease(now, len(self._waiting))
            if lease is None:
                return
            scheduler_id, peer = self._waiting.popitem(last=False)
            self._open(peer, scheduler_id, lease, now)

    def _open(self, peer: bytes, scheduler_id: str, lease: Lease, now: float) -> None:
        self._last_number += 1
        session = Session(self._last_number, scheduler_id, peer, Intake(self._batch, self._last_number), now)
        self._by_peer[peer] = session
        self._lender.open(session.number, lease)
        attached = self._attached()
        attached.protocol_version = PROTOCOL_VERSION
        attached.epoch = self.epoch
        attached.session = session.number
        attached.lease.CopyFrom(lease_messages.first_lease(lease, self._lender.most, self._plans_in_flight))
        sent = self._send(peer, executor_pb2.ToScheduler(attached=attached))
        if sent is not Sent.QUEUED:
            self.end(session, sent.value, now, tell=False)
            return
        _log.info(
            "session_began",
            session=session.number,
            scheduler=scheduler_id,
            epoch=self.epoch,
            blocks=len(lease.block_ids),
        )

    def _forget_waiting(self, peer: bytes) -> None:
        for scheduler_id, waiting in list(self._waiting.items()):
            if waiting == peer:
                del self._waiting[scheduler_id]

    def _fault(self, peer: bytes, scope: Fault.Scope, reason: str, *, session: int = 0, step: int = 0) -> None:
        """A peer that cannot be told will notice by itself."""
        fault = Fault(scope=scope, epoch=self.epoch, session=session, step=step, reason=reason)
        self._send(peer, executor_pb2.ToScheduler(fault=fault))
