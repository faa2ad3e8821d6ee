"""Starting, watching and stopping the services on this machine."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc.aio

T = TypeVar("T")

TAIL_LINES = 20
STOP_S = 20.0
EXECUTOR_READY_S = 900.0
SCHEDULER_READY_S = 60.0
POLL_S = 0.02
# A client notices a dead server before its parent does.
NOTICE_S = 1.0


class ServiceFailed(Exception):
    """A service does not do what it was started for; the text says why."""


class Service:
    """One of our services as a child process. It logs to a file, or where we do."""

    def __init__(self, module: str, process: asyncio.subprocess.Process, log_path: Path | None) -> None:
        self.module = module
        self._process = process
        self._log_path = log_path

    @classmethod
    async def start(cls, module: str, flags: Sequence[str], log_path: Path | None) -> Self:
        """Runs the module with the interpreter that runs this; ends with it, too. Signals of the terminal are not for
        it: whoever has started it stops it."""
        # A container's first process takes all others with it, and looks to its children as if it had adopted them.
        bound = [] if os.getpid() == 1 else ["--exit-with-parent"]
        with contextlib.ExitStack() as stack:
            log = None if log_path is None else stack.enter_context(log_path.open("wb"))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *bound, *flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr if log is None else log,
                stderr=log,
                start_new_session=True,
            )
        return cls(module, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Waits for the end of the process; returns its exit code."""
        return await self._process.wait()

    async def death(self) -> str:
        """Waits for the end of the process; says how it ended, with the last lines of its log if that is a file."""
        code = await self._process.wait()
        if self._log_path is None:
            return f"{self.module} ended with code {code}"
        tail = self._log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{self.module} ended with code {code}; its log ends so:", *tail])

    async def stop(self, timeout_s: float | None = STOP_S) -> int:
        """Asks the process to end, and kills it where it does not in time; returns its exit code."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), timeout_s)
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


def endpoint_file(directory: Path) -> Path:
    """Where an executor says that it is ready, and its endpoint."""
    return directory / "endpoint"


def address_file(directory: Path) -> Path:
    """Where a scheduler says its address."""
    return directory / "address"


async def start_executor(
    directory: Path, flags: Sequence[str], *, log_path: Path | None, endpoint: str = "tcp://127.0.0.1:0"
) -> Service:
    where = ["--endpoint", endpoint, "--endpoint-file", str(endpoint_file(directory))]
    return await Service.start("executor_svc", [*where, *flags], log_path)


async def start_scheduler(
    directory: Path, endpoint: str, *, log_path: Path | None, address: str = "127.0.0.1:0"
) -> Service:
    where = ["--listen-address", address, "--address-file", str(address_file(directory))]
    return await Service.start("scheduler_svc", [*where, "--executor-endpoint", endpoint], log_path)


async def while_alive(work: Coroutine[Any, Any, T], *services: Service) -> T:
    """The work's result; raises ServiceFailed where one of the services ends before it."""
    working = asyncio.create_task(work)
    deaths = [asyncio.create_task(service.death()) for service in services]
    try:
        await asyncio.wait([working, *deaths], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait(deaths, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        for death in deaths:
            if death.done():
                raise ServiceFailed(death.result())
        return working.result()
    finally:
        for task in (working, *deaths):
            task.cancel()
        await asyncio.gather(working, *deaths, return_exceptions=True)


async def written(path: Path, timeout_s: float) -> str:
    """What a service writes to `path` once it is ready. Raises ServiceFailed if it does not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not path.exists():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise ServiceFailed(f"nothing was ready within {timeout_s:g} s") from None
    return path.read_text().strip()


async def serving(address_file: Path, timeout_s: float) -> str:
    """The address of a scheduler that takes requests, once it does. Raises ServiceFailed if it does not in time."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = await written(address_file, timeout_s)
    request = health_pb2.HealthCheckRequest(service="paged.v1.InferenceService")
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(request, timeout=timeout_s):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return address
    raise ServiceFailed("the scheduler stopped before it was ready")
