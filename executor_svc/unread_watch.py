"""Cuts off who sends without end what is no message, before it fills the memory."""

import struct
import threading
import time

import structlog
import zmq

from paged.unread import UnreadBytes

TICK_S = 0.1
_ACCEPTED, _STOPPED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_MONITOR_STOPPED)
_EVENT = struct.Struct("=Hi")  # its number, and the descriptor that it is about

_log = structlog.get_logger()


class UnreadWatch:
    """Of all TCP connections of a socket that is bound to one port. Has a thread of its own: a step may take long."""

    def __init__(self, socket: zmq.Socket, max_unread_bytes: int) -> None:
        """Before the socket is bound. `max_unread_bytes` are of one connection."""
        self._socket = socket
        self._max_unread_bytes = max_unread_bytes
        self._monitor = socket.get_monitor_socket(_ACCEPTED | int(zmq.EVENT_DISCONNECTED) | _STOPPED)
        self._connections: dict[int, UnreadBytes] = {}  # by libzmq's descriptor
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="unread watch", daemon=True)

    def start(self, port: int) -> None:
        """When it is bound."""
        self._port = port
        self._thread.start()

    def note_message(self, descriptor: int) -> None:
        """A whole message of this connection has been read; on the socket's thread."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.note_message()

    def stop(self) -> None:
        """Before the socket is closed, and on its thread."""
        self._socket.disable_monitor()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        next_look = 0.0
        while self._take_events():
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + TICK_S
        for connection in self._connections.values():
            connection.close()
        self._monitor.close(0)

    def _take_events(self) -> bool:
        """Those that have come, or the first one that comes within a tick. False where it was the last."""
        wait_ms = round(TICK_S * 1e3)
        while self._monitor.poll(wait_ms):
            event, descriptor = _EVENT.unpack(self._monitor.recv_multipart()[0])
            if event == _STOPPED:
                return False
            self._take_event(event, descriptor)
            wait_ms = 0
        return True

    def _take_event(self, event: int, descriptor: int) -> None:
        known = self._connections.pop(descriptor, None)
        if known is not None:
            known.close()
        if event == _ACCEPTED:
            connection = UnreadBytes.of_connection(descriptor, port=self._port)
            if connection is not None:
                self._connections[descriptor] = connection

    def _look(self) -> None:
        for descriptor, connection in list(self._connections.items()):
            num_bytes = connection.look()
            if num_bytes > self._max_unread_bytes:
                _log.warning("connection_cut", bytes=num_bytes, reason="it brought no whole message for too long")
                connection.cut()
                self._connections.pop(descriptor).close()
