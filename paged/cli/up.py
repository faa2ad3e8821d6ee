"""`paged up`: one executor and one scheduler on this machine, until they are told to stop."""

import asyncio
import json
import signal
import tempfile
import time
from pathlib import Path

from rich.console import Console

from paged.cli.processes import (
    EXECUTOR_READY_S,
    SCHEDULER_READY_S,
    Service,
    ServiceFailed,
    address_file,
    endpoint_file,
    serving,
    start_executor,
    start_scheduler,
    while_alive,
    written,
)
from paged.cli.restarts import Restarts
from paged.cli.waiting import say, small_model, waiting

BAD_SETTINGS = 2  # exit code of a service that would not start the next time either


async def run(model: str | None, *, simulate: bool, address: str, as_json: bool = False) -> None:
    """Serve until SIGTERM or SIGINT; the second one kills both services. As JSON, standard output is one object, once
    there is somebody to call. Raises ServiceFailed where either cannot go on. No process is left behind."""
    console = Console(stderr=as_json)
    if model is None and not simulate:
        model = await small_model(console)
    machine = _Machine(console, ["--model", model] if model else ["--simulate"], address, as_json=as_json)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, machine.on_signal, stopped)
    serving_until_told = asyncio.create_task(machine.serve())
    told = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait([serving_until_told, told], return_when=asyncio.FIRST_COMPLETED)
        if serving_until_told.done():
            serving_until_told.result()  # raises: it never ends by itself
    finally:
        for task in (serving_until_told, told):
            task.cancel()
        await asyncio.gather(serving_until_told, told, return_exceptions=True)
        await machine.stop()
    say(console, "Both processes have stopped.")


class _Machine:
    def __init__(self, console: Console, executor_flags: list[str], address: str, *, as_json: bool) -> None:
        self._console = console
        self._as_json = as_json
        self._executor_flags = executor_flags
        self._address = address
        self._executor: Service | None = None
        self._scheduler: Service | None = None
        self._restarts = Restarts()

    def on_signal(self, stopped: asyncio.Event) -> None:
        if not stopped.is_set():
            stopped.set()
            return
        for service in self._services:
            service.kill()

    async def serve(self) -> None:
        """Until cancelled. Raises ServiceFailed."""
        with tempfile.TemporaryDirectory(prefix="paged-up-") as name:  # gone once both are ready
            directory = Path(name)
            endpoint = await self._start_executor(directory)
            self._scheduler = await start_scheduler(directory, endpoint, log_path=None, address=self._address)
            ready = while_alive(serving(address_file(directory), SCHEDULER_READY_S), *self._services)
            address = await waiting(self._console, "the scheduler", ready)
        say(self._console, f"Serving at {address}; Ctrl-C stops.")
        if self._as_json:
            print(json.dumps({"address": address, "executor": endpoint}), flush=True)
        await while_alive(self._keep_executor(endpoint), self._scheduler)

    async def stop(self) -> None:
        """The scheduler first: its streams end while there is an executor."""
        for service in self._services:
            await service.stop(timeout_s=None)

    @property
    def _services(self) -> list[Service]:
        return [service for service in (self._scheduler, self._executor) if service is not None]

    async def _start_executor(self, directory: Path) -> str:
        """Returns its endpoint, once it is ready."""
        self._executor = await start_executor(directory, self._executor_flags, log_path=None)
        loaded = while_alive(written(endpoint_file(directory), EXECUTOR_READY_S), self._executor)
        return await waiting(self._console, "the executor, which loads the model", loaded)

    async def _keep_executor(self, endpoint: str) -> None:
        """Start it again each time that it ends, where it was: the scheduler attaches by itself."""
        flags = ["--endpoint", endpoint, *self._executor_flags]
        began = time.monotonic()
        while self._executor is not None:
            code = await self._executor.ended()
            now = time.monotonic()
            pause_s = self._restarts.pause_s(now, now - began)
            if code == BAD_SETTINGS or pause_s is None:
                raise ServiceFailed(f"executor_svc ended with code {code}, and is not started again")
            say(self._console, f"The executor has ended with code {code}; it is started again in {pause_s:g} s.")
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            self._executor = await Service.start("executor_svc", flags, None)
