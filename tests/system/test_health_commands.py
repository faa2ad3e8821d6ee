"""What containers are probed with says what is so, with or without TLS."""

import socket
import subprocess
import sys
from pathlib import Path

from tests.processes import free_port, wait_for
from tests.security.keys import Keys
from tests.system.conftest import System


def health(service: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{service}.health_command", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_scheduler_is_ready_while_it_has_an_executor_and_lives_without(system: System) -> None:
    system.start()
    address = ["--address", system.address]
    wait_for(lambda: health("scheduler_svc", *address).returncode == 0, "a ready scheduler")
    system.executor.kill()
    wait_for(lambda: health("scheduler_svc", *address).returncode == 1, "a scheduler that is not ready")
    assert health("scheduler_svc", *address).stdout == "NOT_SERVING\n"
    assert health("scheduler_svc", *address, "--service", "live").returncode == 0


def test_nobody_there_is_not_well() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        asked = health("scheduler_svc", "--address", address)
        assert (asked.returncode, "UNAVAILABLE" in asked.stderr) == (1, True)
        asked = health("executor_svc", "--metrics-address", address)
        assert (asked.returncode, "refused" in asked.stderr) == (1, True)


def test_a_scheduler_with_tls_is_asked_by_its_ca(system: System, tmp_path: Path) -> None:
    keys = Keys.make(tmp_path / "keys")
    system.scheduler_flags = keys.scheduler_flags
    system.start()
    address, root = ["--address", system.address], ["--tls-root", str(keys.tls / "ca.pem")]
    pair = ["--tls-certificate", str(keys.tls / "client.pem"), "--tls-private-key", str(keys.tls / "client-key.pem")]
    wait_for(lambda: health("scheduler_svc", *address, *root, *pair).returncode == 0, "a ready scheduler")
    for too_little in ([], root):
        assert health("scheduler_svc", *address, *too_little, "--timeout-s", "1").returncode == 1


def test_a_ca_that_is_not_there_is_told(tmp_path: Path) -> None:
    asked = health("scheduler_svc", "--tls-root", str(tmp_path / "ca.pem"))
    assert (asked.returncode, "ca.pem" in asked.stderr) == (2, True)


def test_an_executor_is_well_once_it_serves(system: System) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    system.executor_flags = ["--metrics-address", metrics]
    system.start()
    wait_for(lambda: health("executor_svc", "--metrics-address", metrics).returncode == 0, "an executor that serves")
    system.executor.kill()
    assert health("executor_svc", "--metrics-address", metrics).returncode == 1


def test_flags_that_are_none_are_refused() -> None:
    assert health("scheduler_svc", "--service", "asleep").returncode == 2
    assert health("executor_svc", "--port", "1").returncode == 2
