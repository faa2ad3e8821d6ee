"""One attachment to an executor, over a socket of its own: attach, send plans, receive results, notice its loss.

A session's socket is never used for another: plans that still wait in it could reach a restarted executor.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog
import zmq
from google.protobuf.message import DecodeError

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.plan import Lease, Plan
from scheduler_svc.link.codec import MalformedMessage, decode_lease, encode_plan
from scheduler_svc.link.connection import MAX_MESSAGE_BYTES, Connection
from scheduler_svc.link.curve import CurveKeys

PROTOCOL_VERSION = 1
TOKENIZER_TIMEOUT_S = 60.0
# An executor says something several times a second to who waits for a lease, but nothing in a step or while it loads
# its model. Who has waited in vain asks anew, so this may be short of that.
ATTACH_SILENCE_S = 60.0
MAX_EARLY_CHANGES = 16  # of a lease, between its coming and being followed: in one turn of the event loop
MAX_RESULT_TIMEOUT_S = 3600.0  # whatever an executor says of its steps
MAX_REASON_CHARS = 500  # of what an executor says
MESSAGES_IN_A_TURN = 2  # of the event loop

log = structlog.get_logger()


class SessionLost(Exception):
    """The session is over. `refused` means that another try would end the same way."""

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class LinkOptions:
    endpoint: str
    scheduler_id: str
    result_timeout_s: float
    max_bundle_bytes: int = 1 << 27
    keys: CurveKeys | None = None


class ExecutorSession:
    """Use: `session = ExecutorSession(...)`, `attached = await session.attach()`, then `send` plans; `on_result` is
    called with each result, what `follow_lease` is given with each change of the lease; `lost` is a future that gets
    the reason when the session ends. `is_leaving`: the executor has been told to stop. `close` ends it."""

    def __init__(self, context: zmq.Context, options: LinkOptions) -> None:
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[SessionLost] = self._loop.create_future()
        self._attached: asyncio.Future[pb.Attached] = self._loop.create_future()
        self._bundle: asyncio.Future[bytes] | None = None
        self._bundle_data = bytearray()
        self._epoch = self._session = 0
        self._is_reading = False
        self._next_read: asyncio.Handle | None = None
        self._sent_at: deque[float] = deque()
        self.is_computed_alone = False  # whether the next result awaited is that of an exclusive plan's step, begun
        self.is_leaving = False
        self._last_sent_at = time.monotonic()
        self._heard_at: float | None = None  # when the executor last said anything, the handshake included
        self.last_message_bytes = 0  # of the message that is being taken
        self.on_result: Callable[[pb.StepResult], None] | None = None
        self._on_lease_change: Callable[[pb.LeaseChange], None] | None = None
        self._early_changes: list[pb.LeaseChange] = []
        self._result_timeout_s = options.result_timeout_s
        try:
            self._connection = Connection(context, options.endpoint, options.keys)
        except zmq.ZMQError as error:
            raise SessionLost(f"cannot connect to {options.endpoint}: {error}", refused=True) from error
        self._watching = asyncio.create_task(self._watch())
        # Straight on the sockets' descriptors: zmq.asyncio costs 80 µs a round trip more.
        self._loop.add_reader(self._connection.messages_descriptor, self._read)
        self._loop.add_reader(self._connection.events_descriptor, self._check_connection)
        self._check_connection()

    async def attach(self, attached_executors: Iterable[str] = ()) -> tuple[pb.Attached, Lease]:
        """Ask for a lease, and wait until there is one: however long for an executor to appear, and for one that says
        that it is there; ATTACH_SILENCE_S for one that says nothing. An executor that is one of these refuses. Raises
        SessionLost."""
        request = pb.Attach(
            protocol_version=PROTOCOL_VERSION,
            scheduler_id=self._options.scheduler_id,
            attached_executors=attached_executors,
        )
        self._send(pb.ToExecutor(attach=request).SerializeToString())
        await self._wait_attached()
        attached = self._attached.result()
        self._epoch, self._session = attached.epoch, attached.session
        if attached.protocol_version != PROTOCOL_VERSION:
            raise SessionLost(f"the executor speaks version {attached.protocol_version}", refused=True)
        try:
            lease = decode_lease(attached)
        except MalformedMessage as error:
            raise SessionLost(str(error), refused=True) from error
        five_steps_s = min(5 * attached.worst_step_ms / 1000, MAX_RESULT_TIMEOUT_S)
        self._result_timeout_s = max(self._options.result_timeout_s, five_steps_s)
        return attached, lease

    def follow_lease(self, on_change: Callable[[pb.LeaseChange], None]) -> None:
        """Call this with each change of the lease, those that came right behind the lease included."""
        self._on_lease_change = on_change
        early, self._early_changes = self._early_changes, []
        for change in early:
            self._take_lease_change(change)

    async def fetch_tokenizer(self) -> bytes:
        """The executor's tokenizer bundle. Raises SessionLost."""
        self._bundle = self._loop.create_future()
        self._send(pb.ToExecutor(get_tokenizer=pb.GetTokenizer()).SerializeToString())
        await self._first_of(self._bundle, TOKENIZER_TIMEOUT_S)
        return self._bundle.result()

    def send(self, plan: Plan) -> int:
        """Send one plan; returns its size in bytes. Never waits; a full socket ends the session."""
        data = encode_plan(plan, self._epoch, self._session)
        self._send(data)
        self._sent_at.append(self._last_sent_at)
        return len(data)

    @property
    def idle_s(self) -> float:
        """Seconds since anything was sent."""
        return time.monotonic() - self._last_sent_at

    @property
    def is_stalled(self) -> bool:
        """Whether a result has been awaited for so long that its executor may well be lost: half of the time after
        which it is."""
        return bool(self._sent_at) and time.monotonic() - self._sent_at[0] > self._result_timeout_s / 2

    def say_goodbye(self) -> None:
        """Tell the executor that the session is over, so that its lease is free at once. `close` must follow."""
        if not self.lost.done() and self._attached.done():
            self._connection.linger()
            self._send(pb.ToExecutor(detach=pb.Detach(session=self._session)).SerializeToString())

    def end(self, reason: str) -> None:
        """Give the session up."""
        self._lose(SessionLost(reason))

    def close(self) -> None:
        """End the session here: nothing is received any more."""
        self._lose(SessionLost("closed"))
        self._watching.cancel()
        self._loop.remove_reader(self._connection.messages_descriptor)
        self._loop.remove_reader(self._connection.events_descriptor)
        self._connection.close()

    def _send(self, data: bytes) -> None:
        self._last_sent_at = time.monotonic()
        try:
            self._connection.send(data)
        except zmq.Again:
            self._lose(SessionLost("the socket to the executor takes no more messages"))
        if not self._is_reading:
            self._read_soon()

    async def _wait_attached(self) -> None:
        while not self._attached.done():
            now = time.monotonic()
            silent_s = 0.0 if self._heard_at is None else now - self._heard_at
            if silent_s >= ATTACH_SILENCE_S:
                self._lose(SessionLost(f"the executor has said nothing for {ATTACH_SILENCE_S:g} s"))
            if self.lost.done():
                raise self.lost.result()
            either: list[asyncio.Future] = [self._attached, self.lost]
            await asyncio.wait(either, timeout=ATTACH_SILENCE_S - silent_s, return_when=asyncio.FIRST_COMPLETED)

    async def _first_of(self, wanted: asyncio.Future, timeout_s: float) -> None:
        """Wait for this future, or raise what has ended the session."""
        await asyncio.wait([wanted, self.lost], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not wanted.done():
            wanted.cancel()
            self._lose(SessionLost(f"no answer within {timeout_s} s"))
            raise self.lost.result()

    def _lose(self, reason: SessionLost) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def _read(self) -> None:
        """Take what has arrived. An executor faster than we are would always have one more result there, so the rest
        is taken after a turn for everything else."""
        if self._next_read is not None:  # once a turn, whoever asks for it
            self._next_read.cancel()
            self._next_read = None
        self._is_reading = True
        is_empty = self._read_some()
        self._is_reading = False
        if not is_empty:
            self._read_soon()

    def _read_soon(self) -> None:
        if self._next_read is None:
            self._next_read = self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Whether nothing is left to be read."""
        for _ in range(MESSAGES_IN_A_TURN):
            if self.lost.done():
                break
            try:
                data = self._connection.receive()
                self._note_heard()
                self.last_message_bytes = len(data)
                self._take(pb.ToScheduler.FromString(data))
            except zmq.Again:
                return True
            except (DecodeError, MalformedMessage) as error:
                self._lose(SessionLost(f"malformed message from the executor: {error}"))
            except Exception as error:  # a fault of ours must not leave the messages behind it unread
                log.exception("message_failed")
                self._lose(SessionLost(f"{type(error).__name__} over a message from the executor"))
        return self.lost.done()

    def _note_heard(self) -> None:
        self._heard_at = time.monotonic()

    def _take(self, message: pb.ToScheduler) -> None:
        match message.WhichOneof("message"):
            case "result":
                self._take_result(message.result)
            case "attached":
                if not self._attached.done():
                    self._attached.set_result(message.attached)
            case "fault":
                refused = message.fault.scope == pb.Fault.SCOPE_REFUSED
                self._lose(SessionLost(message.fault.reason[:MAX_REASON_CHARS], refused=refused))
            case "lease_change":
                self._take_lease_change(message.lease_change)
            case "begun":
                begun = message.begun
                self.is_computed_alone |= (begun.epoch, begun.session) == (self._epoch, self._session)
            case "leaving":
                leaving = message.leaving
                self.is_leaving |= (leaving.epoch, leaving.session) == (self._epoch, self._session)
            case "tokenizer_chunk":
                self._take_chunk(message.tokenizer_chunk)
            case None:
                pass  # the executor makes sure that we are there

    def _take_result(self, result: pb.StepResult) -> None:
        if self.lost.done() or (result.epoch, result.session) != (self._epoch, self._session):
            return
        if not self._sent_at or self.on_result is None:
            raise MalformedMessage("a result without a plan")
        self._sent_at.popleft()
        self.is_computed_alone = False
        self.on_result(result)

    def _take_lease_change(self, change: pb.LeaseChange) -> None:
        if self._on_lease_change is None:
            if not self._attached.done() or len(self._early_changes) == MAX_EARLY_CHANGES:
                early = f"the lease is not there, and {len(self._early_changes)} changes of it are"
                raise MalformedMessage(early)
            self._early_changes.append(change)
        elif not self.lost.done() and (change.epoch, change.session) == (self._epoch, self._session):
            self._on_lease_change(change)

    def _take_chunk(self, chunk: pb.TokenizerChunk) -> None:
        if self._bundle is None or self._bundle.done():
            return
        if chunk.offset != len(self._bundle_data) or chunk.total_bytes > self._options.max_bundle_bytes:
            raise MalformedMessage(f"tokenizer chunk at {chunk.offset} of {chunk.total_bytes} bytes")
        self._bundle_data += chunk.data
        if len(self._bundle_data) >= chunk.total_bytes:
            self._bundle.set_result(bytes(self._bundle_data))
            self._bundle_data.clear()

    def _check_connection(self) -> None:
        reason = self._connection.how_it_was_lost(self._note_heard)
        if reason is not None:
            while not self._read_some():  # it may say over which step the executor was lost
                pass
            self._lose(SessionLost(reason))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(0.25, self._result_timeout_s / 4))
            if self._sent_at and time.monotonic() - self._sent_at[0] > self._result_timeout_s:
                self._lose(SessionLost(f"no result within {self._result_timeout_s:.1f} s"))
            # All that may wait to be read is less: a tokenizer, a lease, results.
            if self._connection.unread_bytes() > MAX_MESSAGE_BYTES:
                self._lose(SessionLost(f"{MAX_MESSAGE_BYTES} bytes of the executor were no whole message"))
