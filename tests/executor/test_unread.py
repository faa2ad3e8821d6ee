"""A message without an end fills no memory: who sends one is cut off, and nobody else notices."""

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from paged.unread import UnreadBytes
from paged.v1.executor_pb2 import GetTokenizer, ToExecutor
from tests.executor.client import PlanClient
from tests.executor.oracle import says_the_oracle
from tests.processes import Service, wait_for
from tests.zmtp import send_until_cut, shake_hands

MESSAGE_BYTES = 4 << 20  # of the largest; three of them may wait
LIMITED = ("--max-message-bytes", str(MESSAGE_BYTES))


def connection_to(executor: Service) -> socket.socket:
    host, _, port = executor.address.removeprefix("tcp://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    shake_hands(connection, b"DEALER")
    return connection


@pytest.mark.parametrize("part_bytes", [0, 200, 100_000])
def test_who_sends_a_message_without_an_end_is_cut_off_each_time(
    start: Callable[..., Service], part_bytes: int
) -> None:
    executor = start(*LIMITED, "--session-timeout-s", "600")
    with PlanClient(executor.address) as client:
        for number in range(1, 3):
            client.attach()
            assert says_the_oracle(client)
            with connection_to(executor) as connection:
                send_until_cut(connection, bytes(part_bytes))
            assert executor.log.count("connection_cut") == number
            client.run()  # its session has gone on
            client.detach()


def test_who_sends_whole_messages_may_send_any_number(start: Callable[..., Service]) -> None:
    """Each is read before the next one: the answer shows it."""
    executor = start(*LIMITED)
    asking = ToExecutor(get_tokenizer=GetTokenizer()).SerializeToString()
    padding = MESSAGE_BYTES - 100
    unknown = b"\xfa\x01" + _varint(padding) + bytes(padding)  # a field that nobody knows is left alone
    with PlanClient(executor.address) as client:
        for _ in range(8):
            client.send_bytes(asking + unknown)
            assert client.receive().HasField("tokenizer_chunk")
        client.attach()
    assert "connection_cut" not in executor.log


def test_a_message_of_many_parts_is_left_out_and_the_next_one_is_heard(client: PlanClient, executor: Service) -> None:
    client.send_bytes(*[b""] * 5001)
    assert says_the_oracle(client)
    assert "message_dropped" in executor.log


def test_a_message_over_the_transports_first_version_is_dropped_like_any_other(
    client: PlanClient, executor: Service
) -> None:
    host, _, port = executor.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as old:
        old.sendall(b"\x01\x00" + b"\x05\x00what")  # no name; a length, no flags, what is no message of ours
        wait_for(lambda: "message_dropped" in executor.log or executor.process.poll() is not None, "the message")
    assert says_the_oracle(client)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def send(pair: tuple[socket.socket, socket.socket], data: bytes) -> None:
    """It has arrived, when this returns."""
    pair[0].sendall(data)
    assert len(pair[1].recv(len(data), socket.MSG_WAITALL)) == len(data)


def test_bytes_count_from_the_last_message_that_was_read(pair: tuple[socket.socket, socket.socket]) -> None:
    unread = UnreadBytes(pair[1].fileno())
    send(pair, bytes(1000))
    assert unread.look() == 1000
    send(pair, bytes(500))
    assert unread.look() == 1500
    unread.note_message()
    assert unread.look() == 0
    send(pair, bytes(7))
    assert unread.look() == 7
    unread.cut()
    with pytest.raises(ConnectionResetError):
        pair[0].recv(1)
    unread.close()


def test_only_a_connection_of_the_port_is_watched(pair: tuple[socket.socket, socket.socket]) -> None:
    """The number of a connection that has ended may be anybody's."""
    port = pair[1].getsockname()[1]
    found = UnreadBytes.of_connection(pair[1].fileno(), port=port)
    assert found is not None
    found.close()
    assert UnreadBytes.of_connection(pair[0].fileno(), port=port) is None
    assert UnreadBytes.of_connection(10**6, port=port) is None
    reader, writer = os.pipe()
    assert UnreadBytes.of_connection(reader, port=port) is None
    os.close(reader)
    os.close(writer)


def _varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])
