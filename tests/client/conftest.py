import asyncio
import threading
from collections.abc import Iterator

import pytest

from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings
from tests.api.conftest import address, client, engine, settings
from tests.api.scripted_engine import ScriptedEngine

__all__ = ["address", "client", "engine", "settings"]

END_S = 60.0


@pytest.fixture
def in_thread(engine: ScriptedEngine, settings: SchedulerSettings) -> Iterator[str]:
    """The address of a server in a thread, for commands that are run in this one."""
    ready, stop, address, loops = threading.Event(), asyncio.Event(), [], []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        server = ApiServer(engine, settings)
        address.append(await server.start())
        ready.set()
        await stop.wait()
        await server.stop(0.1)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))  # ends the tasks that gRPC leaves, too
    thread.start()
    assert ready.wait(END_S)
    yield address[0]
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(END_S)
