"""The compose stack on a docker daemon: started, scaled, its containers killed, asked from a container of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.simulated.text import simulated_continuation
from tests.deploy.manifests import ROOT
from tests.processes import wait_for

PATIENCE_S = 600.0
CALLER = Path(__file__).with_name("caller.py")
VOCAB_SIZE = 32_000
FETCH = """
import sys, urllib.request
headers = {"content-type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode() or None, headers)
print(urllib.request.urlopen(request, timeout=20).read().decode())
"""


@dataclass
class Stack:
    """`docker` is a command line, `project` what compose calls all of it."""

    docker: str
    project: str
    overrides: tuple[str, ...] = ("compose.simulate.yaml",)

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run(self._command(*arguments), check=check)

    def up(self, *services: str, schedulers: int = 1, executors: int = 1, profile: Sequence[str] = ()) -> None:
        """Until all that was asked for is healthy. Images are not built."""
        profiles = [part for name in profile for part in ("--profile", name)]
        scale = ["--scale", f"scheduler={schedulers}", "--scale", f"executor={executors}"]
        wait = ["--detach", "--no-build", "--wait", "--wait-timeout", str(int(PATIENCE_S))]
        done = self.compose(*profiles, "up", *wait, *scale, *services, check=False)
        if done.returncode:
            logs = self.compose("logs", "--tail", "20", check=False).stdout
            raise AssertionError(f"not all of it came up:\n{done.stderr[-2000:]}{logs}")

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "30", check=False)

    def containers(self, service: str) -> list["Container"]:
        ids = self.compose("ps", "--quiet", service).stdout.split()
        found: list[dict[str, Any]] = json.loads(_run([self.docker, "inspect", *ids]).stdout) if ids else []
        return [Container.of(self, facts) for facts in found]

    def healthy(self, service: str) -> int:
        return sum(container.is_healthy for container in self.containers(service))

    def image_bytes(self, name: str) -> int:
        return int(_run([self.docker, "image", "inspect", "--format", "{{.Size}}", name]).stdout)

    def calling(self, *arguments: str) -> subprocess.Popen[str]:
        """caller.py in a container beside the schedulers."""
        run = ["run", "--rm", "--no-deps", "-T", "--entrypoint", "python", "client", "-c", CALLER.read_text()]
        command = self._command(*run, *arguments)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    def _command(self, *arguments: str) -> list[str]:
        files = [part for file in ("docker-compose.yml", *self.overrides) for part in ("-f", file)]
        program = str(Path(sys.executable).with_name("docker-compose"))
        return [program, "-p", self.project, "--project-directory", str(ROOT), "--ansi", "never", *files, *arguments]


@dataclass
class Container:
    id: str
    pid: int
    restarts: int
    is_healthy: bool
    addresses: list[str]
    stack: Stack

    @classmethod
    def of(cls, stack: Stack, facts: dict[str, Any]) -> "Container":
        state = facts["State"]
        networks = facts["NetworkSettings"]["Networks"].values()
        return cls(
            id=facts["Id"],
            pid=state["Pid"],
            restarts=facts["RestartCount"],
            is_healthy=state.get("Health", {}).get("Status") == "healthy",
            addresses=[network["IPAddress"] for network in networks],
            stack=stack,
        )

    def execute(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return _run([self.stack.docker, "exec", self.id, *command], check=check)

    def fetch(self, url: str, body: object = None) -> str | None:
        """By HTTP from inside; None where no answer comes, or one that says no."""
        done = self.execute("python", "-c", FETCH, url, json.dumps(body) if body else "", check=False)
        return done.stdout if done.returncode == 0 else None

    def metric(self, port: int, name: str, label: str = "") -> float:
        """The sum of all that have the label; 0 where nothing answers."""
        lines = (self.fetch(f"http://127.0.0.1:{port}/metrics") or "").splitlines()
        found = [line for line in lines if line.startswith((f"{name}{{", f"{name} ")) and label in line]
        return sum(float(line.split()[-1]) for line in found)

    def crash(self) -> None:
        """As by a fault: what docker itself is told to kill it does not start again."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def times_started(self) -> int:
        (facts,) = json.loads(_run([self.stack.docker, "inspect", self.id]).stdout)
        return int(facts["RestartCount"]) + 1


@dataclass
class Answers:
    """What caller.py has printed."""

    by_number: dict[int, list[int]]
    failed: list[str]
    tokens_by_scheduler: dict[str, int]

    @classmethod
    def of(cls, caller: "subprocess.Popen[str]") -> "Answers":
        output, errors = caller.communicate(timeout=PATIENCE_S)
        assert caller.returncode == 0, errors
        printed = json.loads(output.splitlines()[-1])
        return cls(
            {int(number): ids for number, ids in printed["answers"].items()},
            printed["failed"],
            printed["tokens_by_scheduler"],
        )

    def check_exact(self, count: int, max_tokens: int) -> None:
        """As the simulated model must say, all of them."""
        assert not self.failed
        assert sorted(self.by_number) == list(range(count))
        for number, ids in self.by_number.items():
            prompt = [256, *f"Question {number}".encode()]
            assert ids == simulated_continuation(prompt, max_tokens, vocab_size=VOCAB_SIZE), number


def until(condition: Any, what: str) -> None:
    wait_for(condition, what, PATIENCE_S)


def _run(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=2 * PATIENCE_S
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done
