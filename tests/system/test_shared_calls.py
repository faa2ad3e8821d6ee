"""Calls that many generations share, as a whole: what they may take, how they end, and that they leave nothing."""

import asyncio
import gc
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paged.client import Client, Retries, UnavailableError
from paged.v1 import inference_pb2
from tests.overload.test_cycles import GRPCS_OBJECTS, what_waits_for_the_collector
from tests.overload.test_many import served, settled
from tests.system.conftest import System
from tests.system.requests import answer, idle_load, mixed_calls, ready
from tests.system.shared_calls import ENDLESS, SOON_S, Stub, begun, generate_many, read_to_the_end
from tests.system.test_delivery import LONG, SMALL_WINDOW

OBJECTS = 24  # that the collector knows, of a generation; with a task of its own it had 85


async def accepted(stub: Stub, request: inference_pb2.GenerateManyRequest) -> Any:
    """A call in which this has begun. The place of one before is free a little after its client has heard its end."""
    async with asyncio.timeout(SOON_S):
        while True:
            call = stub()
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(request)
                await anext(aiter(call))
                return call


async def test_limits_hold_for_calls_and_for_each_of_their_generations(system: System) -> None:
    system.scheduler_flags = ["--max-unread-bytes", "65536", "--max-many-calls", "1", "--max-concurrent-calls", "40"]
    address = system.start().address
    async with (
        Client(address, share_calls=True) as client,
        generate_many(address, SMALL_WINDOW) as narrow,
        generate_many(address) as stub,
    ):
        await ready(client)
        # Who does not read loses its answers.
        unread = narrow()
        for number in range(4):
            await unread.write(begun(number, logprobs=20, **ENDLESS))
        await anext(aiter(unread))
        with pytest.raises(grpc.aio.AioRpcError, match="max_many_calls") as caught:
            await read_to_the_end(stub())
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        load = await idle_load(client)  # their sequences have ended, although nobody could be told
        assert (load.unread_bytes, load.used_blocks) == (0, 0)
        await unread.done_writing()
        for updates in (await read_to_the_end(unread)).values():
            assert updates[-1].end.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert "max_unread_bytes" in updates[-1].end.message
        # A client that gets no such call does without.
        first = await accepted(stub, begun(1, max_tokens=LONG, ignore_eos=True))
        calls = mixed_calls(10, random.Random(2))
        assert await asyncio.gather(*(answer(client, call) for call in calls)) == [call.expected() for call in calls]
        # With the call and what it has begun, 40 are going on.
        for number in range(2, 62):
            await first.write(begun(number, max_tokens=1000, ignore_eos=True))
        await first.done_writing()
        ends = [updates[-1].end for updates in (await read_to_the_end(first)).values()]
        refused = [end.message for end in ends if end.code]
        assert len(ends) - len(refused) == 39
        assert all("max_concurrent_calls" in message for message in refused)


async def test_a_scheduler_that_stops_says_so_and_ends_what_has_begun(system: System) -> None:
    async with Client(system.start().address) as client, generate_many(system.address) as stub:
        await ready(client)
        idle, call = stub(), stub()
        await idle.write(begun(1, max_tokens=1))
        await call.write(begun(1, max_tokens=1500, ignore_eos=True))
        await anext(aiter(call))
        system.scheduler.process.terminate()
        messages = [message async for message in call]
        assert [message.closing async for message in idle].count(True) == 1
    assert [message.closing for message in messages].count(True) == 1
    last = [update for message in messages for update in message.updates][-1]
    assert (last.end.code, last.response.finish.reason) == (0, inference_pb2.FINISH_REASON_LENGTH)
    assert await call.code() == grpc.StatusCode.OK


async def test_a_scheduler_that_dies_ends_what_has_begun_and_the_rest_is_tried_again(system: System) -> None:
    async with Client(system.start().address, share_calls=True, retries=Retries(max_attempts=200)) as client:
        await ready(client)
        begun_one = client.generate([300] * 8, **ENDLESS)
        await anext(begun_one)
        system.scheduler.kill()
        with pytest.raises(UnavailableError):
            [_ async for _ in begun_one]
        system.restart_scheduler()
        (call,) = mixed_calls(1, random.Random(3))
        assert await answer(client, call) == call.expected()


async def test_a_call_without_generations_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as (_, address), generate_many(address) as stub:
        call = stub()
        await call.write(begun(1, max_tokens=300, ignore_eos=True))
        await anext(aiter(call))  # a call whose first request takes its time is idle, too
        monkeypatch.setattr("scheduler_svc.api.generate_many.IDLE_S", 0.2)
        updates = await read_to_the_end(call)  # without done_writing
        assert updates[1][-1].end.code == 0
        assert await call.code() == grpc.StatusCode.OK


async def test_an_open_generation_has_no_task_and_few_objects(tmp_path: Path) -> None:
    """Thousands are open at once, and what is small keeps memory of what was beside it when it came."""
    async with served(tmp_path) as (engine, address), generate_many(address) as stub:
        call = stub()

        async def begin(number: int) -> None:
            await call.write(begun(number, max_tokens=2000, ignore_eos=True))
            async with asyncio.timeout(SOON_S):
                while len(engine.lives.samples) <= number:
                    await asyncio.sleep(0.001)

        await begin(0)
        await anext(aiter(call))  # what the call itself has is there
        gc.collect()
        num_tasks, num_objects = len(asyncio.all_tasks()), len(gc.get_objects())
        for number in range(1, 41):
            await begin(number)
        gc.collect()
        assert len(engine.lives.samples) == 41
        assert len(gc.get_objects()) - num_objects < 40 * OBJECTS
        assert len(asyncio.all_tasks()) == num_tasks
        call.cancel()
        await settled(engine)


@pytest.mark.parametrize("leaves", [False, True])
async def test_nothing_of_a_generation_waits_for_the_collector(tmp_path: Path, leaves: bool) -> None:
    async with served(tmp_path) as (engine, address), Client(address, share_calls=True) as client:

        async def one() -> None:
            async for _ in client.generate([300] * 9, max_tokens=200, ignore_eos=True):
                if leaves:
                    break

        async def all_of_them() -> None:
            await asyncio.gather(*(one() for _ in range(40)))
            await settled(engine)

        await all_of_them()
        with what_waits_for_the_collector() as found:
            await all_of_them()
    assert found.total() < (GRPCS_OBJECTS + 1) * 40, found
