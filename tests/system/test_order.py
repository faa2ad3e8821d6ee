"""Priorities, tenants and the prefix cache's control, through the whole system."""

import asyncio
import hashlib
import random
import struct
from contextlib import aclosing

import pytest

from paged.client import Client, DuplicateRequestError, InvalidRequestError, ResourceExhaustedError
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, mixed_calls, ready


async def test_higher_priority_is_served_first_and_every_text_is_exact(system: System) -> None:
    system.executor_flags = ["--num-blocks", "96", "--max-rows", "8", "--simulate-fixed-us", "6000"]
    system.scheduler_flags = ["--tenant-weights", "gold=4"]
    system.start()
    chance = random.Random(11)
    calls = mixed_calls(100, chance)
    low, high = calls[:80], calls[80:]

    async def one(client: Client, call: Call, priority: int) -> bool:
        ids: list[int] = []
        options = {"temperature": call.temperature, "seed": call.seed, "cache_salt": call.cache_salt}
        place = {"priority": priority, "tenant": chance.choice(["", "gold"])}
        async for message in client.generate(call.prompt, max_tokens=call.max_tokens, **options, **place):
            ids += message.token_ids
        return ids == call.expected()

    async with Client(system.address) as client, asyncio.timeout(60):
        await ready(client)
        first = [asyncio.create_task(one(client, call, -1)) for call in low]
        load = await client.load()
        while load.waiting_sequences + load.running_sequences + load.finished_requests < len(low):  # all have come
            await asyncio.sleep(0.01)
            load = await client.load()
        assert all(await asyncio.gather(*[one(client, call, 1) for call in high]))
        assert sum(not task.done() for task in first) > 40, "those that came before were not passed"
        assert all(await asyncio.gather(*first))
        load = await idle_load(client)
    assert load.preemptions > 0
    assert load.used_blocks == 0
    assert "error" not in system.scheduler.log


async def test_c6_3_a_request_of_high_priority_gets_its_token_though_all_rows_are_taken(system: System) -> None:
    system.executor_flags = ["--max-rows", "2", "--simulate-fixed-us", "5000"]
    system.start()
    low = [Call([300 + i], 400, 0.0, 0, "") for i in range(2)]
    async with Client(system.address) as client:
        await ready(client)
        running = [asyncio.create_task(answer(client, call)) for call in low]
        while (await client.load()).generated_tokens < 8:
            await asyncio.sleep(0.01)
        high = await client.complete([400], max_tokens=5, temperature=0, priority=1)
        assert list(high.token_ids) == Call([400], 5, 0.0, 0, "").expected()
        assert not any(task.done() for task in running)
        assert (await client.load()).preemptions >= 1
        assert await asyncio.gather(*running) == [call.expected() for call in low]


async def test_c6_8_an_id_is_free_again_as_soon_as_its_request_has_ended(system: System) -> None:
    system.start()
    call = Call([300, 301], 8, 0.0, 0, "")
    async with Client(system.address) as client:
        await ready(client)
        for _ in range(20):
            stream = client.generate(call.prompt, max_tokens=2000, ignore_eos=True, request_id="x")
            await anext(stream)
            await client.abort(["x"])
            await stream.aclose()
            whole = await client.complete(call.prompt, max_tokens=8, temperature=0, request_id="x")
            assert list(whole.token_ids) == call.expected()
        assert (await idle_load(client)).used_blocks == 0


async def test_c6_8_of_two_live_requests_of_one_id_the_second_is_refused_and_the_first_unharmed(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "5000"]
    system.start()
    call = Call([300, 301], 200, 0.0, 0, "")
    async with Client(system.address) as client, Client(system.address) as other:
        await ready(client)
        first = client.generate(call.prompt, max_tokens=200, temperature=0, request_id="x")
        ids = list((await anext(first)).token_ids)
        again = [each.complete([400], max_tokens=1, request_id="x") for each in (client, other, other)]
        refused = await asyncio.gather(*again, return_exceptions=True)
        assert [type(error) for error in refused] == [DuplicateRequestError] * 3
        assert len(ids) < 200
        async for message in first:
            ids += message.token_ids
        assert ids == call.expected()
        assert (await idle_load(client)).used_blocks == 0


