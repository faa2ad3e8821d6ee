from collections.abc import AsyncIterator

import pytest

from paged.client import Client, Retries
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def settings() -> SchedulerSettings:
    return SchedulerSettings(listen_address="127.0.0.1:0")


@pytest.fixture
async def address(engine: ScriptedEngine, settings: SchedulerSettings) -> AsyncIterator[str]:
    """Of a real server over the scripted engine."""
    server = ApiServer(engine, settings)
    yield await server.start()
    await server.stop(0.1)


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    """What the server says is told as it is; that some of it is asked again is `tests/client`'s."""
    async with Client(address, retries=Retries(max_attempts=1)) as connected:
        yield connected
