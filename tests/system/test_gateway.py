"""OpenAI's API through the ready-made gateway: the official client, smg as it is, schedulers, simulated executors."""

import asyncio
import json
import random
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import openai
import pytest
from openai import AsyncOpenAI
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from executor_svc.simulated.byte_tokenizer import make_bundle
from executor_svc.simulated.text import simulated_continuation
from paged.client import Client
from scheduler_svc.text.tokenizer import Tokenizer
from tests.processes import Service, cleaned_up, free_port, start_executor, start_scheduler, wait_for
from tests.system.conftest import VOCAB_SIZE
from tests.system.gateway import Gateway, gateway_before
from tests.system.requests import idle_load, ready

MODEL = "simulated"
SCRIPT = {"replies": [{"prompt": list(b"Say it"), "output": [*b"one two stop three", 257]}]}
SOON_S = 20


@dataclass
class Stack:
    """Two schedulers, each with its own executor, behind one gateway."""

    gateway: Gateway
    schedulers: list[Service]
    client: AsyncOpenAI
    addresses: list[str] = field(default_factory=list)

    async def until_running(self) -> None:
        async with asyncio.timeout(SOON_S), Client(self.addresses[0]) as one, Client(self.addresses[1]) as two:
            while not ((await one.load()).running_sequences or (await two.load()).running_sequences):
                await asyncio.sleep(0.01)

    async def generated(self) -> list[int]:
        """Tokens that each scheduler has made so far."""
        loads = []
        for address in self.addresses:
            async with Client(address) as client:
                loads.append((await idle_load(client)).generated_tokens)
        return loads


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, list[Service]]]:
    directory = tmp_path_factory.mktemp("gateway")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    flags = ["--simulate", "--served-name", MODEL, "--simulate-script", str(script), "--simulate-fixed-us", "1000"]
    with cleaned_up([]) as services:
        executors = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            executors.append(start_executor(directory / name, *flags))
            services.append(executors[-1])
        schedulers = []
        for number, executor in enumerate(executors):
            endpoint = executor.wait_until_ready().address
            schedulers.append(start_scheduler(directory, endpoint, name=f"scheduler{number}"))
            services.append(schedulers[-1])
        addresses = [scheduler.wait_until_ready().address for scheduler in schedulers]
        asyncio.run(know_their_model(addresses))
        policy = [
            "--policy",
            "cache_aware",
            "--balance-abs-threshold",
            "1000",
            "--disable-worker-overload-protection",
        ]
        policy += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        with gateway_before(directory / "gateway.log", MODEL, addresses, *policy) as gateway:
            yield gateway, schedulers


async def know_their_model(addresses: list[str]) -> None:
    """The gateway does not ask again for a while."""
    for address in addresses:
        async with Client(address) as client:
            await ready(client)


@pytest.fixture
async def stack(running: tuple[Gateway, list[Service]]) -> AsyncIterator[Stack]:
    gateway, schedulers = running
    async with gateway.client() as client:
        stack = Stack(gateway, schedulers, client, [scheduler.address for scheduler in schedulers])
        for address in stack.addresses:
            async with Client(address) as own:
                await ready(own)
        yield stack


def said(prompt: str, max_tokens: int, *, seed: int = 0, temperature: float = 0.0, index: int = 0) -> str:
    """What the simulated model answers to the prompt, of which the gateway makes ids without a begin token."""
    ids = simulated_continuation(
        list(prompt.encode()),
        max_tokens,
        vocab_size=VOCAB_SIZE,
        temperature=temperature,
        seed=seed,
        index=index,
        end_token_ids=(257,),
    )
    return text_of(ids)


def text_of(ids: Any) -> str:
    tokenizer = Tokenizer.from_bundle(make_bundle(VOCAB_SIZE, 4096, 257))
    return tokenizer.decode(list(ids), True)


async def test_a_completion_is_the_models_text_whole_and_streamed(stack: Stack) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = await stack.client.completions.create(**asked)
    assert whole.choices[0].text == said("Once upon a time", 12)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (16, 12)
    stream = await stack.client.completions.create(**asked, stream=True)
    pieces = [piece.choices[0].text async for piece in stream if piece.choices]
    assert "".join(pieces) == whole.choices[0].text


async def test_a_conversation_is_answered_and_its_cached_part_is_told(stack: Stack) -> None:
    messages: Any = [{"role": "user", "content": "Tell me of the sea, and of ships, and of the wind."}]
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0}
    first = await stack.client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert first.choices[0].logprobs is not None
    content = first.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 6
    assert "".join(token.token for token in content) == first.choices[0].message.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)
    async with asyncio.timeout(SOON_S):
        num_cached = 0
        while num_cached == 0:  # until it has been told where the conversation is cached, or both have it
            again = await stack.client.chat.completions.create(**asked)
            assert again.choices[0].message.content == first.choices[0].message.content
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            num_cached = again.usage.prompt_tokens_details.cached_tokens or 0
    assert num_cached == again.usage.prompt_tokens // 16 * 16
    stream = await stack.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    pieces = [piece async for piece in stream]
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == first.choices[0].message.content
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 6


