"""Real models through the whole system: gRPC, scheduler, plan stream, executor. Judged by the margin rule."""

import asyncio
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client
from paged.v1 import executor_pb2, inference_pb2
from tests.margin import MARGIN, assert_drawn, assert_greedy, assert_logprobs, reference_logits, reference_model
from tests.model.test_rotary import ORIGINAL, rope_config
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.system.requests import idle_load, ready
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save_model, save_tiny

# Gemma's residual stream grows into the thousands over 18 layers, where fp32 is ten times coarser than in tiny models.
REAL_MODEL_MARGIN = 1e-3


@dataclass
class Answered:
    """A request with its answer."""

    prompt: list[int]
    sampling: executor_pb2.RowSampling
    ids: list[int] = field(default_factory=list)
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)


async def ask(client: Client, wanted: Answered, max_tokens: int) -> None:
    sampling = wanted.sampling
    stream = client.generate(
        wanted.prompt,
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        logprobs=3,
        ignore_eos=True,
    )
    async for message in stream:
        wanted.ids += message.token_ids
        wanted.logprobs += message.logprobs


def judge(reference: PreTrainedModel, answered: Answered, margin: float = MARGIN) -> None:
    token_ids, num_prompt = answered.prompt + answered.ids, len(answered.prompt)
    logits = reference_logits(reference, token_ids)
    if answered.sampling.temperature == 0 and answered.sampling.repetition_penalty == 1:
        assert_greedy(logits, token_ids, num_prompt, margin)
    elif answered.sampling.temperature > 0:
        assert_drawn(logits, token_ids, num_prompt, answered.sampling, margin)
    columns = [
        ([token, *entry.top_ids], [entry.logprob, *entry.top_logprobs], entry.rank)
        for token, entry in zip(answered.ids, answered.logprobs, strict=True)
    ]
    assert_logprobs(logits, token_ids, num_prompt, columns, margin)


