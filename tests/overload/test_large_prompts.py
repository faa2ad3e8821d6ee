"""Prompts that are far too long are refused by name, many at once, while others' answers go on (C7.6, C7.10)."""

import asyncio
import random
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paged.client import Client, InvalidRequestError, generate_request
from scheduler_svc.api.health import LIVE
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, mixed_calls, ready

TEXTS = {"ascii": "a" * (15 << 20), "emoji": "👩" * (3 << 20), "spaces": " " * (15 << 20)}


@pytest.mark.parametrize(
    "kind", ["ascii", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("emoji", "spaces"))]
)
async def test_others_go_on_while_prompts_of_megabytes_are_refused(system: System, kind: str) -> None:
    system.executor_flags = ["--simulate-fixed-us", "2000"]
    system.start()
    calls = mixed_calls(20, random.Random(2))
    channel = grpc.aio.insecure_channel(system.address)
    async with Client(system.address) as client, channel:
        await ready(client)
        running = [asyncio.create_task(answer(client, call)) for call in calls]
        large = [asyncio.create_task(client.complete(TEXTS[kind])) for _ in range(8)]
        health: Any = health_pb2_grpc.HealthStub(channel)
        while not all(task.done() for task in large):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=30)).status == 1
        for task in large:
            with pytest.raises(InvalidRequestError, match="text: "):
                await task
        assert await asyncio.gather(*running) == [call.expected() for call in calls]
        assert (await idle_load(client)).used_blocks == 0


async def test_a_million_ids_are_refused_by_name(system: System) -> None:
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        with pytest.raises(InvalidRequestError, match="token_ids: has 1200000 tokens, above the limit of 4095"):
            await client.complete([300] * 1_200_000)


@pytest.mark.slow
async def test_c7_6_an_answer_above_grpcs_own_limit_of_4_mib_comes_in_one_message(system: System) -> None:
    system.executor_flags = ["--num-blocks", "2500", "--simulate-max-model-len", "32000"]
    system.start()
    call = Call([300] * 8, 30_000, 0.0, 0, "")
    request = generate_request(call.prompt, max_tokens=call.max_tokens, temperature=0, ignore_eos=True, logprobs=20)
    request.stream = False
    async with Client(system.address) as client:
        await ready(client, 60)
        (whole,) = [message async for message in client._messages(request, 300)]
    assert whole.ByteSize() > 4 << 20
    assert list(whole.token_ids) == call.expected(end_token_ids=())
    assert [len(entry.top_ids) for entry in whole.logprobs] == [20] * len(whole.token_ids)
