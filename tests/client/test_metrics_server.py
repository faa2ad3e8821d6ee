"""Who connects to the metrics and says nothing, or nonsense, keeps neither threads nor others from reading them."""

import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator

import pytest

from paged import metrics_server
from paged.metrics_server import MAX_CONNECTIONS, MetricsServer
from tests.processes import wait_for


def app(environ: dict, start_response) -> Iterable[bytes]:
    start_response("200 OK", [])
    return [b"here"]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, app)
    server.begin()
    yield server
    server.end()


def read(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=30) as answer:
        return answer.read()


def connected(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=30)


def test_connections_that_say_nothing_are_few_and_do_not_last(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    silent = [connected(server) for _ in range(MAX_CONNECTIONS)]
    wait_for(lambda: threading.active_count() == before + MAX_CONNECTIONS, "a thread for each")
    for _ in range(50):
        with connected(server) as another:
            assert another.recv(1) == b"", "it is closed at once"
    assert threading.active_count() == before + MAX_CONNECTIONS
    silent.pop().close()
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    wait_for(lambda: threading.active_count() == before + MAX_CONNECTIONS - 1, "the end of one")
    assert read(server) == b"here"
    with connected(server) as late:
        assert late.recv(1) == b"", "nothing was said for too long"
    for connection in silent:
        connection.close()
    wait_for(lambda: threading.active_count() == before, "the end of all")


def test_nonsense_leaves_nothing_in_the_log(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    for said in (b"\xff" * 5000, b"GET / HTTP/1.1\r\nHost", b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"x" * 70_000):
        with connected(server) as connection:
            connection.sendall(said)
    wait_for(lambda: threading.active_count() == before, "the end of all")
    assert read(server) == b"here"
    assert capfd.readouterr().err == ""
