"""The two services as real processes, for tests that need them: started, watched, killed, and always cleaned up."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fork_server import NUM_THREADS, ForkedProcess, fork_server

START_TIMEOUT_S = 180.0


class Service:
    """One process that writes its address to a file once it is ready; a launcher may start several. It is a fork of one
    that has its imports done, but where it is to be one `of_its_own`, as those of launchers are."""

    process: "subprocess.Popen[bytes] | ForkedProcess"

    def __init__(
        self,
        module: str,
        address_flag: str,
        address_file: Path,
        *flags: str,
        launcher: Sequence[str] = (),
        of_its_own: bool = False,
    ) -> None:
        self.address_file = address_file
        self.address_file.unlink(missing_ok=True)
        self.log_file = address_file.with_suffix(".log")
        arguments = [address_flag, str(address_file), "--exit-with-parent", *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1" if launcher else NUM_THREADS}
        if not launcher and not of_its_own:
            more = ["executor_svc.model.load"] if "--model" in flags else []
            self.process = fork_server(module, *more).start(arguments, self.log_file, environment)
            return
        with self.log_file.open("ab") as log:
            command = [sys.executable, *launcher, "-m", module, *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def address(self) -> str:
        return self.address_file.read_text().strip()

    def wait_until_ready(self, timeout_s: float = START_TIMEOUT_S) -> "Service":
        wait_for(lambda: self.address_file.exists() or self.process.poll() is not None, "the address file", timeout_s)
        assert self.process.poll() is None, self.log
        return self

    @property
    def resident_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    @property
    def ranks(self) -> dict[int, int]:
        """By rank, the ids of the processes that the launcher has started and that live."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        environments = {int(pid): Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids}
        return {
            int(entry.partition(b"=")[2]): pid
            for pid, environment in environments.items()
            for entry in environment
            if entry.startswith(b"RANK=")
        }

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(30)


def free_port() -> int:
    """One of loopback that nobody listens on. The system gives it to nobody who asks for any port, as tests beside this
    one do all the time."""
    while True:
        port = secrets.choice(range(20_000, 32_768))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Until the condition holds. AssertionError after the time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def start_executor(
    directory: Path,
    *flags: str,
    endpoint: str = "tcp://127.0.0.1:0",
    launcher: Sequence[str] = (),
    of_its_own: bool = False,
) -> Service:
    where, how = ["--endpoint", endpoint], {"launcher": launcher, "of_its_own": of_its_own}
    return Service("executor_svc", "--endpoint-file", directory / "executor", *where, *flags, **how)


def torchrun(num_ranks: int, *options: str) -> list[str]:
    """A launcher."""
    count = str(num_ranks)
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count, *options]


def start_scheduler(
    directory: Path, executor_endpoint: str, *flags: str, address: str = "127.0.0.1:0", name: str = "scheduler"
) -> Service:
    cache = ["--cache-dir", str(directory / "tokenizers")]
    where = ["--listen-address", address, "--executor-endpoint", executor_endpoint]
    return Service("scheduler_svc", "--address-file", directory / name, *where, *cache, *flags)


def descendants(pid: int) -> set[int]:
    """Ids of all processes that the process has started, or one of those."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child, *descendants(child)}
    return found


@contextmanager
def cleaned_up(services: list[Service]) -> Iterator[list[Service]]:
    """Whatever was put into the list is gone afterwards."""
    try:
        yield services
    finally:
        for service in services:
            if service.process.poll() is None:
                service.thaw()
                service.kill()
