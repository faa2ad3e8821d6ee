"""A gateway's file of schedulers follows the name that stands for them."""

import json
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paged.gateway_workers import WorkersFile, main, resolve
from tests.processes import wait_for


class Names:
    """A resolver whose answers a test changes."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def __call__(self, host: str) -> list[str]:
        assert host == "scheduler"
        if not self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return self.addresses


def workers_in(file: Path) -> list[str]:
    content = json.loads(file.read_text())
    assert content["version"] == 1
    return [worker["url"] for worker in content["workers"]]


def test_schedulers_that_come_and_go_are_in_the_file(tmp_path: Path) -> None:
    names, file = Names("10.0.0.2"), tmp_path / "workers.json"
    workers = WorkersFile("scheduler:50051", file, names)
    workers.update()
    assert workers_in(file) == ["grpc://10.0.0.2:50051"]
    names.addresses = ["10.0.0.2", "10.0.0.3"]
    workers.update()
    assert workers_in(file) == ["grpc://10.0.0.2:50051", "grpc://10.0.0.3:50051"]
    names.addresses = ["fd00::3"]
    workers.update()
    assert workers_in(file) == ["grpc://[fd00::3]:50051"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o644  # the gateway may be another user
    assert [path.name for path in tmp_path.iterdir()] == ["workers.json"]


def test_a_file_is_there_before_the_first_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    WorkersFile("scheduler:50051", file, Names()).update()
    assert workers_in(file) == []


def test_a_name_that_is_not_found_for_a_while_keeps_its_schedulers(tmp_path: Path) -> None:
    names, file = Names("10.0.0.2"), tmp_path / "workers.json"
    workers = WorkersFile("scheduler:50051", file, names)
    workers.update()
    names.addresses = []
    workers.update()
    assert workers_in(file) == ["grpc://10.0.0.2:50051"]
    names.addresses = ["10.0.0.4"]
    workers.update()
    assert workers_in(file) == ["grpc://10.0.0.4:50051"]


def test_a_file_that_would_be_the_same_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    workers = WorkersFile("scheduler:50051", file, Names("10.0.0.2"))
    workers.update()
    file.unlink()
    workers.update()
    assert not file.exists()


def test_the_systems_resolver_is_asked() -> None:
    assert resolve("localhost") == ["127.0.0.1"]
    with pytest.raises(OSError):
        resolve("a..b")


@pytest.mark.parametrize("schedulers", ["scheduler", ":50051", "scheduler:0", "scheduler:65536", "scheduler:x"])
def test_what_is_no_name_with_a_port_is_refused(
    schedulers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([schedulers, str(tmp_path / "workers.json")])
    assert end.value.code == 2
    assert "must be NAME:PORT" in capsys.readouterr().err


def test_the_command_writes_the_file_and_ends_when_told_to(tmp_path: Path) -> None:
    file = tmp_path / "workers.json"
    command = [sys.executable, "-m", "paged.gateway_workers", "localhost:50051", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for(file.exists, "the file")
            assert workers_in(file) == ["grpc://127.0.0.1:50051"]
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_directory_that_is_not_there_ends_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paged.gateway_workers", "localhost:50051", str(tmp_path / "no" / "workers.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
