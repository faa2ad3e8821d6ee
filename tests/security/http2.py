"""HTTP/2 by hand: callers that do what no library would."""

import re
import socket
import struct

SETTINGS, HEADERS, DATA = 4, 1, 0
END_STREAM, END_HEADERS = 1, 4
TIMEOUT_S = 20.0
_STATUS = re.compile(rb"grpc-status.(\d+).*?grpc-message(.[^\x00]*)", re.DOTALL)


def frame(kind: int, body: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def message(body: bytes, announced: int | None = None) -> bytes:
    """As gRPC frames it; `announced` bytes instead of those there are."""
    return b"\x00" + struct.pack(">I", len(body) if announced is None else announced) + body


def header(name: bytes, value: bytes) -> bytes:
    """Literal, without an index."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


class Connection:
    """One, without TLS, that begins calls. `window`: bytes of each answer that the server may send."""

    def __init__(self, address: str, window: int = 65_535) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._next_stream = 1
        settings = struct.pack(">HIHI", 1, 0, 4, window)  # and no table: all headers come as they are
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, settings))

    def begin(self, path: str, token: str = "", data: bytes = b"", *, ends: bool = False) -> None:
        """A call: its headers, and this much of its request; `ends` where that is all."""
        headers = [
            *((b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x")),
            *((b"te", b"trailers"), (b"content-type", b"application/grpc")),
        ]
        if token:
            headers.append((b"authorization", b"Bearer " + token.encode()))
        block = b"".join(header(*pair) for pair in headers)
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self.socket.sendall(
            frame(HEADERS, block, flags=END_HEADERS, stream=stream)
            + frame(DATA, data, flags=END_STREAM if ends else 0, stream=stream)
        )

    def statuses(self, count: int) -> list[tuple[int, str]]:
        """Codes and messages of the first calls that end on it, waited for."""
        heard = b""
        while len(found := _STATUS.findall(heard)) < count:
            received = self.socket.recv(1 << 16)
            assert received, "the server has hung up"
            heard += received
        return [(int(code), text[1 : 1 + text[0]].decode()) for code, text in found]

    def close(self) -> None:
        self.socket.close()
