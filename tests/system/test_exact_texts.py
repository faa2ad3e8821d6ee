"""Every text is exact, whoever else is served, in a pool too small for all, with callers that go away."""

import asyncio
import random

import pytest

from paged.client import Client
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, mixed_calls, ready


@pytest.mark.parametrize(("count", "concurrency"), [(2000, 150)])
async def test_two_thousand_requests_in_a_pool_too_small(system: System, count: int, concurrency: int) -> None:
    system.executor_flags = ["--num-blocks", "128", "--max-rows", "64", "--tokens-per-step", "512"]
    system.start()
    chance = random.Random(2)
    calls = mixed_calls(count, chance)
    room = asyncio.Semaphore(concurrency)
    wrong, cancelled = [], 0

    async def one(client: Client, i: int) -> None:
        nonlocal cancelled
        give_up = chance.randrange(1, 30) if chance.random() < 0.2 else None
        async with room:
            ids = await answer(client, calls[i], give_up)
        expected = calls[i].expected()
        cancelled += len(ids) < len(expected)
        if ids != expected[: len(ids)] or (give_up is None and len(ids) != len(expected)):
            wrong.append(i)

    async with Client(system.address) as client:
        await ready(client)
        async with asyncio.TaskGroup() as tasks:
            for i in range(count):
                tasks.create_task(one(client, i))
        load = await idle_load(client)
    assert wrong == []
    assert cancelled > 0
    assert load.preemptions > 0, "the pool was meant to be too small"
    assert load.cached_prompt_tokens > 0
    assert load.used_blocks == load.unused_slots == 0
    assert load.finished_requests + load.cancelled_requests == count
    assert load.failed_requests == 0
    assert "error" not in system.scheduler.log
    assert "error" not in system.executor.log
    assert system.scheduler.stop() == 0
    assert system.executor.stop() == 0


async def test_many_questions_on_one_long_document_start_in_plans_that_the_executor_takes(system: System) -> None:
    """Each costs a block of budget and all ids of the document in bytes."""
    memory = ["--num-blocks", "5000", "--simulate-max-model-len", "40000", "--max-message-bytes", str(1 << 22)]
    # Slow enough for all to wait while the first computes the document.
    system.executor_flags = [*memory, "--simulate-fixed-us", "50000"]
    system.start()
    document = [300 + i * 7919 % 31_000 for i in range(30_000)]
    calls = [Call([*document, 400 + i], 8, 0.0, 0, "") for i in range(48)]
    async with Client(system.address) as client:
        await ready(client)
        answers = await asyncio.gather(*[answer(client, call) for call in calls])
        load = await idle_load(client)
    assert answers == [call.expected() for call in calls]
    assert load.executor_losses == 0
    assert load.cached_prompt_tokens > 0
