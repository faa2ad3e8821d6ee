"""Samples and beams on the small real model, through the whole system, against transformers in the same type."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client, Completion
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.requests import GenerationRequest
from tests.margin import assert_greedy, reference_logits, reference_model
from tests.processes import cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.engines import engine_over, keep_plans, samples_ids
from tests.system.requests import idle_load, ready
from tests.system.test_beams import Search, hugging_face
from tests.system.test_real_models import REAL_MODEL_MARGIN

pytestmark = pytest.mark.model

BLOCK_SIZE = 16
TEXTS = [
    "The three primary colours are red, blue and yellow. Every other colour is made by mixing two of them, and the",
    "Once upon a time there was a small village at the foot of a mountain, where nobody had ever seen the sea. One day",
]
POOL = ["--num-blocks", "40", "--max-rows", "24", "--tokens-per-step", "48"]
PROMPT_LENGTHS = [16, 21, 9]  # on the edge of a block, and inside one


@pytest.fixture(scope="module")
def directory() -> Path:
    return demo_model_path()


@pytest.fixture(scope="module")
def reference(directory: Path) -> PreTrainedModel:
    return reference_model(directory)


@pytest.fixture(scope="module")
def prompts(directory: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer(text).input_ids[:length] for text in TEXTS for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def end_ids(directory: Path) -> tuple[int, ...]:
    """Where sentences end, so that some beams end early."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return tuple(tokenizer.convert_tokens_to_ids([".", ",", "\n"]))


@pytest.fixture(scope="module")
def endpoint(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of an executor with the model."""
    with cleaned_up([]) as services:
        flags = ["--model", str(directory), "--dtype", "float32", *POOL]
        services.append(start_executor(tmp_path_factory.mktemp("real"), *flags))
        wait_for(services[0].address_file.exists, "the model to be served", 300)
        yield services[0].address


def judge(reference: PreTrainedModel, search: Search, said: list[Completion]) -> None:
    """Scores are transformers' own of these ids; the answers are those of generate(), but for near-ties."""
    outputs, scores = hugging_face(reference, search)
    assert len(said) == search.returned
    for ours, output, score in zip(said, outputs, scores, strict=True):
        logits = reference_logits(reference, search.prompt + ours.token_ids)
        rows = torch.log_softmax(logits[len(search.prompt) - 1 : -1].double(), -1)
        total = float(rows.gather(1, torch.tensor(ours.token_ids)[:, None]).sum())
        own = total / len(ours.token_ids) ** search.length_penalty
        # A score may be a sum of as many log-probabilities as there are tokens.
        allowed = REAL_MODEL_MARGIN * len(ours.token_ids) ** max(0.0, 1 - search.length_penalty)
        assert abs(ours.score - own) <= allowed
        assert ours.token_ids == output or abs(own - score) <= allowed, search


async def run_searches(
    endpoint: str, root: Path, searches: list[Search], others: list[list[int]]
) -> tuple[list[list[Completion]], int]:
    """Answers of searches in one batch with greedy requests, and the number of preemptions."""
    with cleaned_up([]) as services:
        services.append(start_scheduler(root, endpoint))
        async with Client(services[0].wait_until_ready().address) as client:
            await ready(client)
            beside = [client.complete(prompt, max_tokens=24, temperature=0, ignore_eos=True) for prompt in others]
            said = await asyncio.gather(*[search.ask(client) for search in searches], *beside)
            load = await idle_load(client)
    assert load.used_blocks == 0
    return said[: len(searches)], load.preemptions


@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.slow)])
async def test_beams_of_the_real_model_are_those_of_hugging_face(
    count: int,
    endpoint: str,
    reference: PreTrainedModel,
    prompts: list[list[int]],
    end_ids: tuple[int, ...],
    tmp_path: Path,
) -> None:
    early = (False, True, "never")
    searches = [
        Search(prompt, width, 10, penalty, early[i % 3], width, end_ids)
        for i, (prompt, width, penalty) in enumerate(
            zip(prompts, (2, 4) * 3, (1.0, 0.0, 2.0, 1.0, 0.0, 1.0), strict=True)
        )
    ][:count]
    said, _ = await run_searches(endpoint, tmp_path, searches, prompts[:2])
    for search, wholes in zip(searches, said, strict=True):
        judge(reference, search, wholes)
    assert {whole.token_ids[-1] in end_ids for wholes in said for whole in wholes} == {True, False}


@pytest.mark.parametrize("counts", [(1, 2, 5), pytest.param(range(1, 9), marks=pytest.mark.slow)], ids=str)
async def test_greedy_samples_of_the_real_model_are_equal_and_copy_one_block_each(
    counts: Sequence[int], endpoint: str, reference: PreTrainedModel, prompts: list[list[int]], tmp_path: Path
) -> None:
    """The prompt is computed once; all samples but one copy its last block where it is partly filled."""
    num_outputs, answers = 6, {0: [], 1: []}
    async with engine_over(endpoint, tmp_path / "cache") as engine:
        plans = keep_plans(engine)
        for which, count in itertools.product(answers, counts):
            prompt = prompts[which]
            plans.clear()
            request = GenerationRequest(
                "r", prompt, Sampling(temperature=0), num_outputs, ignore_eos=True, num_samples=count, bypass_cache=True
            )
            answers[which] += await samples_ids(engine, request)
            copies = sum(len(plan.copies.rows) for plan in plans)
            assert copies == (count - 1 if len(prompt) % BLOCK_SIZE else 0)
            assert sum(int(plan.num_tokens.sum()) for plan in plans) == len(prompt) + count * (num_outputs - 1)
        assert engine.load().used_blocks == 0
    for which, samples in answers.items():
        token_ids = prompts[which] + samples[0]
        logits = reference_logits(reference, token_ids)
        assert_greedy(logits, token_ids, len(prompts[which]), REAL_MODEL_MARGIN)
        best, second = logits[len(prompts[which]) - 1 : -1].topk(2).values.T
        assert (best - second).min() > REAL_MODEL_MARGIN, "texts were meant to have no near-tie"
        assert samples == [samples[0]] * sum(counts)
