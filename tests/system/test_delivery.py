"""Streams through a whole system: bounded for readers who do not read, nobody else affected, and nothing kept."""

import asyncio
import gc
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from paged.client import Client, generate_request
from paged.v1 import inference_pb2_grpc
from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.delivery import MESSAGES_IN_A_TURN, TURNS_BETWEEN, Delivery
from scheduler_svc.engine import Engine
from scheduler_svc.errors import ReaderTooSlow
from scheduler_svc.opening import open_request
from scheduler_svc.reader import Reader
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.samples import Samples
from tests.processes import cleaned_up, start_executor
from tests.system.conftest import System
from tests.system.engines import engine_over
from tests.system.requests import answer, idle_load, mixed_calls, ready
from tests.text.test_detokenizer import tokenizer_of

LONG = 3000  # tokens
# So that the network does not hold the whole of an answer that nobody reads.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 32 * 1024)]


async def test_a_reader_who_does_not_read_loses_its_own_stream_alone(system: System) -> None:
    system.scheduler_flags = ["--max-unread-bytes", "65536"]
    system.start()
    narrow = grpc.aio.insecure_channel(system.address, options=SMALL_WINDOW)
    async with Client(system.address) as client, narrow as channel:
        await ready(client)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        unread = stub.Generate(generate_request([300] * 8, max_tokens=LONG, ignore_eos=True, logprobs=20))
        await unread.read()
        for call in mixed_calls(20, random.Random(0)):
            assert await answer(client, call) == call.expected()
        load = await idle_load(client, 60)  # its sequence has ended, although nobody could be told
        assert (load.unread_bytes, load.used_blocks) == (0, 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(unread)
        async with asyncio.timeout(60):
            while not (await client.load()).failed_requests:
                await asyncio.sleep(0.02)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_unread_bytes" in str(caught.value.details())


async def test_where_too_much_waits_of_all_together_the_largest_ends(tmp_path: Path) -> None:
    with cleaned_up([start_executor(tmp_path, "--simulate")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path, max_total_unread_bytes=1024 * 1024) as engine:
            small, large = engine.generate(request("small", 500)), engine.generate(request("large", LONG, logprobs=20))
            num_tokens = len((await anext(small)).token_ids)
            await anext(large)  # and neither reads on
            async with asyncio.timeout(60):
                while engine.load().running_sequences:
                    await asyncio.sleep(0.01)
            with pytest.raises(ReaderTooSlow, match="max_total_unread_bytes"):
                [_ async for _ in large]
            num_tokens += sum([len(delta.token_ids) async for delta in small])
            assert num_tokens == 500
            assert engine.load().unread_bytes == 0


async def test_after_streams_have_ended_nothing_of_them_is_kept_nor_waits_for_the_collector(tmp_path: Path) -> None:
    with cleaned_up([start_executor(tmp_path, "--simulate")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine:

            async def read(number: int) -> None:
                stream = engine.generate(request(f"r{number}", 40, prompt=[300 + number] * 8))
                async for _ in stream:
                    if number % 3 == 0:
                        break  # and leave
                await stream.aclose()

            gc.collect()  # what others have left
            gc.disable()
            try:
                await asyncio.gather(*(read(number) for number in range(64)))
                async with asyncio.timeout(60):
                    while engine.load().running_sequences or engine.load().used_blocks:
                        await asyncio.sleep(0.01)
                while engine.delivery._queue or any(engine.delivery._resting):  # those who have left
                    await asyncio.sleep(0.001)
                kept = [kept for kept in gc.get_objects() if isinstance(kept, Answer | Sequence | Reader | Samples)]
            finally:
                gc.enable()
            assert kept == []
            assert (engine.lives.samples, engine.delivery._readers, engine.load().unread_bytes) == ({}, set(), 0)


async def test_many_streams_rest_after_a_message_and_few_do_not(tmp_path: Path) -> None:
    steps = ("--simulate-fixed-us", "500", "--max-rows", "256")
    with cleaned_up([start_executor(tmp_path, "--simulate", *steps)]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine:

            async def tokens_in_a_message(num_streams: int) -> float:
                before = engine.load()
                counts = await asyncio.gather(
                    *(read_all(engine, request(f"{num_streams}-{i}", 100)) for i in range(num_streams))
                )
                assert counts == [100] * num_streams
                after = engine.load()
                return 100 * num_streams / (after.stream_messages - before.stream_messages)

            await tokens_in_a_message(4)
            assert not any(engine.delivery._resting)
            assert await tokens_in_a_message(250) > 1.5  # a rest is longer than a step


async def test_after_some_messages_a_few_turns_are_for_others() -> None:
    delivery = Delivery(
        max_unread_bytes=1 << 20, max_total_unread_bytes=1 << 20, take=Answer.take, fail=lambda name, error: None
    )
    tokenizer = tokenizer_of("byte_level")
    streams = [open_request(request(f"r{i}", 40), tokenizer, (), None, delivery) for i in range(3 * MESSAGES_IN_A_TURN)]
    reading = asyncio.gather(*(samples.next_delta() for samples in streams))
    await asyncio.sleep(0)  # all wait for their first message
    for samples in streams:
        samples.first.token_ids.append(300)
    delivery.note(samples.first for samples in streams)
    in_turns = [0]
    while not reading.done():
        await asyncio.sleep(0)
        in_turns.append(delivery.num_messages)
    sent = [after - before for before, after in pairwise(in_turns)]
    turns = [turn for turn, count in enumerate(sent) if count]
    assert sum(sent) == len(streams)
    assert max(sent) <= MESSAGES_IN_A_TURN
    assert min(later - turn for turn, later in pairwise(turns)) > TURNS_BETWEEN


async def read_all(engine: Engine, generation: GenerationRequest) -> int:
    return sum([len(delta.token_ids) async for delta in engine.generate(generation)])


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def request(
    request_id: str, max_tokens: int, *, logprobs: int | None = None, prompt: list[int] | None = None
) -> GenerationRequest:
    sampling = Sampling(temperature=0.0, logprobs=logprobs)
    return GenerationRequest(request_id, prompt or [300] * 8, sampling, max_tokens=max_tokens, ignore_eos=True)
