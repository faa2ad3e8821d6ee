"""Schedulers and executors of which everything is real but the network, the clock and the model."""

from collections import deque

from executor_svc.service import Service
from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.load import load_simulated
from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.audit import audit
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.link.codec import decode_lease, decode_lease_change, decode_result, encode_plan
from scheduler_svc.link.session import PROTOCOL_VERSION
from tests.executor.plans import ids_of
from tests.system.network import Clock, Connection, SimulatedRouter

RESULT_TIMEOUT_S = 10.0
IDLE_PLAN_S = 1.0


class NeverStops:
    requested = False


class ExecutorNode:
    """One process: the executor's loop over the simulated runner."""

    def __init__(self, settings: ExecutorSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.is_frozen = False
        self.start()

    def start(self) -> None:
        self.router = SimulatedRouter()
        self.is_up = True
        self.service = Service(
            self._settings,
            load_simulated(self._settings),
            self.router,  # type: ignore[arg-type]
            NeverStops(),
            clock=self._clock,
        )

    def crash(self) -> None:
        self.router.close()
        self.is_up = False
        self.is_frozen = False

    def turn(self) -> None:
        if self.is_up and not self.is_frozen:
            assert self.service.turn(), "the runner has failed"

    @property
    def ownership(self):
        return self.service._sessions._lender._ownership

    @property
    def sessions(self):
        """By number."""
        return {session.number: session for session in self.service._sessions._by_peer.values()}

    def owned_by(self, session: int) -> set[int]:
        return {block for block, owner in enumerate(self.ownership.of_block.tolist()) if owner == session}


class Link:
    """One scheduler's end of its session with one executor, and the core that goes with it."""

    def __init__(self, scheduler_id: str, executor: ExecutorNode, clock: Clock) -> None:
        self.scheduler_id = scheduler_id
        self.executor = executor
        self._clock = clock
        self.core = Scheduler()
        self.connection: Connection | None = None
        self.key: tuple[int, int] | None = None  # epoch and session
        self._sent_at: deque[float] = deque()
        self._spoke_at = 0.0

    def act(self, most: int = 1 << 20) -> None:
        """Take some of what has arrived, attach anew where that is due, and plan."""
        connection = self.connection
        if connection is None:
            self._attach()
        elif connection.is_gone or (self._sent_at and self._clock() - self._sent_at[0] > RESULT_TIMEOUT_S):
            self.lose()
        else:
            for _ in range(min(most, len(connection.to_scheduler))):
                if self.connection is connection:
                    self._take(pb.ToScheduler.FromString(connection.to_scheduler.popleft()))
            self.plan()

    def plan(self) -> None:
        while self.key is not None and len(self.core.state.in_flight) < self.core.state.lease.plans_in_flight:
            is_idle = self._clock() - self._spoke_at >= IDLE_PLAN_S
            plan = self.core.plan(even_if_empty=is_idle)
            audit(self.core.state)
            if plan is None:
                return
            assert self.connection is not None
            self.connection.send(encode_plan(plan, *self.key))
            self._sent_at.append(self._clock())
            self._spoke_at = self._clock()

    def lose(self) -> None:
        if self.connection is not None:
            self.connection.break_off()
        if self.key is not None:
            self.core.detach()
        self.connection, self.key = None, None
        self._sent_at.clear()

    def detach(self) -> None:
        """Say goodbye."""
        if self.key is not None and self.connection is not None:
            self.connection.send(pb.ToExecutor(detach=pb.Detach(session=self.key[1])).SerializeToString())
            self.executor.router.deliver(self.connection)
        self.lose()

    def submit(self, sequence: Sequence) -> None:
        self.core.submit(sequence)

    @property
    def is_current(self) -> bool:
        """Whether the executor knows of the session, too."""
        executor, key = self.executor, self.key
        if key is None or not executor.is_up:
            return False
        session = executor.sessions.get(key[1])
        is_own = session is not None and self.connection is not None and session.peer == self.connection.peer
        return executor.service._sessions.epoch == key[0] and is_own

    def blocks_under_way(self) -> list[int]:
        """Of the present session: returned in plans that were not issued yet, or granted in messages not read yet."""
        assert self.connection is not None
        assert self.key is not None
        connection, session = self.connection, self.executor.sessions[self.key[1]]
        plans = [pb.ToExecutor.FromString(data).plan for data in connection.to_executor]
        plans += [pb.ToExecutor.FromString(d).plan for p, d in self.executor.router.arrived if p == connection.peer]
        plans += session.plans
        found = [block for plan in plans for block in ids_of(plan.returned_blocks)]
        for data in connection.to_scheduler:
            found += ids_of(pb.ToScheduler.FromString(data).lease_change.granted_blocks)
        return found

    def _attach(self) -> None:
        if self.executor.is_up:
            self.connection = self.executor.router.connect(self.scheduler_id, self._clock)
            attach = pb.Attach(protocol_version=PROTOCOL_VERSION, scheduler_id=self.scheduler_id)
            self.connection.send(pb.ToExecutor(attach=attach).SerializeToString())

    def _take(self, message: pb.ToScheduler) -> None:
        match message.WhichOneof("message"):
            case "attached":
                hopeless = self.core.attach(decode_lease(message.attached))
                assert not hopeless
                self.key = message.attached.epoch, message.attached.session
            case "result":
                self._sent_at.popleft()
                record = self.core.state.in_flight[0]
                wanted = [s.sampling.logprobs for s in record.sequences] if message.result.logprob_ids else []
                self.core.apply(decode_result(message.result, wanted))
                self.plan()
            case "lease_change":
                self.core.change_lease(decode_lease_change(message.lease_change))
            case "fault":
                self.lose()
        audit(self.core.state)
