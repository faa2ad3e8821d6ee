"""A network between schedulers and executors in one process: as ZeroMQ, but that nothing moves unless it is told to.

Messages of one connection arrive in their order or not at all; between connections there is no order. A connection that
breaks loses what is under way, and each end finds out by itself. One that has gone silent loses all that is sent, and
neither end knows before the heartbeats have stopped for `HEARTBEAT_TIMEOUT_S`.
"""

from collections import deque
from dataclasses import dataclass, field

from executor_svc.router import Sent
from paged.v1 import executor_pb2 as pb

HEARTBEAT_TIMEOUT_S = 3.0


@dataclass
class Clock:
    """Seconds, as the test says."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Connection:
    """From one scheduler to one executor; `scheduler_id` is for the test alone."""

    peer: bytes
    scheduler_id: str
    clock: Clock
    to_executor: deque[bytes] = field(default_factory=deque)
    to_scheduler: deque[bytes] = field(default_factory=deque)
    is_broken: bool = False
    silent_since: float | None = None

    @property
    def is_sound(self) -> bool:
        return not self.is_broken and self.silent_since is None

    @property
    def is_gone(self) -> bool:
        """Whether the ends can know."""
        silent_since = self.silent_since
        return self.is_broken or (silent_since is not None and self.clock() - silent_since > HEARTBEAT_TIMEOUT_S)

    def break_off(self) -> None:
        self.is_broken = True
        self.to_executor.clear()
        self.to_scheduler.clear()

    def fall_silent(self) -> None:
        self.silent_since = self.clock() if self.silent_since is None else self.silent_since
        self.to_executor.clear()
        self.to_scheduler.clear()

    def send(self, data: bytes) -> None:
        """What the scheduler says."""
        if self.is_sound:
            self.to_executor.append(data)


class SimulatedRouter:
    """Stands where an executor's socket is. It also watches what the executor says: a plan that it has carried out has
    a result, and results are of live sessions only, step by step."""

    def __init__(self) -> None:
        self.connections: dict[bytes, Connection] = {}
        self.arrived: deque[tuple[bytes, bytes]] = deque()
        self.live: dict[tuple[int, int], tuple[str, int]] = {}  # epoch and session to scheduler and its last step
        self._num_peers = 0

    def connect(self, scheduler_id: str, clock: Clock) -> Connection:
        self._num_peers += 1
        connection = Connection(b"%d" % self._num_peers, scheduler_id, clock)
        self.connections[connection.peer] = connection
        return connection

    def deliver(self, connection: Connection, most: int = 1 << 20) -> None:
        """Some of what has been sent arrives."""
        for _ in range(min(most, len(connection.to_executor))):
            self.arrived.append((connection.peer, connection.to_executor.popleft()))

    def receive(self, *, wait: bool) -> tuple[bytes, bytes | None] | None:
        return self.arrived.popleft() if self.arrived else None

    def send(self, peer: bytes, payload: bytes) -> Sent:
        connection = self.connections[peer]
        self._watch(connection, pb.ToScheduler.FromString(payload))
        if connection.is_gone:
            return Sent.GONE
        if connection.is_sound:
            connection.to_scheduler.append(payload)
        return Sent.QUEUED

    def close(self) -> None:
        for connection in self.connections.values():
            connection.break_off()

    def _watch(self, connection: Connection, message: pb.ToScheduler) -> None:
        match message.WhichOneof("message"):
            case "attached":
                attached = message.attached
                others = [key for key, (owner, _) in self.live.items() if owner == connection.scheduler_id]
                for key in others:
                    del self.live[key]
                self.live[attached.epoch, attached.session] = (connection.scheduler_id, 0)
            case "result":
                key = message.result.epoch, message.result.session
                assert key in self.live, "a plan of a session that is over was carried out"
                owner, last = self.live[key]
                assert message.result.step == last + 1, "a step was left out, or came twice"
                self.live[key] = (owner, last + 1)
            case "fault" if message.fault.scope == pb.Fault.SCOPE_EPOCH:
                self.live = {key: value for key, value in self.live.items() if key[0] != message.fault.epoch}
            case "fault":
                self.live.pop((message.fault.epoch, message.fault.session), None)
