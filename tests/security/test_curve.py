"""The executor's socket with CURVE: the schedulers it knows come in, and nobody else (C10.1)."""

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from executor_svc.curve import CurveGuard
from executor_svc.router import Router
from executor_svc.settings import parse
from paged.v1 import executor_pb2 as pb
from scheduler_svc.link.curve import BadKeys, CurveKeys, read_curve_keys
from tests.executor.client import PlanClient
from tests.executor.conftest import SIMULATED, start
from tests.executor.oracle import prefill, says_the_oracle
from tests.processes import Service, cleaned_up, start_executor, wait_for
from tests.security.keys import Keys, run_keys

__all__ = ["start"]

TIMEOUT_S = 10.0
ATTACH = pb.ToExecutor(attach=pb.Attach(protocol_version=1, scheduler_id="stranger")).SerializeToString()


@dataclass
class Watched:
    """What becomes of a socket's handshakes. Used as a guard of a `PlanClient`."""

    keys: CurveKeys | None
    monitor: zmq.Socket | None = None

    def __call__(self, socket: zmq.Socket) -> None:
        if self.keys is not None:
            self.keys.guard(socket)
        self.monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def was_let_in(self) -> bool:
        assert self.monitor is not None
        assert self.monitor.poll(TIMEOUT_S * 1e3), "the handshake neither succeeded nor failed"
        (event,) = struct.unpack("=H", self.monitor.recv_multipart()[0][:2])
        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def ours(keys: Keys) -> CurveKeys:
    return read_curve_keys(keys.curve / "scheduler.key_secret", keys.curve / "executor.key")


def is_let_in(endpoint: str, keys: CurveKeys | None) -> bool:
    """And where it is not, nothing is answered to it."""
    watched = Watched(keys)
    with PlanClient(endpoint, watched) as client:
        client.ask_to_attach("stranger")
        let_in = watched.was_let_in()
        assert let_in or client.hears_nothing(0)
        assert watched.monitor is not None
        watched.monitor.close(0)
    return let_in


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory, made_once: Keys) -> Iterator[Service]:
    """One for all who are not let in."""
    place = tmp_path_factory.mktemp("executor")
    with cleaned_up([start_executor(place, *SIMULATED, *made_once.executor_flags)]) as (service,):
        yield service.wait_until_ready()


@pytest.fixture
def known(executor: Service, made_once: Keys) -> Iterator[PlanClient]:
    """An allowed scheduler, attached."""
    with PlanClient(executor.address, ours(made_once).guard) as client:
        client.attach("known")
        yield client


@pytest.mark.parametrize("stranger", ["no keys", "a key that is not allowed", "a wrong key of the executor"])
def test_a_stranger_is_not_let_in_and_the_known_scheduler_goes_on(
    stranger: str, executor: Service, known: PlanClient, keys: Keys, tmp_path: Path
) -> None:
    others = Keys.make(tmp_path / "others")
    mine, theirs = ours(keys), ours(others)
    shown = {
        "no keys": None,
        "a key that is not allowed": CurveKeys(theirs.public, mine.executor, theirs.secret),
        "a wrong key of the executor": CurveKeys(mine.public, theirs.executor, mine.secret),
    }[stranger]
    assert not is_let_in(executor.address, shown)
    assert says_the_oracle(known)
    if stranger == "a key that is not allowed":
        wait_for(lambda: "scheduler_refused" in executor.log, "the refusal in the log")
        assert theirs.public.decode() in executor.log
    assert mine.secret.decode() not in executor.log


def greeting(mechanism: bytes, major: int = 3) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major, 0]) + mechanism.ljust(20, b"\0") + bytes(32)


def framed(body: bytes, flags: int = 0) -> bytes:
    return bytes([flags, len(body)]) + body


READY = framed(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00", 4)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(greeting(b"NULL") + READY + framed(ATTACH), id="ZMTP 3 without security"),
        pytest.param(
            greeting(b"PLAIN") + framed(b"\x05HELLO\x01a\x01b", 4) + READY + framed(ATTACH), id="name and password"
        ),
        pytest.param(b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + framed(b"") + framed(ATTACH), id="ZMTP 2"),
        pytest.param(b"\x01\x00" + bytes([len(ATTACH) + 1, 0]) + ATTACH, id="ZMTP 1"),
        pytest.param(greeting(b"CURVE") + READY + framed(ATTACH), id="CURVE without a hello"),
        pytest.param(greeting(b"CURVE") + framed(b"\x05HELLO\x01\x00" + bytes(192), 4), id="CURVE with a false hello"),
        pytest.param(bytes(range(256)) * 16, id="anything"),
    ],
)
def test_bytes_that_are_no_handshake_get_no_answer(said: bytes, executor: Service, known: PlanClient) -> None:
    host, port = executor.address.removeprefix("tcp://").split(":")
    heard = b""
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(said)
        try:
            while received := connection.recv(4096):  # until it is ended from there
                heard += received
        except ConnectionResetError:
            pass
    assert len(heard) <= len(greeting(b"")), heard  # its own greeting, which says nothing but CURVE
    assert says_the_oracle(known)


