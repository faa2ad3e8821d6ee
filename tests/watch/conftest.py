"""A scheduler in the test's own process, over a real executor process (the simulated one), served as it is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from paged.client import Client
from paged.v1 import control_pb2
from scheduler_svc.api.server import ApiServer
from scheduler_svc.core.audit import audit
from scheduler_svc.engine import Engine
from scheduler_svc.settings import SchedulerSettings
from tests.processes import Service, cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler

NUM_BLOCKS = 200


@dataclass
class Watched:
    """What is watched. `client` has no token."""

    engine: Engine
    server: ApiServer
    address: str
    client: Client

    @property
    def endpoint(self) -> str:
        (endpoint,) = self.engine.fleet.drivers
        return endpoint

    def counts(self) -> dict[int, int]:
        """By block that is in use, how many tables hold it now; the books are checked."""
        state = only_scheduler(self.engine).state
        audit(state)
        return {block: count for block, count in enumerate(state.cache.pool.ref_count) if count}

    async def idle(self) -> None:
        async with asyncio.timeout(30):
            while self.client_load().running_sequences or self.client_load().waiting_sequences:
                await asyncio.sleep(0.01)

    def client_load(self) -> control_pb2.GetLoadResponse:
        return self.engine.load()


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Service]:
    """With steps slow enough to look on."""
    with cleaned_up([]) as services:
        flags = ["--num-blocks", str(NUM_BLOCKS), "--max-rows", "16", "--simulate-fixed-us", "20000"]
        services.append(start_executor(tmp_path, "--simulate", *flags))
        yield services[0].wait_until_ready()


@pytest.fixture
def flags() -> dict[str, object]:
    """Settings of the scheduler, besides where it listens."""
    return {}


@pytest.fixture
async def watched(executor: Service, tmp_path: Path, flags: dict[str, object]) -> AsyncIterator[Watched]:
    given = {"listen_address": "127.0.0.1:0", **flags}
    async with engine_over(executor.address, tmp_path / "tokenizers", **given) as engine:
        settings = SchedulerSettings(executor_endpoint=executor.address, **given)
        server = ApiServer(engine, settings)
        address = await server.start()
        async with Client(address) as client:
            yield Watched(engine, server, address, client)
        await server.stop(0.1)


@contextlib.asynccontextmanager
async def answering(client: Client, request_id: str, prompt: list[int], **options: object) -> AsyncIterator[None]:
    """A request under way, that has got its first token."""
    answer = client.generate(prompt, request_id=request_id, temperature=0, **options)
    await anext(answer)
    reading = asyncio.create_task(_read(answer))
    try:
        yield
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


async def _read(answer: AsyncIterator[object]) -> None:
    async for _ in answer:
        pass
