"""What is tried again, by whom, and for how long: the client over real servers that come and go."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from paged.client import Client, ResourceExhaustedError, Retries, UnavailableError
from scheduler_svc.api.server import ApiServer
from scheduler_svc.errors import QueueFull, Unavailable
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ANSWER, ScriptedEngine

QUICK = Retries(max_attempts=3, first_pause_s=0.001, longest_pause_s=0.002)
SOON_S = 10.0


async def started(stack: AsyncExitStack, engine: ScriptedEngine, address: str = "127.0.0.1:0") -> tuple[ApiServer, str]:
    server = ApiServer(engine, SchedulerSettings(listen_address=address))
    real = await server.start()
    stack.push_async_callback(server.stop, 0)
    return server, real


async def test_a_request_that_nobody_has_begun_is_tried_again_and_no_more_often_than_allowed(
    address: str, engine: ScriptedEngine
) -> None:
    engine.script = [Unavailable("not now")]
    async with Client(address, retries=QUICK) as client:
        with pytest.raises(UnavailableError, match="not now"):
            await client.complete("hi")
    assert len(engine.submitted) == QUICK.max_attempts


async def test_an_answer_that_has_begun_is_not_asked_for_again(address: str, engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], Unavailable("gone")]
    async with Client(address, retries=QUICK) as client:
        answer = client.generate("hi")
        assert (await anext(answer)).text == "On"
        with pytest.raises(UnavailableError, match="gone"):
            await anext(answer)
    assert len(engine.submitted) == 1


async def test_an_answer_that_is_whole_has_not_failed_for_want_of_a_status(
    address: str, engine: ScriptedEngine
) -> None:
    engine.script = [*ANSWER, Unavailable("gone")]
    async with Client(address, retries=QUICK) as client:
        answer = [message async for message in client.generate("hi")]
        assert "".join(message.text for message in answer) == "Once!"
        assert answer[-1].HasField("finish")
        with pytest.raises(UnavailableError, match="gone"):
            [_ async for _ in client.generate("hi", n=2)]
    assert len(engine.submitted) == 2


async def test_a_full_queue_is_asked_again_after_the_time_it_names(address: str, engine: ScriptedEngine) -> None:
    engine.script = [QueueFull("full", 0.2)]
    loop = asyncio.get_running_loop()
    async with Client(address, retries=QUICK) as client:
        began = loop.time()
        with pytest.raises(ResourceExhaustedError):
            await client.complete("hi")
        assert loop.time() - began >= 0.2 * (QUICK.max_attempts - 1)
    assert len(engine.submitted) == QUICK.max_attempts


async def test_a_call_does_not_wait_longer_than_its_deadline_for_another_attempt(
    address: str, engine: ScriptedEngine
) -> None:
    engine.script = [QueueFull("full", 60.0)]
    async with Client(address, retries=QUICK) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.complete("hi", timeout_s=5)
    assert caught.value.retry_after_s == 60.0
    assert len(engine.submitted) == 1


async def test_calls_go_to_all_schedulers_in_turn() -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    async with AsyncExitStack() as stack:
        addresses = [(await started(stack, engine))[1] for engine in engines]
        client = await stack.enter_async_context(Client("ipv4:" + ",".join(addresses)))
        async with asyncio.timeout(SOON_S):
            while not all(engine.submitted for engine in engines):  # until all are connected
                await client.complete("hi")
        before = [len(engine.submitted) for engine in engines]
        for _ in range(30):
            await client.complete("hi")
    assert [len(engine.submitted) - n for engine, n in zip(engines, before, strict=True)] == [10, 10, 10]


async def test_a_rolling_restart_loses_no_call() -> None:
    """Each of three schedulers is told to stop, is gone, and comes back, while calls go on."""
    engines = [ScriptedEngine() for _ in range(3)]
    async with AsyncExitStack() as stack:
        servers = [await started(stack, engine) for engine in engines]
        client = await stack.enter_async_context(Client("ipv4:" + ",".join(address for _, address in servers)))
        over, num_answers = asyncio.Event(), 0

        async def ask() -> None:
            nonlocal num_answers
            while not over.is_set():
                assert (await client.complete("hi")).text == "Once!"
                num_answers += 1

        async with asyncio.timeout(6 * SOON_S), asyncio.TaskGroup() as calls:
            for _ in range(8):
                calls.create_task(ask())
            for (server, address), engine in zip(servers, engines, strict=True):
                await server.stop_accepting()
                engine.script = [Unavailable("the scheduler is shutting down")]
                await server.stop(1.0)
                engine.script = list(ANSWER)
                engine.submitted.clear()
                await started(stack, engine, address)
                while not engine.submitted:  # calls find it by themselves
                    await asyncio.sleep(0.01)
            over.set()
    assert num_answers > 0
