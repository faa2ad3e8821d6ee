"""Every socket that a service listens on is known, and tells nothing to whoever comes without credentials (shown 7)."""

import asyncio
import errno
import pickle
import socket
import ssl
import sys

import aiohttp
import pytest

from paged.client import Client
from tests.security.keys import Keys
from tests.security.sockets import listening
from tests.security.test_curve import ATTACH, READY, framed, greeting
from tests.system.conftest import System
from tests.system.requests import ready

TIMEOUT_S = 20.0
PROMPT, SALT, REQUEST = "marker-in-a-prompt", "marker-in-a-salt", "marker-in-an-id"
HTTP = b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
SAID = {
    "HTTP": HTTP % b"watch",
    "HTTP/2 without TLS": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "ZeroMQ without keys": greeting(b"NULL") + READY + framed(ATTACH),
    "a pickle": pickle.dumps(print),
    "anything": bytes(range(256)) * 64,
}
HUNG_UP = {errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN}  # which of them depends on when the other side does it
ZMTP_GREETING_BYTES = 64  # more than an alert of TLS has


def heard(port: int, said: bytes) -> bytes:
    """All that is answered to these bytes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        try:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            while received := connection.recv(1 << 16):
                answer += received
        except OSError as error:
            if error.errno not in HUNG_UP:
                raise
    return answer


@pytest.fixture
def guarded(system: System, keys: Keys) -> System:
    """With everything that there is to listen on."""
    metrics = ["--metrics-address", "127.0.0.1:0"]
    system.executor_flags = [*keys.executor_flags, *metrics]
    system.scheduler_flags = [*keys.scheduler_flags, *keys.link_flags, *metrics]
    system.scheduler_flags += ["--block-map-address", "127.0.0.1:0"]
    return system.start()


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
async def test_no_socket_tells_a_stranger_anything(guarded: System, keys: Keys) -> None:
    async with Client(guarded.address, credentials=keys.credentials, token=keys.operator) as client:
        await ready(client)
        await client.complete(PROMPT, max_tokens=5, cache_salt=SALT, tenant=SALT, request_id=REQUEST)
        going_on = asyncio.create_task(client.complete(PROMPT, max_tokens=3000, request_id=REQUEST, ignore_eos=True))
        ports = {port for service in (guarded.scheduler, guarded.executor) for _, port in listening(service)}
        named = {int(address.rpartition(":")[2]) for address in (guarded.address, guarded.executor.address)}
        figures = {port for port in ports if b"# HELP" in await asyncio.to_thread(heard, port, HTTP % b"metrics")}
        assert named < ports
        assert (len(ports), len(figures), len(named & figures)) == (5, 2, 0), "two of gRPC and plans, page, metrics"
        for port in ports:
            for what, said in SAID.items():
                answer = await asyncio.to_thread(heard, port, said)
                for secret in (PROMPT, SALT, REQUEST, "operator", keys.operator):
                    assert secret.encode() not in answer, (what, secret)
                if port not in figures:
                    assert len(answer) <= ZMTP_GREETING_BYTES, (what, answer)
        (page,) = ports - named - figures
        await nothing_is_shown(page, keys)
        going_on.cancel()


async def nothing_is_shown(page: int, keys: Keys) -> None:
    """By the block map page, to those with a certificate and no token that opens it; without one there is no page."""
    expired = keys.token("late", "--days", "0", "--role", "read")
    tls = ssl.create_default_context(cafile=keys.tls / "ca.pem")
    url = f"https://127.0.0.1:{page}"
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientError):
            await http.get(url, ssl=tls)
        tls.load_cert_chain(keys.tls / "client.pem", keys.tls / "client-key.pem")
        async with http.get(url, ssl=tls) as answer:
            assert answer.status == 200
            static = await answer.text()
        for secret in (PROMPT, SALT, REQUEST, keys.operator):
            assert secret not in static
        for path in ("watch", f"requests/{REQUEST}", "prefixes"):
            for token in (None, keys.operator[:-1] + "!", expired):
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                async with http.get(f"{url}/{path}", ssl=tls, headers=headers) as answer:
                    assert answer.status == 401, (path, token)