def test_the_keys_allowed_are_those_that_lie_in_the_directory_now(start: Callable[..., Service], keys: Keys) -> None:
    executor = start(*keys.executor_flags)
    own, allowed = keys.curve / "second.key_secret", keys.curve / "allowed" / "second.key"
    run_keys("curve", str(keys.curve), "second")
    second = read_curve_keys(own, keys.curve / "executor.key")
    assert not is_let_in(executor.address, second)
    allowed.write_bytes((keys.curve / "second.key").read_bytes())
    wait_for(lambda: is_let_in(executor.address, second), "the second key to be allowed")
    (keys.curve / "allowed" / "broken.key").write_text("no key")
    wait_for(lambda: is_let_in(executor.address, second) and "not_reloaded" in executor.log, "the broken file's report")
    assert "broken.key" in executor.log
    (keys.curve / "allowed" / "broken.key").unlink()
    allowed.unlink()
    wait_for(lambda: not is_let_in(executor.address, second), "the second key to be refused")
    assert is_let_in(executor.address, ours(keys))


def test_a_handshake_does_not_wait_for_a_step(start: Callable[..., Service], keys: Keys) -> None:
    executor = start(*keys.executor_flags, "--simulate-fixed-us", "3000000")
    with PlanClient(executor.address, ours(keys).guard) as busy:
        busy.attach("busy")
        busy.send_plan(prefill())
        assert is_let_in(executor.address, ours(keys))
        assert busy.hears_nothing(0)  # its step is still under way


# In a process of its own: libzmq may end the one that is cut off in the midst of sending.
ENDLESS = """
import sys
from pathlib import Path
from scheduler_svc.link.curve import read_curve_keys
from tests.executor.client import PlanClient
curve = Path(sys.argv[2])
keys = read_curve_keys(curve / "scheduler.key_secret", curve / "executor.key")
with PlanClient(sys.argv[1], keys.guard) as client:
    client.send_bytes(*[bytes(1000)] * 150_000)
    sys.stdin.read()
"""


def test_who_has_an_allowed_key_fills_no_memory_with_a_message_of_endlessly_many_parts(
    start: Callable[..., Service], keys: Keys
) -> None:
    """libzmq sends no message that has no end: this one is twelve times of what may wait, and cut off on its way."""
    executor = start(*keys.executor_flags, "--max-message-bytes", str(4 << 20))
    command = [sys.executable, "-c", ENDLESS, executor.address, str(keys.curve)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as sender:
        wait_for(lambda: "connection_cut" in executor.log, "the end of the connection")
        sender.kill()
    with PlanClient(executor.address, ours(keys).guard) as client:
        client.attach()
        assert says_the_oracle(client)


@pytest.mark.parametrize(("flags", "mode"), [((), 0o600), (("--ipc-mode", "660"), 0o660)])
def test_the_file_of_an_ipc_endpoint_is_its_owners(tmp_path: Path, flags: tuple[str, ...], mode: int) -> None:
    settings = parse(["--simulate", "--endpoint", f"ipc://{tmp_path}/plans", *flags])
    ipc_mode = int(settings.ipc_mode, 8)
    router = Router(settings.endpoint, max_message_bytes=1 << 20, longest_wait_ms=1, ipc_mode=ipc_mode)
    found = (tmp_path / "plans").stat().st_mode & 0o777
    router.close()
    assert found == mode


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:0", "tcp://10.0.0.1:1", "tcp://127.evil.test:1", "ipc://@plans"],
)
def test_beyond_this_machine_nothing_is_listened_on_without_curve(
    endpoint: str, capsys: pytest.CaptureFixture[str], keys: Keys
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--simulate", "--endpoint", endpoint])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert endpoint in said
    for remedy in ("--curve-key-file", "--curve-allowed-keys", "paged keys create", "--insecure"):
        assert remedy in said
    parse(["--simulate", "--endpoint", endpoint, "--insecure"])
    parse(["--simulate", "--endpoint", endpoint, *keys.executor_flags])


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://127.8.8.8:1", "tcp://[::1]:1", "tcp://localhost:1"])
def test_on_this_machine_nothing_is_needed(endpoint: str) -> None:
    assert parse(["--simulate", "--endpoint", endpoint]).insecure is False


def test_half_of_what_curve_takes_is_refused(capsys: pytest.CaptureFixture[str], keys: Keys) -> None:
    with pytest.raises(SystemExit):
        parse(["--simulate", *keys.executor_flags[:2]])
    assert "--curve-key-file and --curve-allowed-keys go together" in capsys.readouterr().err


@pytest.mark.parametrize("service", ["scheduler", "executor"])
def test_files_that_hold_no_keys_are_named_and_not_quoted(service: str, keys: Keys) -> None:
    own = keys.curve / f"{service}.key_secret"

    def use() -> None:
        if service == "scheduler":
            read_curve_keys(own, keys.curve / "executor.key")
        else:
            guard = CurveGuard(own, keys.curve / "allowed")
            Router("tcp://127.0.0.1:0", max_message_bytes=1 << 20, longest_wait_ms=1, guard=guard).close()

    use()
    good = own.read_text()
    secret = good.split('secret-key = "')[1].split('"')[0]
    for bad in (good.replace("secret-key", "public-kay"), good.replace(secret, secret[:-1]), "", None):
        if bad is None:
            own.unlink()
        else:
            own.write_text(bad)
        with pytest.raises(ValueError, match=service) as caught:
            use()
        assert secret[:-1] not in str(caught.value)


def test_a_pair_that_is_none_is_refused(keys: Keys) -> None:
    own, other = keys.curve / "scheduler.key_secret", keys.curve / "executor.key"
    mine, theirs = ours(keys).public.decode(), ours(keys).executor.decode()
    own.write_text(own.read_text().replace(mine, theirs))
    with pytest.raises(BadKeys, match="not that of its secret key"):
        read_curve_keys(own, other)


def test_keys_are_not_shown_by_accident(keys: Keys) -> None:
    assert ours(keys).secret.decode() not in repr(ours(keys))