def mixed(count: int, vocab_size: int, longest: int, chance: random.Random) -> list[Answered]:
    """Prompts of mixed lengths, half of them with a common beginning; greedy, drawn and penalised."""
    stem = [chance.randrange(vocab_size) for _ in range(longest)]
    wanted = []
    for i in range(count):
        begin = stem[: chance.randrange(longest // 2)] if i % 2 else []
        tail = [chance.randrange(vocab_size) for _ in range(chance.randrange(1, longest // 2))]
        sampling = executor_pb2.RowSampling(
            temperature=0.0 if i % 3 else 1.0,
            top_p=1.0,
            top_k=0 if i % 2 else 20,
            repetition_penalty=1.3 if i % 4 == 3 else 1.0,
            seed=i,
        )
        wanted.append(Answered(begin + tail, sampling))
    return wanted


@pytest.fixture(scope="module")
def tiny_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {family: save_tiny(root, family) for family in CONFIGS}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
async def test_margins_hold_alone_together_chunked_cached_and_preempted(
    family: str, tiny_directories: dict[str, Path], tmp_path: Path
) -> None:
    directory = tiny_directories[family]
    wanted = mixed(14, VOCAB_SIZE, 40, random.Random(1))
    pool = ["--block-size", "4", "--num-blocks", "40", "--max-rows", "8", "--tokens-per-step", "12"]
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            await ask(client, wanted[0], 20)
            alone = await idle_load(client)
            await asyncio.gather(*[ask(client, one, 20) for one in wanted[1:]])
            load = await idle_load(client)
    assert alone.preemptions == 0
    assert load.preemptions > 0
    assert load.cached_prompt_tokens > 0
    assert load.peak_running_sequences > 2
    assert load.used_blocks == 0
    reference = reference_model(directory)
    for answered in wanted:
        assert len(answered.ids) == 20
        judge(reference, answered)


async def test_answers_that_cross_the_length_at_which_keys_change_are_right_on_both_sides(tmp_path: Path) -> None:
    """C8.6. Each token is judged by a pass over those before it, whose number alone decides on its factors."""
    directory = save_model(tmp_path / "longrope", rope_config("longrope"))
    wanted = mixed(14, VOCAB_SIZE, 26, random.Random(3))
    assert {len(one.prompt) < ORIGINAL < len(one.prompt) + 20 for one in wanted} == {True, False}
    pool = ["--block-size", "4", "--num-blocks", "50", "--max-rows", "8", "--tokens-per-step", "12"]
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            await asyncio.gather(*[ask(client, one, 20) for one in wanted])
            load = await idle_load(client)
    assert load.cached_prompt_tokens > 0
    assert load.used_blocks == 0
    reference = reference_model(directory)
    for answered in wanted:
        assert len(answered.ids) == 20
        judge_by_length(reference, answered)


def judge_by_length(reference: PreTrainedModel, answered: Answered) -> None:
    for i, entry in enumerate(answered.logprobs):
        before = answered.prompt + answered.ids[:i]
        token_ids, logits = [*before, answered.ids[i]], reference_logits(reference, before)
        if answered.sampling.temperature == 0 and answered.sampling.repetition_penalty == 1:
            assert_greedy(logits, token_ids, len(before))
        elif answered.sampling.temperature > 0:
            # A token's randomness follows from its place in the whole sequence.
            assert_drawn(logits, token_ids, len(before), answered.sampling)
        column = ([answered.ids[i], *entry.top_ids], [entry.logprob, *entry.top_logprobs], entry.rank)
        assert_logprobs(logits, token_ids, len(before), [column])


async def test_samples_that_cross_the_length_at_which_keys_change_are_right_cold_preempted_and_cached(
    tmp_path: Path,
) -> None:
    """C8.6. Prompts end before, at and behind that length, and each is asked for twice."""
    directory = save_model(tmp_path / "longrope", rope_config("longrope"))
    chance = random.Random(6)
    stem = [chance.randrange(VOCAB_SIZE) for _ in range(ORIGINAL + 4)]
    prompts = [stem[:length] for length in range(ORIGINAL - 2, ORIGINAL + 2)]
    pool = ["--block-size", "4", "--num-blocks", "16", "--max-rows", "8", "--tokens-per-step", "24"]
    asked = {"max_tokens": 12, "temperature": 1.0, "logprobs": 3, "ignore_eos": True, "n": 3}
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            rounds = [
                await asyncio.gather(
                    *[client.complete_samples(prompt, seed=i, **asked) for i, prompt in enumerate(prompts)]
                )
                for _ in range(2)
            ]
            load = await idle_load(client)
    assert load.used_blocks == 0
    assert load.cached_prompt_tokens > 0
    assert load.preemptions > 0
    reference = reference_model(directory)
    for wholes in rounds:
        for seed, (prompt, samples) in enumerate(zip(prompts, wholes, strict=True)):
            for index, sample in enumerate(samples):
                sampling = executor_pb2.RowSampling(
                    temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=seed, index=index
                )
                assert len(sample.token_ids) == 12
                judge_by_length(reference, Answered(prompt, sampling, sample.token_ids, sample.logprobs))


@pytest.mark.model
@pytest.mark.parametrize(("num_requests", "num_blocks"), [(12, 23), pytest.param(100, 33, marks=pytest.mark.slow)])
async def test_requests_to_the_small_real_model_in_a_pool_too_small(
    num_requests: int, num_blocks: int, tmp_path: Path
) -> None:
    directory = demo_model_path()
    wanted = mixed(num_requests, 200_000, 40, random.Random(2))
    pool = ["--num-blocks", str(num_blocks), "--max-rows", "16", "--tokens-per-step", "128", "--dtype", "float32"]
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            await asyncio.gather(*[ask(client, one, 24) for one in wanted])
            load = await idle_load(client)
        resident_mb = services[1].resident_mb
    assert [len(answered.ids) for answered in wanted] == [24] * num_requests
    assert load.preemptions > 0
    assert load.used_blocks == 0
    assert load.finished_requests == num_requests
    assert resident_mb < 250, "a scheduler stays small even with a vocabulary of 262,144"
    reference = reference_model(directory)
    for answered in wanted:
        judge(reference, answered, REAL_MODEL_MARGIN)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
async def test_each_of_several_samples_keeps_the_margin(
    family: str, tiny_directories: dict[str, Path], tmp_path: Path
) -> None:
    chance, pool = random.Random(4), ["--block-size", "4", "--num-blocks", "36", "--max-rows", "12"]
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 8, 13, 22, 24)]
    samplings = [
        executor_pb2.RowSampling(temperature=1.0, top_p=1.0, seed=i, repetition_penalty=1.0 + 0.3 * (i % 2))
        for i in range(len(prompts))
    ]
    asked = {"max_tokens": 12, "temperature": 1.0, "logprobs": 3, "ignore_eos": True, "n": 4}
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(tiny_directories[family]), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            calls = [
                client.complete_samples(prompt, seed=s.seed, repetition_penalty=s.repetition_penalty, **asked)
                for prompt, s in zip(prompts, samplings, strict=True)
            ]
            wholes = await asyncio.gather(*calls)
            load = await idle_load(client)
    assert load.used_blocks == 0
    assert load.preemptions > 0
    reference = reference_model(tiny_directories[family])
    for prompt, sampling, samples in zip(prompts, samplings, wholes, strict=True):
        assert len({tuple(sample.token_ids) for sample in samples}) == 4
        for index, sample in enumerate(samples):
            sampling.index = index
            judge(reference, Answered(prompt, sampling, sample.token_ids, sample.logprobs))


@pytest.mark.model
async def test_what_the_small_real_model_says_satisfies_its_grammar(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 1, "maximum": 10**9},
            "languages": {"type": "array", "items": {"enum": ["French", "German", "Italian"]}, "maxItems": 3},
        },
        "required": ["capital", "population", "languages"],
        "additionalProperties": False,
    }
    prompt = "Switzerland as JSON:\n"
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(demo_model_path()), "--num-blocks", "200"))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            samples, plain, chosen, date = await asyncio.gather(
                client.complete_samples(prompt, json_schema=schema, n=3, temperature=1.0, seed=1, max_tokens=120),
                client.complete(prompt, temperature=0, max_tokens=20),
                client.complete("Is water wet? ", choice=["yes", "no"], temperature=0),
                client.complete("The moon landing was on ", regex="[0-9]{4}-[01][0-9]-[0-3][0-9]", temperature=0),
            )
            alone = await client.complete(prompt, temperature=0, max_tokens=20)
    for sample in samples:
        said = json.loads(sample.text)
        assert said.keys() == schema["properties"].keys()
        assert len(said["capital"]) <= 20
        assert 1 <= said["population"] <= 10**9
        assert {*said["languages"]} <= {"French", "German", "Italian"}
    assert len({sample.text for sample in samples}) > 1
    assert chosen.text in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[01][0-9]-[0-3][0-9]", date.text)
    assert plain.text == alone.text
