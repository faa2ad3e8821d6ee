"""A peer of a ZeroMQ socket that says what libzmq never would: ZMTP 3.0 on a plain socket, without CURVE."""

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def shake_hands(connection: socket.socket, kind: bytes) -> None:
    """As a socket of this kind (`DEALER`)."""
    connection.sendall(GREETING)
    _receive(connection, len(GREETING))
    connection.sendall(frame(b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind, COMMAND))
    _, length = _receive(connection, 2)
    _receive(connection, length)


def send_until_cut(connection: socket.socket, part: bytes, most_bytes: int = 1 << 32) -> None:
    """Parts of one message, until the other end resets the connection. AssertionError where it does not."""
    block = frame(part, MORE) * max(1, (1 << 16) // len(frame(part)))
    try:
        for _ in range(most_bytes // len(block)):
            connection.sendall(block)
    except ConnectionError:
        return
    raise AssertionError(f"{most_bytes} bytes of a message without an end were taken")


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        assert more, "the other end has hung up"
        data += more
    return data
