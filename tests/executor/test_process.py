"""The executor as a process: signals, endpoints, its parent, what it imports."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paged.v1.executor_pb2 import Fault
from tests.executor.client import PlanClient
from tests.executor.oracle import decode, prefill, says_the_oracle
from tests.processes import Service, wait_for


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_tells_everybody(
    executor: Service, client: PlanClient, number: signal.Signals
) -> None:
    with PlanClient(executor.address) as waiting:
        waiting.ask_to_attach("two")
        assert waiting.is_kept_waiting()
        client.run(prefill())
        executor.process.send_signal(number)
        fault = waiting.fault()
        assert (fault.scope, fault.reason) == (Fault.SCOPE_SESSION, "shutting down")
        leaving = client.receive().leaving
        assert (leaving.epoch, leaving.session) == (client.attached.epoch, client.attached.session)
        assert leaving.grace_ms == 10_000
        with PlanClient(executor.address) as late:
            late.ask_to_attach("three")
            assert late.fault().reason == "shutting down"
        client.run(decode())  # what runs there goes on
        client.detach()
    assert executor.process.wait(10) == 0


def test_a_scheduler_that_does_not_leave_is_told_the_end_when_its_time_is_over(start: Callable[..., Service]) -> None:
    executor = start("--shutdown-grace-s", "0.3")
    with PlanClient(executor.address) as client:
        client.attach()
        client.run(prefill())
        executor.process.terminate()
        assert client.receive().HasField("leaving")
        fault = client.fault()
        assert (fault.scope, fault.reason) == (Fault.SCOPE_SESSION, "shutting down")
    assert executor.process.wait(10) == 0


def test_a_second_signal_ends_it_at_once(start: Callable[..., Service], tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 1, "kind": "hang"}]}')
    executor = start("--simulate-script", str(script), "--log-level", "debug")
    with PlanClient(executor.address) as client:
        client.attach()
        client.send_plan(prefill())
        assert client.hears_nothing(0.2)
        executor.process.terminate()
        assert client.hears_nothing(0.2)
        assert executor.process.poll() is None
        executor.process.terminate()
        assert executor.process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_restart_takes_over_the_endpoint_of_a_killed_executor(
    start: Callable[..., Service], transport: str, tmp_path: Path
) -> None:
    first = start(endpoint="tcp://127.0.0.1:0" if transport == "tcp" else f"ipc://{tmp_path}/plans")
    endpoint = first.address
    first.kill()
    with PlanClient(start(endpoint=endpoint).address) as client:
        client.attach()
        assert says_the_oracle(client)


def test_an_orderly_end_leaves_no_file_of_its_endpoint(start: Callable[..., Service], tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    executor = start(endpoint=f"ipc://{directory}/plans")
    assert {file.name for file in directory.iterdir()} == {"plans", "plans.lock"}
    assert executor.stop() == 0
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_second_executor_on_one_endpoint_refuses_to_start(
    start: Callable[..., Service],
    transport: str,
    tmp_path: Path,
) -> None:
    first = start(endpoint="tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/plans")
    second = subprocess.run(
        [sys.executable, "-m", "executor_svc", "--simulate", "--endpoint", first.address],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert second.returncode == 1
    assert first.address in second.stderr.decode()
    with PlanClient(first.address) as client:
        client.attach()


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    endpoint_file = tmp_path / "endpoint"
    command = [sys.executable, "-m", "executor_svc", "--simulate", "--endpoint", "tcp://127.0.0.1:0"]
    command += ["--exit-with-parent", "--endpoint-file", str(endpoint_file)]
    starter = f"import subprocess, sys; p = subprocess.Popen({command!r}); print(p.pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", starter], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        wait_for(endpoint_file.exists, "the executor")
        parent.kill()
    with PlanClient(endpoint_file.read_text()) as client:
        client.ask_to_attach("one")
        assert client.hears_nothing(0.3)


def test_the_simulated_executor_never_imports_torch(tmp_path: Path) -> None:
    endpoint_file = tmp_path / "endpoint"
    command = [sys.executable, "-X", "importtime", "-m", "executor_svc", "--simulate", "--exit-with-parent"]
    command += ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: endpoint_file.exists() or process.poll() is not None, "the executor")
        process.terminate()
        assert process.stderr is not None
        imported = {line.rpartition("|")[2].strip() for line in process.stderr if line.startswith("import time:")}
    assert process.returncode == 0
    assert "executor_svc.simulated" in imported
    assert not imported & {"torch", "transformers", "kernels", "grpc", "tokenizers"}
