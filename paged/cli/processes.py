"""Starting, watching and stopping the services of a demonstration."""

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc.aio

T = TypeVar("T")

TAIL_LINES = 20
STOP_S = 20.0
POLL_S = 0.02
# A client notices a dead server before its parent does.
NOTICE_S = 1.0


class DemoFailed(Exception):
    """The demonstration cannot go on; the text says why."""


class Service:
    """One of our services as a child process that logs to a file."""

    def __init__(self, module: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.module = module
        self._process = process
        self._log_path = log_path

    @classmethod
    async def start(cls, module: str, flags: Sequence[str], log_path: Path) -> Self:
        """Runs the module with the interpreter that runs this; ends with it, too."""
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, "--exit-with-parent", *flags),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return cls(module, process, log_path)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def death(self) -> str:
        """Waits for the end of the process; says how it ended, with the last lines of its log."""
        code = await self._process.wait()
        tail = self._log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{self.module} ended with code {code}; its log ends so:", *tail])

    async def stop(self) -> int:
        """Asks the process to end, and kills it where it does not in time; returns its exit code."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()


async def while_alive(work: Coroutine[Any, Any, T], *services: Service) -> T:
    """The work's result; raises DemoFailed where one of the services ends before it."""
    working = asyncio.create_task(work)
    deaths = [asyncio.create_task(service.death()) for service in services]
    try:
        await asyncio.wait([working, *deaths], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait(deaths, timeout=NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
        for death in deaths:
            if death.done():
                raise DemoFailed(death.result())
        return working.result()
    finally:
        for task in (working, *deaths):
            task.cancel()
        await asyncio.gather(working, *deaths, return_exceptions=True)


async def written(path: Path, timeout_s: float) -> str:
    """What a service writes to `path` once it is ready. Raises DemoFailed if it does not in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not path.exists():
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise DemoFailed(f"nothing was ready within {timeout_s:g} s") from None
    return path.read_text().strip()


async def serving(address_file: Path, timeout_s: float) -> str:
    """The address of a scheduler that takes requests, once it does. Raises DemoFailed if it does not in time."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = await written(address_file, timeout_s)
    request = health_pb2.HealthCheckRequest(service="paged.v1.InferenceService")
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for answer in stub.Watch(request, timeout=timeout_s):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return address
    raise DemoFailed("the scheduler stopped before it was ready")