async def test_c1_1_what_is_cancelled_before_it_runs_harms_nobody(system: System) -> None:
    system.executor_flags = ["--max-rows", "1", "--simulate-fixed-us", "5000"]
    system.start()
    a, b, c = (Call([300 + i], 30, 0.0, 0, "") for i in range(3))
    async with Client(system.address) as client:
        await ready(client)
        first = asyncio.create_task(answer(client, a))
        while (await client.load()).running_sequences == 0:
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(answer(client, b)) for _ in range(20)]
        last = asyncio.create_task(answer(client, c))
        for task in waiting[:10]:
            task.cancel()  # not even sent
        while (await client.load()).waiting_sequences < 11:
            await asyncio.sleep(0.01)
        for task in waiting[10:]:
            task.cancel()
        assert await client.abort(["unknown"]) == []
        assert await asyncio.gather(first, last) == [a.expected(), c.expected()]
        load = await idle_load(client)
    assert (load.used_blocks, load.preemptions) == (0, 0)
    assert load.finished_requests == 2
    assert "error" not in system.scheduler.log


async def test_c2_5_what_a_tenant_is_told_says_nothing_of_prefixes_of_other_salts(system: System) -> None:
    system.start()
    prompt = [300 + i for i in range(64)]
    async with Client(system.address) as client:
        await ready(client)

        async def cached(**options: object) -> int:
            whole = await client.complete(prompt, max_tokens=2, temperature=0, **options)
            return whole.usage.cached_tokens

        assert await cached(tenant="a", cache_salt="a") == 0
        assert await cached(tenant="a", cache_salt="a") == 48
        assert await cached(tenant="b", cache_salt="b") == 0
        assert await cached(tenant="b") == 0
        assert await cached(tenant="b", cache_salt="a") == 48
        assert await cached(tenant="a", cache_salt="a", prefix_cache_bypass=True) == 0
        assert await client.flush_prefix_cache() > 0
        assert await cached(tenant="a", cache_salt="a") == 0


def prefix_hashes(ids: list[int], block_size: int, salt: str = "") -> list[bytes]:
    """As control.proto says."""
    data = salt.encode()
    digest = hashlib.sha256(b"salt:%d:" % len(data) + data if data else b"").digest()
    hashes = []
    for begin in range(0, len(ids) // block_size * block_size, block_size):
        block = struct.pack(f"<{block_size}i", *ids[begin : begin + block_size])
        digest = hashlib.sha256(digest + block).digest()
        hashes.append(digest)
    return hashes


@pytest.mark.parametrize("salt", ["", "é"])
async def test_a_watcher_can_tell_which_prompts_are_cached(system: System, salt: str) -> None:
    system.executor_flags = ["--num-blocks", "12"]
    system.scheduler_flags = ["--max-cache-watchers", "1"]
    system.start()
    prompts = [[300 + 100 * i + j for j in range(100)] for i in range(2)]
    cached: set[bytes] = set()
    async with Client(system.address) as client, aclosing(client.watch_prefix_cache()) as watch:
        await ready(client)
        number = 0

        async def told_until(wanted: set[bytes], unwanted: set[bytes]) -> None:
            nonlocal number
            async with asyncio.timeout(10):
                while not (wanted <= cached and not unwanted & cached):
                    message = await anext(watch)
                    if message.starts_anew:
                        cached.clear()
                    else:
                        assert message.number == number + len(message.events)
                    number = message.number
                    for event in message.events:
                        match event.WhichOneof("event"):
                            case "stored":
                                cached.add(event.stored)
                            case "removed":
                                cached.remove(event.removed)
                            case "cleared":
                                cached.clear()

        size = (await client.model()).block_size
        hashes = [set(prefix_hashes(prompt, size, salt)) for prompt in prompts]
        await client.complete(prompts[0], max_tokens=1, cache_salt=salt)
        await told_until(hashes[0], set())
        with pytest.raises(ResourceExhaustedError):
            await anext(client.watch_prefix_cache())
        await client.complete(prompts[1], max_tokens=1, cache_salt=salt)
        await told_until(hashes[1], hashes[0] & set(prefix_hashes(prompts[0], size, salt)[-1:]))
        await client.flush_prefix_cache()
        await told_until(set(), hashes[0] | hashes[1])


async def test_places_out_of_range_are_refused_by_name(system: System) -> None:
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        for field, value in {"priority": 11, "tenant": "x" * 129}.items():
            with pytest.raises(InvalidRequestError, match=f"{field}: "):
                await client.complete([300], **{field: value})
