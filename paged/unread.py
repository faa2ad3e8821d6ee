"""How much a TCP connection has brought that nobody could read yet, as the kernel counts it.

libzmq keeps the parts of a message until the last one has come, and no limit of its own is about them: MAXMSGSIZE is of
one part, and the high-water mark counts whole messages. What is kept so is seen from outside alone: the connection
brings bytes, and no message comes of them.
"""

import contextlib
import ctypes
import os
import socket
import struct
from typing import Self

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)  # Linux has it
_TCP_INFO_BYTES = 192
_BYTES_RECEIVED, _BYTES_RECEIVED_AT = struct.Struct("=Q"), 128  # tcpi_bytes_received of linux/tcp.h
_NO_ADDRESS = bytes(16)  # of the family AF_UNSPEC: to connect with it is to disconnect


class UnreadBytes:
    """Of one connection, whose descriptor is libzmq's. `note_message` on the thread that reads, the rest on one that
    watches."""

    def __init__(self, descriptor: int) -> None:
        """Raises OSError where it is closed already, or no socket."""
        # Of our own: the number may be another's as soon as libzmq has closed it.
        duplicate = os.dup(descriptor)
        try:
            self._socket = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            raise
        self._num_read = self._num_read_before = 0
        self._read_at = 0  # bytes that had been received when a message was last seen to have been read

    @classmethod
    def of_connection(cls, descriptor: int, *, port: int) -> Self | None:
        """None where it is not, or no longer, one with this port at this end."""
        try:
            connection = cls(descriptor)
        except OSError:
            return None
        with contextlib.suppress(OSError, IndexError):
            if connection._socket.getsockname()[1] == port:
                return connection
        connection.close()
        return None

    def note_message(self) -> None:
        """A whole message has been read."""
        self._num_read += 1

    def look(self) -> int:
        """Bytes received since the last look before which a message had been read. 0 where the kernel does not say."""
        if _TCP_INFO is None:
            return 0
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # not TCP
            return 0
        if len(info) < _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size:
            return 0
        (received,) = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)
        if self._num_read != self._num_read_before:
            self._num_read_before, self._read_at = self._num_read, received
        return int(received - self._read_at)

    def cut(self) -> None:
        """Reset the connection. libzmq finds it broken, and forgets what it has kept of it."""
        # Not shut down: then what goes on arriving goes on being read, and whoever sends fast enough is never cut off.
        ctypes.CDLL(None).connect(self._socket.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))

    def close(self) -> None:
        """Must follow: the connection stays open as long as anybody has it."""
        self._socket.close()
