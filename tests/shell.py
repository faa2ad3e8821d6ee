"""Runs commands of the documentation as they are written, with the simulated model and with ports that are free."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.processes import free_port, wait_for

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TIMEOUT_S = 120.0
STOP_S = 30.0
STEP_US = 500  # so that long answers last a while
EXECUTOR, SCHEDULER, BOTH = "paged-executor", "paged-scheduler", "paged up"


class Shell:
    """In a directory of its own, with what a checkout has that commands name. What stands in `instead` is replaced.
    A command that is not done after `timeout_s` fails."""

    def __init__(
        self, directory: Path, instead: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.directory = directory
        self._timeout_s = timeout_s
        self._instead = {"--model path/to/model": "--simulate", **(instead or {})}
        self._services: list[subprocess.Popen[bytes]] = []
        self._endpoint_file, self._address_file = directory / "executor.endpoint", directory / "scheduler.address"
        self._endpoints, self.addresses = list[str](), list[str]()
        self._ports: dict[str, str] = {}
        (directory / ".venv").symlink_to(BIN.parent)
        for name in ("examples", "protos", "benchmarks"):
            (directory / name).symlink_to(ROOT / name)

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def run(self, command: str, stdin: str = "") -> str:
        """What it prints. AssertionError where it ends with anything but 0."""
        done = self.done(command, stdin)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def run_once_it_works(self, command: str) -> str:
        """For what needs a moment after the services are there. What it prints."""
        said: list[subprocess.CompletedProcess[str]] = []

        def works() -> bool:
            said[:] = [self.done(command)]
            return said[0].returncode == 0

        try:
            wait_for(works, command)
        except AssertionError:
            raise AssertionError(f"{command}\n{said[0].stdout}{said[0].stderr}") from None
        return said[0].stdout

    def done(self, command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", self._here(command)],
            cwd=self.directory,
            env=self._environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=self._timeout_s,
        )

    def start(self, command: str) -> None:
        """A service, until `stop`; returns when it is ready, and its pages over HTTP are there."""
        if BOTH in command:
            address = self._ports.setdefault("up", f"127.0.0.1:{free_port()}")
            self._begin(f"{command} --address {address}")
            self.addresses.append(address)
            self.run_once_it_works("paged info")
            return
        told = self._endpoint_file if EXECUTOR in command else self._address_file
        told.unlink(missing_ok=True)
        service = self._begin(command)
        wait_for(lambda: told.exists() or service.poll() is not None, f"{command} to be ready")
        assert service.poll() is None, self.log
        if told == self._endpoint_file:
            self._endpoints.append(told.read_text().strip().replace("0.0.0.0", "127.0.0.1"))
        else:
            self.addresses.append(told.read_text().strip().replace("0.0.0.0", "localhost"))
        for flag, address in re.findall(r"--(metrics|block-map)-address (\S+)", command):
            page = "/metrics" if flag == "metrics" else "/"
            url = f"http://{self._here(address)}{page}"
            wait_for(lambda url=url: _is_there(url), url)

    def start_other(self, command: str) -> None:
        """A program that is not ours, until `stop`; it is ready when whoever asks it finds it so."""
        self._begin(command)

    def stop(self) -> None:
        for service in reversed(self._services):
            service.send_signal(signal.SIGINT)
            try:
                service.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(service.pid, signal.SIGKILL)
                service.wait()
        self._services.clear()
        self.addresses.clear()
        self._endpoints.clear()

    def _begin(self, command: str) -> subprocess.Popen[bytes]:
        with (self.directory / "log").open("ab") as log:
            service = subprocess.Popen(
                ["bash", "-c", f"exec {self._here(command)}"],
                cwd=self.directory,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._services.append(service)
        return service

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.directory),
            "PAGED_EXECUTOR_ENDPOINT": "tcp://127.0.0.1:0",
            "PAGED_EXECUTOR_ENDPOINT_FILE": str(self._endpoint_file),
            "PAGED_EXECUTOR_EXIT_WITH_PARENT": "true",
            "PAGED_EXECUTOR_SIMULATE_FIXED_US": str(STEP_US),
            "PAGED_SCHEDULER_LISTEN_ADDRESS": "127.0.0.1:0",
            "PAGED_SCHEDULER_ADDRESS_FILE": str(self._address_file),
            "PAGED_SCHEDULER_EXECUTOR_ENDPOINT": (self._endpoints or [f"ipc://{self.directory}/nobody"])[-1],
            "PAGED_SCHEDULER_EXIT_WITH_PARENT": "true",
            "PAGED_SCHEDULER_CACHE_DIR": str(self.directory / "cache"),
            "PAGED_ADDRESS": self.addresses[-1] if self.addresses else "127.0.0.1:1",
        }

    def _here(self, command: str) -> str:
        for old, new in self._instead.items():
            command = command.replace(old, new)
        return self.ported(command)

    def ported(self, text: str) -> str:
        """An executor takes any port; schedulers are told to; what else listens gets one for each that is named."""
        text = re.sub(r"--endpoint (\S+):555\d\b", r"--endpoint \1:0", text)
        for number, endpoint in enumerate(self._endpoints):
            text = re.sub(rf":{5555 + number}\b", f":{endpoint.rpartition(':')[2]}", text)
        for number, address in enumerate(self.addresses):
            text = re.sub(rf":{50051 + number}\b", f":{address.rpartition(':')[2]}", text)
        text = re.sub(r":5005\d\b", ":0", text)
        return re.sub(r"(:|port )(8\d{3}|9\d{3})\b", lambda found: found[1] + self._port(found[2]), text)

    def _port(self, named: str) -> str:
        return self._ports.setdefault(named, str(free_port()))


def _is_there(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False
