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
    ready, stop, address = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        server = ApiServer(engine, settings)
        address.append(await server.start())
        ready.set()
        await stop.wait()
        await server.stop(0.1)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(END_S)
    yield address[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(END_S)
    loop.close()
