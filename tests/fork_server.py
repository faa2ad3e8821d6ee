"""Processes of our services that begin with their imports done: forks of one that has them, and does nothing else.

These take two seconds of CPU, with torch six, and tests start some hundreds of services. From its `main` on such a
process does what `python -m MODULE` does: it has an environment, a log, signals and a parent's death of its own, and
ends as an interpreter does. What OpenMP reads when torch brings it is the same for all that have torch: it starts its
threads at the first work for several, which is done in a fork alone.
"""

import atexit
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from executor_svc.process import let_threads_sleep

ROOT = Path(__file__).parent.parent
POLL_S = 0.005
NUM_THREADS = "2"  # of torch


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:  # its end is told once, and may be waited for in a thread
            if self.returncode is None:
                self.returncode = self._server.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # a process that has ended keeps its id until it is polled
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """This process' end of one. It ends with this process, as their connection does, and those that it has forked with
    it, for they are told `--exit-with-parent`."""

    def __init__(self, module: str, *more: str) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), module, *more]
        # OpenBLAS would start threads with numpy's import, and only the thread that forks lives on in a fork.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": NUM_THREADS}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        self._answers = self._socket.makefile("rb")
        self._lock = threading.Lock()
        atexit.register(self._end)

    def start(self, arguments: Sequence[str], log: Path, environment: dict[str, str]) -> ForkedProcess:
        """As `python -m MODULE ARGUMENT...` that appends what it says to `log`."""
        return ForkedProcess(self, self.ask("fork", list(arguments), str(log), environment, os.getcwd()))

    def ask(self, *request: object):
        with self._lock:
            self._socket.sendall(pickle.dumps(request))
            return pickle.load(self._answers)

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()


@cache
def fork_server(module: str, *more: str) -> ForkServer:
    """The one of this service that has more modules imported, too; started when it is first asked for."""
    return ForkServer(module, *more)


def serve(descriptor: int, module: str, *more: str) -> None:
    """Until whoever asks has ended. In a fork: ends with what its `main` returns."""
    connection = socket.socket(fileno=descriptor)
    service = import_module(f"{module}.__main__")
    let_threads_sleep()
    for name in more:
        import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("imports have started a thread, which no fork would have")
    requests = connection.makefile("rb")
    while True:
        try:
            what, *rest = pickle.load(requests)
        except (EOFError, KeyboardInterrupt):
            return
        if what == "poll":
            answer = exit_code(rest[0])
        elif (answer := os.fork()) == 0:
            requests.close()
            connection.close()
            become(module, *rest)
            sys.exit(service.main())
        connection.sendall(pickle.dumps(answer))


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become(module: str, arguments: list[str], log: str, environment: dict[str, str], directory: str) -> None:
    sys.argv = [module, *arguments]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
