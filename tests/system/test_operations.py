"""What operators see, and what bad requests leave: C10.3, C10.4."""

import asyncio
import contextlib
import random

import pytest

from paged.client import Client, InvalidRequestError, ModelNotFoundError, PagedClientError
from paged.v1 import control_pb2
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, ready

LENGTH = 4096  # of the simulated model


async def test_c10_3_a_bad_request_ends_alone_and_at_once(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "2000"]
    system.start()
    bad = {
        "prompt": [{"prompt": []}, {"prompt": [32000]}, {"prompt": [1] * LENGTH}],
        "stop.max_tokens": [{"max_tokens": 0}],
        "stop.strings": [{"stop": ["x"] * 5000}, {"stop": [""]}],
        "stop.token_ids": [{"stop_token_ids": [7] * 5000}],
        "n": [{"n": 0}, {"n": 1_000_000}],
        "sampling.temperature": [{"temperature": float("nan")}],
        "sampling.logit_bias": [{"logit_bias": {32000: 1.0}}, {"logit_bias": {5: float("inf")}}],
        "regex": [{"regex": "("}],
    }
    async with Client(system.address) as client:
        await ready(client)
        beside = Call([300] * 20, 400, 0.0, 0, "")
        running = asyncio.create_task(answer(client, beside))
        while not (await client.load()).running_sequences:
            await asyncio.sleep(0.01)
        num_waiting = []
        for field, requests in bad.items():
            for request in requests:
                with pytest.raises(InvalidRequestError) as caught:
                    await client.complete_samples(**{"prompt": "hello", **request})
                named = [violation.field for violation in caught.value.violations]
                assert any(field in name or "token_ids" in name for name in named), (field, named)
                num_waiting.append((await client.load()).waiting_sequences)
        with pytest.raises(ModelNotFoundError):
            await client.complete("hello", model="another")
        assert not running.done()
        assert set(num_waiting) == {0}
        assert await running == beside.expected()
        assert await answer(client, beside) == beside.expected()
        load = await idle_load(client)
        assert (load.finished_requests, load.failed_requests, load.used_blocks) == (2, 0, 0)


async def test_c10_4_requests_tokens_and_blocks_are_counted_once_whatever_becomes_of_them(system: System) -> None:
    system.executor_flags = ["--num-blocks", "41", "--max-rows", "8", "--simulate-fixed-us", "1000"]
    system.start()
    chance = random.Random(4)
    async with Client(system.address) as client:
        await ready(client)
        loads = [await client.load()]
        watching = asyncio.create_task(keep_looking(client, loads))

        first = Call([400 + i for i in range(300)], 300, 0.0, 0, "")  # fills the pool
        running = asyncio.create_task(answer(client, first))
        while not loads[-1].running_sequences:
            await asyncio.sleep(0.005)
        waits = asyncio.create_task(client.complete([500] * 320, max_tokens=9))
        begun = steps(loads[-1])
        while steps(loads[-1]) < begun + 50 or not loads[-1].waiting_sequences:
            await asyncio.sleep(0.005)
        waits.cancel()  # it was never let in
        with contextlib.suppress(asyncio.CancelledError):
            await waits
        assert await running == first.expected()

        stem = [chance.randrange(300, 9000) for _ in range(64)]
        calls = [Call(stem[:48] + [9000 + i] * 20, chance.randrange(150, 220), 0.0, 0, "") for i in range(20)]
        cut = [3 if i % 10 < 3 else None for i in range(20)]
        answers = await asyncio.gather(*[answer(client, call, after) for call, after in zip(calls, cut, strict=True)])
        for call, after, ids in zip(calls, cut, answers, strict=True):
            assert ids == call.expected()[: len(ids)]
            assert after is not None or ids == call.expected()
        with pytest.raises(PagedClientError):
            await client.complete("x", temperature=-1.0)  # refused, and no request at all

        load = await idle_load(client)
        watching.cancel()
    assert load.prompt_tokens == len(first.prompt) + sum(len(call.prompt) for call in calls)
    assert 0 < load.cached_prompt_tokens <= load.prompt_tokens
    assert load.preemptions >= 10
    assert (load.finished_requests, load.cancelled_requests, load.failed_requests) == (1 + 14, 1 + 6, 0)
    assert (load.used_blocks, load.running_sequences, load.waiting_sequences) == (0, 0, 0)
    for seen in loads:
        assert seen.used_blocks + seen.cached_blocks <= seen.total_blocks
        assert seen.running_sequences <= 8
        assert seen.cached_prompt_tokens <= seen.prompt_tokens <= load.prompt_tokens
    assert max(seen.used_blocks for seen in loads) > 0.8 * load.total_blocks


def steps(load: control_pb2.GetLoadResponse) -> int:
    return sum(part.steps for part in load.executors)


async def keep_looking(client: Client, loads: list[control_pb2.GetLoadResponse]) -> None:
    while True:
        loads.append(await client.load())
        await asyncio.sleep(0.005)
