"""Log-probabilities of prompts, echo and cut prompts through the whole system, exact on the simulated model."""

import asyncio
import random

import numpy as np
import pytest

from executor_svc.simulated.text import SimulatedText, score
from paged.client import Client, Completion, InvalidRequestError
from paged.v1 import inference_pb2
from tests.system.conftest import VOCAB_SIZE, System
from tests.system.requests import idle_load, ready

Entry = tuple[int, float, list[int], list[float]]


def expected_scores(prompt: list[int], k: int) -> list[Entry]:
    entries = []
    for i in range(1, len(prompt)):
        context = SimulatedText(prompt[:i], vocab_size=VOCAB_SIZE).context_hash()
        ids, values, rank = score(prompt[i], context, k, VOCAB_SIZE)
        values = np.array(values, np.float32).tolist()
        entries.append((rank, values[0], ids[1:].tolist(), values[1:]))
    return entries


def told(entries: list[inference_pb2.TokenLogprobs]) -> list[Entry]:
    return [(entry.rank, entry.logprob, list(entry.top_ids), list(entry.top_logprobs)) for entry in entries]


async def streamed(client: Client, prompt: list[int], **options: object) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in client.generate(prompt, **options)]  # type: ignore[arg-type]


async def test_each_prompts_entries_are_exact_cold_cached_chunked_and_preempted(system: System) -> None:
    system.executor_flags = ["--num-blocks", "64", "--block-size", "4", "--max-rows", "12", "--tokens-per-step", "16"]
    system.start()
    chance = random.Random(8)
    stem = [chance.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [
        [*stem[: chance.randrange(40)], *(chance.randrange(VOCAB_SIZE) for _ in range(1 + i % 9))] for i in range(60)
    ]
    async with Client(system.address) as client:
        await ready(client)
        calls = [
            client.complete_samples(prompt, prompt_logprobs=i % 3, n=1 + i % 2, max_tokens=20, ignore_eos=True)
            if i % 3
            else client.complete_samples(prompt, max_tokens=20, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
        answers = await asyncio.gather(*calls)
        load = await idle_load(client)
    assert load.preemptions > 0
    assert load.used_blocks == 0
    assert load.cached_prompt_tokens > 0
    for i, (prompt, samples) in enumerate(zip(prompts, answers, strict=True)):
        assert told(samples[0].prompt_logprobs) == (expected_scores(prompt, i % 3) if i % 3 else [])
        assert not any(sample.prompt_logprobs for sample in samples[1:])
        assert {len(sample.token_ids) for sample in samples} == {20}
        assert samples[0].usage.cached_tokens == 0 or not i % 3


async def test_entries_survive_the_loss_of_the_executor_and_each_comes_once(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "30000", "--tokens-per-step", "260"]
    system.start()
    prompt = [300 + i * 7919 % 31_000 for i in range(3000)]
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.create_task(
            streamed(client, prompt, prompt_logprobs=1, echo=True, max_tokens=4, ignore_eos=True)
        )
        async with asyncio.timeout(20):
            while not (await client.load()).prompt_tokens:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)  # some of its twelve steps
        system.executor.kill()
        system.restart_executor()
        messages = await asked
        load = await idle_load(client)
    assert load.executor_losses == 1
    assert told([entry for message in messages for entry in message.prompt_logprobs]) == expected_scores(prompt, 1)
    assert [token for message in messages for token in message.prompt_token_ids] == prompt
    assert max(len(message.prompt_logprobs) for message in messages) <= 1024, "a message stays small"
    assert sum(len(message.token_ids) for message in messages) == 4


async def test_an_echo_is_the_prompt_before_each_sample_in_stream_and_in_one_message(system: System) -> None:
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        asked = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "n": 2}
        plain = await client.complete_samples("Hello, wörld", **asked)
        whole = await client.complete_samples("Hello, wörld", echo=True, **asked)
        parts = [message async for message in client.generate("Hello, wörld", echo=True, **asked)]
        prompt = await client.tokenize("Hello, wörld")
        for index, (bare, echoed) in enumerate(zip(plain, whole, strict=True)):
            own = [message for message in parts if message.index == index]
            assert echoed.text == "".join(message.text for message in own) == "Hello, wörld" + bare.text
            assert echoed.prompt_token_ids == [i for message in own for i in message.prompt_token_ids] == prompt
            assert echoed.token_ids == bare.token_ids
            assert bare.prompt_token_ids == []
            assert echoed.usage == bare.usage
        stopped = await client.complete("abc", echo=True, stop="b", max_tokens=3)
        assert stopped.text.startswith("abc"), "a stop string is not looked for in the prompt"


async def test_of_a_longer_prompt_the_last_tokens_are_used(system: System) -> None:
    system.executor_flags = ["--simulate-max-model-len", "64"]
    system.start()
    prompt = list(range(300, 400))
    async with Client(system.address) as client:
        await ready(client)

        async def said(asked: list[int] | str, **options: int) -> Completion:
            return await client.complete(asked, max_tokens=8, temperature=0, echo=True, ignore_eos=True, **options)

        cut = await said(prompt, truncate_prompt_tokens=20)
        assert cut.prompt_token_ids == prompt[-20:]
        assert cut.usage.prompt_tokens == 20
        assert cut.token_ids == (await said(prompt[-20:])).token_ids
        assert (await said(prompt[:5], truncate_prompt_tokens=20)).prompt_token_ids == prompt[:5]
        assert (await said("x" * 100 + "yz", truncate_prompt_tokens=3)).text.startswith("xyz")
        for bad in (0, 64):
            with pytest.raises(InvalidRequestError, match=f"truncate_prompt_tokens: is {bad}; must be 1 to 63"):
                await said(prompt, truncate_prompt_tokens=bad)
        with pytest.raises(InvalidRequestError, match="token_ids: has 100 tokens, above the limit of 63"):
            await said(prompt)
        with pytest.raises(InvalidRequestError, match="prompt_logprobs: is 21, above the limit of 20"):
            await client.complete(prompt[:5], prompt_logprobs=21)
