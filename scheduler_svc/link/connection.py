"""One connection to an executor: a DEALER socket, what libzmq tells of it, and what the kernel does."""

import contextlib
import struct
from collections.abc import Callable

import zmq

from paged.unread import UnreadBytes
from scheduler_svc.link.codec import MalformedMessage
from scheduler_svc.link.curve import CurveKeys

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
RECONNECT_MS = 100
GOODBYE_MS = 200
MAX_MESSAGE_BYTES = 1 << 28  # a lease takes four bytes a block
HANDSHAKE_FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Plain numbers: flags are combined in Python, and slowly.
CONNECTED, READY, LOST = int(zmq.EVENT_CONNECTED), int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)
READABLE = int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
RCVMORE = int(zmq.RCVMORE)
EVENT = struct.Struct("=Hi")  # its number, and the descriptor that it is about


class Connection:
    """Not usable any more once it is lost: plans that wait in it could reach a restarted executor. Raises ZMQError."""

    def __init__(self, context: zmq.Context, endpoint: str, keys: CurveKeys | None) -> None:
        self._is_guarded = keys is not None
        self._unread: UnreadBytes | None = None
        self._socket = context.socket(zmq.DEALER)
        for option, value in {
            zmq.LINGER: 0,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.IPV6: "[" in endpoint,
        }.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            keys.guard(self._socket)
        self._monitor = self._socket.get_monitor_socket(CONNECTED | READY | LOST | HANDSHAKE_FAILED)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        # A descriptor tells of what comes after its socket was last asked for its events, so both are asked after
        # whatever may have hidden some.
        self.messages_descriptor: int = self._socket.getsockopt(zmq.FD)
        self.events_descriptor: int = self._monitor.getsockopt(zmq.FD)

    def send(self, data: bytes) -> None:
        """Never waits. Raises zmq.Again where no more is taken."""
        self._socket.send(data, NOBLOCK)

    def receive(self) -> bytes:
        """A message. Raises zmq.Again where none has come, MalformedMessage where it has several parts."""
        data: bytes = self._socket.recv(NOBLOCK)
        if self._unread is not None:
            self._unread.note_message()
        if self._socket.getsockopt(RCVMORE):
            raise MalformedMessage("it has several parts")
        return data

    def unread_bytes(self) -> int:
        """That have come without being a whole message; of TCP alone."""
        return 0 if self._unread is None else self._unread.look()

    def how_it_was_lost(self, on_ready: Callable[[], None]) -> str | None:
        """Why the connection is over; None while it is not. `on_ready` is called when the executor has let us in."""
        while self._monitor.getsockopt(zmq.EVENTS) & READABLE:
            event, descriptor = EVENT.unpack(self._monitor.recv_multipart(NOBLOCK)[0])
            if event == CONNECTED:
                with contextlib.suppress(OSError):  # it is lost already
                    self._unread = UnreadBytes(descriptor)
            elif event == READY:
                on_ready()
            else:
                return self._what_lost_means(event)
        return None

    def _what_lost_means(self, event: int) -> str:
        if not event & HANDSHAKE_FAILED:
            return "connection to the executor lost"
        if not self._is_guarded:
            return "the executor ended the handshake: it may want CURVE keys (--curve-key-file, --curve-executor-key)"
        return "the executor ended the handshake: it may not allow our CURVE key, have another itself, or none"

    def linger(self) -> None:
        """What is sent from now on has a moment to leave when the connection is closed."""
        self._socket.setsockopt(zmq.LINGER, GOODBYE_MS)

    def close(self) -> None:
        if self._unread is not None:
            self._unread.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
