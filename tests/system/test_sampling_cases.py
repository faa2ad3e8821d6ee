"""What a request means, on a real model through the whole system: one small server, in steps of eight tokens and a pool
too small for all. Judged by transformers; sections 2, 4 and 6 of the known faults of others have their values here."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from paged.client import Client, Completion, InvalidRequestError, ServerError
from paged.v1 import executor_pb2
from tests.margin import assert_logprobs, distribution, reference_logits, reference_model
from tests.model.test_prompt_logprobs import assert_as_transformers
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.rules import rule_columns
from tests.system.requests import idle_load, ready
from tests.tiny_models import TINY_DECODER, VOCAB_SIZE, save_model

EOS_IDS = [5, 9]
POISON = 318  # whatever sees this token is not finite
PROMPT = [7, 20, 31, 4, 150, 7]


@dataclass(frozen=True)
class Served:
    address: str
    reference: transformers.PreTrainedModel


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("cases")
    config = transformers.LlamaConfig(**TINY_DECODER | {"eos_token_id": EOS_IDS})
    directory: Path = save_model(root / "model", config)
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    transformers.GenerationConfig(eos_token_id=EOS_IDS, do_sample=True, top_k=1).save_pretrained(directory)
    pool = ["--block-size", "4", "--num-blocks", "24", "--max-rows", "7", "--tokens-per-step", "8"]
    with cleaned_up([]) as services:
        services.append(start_executor(root, "--model", str(directory), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(root, endpoint, "--max-logprobs", "1000", "--model-sampling"))
        yield Served(services[1].wait_until_ready().address, reference_model(directory))


@pytest.fixture
async def client(served: Served) -> AsyncIterator[Client]:
    async with Client(served.address) as client:
        await ready(client)
        yield client
        load = await idle_load(client)
        assert load.used_blocks == 0


async def greedy(client: Client, prompt: list[int] = PROMPT, **options: Any) -> Completion:
    asked = {"temperature": 0, "top_k": 0, "max_tokens": 8, "ignore_eos": True, **options}
    return await client.complete(prompt, **asked)


async def test_c4_1_what_leaves_one_token_is_greedy_and_what_filters_nothing_changes_nothing(client: Client) -> None:
    plain = (await greedy(client)).token_ids
    tight = [{"temperature": t} for t in (0.0, 1e-45, 1e-38, 1e-6)]
    tight += [{"temperature": 1.0, **one} for one in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0})]
    said = await asyncio.gather(greedy(client, temperature=1.0, seed=1), *[greedy(client, **one) for one in tight])
    assert [answer.token_ids for answer in said[1:]] == [plain] * len(tight)
    free = await greedy(client, temperature=1.0, seed=1)
    assert said[0].token_ids == free.token_ids
    for top_k in (0, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1):
        assert (await greedy(client, temperature=1.0, seed=1, top_k=top_k)).token_ids == free.token_ids
    for name in ("temperature", "top_p", "min_p"):
        for bad in (-1.0, math.nan, math.inf):
            with pytest.raises(InvalidRequestError, match=f"sampling.{name}"):
                await greedy(client, **{name: bad})


async def test_what_a_request_leaves_open_is_as_the_models_makers_say_where_the_server_is_told_so(
    client: Client,
) -> None:
    """Their generation_config.json says top_k 1."""
    asked = {"temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    assert (await client.complete(PROMPT, **asked)).token_ids == (await greedy(client)).token_ids
    assert (await client.complete(PROMPT, top_k=0, **asked)).token_ids != (await greedy(client)).token_ids


async def test_c4_2_a_bias_forces_the_last_id_and_one_outside_the_vocabulary_stops_nobody(client: Client) -> None:
    running = asyncio.create_task(greedy(client, max_tokens=30))
    forced = await greedy(client, logit_bias={VOCAB_SIZE - 1: 1e4})
    assert forced.token_ids == [VOCAB_SIZE - 1] * 8
    for token_id, bias in [(VOCAB_SIZE, 1.0), (2**31, 1.0), (3, 1e30), (3, math.inf), (3, math.nan)]:
        with pytest.raises(InvalidRequestError, match="logit_bias"):
            await greedy(client, logit_bias={token_id: bias})
    assert (await running).token_ids[:8] == (await greedy(client)).token_ids


@pytest.mark.parametrize("min_tokens", [0, 1, 4, 6])
async def test_c4_3_every_end_token_is_held_back_for_exactly_min_tokens(client: Client, min_tokens: int) -> None:
    """Several at once, in a pool where some are preempted half-way and most find their prompt cached."""
    asked = {"ignore_eos": False, "logit_bias": {9: 1e4, 5: 5e3}, "min_tokens": min_tokens, "max_tokens": 6}
    for answer in await asyncio.gather(*[greedy(client, PROMPT * 2 + [i], **asked) for i in range(10, 20)]):
        assert len(answer.token_ids) == min(min_tokens + 1, 6)
        assert not set(EOS_IDS).intersection(answer.token_ids[:min_tokens])
        assert answer.finish.token_id == (9 if min_tokens < 6 else 0)
    with pytest.raises(InvalidRequestError, match=r"stop\.min_tokens"):
        await greedy(client, min_tokens=7, max_tokens=6)


async def test_c4_3_a_stop_string_counts_from_min_tokens_on_in_stream_and_in_one_message(client: Client) -> None:
    letter = (await client.tokenize("a"))[-1]
    for min_tokens, text in ((0, ""), (1, "a"), (3, "aaa")):
        asked = {"temperature": 0, "logit_bias": {letter: 1e4}, "stop": "a", "min_tokens": min_tokens, "max_tokens": 6}
        assert (await client.complete(PROMPT, **asked)).text == text
        assert "".join([message.text async for message in client.generate(PROMPT, **asked)]) == text


async def test_c4_4_penalties_see_what_they_should_alone_in_company_and_preempted(
    client: Client, served: Served
) -> None:
    prompt = [7] * 10
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.3, "eos_token_id": None}
    with torch.inference_mode():
        whole = served.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert (await greedy(client, prompt, repetition_penalty=1.3, max_tokens=12)).token_ids == whole[0, 10:].tolist()
    asked = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logprobs": VOCAB_SIZE, "max_tokens": 12}
    solo = await greedy(client, prompt, **asked)
    counts: Counter[int] = Counter()
    for token, entry in zip(solo.token_ids, solo.logprobs, strict=True):
        scores = {
            i: value - 2.0 * counts[i] - 2.0 * (counts[i] > 0)
            for i, value in zip(entry.top_ids, entry.top_logprobs, strict=True)
        }
        assert scores[token] >= max(scores.values()) - 1e-4
        counts[token] += 1
    before = (await client.load()).preemptions
    crowd = [greedy(client, [40 + i] * 3, max_tokens=40, bad_token_sequences=[[POISON]]) for i in range(6)]
    company = await asyncio.gather(*[greedy(client, prompt, **asked) for _ in range(4)], *crowd)
    assert [answer.token_ids for answer in company[:4]] == [solo.token_ids] * 4
    assert (await client.load()).preemptions > before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_c4_5_a_request_that_is_not_finite_fails_alone_and_is_counted(client: Client, temperature: float) -> None:
    asked = {"temperature": temperature, "seed": 2}
    alone = [await greedy(client, prompt, **asked) for prompt in (PROMPT, PROMPT[::-1])]
    failed = (await client.load()).failed_requests
    said = await asyncio.gather(
        greedy(client, PROMPT, **asked),
        greedy(client, [*PROMPT, POISON, 3], **asked),
        greedy(client, PROMPT[::-1], **asked),
        greedy(client, [*PROMPT, POISON, 3], prompt_logprobs=1, **asked),
        return_exceptions=True,
    )
    assert [said[0].token_ids, said[2].token_ids] == [answer.token_ids for answer in alone]
    assert isinstance(said[1], ServerError)
    assert isinstance(said[3], ServerError)
    await idle_load(client)
    assert (await client.load()).failed_requests == failed + 2


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB_SIZE])
async def test_c4_6_log_probabilities_are_of_the_models_own_logits_one_a_token(
    client: Client, served: Served, k: int
) -> None:
    shapes = [
        {"temperature": 0.3, "seed": 1}, {"temperature": 1.0, "seed": 1}, {"top_k": 1, "temperature": 1.0},
        {"logit_bias": {30: 1e4}}, {"allowed_token_ids": [3, 5], "ignore_eos": False},
    ]  # fmt: skip
    for shape in shapes:
        answer = await greedy(client, **shape, logprobs=k)
        asked = {"temperature": 0, "top_k": 0, "max_tokens": 8, "ignore_eos": True, **shape, "logprobs": k}
        parts = [message async for message in client.generate(PROMPT, **asked)]
        streamed = [entry for part in parts for entry in part.logprobs]
        assert [entry.rank for entry in streamed] == [entry.rank for entry in answer.logprobs]
        assert [entry.top_ids for entry in streamed] == [entry.top_ids for entry in answer.logprobs]
        token_ids = PROMPT + answer.token_ids
        columns = [
            ([token, *entry.top_ids], [entry.logprob, *entry.top_logprobs], entry.rank)
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        assert {len(ids) for ids, _, _ in columns} == {k + 1}
        assert_logprobs(reference_logits(served.reference, token_ids), token_ids, len(PROMPT), columns)
    with pytest.raises(InvalidRequestError, match=f"logprobs: is {VOCAB_SIZE + 1}"):
        await greedy(client, logprobs=VOCAB_SIZE + 1)


async def draws(client: Client, count: int, **options: Any) -> Counter[int]:
    """First tokens of so many samples."""
    calls = [
        client.complete_samples(PROMPT, n=128, seed=seed, max_tokens=1, ignore_eos=True, **{"top_k": 0, **options})
        for seed in range(count // 128)
    ]
    return Counter(sample.token_ids[0] for samples in await asyncio.gather(*calls) for sample in samples)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
async def test_c4_7_the_tokens_that_survive_are_those_of_the_documented_order(
    client: Client, served: Served, temperature: float
) -> None:
    """Probabilities of .60 .25 .10 .05, made by biases on four tokens that alone are allowed."""
    own = reference_logits(served.reference, PROMPT)[-1].double()
    bias = {i: float(math.log(p) - own[i]) for i, p in {30: 0.60, 40: 0.25, 50: 0.10, 60: 0.05}.items()}
    for min_p in (0.2, 0.5):
        shape = {"temperature": temperature, "min_p": min_p, "top_p": 0.8, "top_k": 3}
        sampling = executor_pb2.RowSampling(
            repetition_penalty=1, **shape, **rule_columns(bias=bias, allowed=list(bias))
        )
        expected = distribution(own.float(), PROMPT, len(PROMPT), sampling)
        counts = await draws(client, 256, logit_bias=bias, allowed_token_ids=list(bias), **shape)
        assert set(counts) == set(torch.nonzero(expected).flatten().tolist())


DRAWN = {
    "filters and penalties": {"temperature": 1.3, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.4},
    "rules": {"temperature": 1.0},
}


@pytest.mark.parametrize("shape", DRAWN)
async def test_seeded_samples_are_spread_as_transformers_distribution_says(
    client: Client, served: Served, shape: str
) -> None:
    """A chi-square test of 1024 draws: a value this high comes by chance once in a hundred thousand times."""
    rules = {"bias": {30: 2.0, 150: -1.5}, "allowed": list(range(20, 200)), "banned": [[20], [150, 7, 31]]}
    asked, columns = {}, {}
    if shape == "rules":
        asked = {
            "logit_bias": rules["bias"],
            "allowed_token_ids": rules["allowed"],
            "bad_token_sequences": rules["banned"],
        }
        columns = rule_columns(**rules)
    sampling = executor_pb2.RowSampling(**{"repetition_penalty": 1, "top_p": 1, **DRAWN[shape]}, **columns)
    expected = 1024 * distribution(reference_logits(served.reference, PROMPT)[-1], PROMPT, len(PROMPT), sampling)
    counts = await draws(client, 1024, **DRAWN[shape], **asked)
    assert sum(counts.values()) == 1024
    assert all(expected[token] > 0 for token in counts)
    common = torch.nonzero(expected >= 5).flatten().tolist()
    pairs = [(counts[token], float(expected[token])) for token in common]
    rest = float(expected.sum()) - sum(wanted for _, wanted in pairs)
    if rest > 5:
        pairs.append((1024 - sum(found for found, _ in pairs), rest))
    degrees = len(pairs) - 1
    assert degrees >= 5
    highest = degrees * (1 - 2 / (9 * degrees) + 4.27 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty
    assert sum((found - wanted) ** 2 / wanted for found, wanted in pairs) < highest


def told(answer: Completion) -> list[tuple[int, list[int], list[float]]]:
    prompt = answer.prompt_token_ids[1:]
    return [
        (entry.rank, [token, *entry.top_ids], [entry.logprob, *entry.top_logprobs])
        for token, entry in zip(prompt, answer.prompt_logprobs, strict=True)
    ]


@pytest.mark.parametrize("length", [15, 16, 17, 33])
async def test_c2_4_a_prompts_log_probabilities_are_the_same_cold_warm_and_after_another(
    client: Client, served: Served, length: int
) -> None:
    prompt = [(length * 37 + i * 11) % 300 for i in range(length)]
    asked = {"prompt_logprobs": 3, "echo": True, "max_tokens": 2}
    answers = [await greedy(client, prompt, **asked), await greedy(client, prompt, **asked)]
    await greedy(client, [*prompt[:9], *range(100, 120)], **asked)
    answers.append(await greedy(client, prompt, **asked))
    for answer in answers:
        assert len(answer.prompt_logprobs) == length - 1
        assert_as_transformers(served.reference, prompt, told(answer))


async def test_c6_7_a_last_chunk_of_one_token_is_no_decode_step(client: Client, served: Served) -> None:
    """Eight tokens a step, two rows that decode: prompts whose last chunk is one token, and one that is cached but for
    one token."""
    cached = [(i * 13) % 300 for i in range(17)]
    await greedy(client, cached, max_tokens=1)
    decoding = [asyncio.create_task(greedy(client, [50 + i], max_tokens=40)) for i in range(2)]
    prompts = [[(length * 41 + i * 17) % 300 for i in range(length)] for length in (1, 8, 9, 17)]
    asked = {"prompt_logprobs": 3, "echo": True, "max_tokens": 4, "logprobs": 3}
    answers = await asyncio.gather(
        *[greedy(client, prompt, **asked) for prompt in prompts], greedy(client, cached, max_tokens=4, logprobs=3)
    )
    await asyncio.gather(*decoding)
    assert answers[-1].usage.cached_tokens == 16
    for prompt, answer in zip([*prompts, cached], answers, strict=True):
        token_ids = prompt + answer.token_ids
        columns = [
            ([token, *entry.top_ids], [entry.logprob, *entry.top_logprobs], entry.rank)
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        ]
        assert_logprobs(reference_logits(served.reference, token_ids), token_ids, len(prompt), columns)
        if answer.prompt_token_ids:
            assert_as_transformers(served.reference, prompt, told(answer))
