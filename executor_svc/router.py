"""The executor's socket: a ZeroMQ ROUTER that never waits for a peer, and says so when one is gone or full."""

import enum
import fcntl
import os
from pathlib import Path
from typing import IO, Protocol

import zmq

from executor_svc.unread_watch import UnreadWatch

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000
_HANDSHAKE_MS = 5000  # whoever connects and then says nothing is let go after that
# Messages of one peer that wait to be read. max_message_bytes is the most of one part; a message may have many.
_RECEIVE_QUEUE = 8
_PARTS_AT_ONCE = 1000  # of a message that has many: there may be millions
_SEND_QUEUE = 2048  # a tokenizer's chunks in one go, and results besides
_LAST_WORDS_MS = 250
# Plain numbers: flags are combined in Python, and slowly.
_NOBLOCK = int(zmq.NOBLOCK)
_SRCFD = int(zmq.SRCFD)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class EndpointTaken(Exception):
    """The endpoint cannot be listened on. Names it, and says why."""


class Sent(enum.Enum):
    """What became of a message."""

    QUEUED = "queued"
    GONE = "peer is gone"
    FULL = "peer does not read"


class Guard(Protocol):
    """Who may come in; see `executor_svc.curve`."""

    def protect(self, context: zmq.Context, socket: zmq.Socket) -> None:
        """Before the socket is bound."""

    def stop(self) -> None:
        """Before the context ends."""


class Router:
    """Listens on one endpoint. Peers are known by the routing id that ZeroMQ gives each connection.

    `max_message_bytes` are of one part of a message; libzmq bounds their number by nothing. So a TCP connection is cut
    that brings as many bytes as `max_unread_messages` of the largest, and no message is read of it. `guard` says who
    may come in; None lets everybody in. `ipc_mode` is what the file of an ipc endpoint may be used by.

    Raises EndpointTaken.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        max_message_bytes: int,
        longest_wait_ms: int,
        max_unread_messages: int = 3,
        guard: Guard | None = None,
        ipc_mode: int = 0o600,
    ) -> None:
        self._guard = guard
        self._unfinished: bytes | None = None  # whose message, of many parts, is being left out
        self._lock = _lock_ipc_path(endpoint)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in {
            zmq.ROUTER_MANDATORY: 1,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: _HEARTBEAT_TIMEOUT_MS,
            zmq.HEARTBEAT_TTL: _HEARTBEAT_TIMEOUT_MS,
            zmq.RCVTIMEO: longest_wait_ms,
            zmq.MAXMSGSIZE: max_message_bytes,
            zmq.RCVHWM: _RECEIVE_QUEUE,
            zmq.SNDHWM: _SEND_QUEUE,
            zmq.HANDSHAKE_IVL: _HANDSHAKE_MS,
        }.items():
            self._socket.setsockopt(option, value)
        # Peers at an ipc endpoint are this machine's, and the kernel does not count what they send.
        self._watch = None
        if endpoint.startswith("tcp://"):
            self._watch = UnreadWatch(self._socket, max_unread_messages * max_message_bytes)
        try:
            if guard is not None:
                guard.protect(self._context, self._socket)
            self._bind(endpoint, ipc_mode)
        except BaseException:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._watch is not None:
            self._watch.start(int(self.endpoint.rpartition(":")[2]))

    def _bind(self, endpoint: str, ipc_mode: int) -> None:
        # The file must never be there with another mode, so it is made with this one.
        mask = os.umask(0o777 & ~ipc_mode)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise EndpointTaken(f"cannot listen on {endpoint}: {error.strerror}") from error
        finally:
            os.umask(mask)

    def receive(self, *, wait: bool) -> tuple[bytes, bytes | None] | None:
        """A peer and its message (None if it is not a single frame), or None where none has come.

        Waits for one, if asked to, for longest_wait_ms; a signal does not cut that short.
        """
        if self._unfinished is not None:
            return self._leave_out(self._unfinished)
        try:
            peer = self._socket.recv(0 if wait else _NOBLOCK)
        except zmq.Again:
            return None
        frame = self._socket.recv(copy=False)  # what a peer sends has a frame at least
        if self._watch is not None:
            self._watch.note_message(_descriptor(frame))
        if frame.more:
            return self._leave_out(peer)
        return peer, frame.bytes

    def _leave_out(self, peer: bytes) -> tuple[bytes, None]:
        """Some parts of this message; the others in the next calls, between which the loop goes on."""
        for _ in range(_PARTS_AT_ONCE):
            if not self._socket.recv(copy=False).more:
                self._unfinished = None
                return peer, None
        self._unfinished = peer
        return peer, None

    def send(self, peer: bytes, payload: bytes) -> Sent:
        # Decided by the first frame; large payloads are shared with ZeroMQ's thread instead of copied.
        try:
            self._socket.send(peer, _MORE)
            self._socket.send(payload, _NOBLOCK, copy=len(payload) < 1 << 16)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.QUEUED

    def close(self) -> None:
        """Last words get a moment to leave; a peer that does not read cannot hold the process up for longer."""
        if self._guard is not None:
            self._guard.stop()
        if self._watch is not None:
            self._watch.stop()
        self._context.destroy(linger=_LAST_WORDS_MS)
        if self._lock is not None:
            lock = Path(self._lock.name)
            for path in (lock.with_suffix(""), lock):  # ZeroMQ leaves its own; while the lock is held, nobody else's
                path.unlink(missing_ok=True)
            self._lock.close()


def _lock_ipc_path(endpoint: str) -> IO[bytes] | None:
    """ZeroMQ takes over the file of an ipc endpoint that is in use; this lock, gone with its process, keeps it off."""
    if not endpoint.startswith("ipc://"):
        return None
    path = Path(endpoint.removeprefix("ipc://") + ".lock")
    while True:
        try:
            lock = path.open("ab")
        except OSError as error:
            raise EndpointTaken(f"cannot listen on {endpoint}: {error.strerror}: {path}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise EndpointTaken(f"cannot listen on {endpoint}: another executor does") from error
        if _is_at(lock, path):
            return lock
        lock.close()  # who held it has removed it meanwhile


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _descriptor(frame: zmq.Frame) -> int:
    """Of the connection over which the frame has come; -1 over one of the transport's first versions, whose frames tell
    nothing of it."""
    try:
        return int(frame.get(_SRCFD))
    except zmq.ZMQError:
        return -1
