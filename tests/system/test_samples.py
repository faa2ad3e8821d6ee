"""Several samples of one prompt, through the whole system."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from paged.client import Client, InvalidRequestError, ResourceExhaustedError, Retries
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.errors import RequestFailed
from scheduler_svc.requests import GenerationRequest
from tests.processes import start_executor
from tests.system.conftest import System
from tests.system.engines import engine_over
from tests.system.requests import Call, answers, idle_load, mixed_calls, ready
from tests.system.test_scripted import script


async def test_each_sample_is_exact_in_a_pool_too_small_whoever_goes_away(system: System) -> None:
    system.executor_flags = ["--num-blocks", "128", "--max-rows", "48", "--tokens-per-step", "256"]
    system.start()
    chance = random.Random(3)
    calls = [replace(call, num_samples=chance.choice([1, 2, 3, 4, 8])) for call in mixed_calls(400, chance)]
    room = asyncio.Semaphore(40)
    wrong, cancelled = [], 0

    async def one(client: Client, call: Call) -> None:
        nonlocal cancelled
        give_up = chance.randrange(1, 60) if chance.random() < 0.2 else None
        async with room:
            said = await answers(client, call, give_up)
        expected = [call.expected(index=index) for index in range(call.num_samples)]
        cancelled += said != expected
        if any(ids != right[: len(ids)] for ids, right in zip(said, expected, strict=True)):
            wrong.append(call)
        if give_up is None and said != expected:
            wrong.append(call)

    async with Client(system.address) as client:
        await ready(client)
        await asyncio.gather(*[one(client, call) for call in calls])
        load = await idle_load(client)
    assert wrong == []
    assert cancelled > 0
    assert load.preemptions > 0, "the pool was meant to be too small"
    assert load.used_blocks == load.unused_slots == 0
    assert load.finished_requests + load.cancelled_requests == len(calls)
    assert "error" not in system.scheduler.log


async def test_samples_survive_the_loss_of_the_executor(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "20000"]
    system.start()
    call = Call(list(range(300, 321)), 60, 1.0, 7, "", num_samples=5)
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.create_task(answers(client, call))
        async with asyncio.timeout(20):
            while (await client.load()).generated_tokens < 20:
                await asyncio.sleep(0.02)
        system.executor.kill()
        system.restart_executor()
        assert await asked == [call.expected(index=index) for index in range(5)]
        assert (await idle_load(client)).used_blocks == 0


async def test_each_sample_that_waits_counts_for_the_limit_of_the_queue(system: System) -> None:
    system.executor_flags = ["--max-rows", "1", "--simulate-fixed-us", "5000"]
    system.scheduler_flags = ["--max-waiting-requests", "3"]
    system.start()
    async with Client(system.address, retries=Retries(max_attempts=1)) as client:
        await ready(client)
        many = client.generate([300], n=4, max_tokens=2000, ignore_eos=True)
        await anext(many)
        load = await client.load()
        assert (load.running_sequences, load.waiting_sequences) == (1, 3)
        with pytest.raises(ResourceExhaustedError, match="3 sequences wait"):
            await client.complete([300], max_tokens=1)
        await many.aclose()
        assert (await idle_load(client)).used_blocks == 0
        await client.complete([300], max_tokens=1)


async def test_a_prompt_with_samples_is_computed_and_stored_once(system: System) -> None:
    system.start()
    prompt = list(range(300, 300 + 16 * 20))
    async with Client(system.address) as client:
        await ready(client)
        whole = await client.complete_samples(prompt, n=6, max_tokens=4, seed=1, ignore_eos=True)
        load = await idle_load(client)
        assert len({tuple(sample.token_ids) for sample in whole}) == 6
        assert {sample.usage.completion_tokens for sample in whole} == {4}
        assert load.peak_used_blocks == 20 + 6
        assert load.prompt_tokens == len(prompt)
        with pytest.raises(InvalidRequestError, match="n: is 129; must be 1 to 128"):
            await client.complete_samples(prompt, n=129)
        with pytest.raises(TypeError, match="complete_samples"):
            await client.complete(prompt, n=2)


@contextlib.asynccontextmanager
async def running_engine(system: System, *flags: str) -> AsyncIterator[Engine]:
    """One over a simulated executor with these flags."""
    system.services.append(executor := start_executor(system.directory, "--simulate", *flags, *system.executor_flags))
    async with engine_over(executor.wait_until_ready().address, system.directory / "cache") as engine:
        yield engine


async def test_an_error_in_one_sample_ends_the_others_though_nobody_reads(system: System) -> None:
    prompt = [1, 2, 3]
    script(system, faults=[{"kind": "not_finite", "row_of_prompt": prompt, "step": 5}])
    # Two samples meet the fault; the third would be computed after them.
    async with running_engine(system, "--max-rows", "2", "--simulate-fixed-us", "2000") as engine:
        request = GenerationRequest("r", prompt, Sampling(), max_tokens=2000, ignore_eos=True, num_samples=3)
        async with contextlib.aclosing(engine.generate(request)) as deltas:
            await anext(deltas)
            while engine.load().running_sequences or engine.load().waiting_sequences:
                await asyncio.sleep(0.01)
            assert engine.load().generated_tokens == 2 * 4
            with pytest.raises(RequestFailed, match="not finite"):
                async for _ in deltas:
                    pass
        assert engine.load().failed_requests == 1
