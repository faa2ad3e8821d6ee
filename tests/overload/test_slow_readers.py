"""Readers who read one message and stop, for a minute, beside others who read: C7.7 in its long form."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from paged.client import Client, generate_request
from paged.v1 import inference_pb2_grpc
from tests.system.conftest import System
from tests.system.requests import answer, idle_load, mixed_calls, ready
from tests.system.test_delivery import SMALL_WINDOW, read_to_the_end

NUM_STOPPED, NUM_READING, STOPPED_TOKENS = 20, 10, 3900
ALONE_S, BESIDE_S = 15.0, 60.0
MAX_UNREAD_BYTES = 4 * 1024 * 1024
MOST_GROWN_MB = NUM_STOPPED * MAX_UNREAD_BYTES / 1e6 + 64


async def tokens_a_second(client: Client, seconds: float, seed: int) -> float:
    """Of readers who read, each one call after another; every text is the right one."""
    loop, chance, num_tokens = asyncio.get_running_loop(), random.Random(seed), 0
    end = loop.time() + seconds

    async def read_on() -> None:
        nonlocal num_tokens
        while loop.time() < end:
            (call,) = mixed_calls(1, chance)
            ids = await answer(client, call)
            assert ids == call.expected()
            num_tokens += len(ids)

    await asyncio.gather(*(read_on() for _ in range(NUM_READING)))
    return num_tokens / seconds


async def grown_mb(system: System, since_mb: float) -> AsyncIterator[float]:
    while True:
        yield system.scheduler.resident_mb - since_mb
        await asyncio.sleep(0.25)


@pytest.mark.slow
async def test_c7_7_who_stops_reading_costs_the_others_nothing_and_no_memory_without_bound(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    system.executor_flags = ["--simulate-fixed-us", "2000", "--max-rows", "64"]
    system.scheduler_flags = ["--max-unread-bytes", str(MAX_UNREAD_BYTES)]
    system.start()
    narrow = grpc.aio.insecure_channel(system.address, options=SMALL_WINDOW)
    async with Client(system.address) as client, narrow as channel:
        await ready(client)
        alone = await tokens_a_second(client, ALONE_S, 1)
        before_mb, most_mb = system.scheduler.resident_mb, 0.0

        async def follow() -> None:
            nonlocal most_mb
            async for grown in grown_mb(system, before_mb):
                most_mb = max(most_mb, grown)

        following = asyncio.create_task(follow())
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = generate_request([300] * 8, max_tokens=STOPPED_TOKENS, ignore_eos=True, logprobs=20)
        stopped = [stub.Generate(request) for _ in range(NUM_STOPPED)]
        for call in stopped:
            await call.read()
        beside = await tokens_a_second(client, BESIDE_S, 2)
        held = await client.load()
        assert held.running_sequences == 0, "nobody holds rows and blocks for ever"
        resumed, cut = stopped[::2], stopped[1::2]
        for call in resumed:
            with pytest.raises(grpc.aio.AioRpcError, match="max_unread_bytes") as caught:
                await asyncio.wait_for(read_to_the_end(call), 60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in cut:
            call.cancel()
        load = await idle_load(client)
        async with asyncio.timeout(60):
            while (load := await client.load()).unread_bytes:
                await asyncio.sleep(0.02)
        following.cancel()
    with capsys.disabled():
        print(f"tokens a second: {alone:.0f} alone, {beside:.0f} beside {NUM_STOPPED} who do not read")
        print(f"memory: {before_mb:.0f} MB, at most {most_mb:.0f} MB more; {held.unread_bytes} unread bytes held")
    assert load.used_blocks == 0
    assert most_mb < MOST_GROWN_MB
