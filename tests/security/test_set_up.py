"""The commands of docs/security.md, as they are there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paged.cli.app import app
from tests.processes import wait_for
from tests.security.keys import Keys

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
BESIDE_PYTHON = Path(sys.executable).parent
TIMEOUT_S = 60.0


def commands() -> list[list[str]]:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]


class Shell:
    """Runs them in a directory, with ports that are free instead of those on the page."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.services: list[subprocess.Popen[bytes]] = []
        self.executor, self.scheduler = directory / "executor.endpoint", directory / "scheduler.address"

    def run(self, command: list[str]) -> str:
        done = self._done(command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run_once_it_works(self, command: list[str]) -> str:
        """Returns what it prints."""
        said: list[str] = []

        def works() -> bool:
            done = self._done(command)
            said.append(done.stdout)
            return done.returncode == 0

        wait_for(works, f"{command[0]} to work")
        return said[-1]

    def _done(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._here(command),
            cwd=self.directory,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def start(self, command: list[str], told: Path) -> None:
        with (self.directory / "log").open("ab") as log:
            service = subprocess.Popen(
                self._here(command), cwd=self.directory, env=self._environment(), stdout=log, stderr=log
            )
        self.services.append(service)
        wait_for(lambda: told.exists() or service.poll() is not None, f"{command[0]} to be ready")
        assert service.poll() is None, (self.directory / "log").read_text()

    def _environment(self) -> dict[str, str]:
        scheduler = self.scheduler.read_text().strip() if self.scheduler.exists() else ""
        return {
            **os.environ,
            "PAGED_EXECUTOR_ENDPOINT_FILE": str(self.executor),
            "PAGED_EXECUTOR_EXIT_WITH_PARENT": "true",
            "PAGED_SCHEDULER_ADDRESS_FILE": str(self.scheduler),
            "PAGED_SCHEDULER_EXIT_WITH_PARENT": "true",
            "PAGED_SCHEDULER_CACHE_DIR": str(self.directory / "cache"),
            "PAGED_ADDRESS": scheduler.replace("0.0.0.0", "localhost"),
        }

    def _here(self, command: list[str]) -> list[str]:
        port = self.executor.read_text().strip().rpartition(":")[2] if self.executor.exists() else "0"
        words = [word.replace(":5555", f":{port}").replace(":50051", ":0") for word in command]
        return [str(BESIDE_PYTHON / words[0]), *words[1:]]


def test_five_commands_set_up_a_guarded_system(tmp_path: Path) -> None:
    create, executor, scheduler, token, ask = commands()
    shell = Shell(tmp_path)
    try:
        listed = shell.run(create)
        assert "600 keys/curve/executor.key_secret" in listed.splitlines()
        shell.start(executor, shell.executor)
        shell.start(scheduler, shell.scheduler)
        assert shell.run(token) == ""
        assert (tmp_path / "shop.token").stat().st_mode & 0o777 == 0o600
        answer = shell.run_once_it_works(ask)  # the scheduler looks at its file once a second
        assert len(answer.strip()) > 10
        with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
            shell.run([word for word in ask if word not in ("--token-file", "shop.token")])
        assert "insecure" not in (tmp_path / "log").read_text()
    finally:
        for service in shell.services:
            service.kill()
            service.wait()


def test_nothing_is_written_over(keys: Keys) -> None:
    before = {file: file.read_bytes() for file in keys.directory.rglob("*") if file.is_file()}
    for again in (
        ["create", str(keys.directory), "--host", "x"],
        ["certificate", str(keys.tls), "client"],
        ["curve", str(keys.curve), "executor"],
        ["token", str(keys.token_file), "x", "--out", str(keys.directory / "operator.token")],
    ):
        done = CliRunner().invoke(app, ["keys", *again])
        assert done.exit_code == 1
        assert "is there already" in done.output
    assert {file: file.read_bytes() for file in keys.directory.rglob("*") if file.is_file()} == before
    secret = [file for file in before if file.suffix == ".key_secret" or "-key" in file.name or ".token" in file.name]
    assert len(secret) == 6
    assert all(file.stat().st_mode & 0o077 == 0 for file in secret)