async def test_samples_are_drawn_as_if_each_were_asked_for_alone(stack: Stack) -> None:
    prompt = "Three wishes"
    answer = await stack.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=1.0, seed=7, n=3
    )
    texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {i: said(prompt, 8, seed=7, temperature=1.0, index=i) for i in range(3)}


async def test_an_answer_ends_before_a_stop_string_and_at_an_end_token(stack: Stack) -> None:
    before = await stack.generated()
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Say it", "max_tokens": 100, "temperature": 0}
    stopped = await stack.client.completions.create(**asked, stop=[" stop"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one two", "stop")
    made = sum(await stack.generated()) - sum(before)
    assert made <= len("one two stop") + 2, "the scheduler has to stop it, not the gateway"
    ended = await stack.client.completions.create(**asked)
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("one two stop three", "stop")


async def test_an_answer_keeps_to_a_json_schema_and_a_regex(stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"safe": {"type": "boolean"}, "grade": {"enum": ["a", "b"]}},
        "required": ["safe", "grade"],
        "additionalProperties": False,
    }
    answer = await stack.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is it?"}],
        max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "grade", "schema": schema, "strict": True}},
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert isinstance(content["safe"], bool)
    assert content["grade"] in ("a", "b")
    matched = await stack.client.completions.create(
        model=MODEL, prompt="A number", max_tokens=40, extra_body={"regex": "[0-9]{4}-[0-9]{2}"}
    )
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", matched.choices[0].text)


async def test_a_bad_request_is_told_why(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await stack.client.completions.create(model=MODEL, prompt="x" * 5000, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match=r"grammar\.regex"):
        await stack.client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_body={"regex": "(("})
    with pytest.raises(openai.NotFoundError):
        await stack.client.completions.create(model="another", prompt="x", max_tokens=1)


async def test_a_prompt_goes_where_its_beginning_is_cached(stack: Stack) -> None:
    async def ask(prompt: str) -> int:
        """Which of the schedulers has answered."""
        before = await stack.generated()
        await stack.client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
        after = await stack.generated()
        (which,) = [i for i, (was, is_now) in enumerate(zip(before, after, strict=True)) if is_now > was]
        return which

    async def goes_where_it_is_cached(where: int) -> bool:
        """A new one, cached behind the gateway's back: only by following the caches can it know where."""
        stem = f"{uuid.uuid4()} is the long beginning of many prompts, and worth keeping. " * 8
        await cache_behind_its_back(stack.addresses[where], list(stem.encode()))
        return await ask(f"{stem} And more") == where

    async with asyncio.timeout(SOON_S):  # it does not say when it has begun to follow them
        while not all([await goes_where_it_is_cached(where) for where in (0, 1)]):
            pass
    # Nor when it has been told of a block, so a few may come too early; by chance, or by turns, half of them are right.
    anywhere = random.Random(0).choices((0, 1), k=20)
    assert sum([await goes_where_it_is_cached(where) for where in anywhere]) >= 17


async def cache_behind_its_back(address: str, prompt: list[int]) -> None:
    """Until whoever follows the scheduler's cache has been told."""
    async with Client(address) as client, grpc.aio.insecure_channel(address) as channel:
        events = vllm_grpc.VllmEngineStub(channel).SubscribeKvEvents(common.SubscribeKvEventsRequest())
        await events.read()
        await client.complete(prompt, max_tokens=1)
        async with asyncio.timeout(SOON_S):
            told: list[int] = []
            while len(told) < len(prompt) // 16 * 16:
                batch = await events.read()
                chains = [event.stored.blocks for event in batch.events if event.HasField("stored")]
                told = next((ids for ids in map(ids_of, chains) if ids[:16] == prompt[:16]), told)
        events.cancel()


def ids_of(blocks: Any) -> list[int]:
    return [token for block in blocks for token in block.token_ids]


async def test_whoever_hangs_up_ends_the_answer(stack: Stack) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Never ending", "max_tokens": 4000, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    before = sum(await stack.generated())
    stream = await stack.client.completions.create(**asked, stream=True)
    await anext(stream)
    await stream.close()
    whole = asyncio.create_task(stack.client.completions.create(**asked))
    await stack.until_running()
    whole.cancel()
    async with asyncio.timeout(SOON_S):
        assert sum(await stack.generated()) - before < 4000  # of 8000, once nothing runs


async def test_one_scheduler_killed_costs_nothing_that_had_not_begun(stack: Stack) -> None:
    stack.schedulers[1].kill()
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0}
    for number in range(10):
        prompt = f"After the loss, number {number}"
        answer = await stack.client.completions.create(prompt=prompt, **asked)
        assert answer.choices[0].text == said(prompt, 5)


async def test_a_scheduler_that_has_no_executor_yet_is_taken_once_it_has_one(tmp_path: Path) -> None:
    """Its model is asked for once, when it has one to tell."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with cleaned_up([start_scheduler(tmp_path, endpoint)]) as services:
        address = services[0].wait_until_ready().address
        gateway = Gateway(tmp_path / "gateway.log", MODEL, [address], "--worker-startup-check-interval", "1")
        try:
            wait_for(lambda: "no executor has been attached yet" in gateway.log, "the gateway to ask")
            services.append(start_executor(tmp_path, "--simulate", endpoint=endpoint))
            gateway.wait_until_ready()
        finally:
            gateway.stop()
