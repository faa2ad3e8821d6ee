"""Beam search and the best of samples, through the whole system."""

import asyncio
import random
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from paged.client import Client, Completion, InvalidRequestError
from paged.v1.inference_pb2 import BeamSearch
from tests.core.beam_oracle import beam_answers
from tests.margin import MARGIN, reference_model
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.system.conftest import System
from tests.system.requests import Call, idle_load, ready
from tests.system.simulated_answers import END_IDS, likely_tokens
from tests.system.simulated_answers import VOCAB_SIZE as SIMULATED_VOCAB
from tests.tiny_models import VOCAB_SIZE, save_tiny

EARLY = {
    False: BeamSearch.EARLY_STOPPING_NO,
    True: BeamSearch.EARLY_STOPPING_YES,
    "never": BeamSearch.EARLY_STOPPING_NEVER,
}


@dataclass(frozen=True)
class Search:
    prompt: list[int]
    width: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | str
    returned: int
    end_ids: tuple[int, ...]

    async def ask(self, client: Client, **options) -> list[Completion]:
        beam = BeamSearch(
            width=self.width, length_penalty=self.length_penalty, early_stopping=EARLY[self.early_stopping]
        )
        return await client.complete_samples(
            self.prompt,
            beam=beam,
            n=self.returned,
            max_tokens=self.max_tokens,
            stop_token_ids=self.end_ids,
            ignore_eos=True,
            **options,
        )


def searches(
    count: int, vocab_size: int, longest: int, chance: random.Random, end_ids: tuple[int, ...]
) -> list[Search]:
    """All widths, penalties and ways to stop, over prompts that end inside a block and on its edge."""
    stem = [chance.randrange(vocab_size) for _ in range(longest)]
    found = []
    for i in range(count):
        width = (2, 4, 6, 3)[i % 4]
        prompt = stem[: 4 * (i % 6)] + [chance.randrange(vocab_size) for _ in range(1 + i % 9)]
        penalty, early = (0.0, 0.6, 1.0, 2.0, -1.0)[i % 5], (False, True, "never")[i % 3]
        found.append(Search(prompt, width, (8, 24, 1, 16)[i // 4 % 4], penalty, early, width if i % 2 else 1, end_ids))
    return found


async def test_searches_are_exact_beside_ordinary_requests_in_a_pool_too_small(system: System) -> None:
    """C3.2, C3.3, C1.6: whoever is preempted, and whoever goes away."""
    system.executor_flags = ["--simulate-vocab-size", str(SIMULATED_VOCAB), "--block-size", "4"]
    system.executor_flags += ["--num-blocks", "84", "--max-rows", "24", "--tokens-per-step", "64"]
    system.start()
    chance = random.Random(5)
    wanted = searches(60, SIMULATED_VOCAB, 24, chance, END_IDS)
    wrong: list[Search] = []
    room = asyncio.Semaphore(14)

    async def one(client: Client, number: int, search: Search) -> None:
        async with room:
            if number % 7 == 3:
                asked = asyncio.create_task(search.ask(client))
                await asyncio.sleep(chance.random() / 50)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                return
            said = await search.ask(client, request_id=f"search-{number % 14}-{number}")
        expected = beam_answers(
            search.prompt,
            search.width,
            search.max_tokens,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            end_ids=END_IDS,
            likely=likely_tokens,
        )
        if [(whole.token_ids, whole.score) for whole in said] != expected[: search.returned]:
            wrong.append(search)

    async with Client(system.address) as client:
        await ready(client)
        others = [client.complete(search.prompt, max_tokens=30, temperature=0, ignore_eos=True) for search in wanted]
        await asyncio.gather(*others, *[one(client, number, search) for number, search in enumerate(wanted)])
        load = await idle_load(client)
    assert wrong == []
    assert load.preemptions > 0, "the pool was meant to be too small"
    assert load.used_blocks == load.unused_slots == load.running_sequences == 0
    assert "error" not in system.scheduler.log


async def test_a_search_outlives_the_executor_and_says_nothing_before_its_end(system: System) -> None:
    system.executor_flags = ["--simulate-vocab-size", str(SIMULATED_VOCAB), "--simulate-fixed-us", "20000"]
    system.start()
    prompt, beam = list(range(30, 61)), BeamSearch(width=4)
    async with Client(system.address) as client:
        await ready(client)

        async def stream() -> list:
            asked = client.generate(prompt, beam=beam, n=3, max_tokens=40, ignore_eos=True, logprobs=2)
            return [message async for message in asked]

        asked = asyncio.create_task(stream())
        async with asyncio.timeout(20):
            while (await client.load()).generated_tokens < 40:
                await asyncio.sleep(0.02)
        system.executor.kill()
        system.restart_executor()
        messages = await asked
        load = await idle_load(client)
    assert load.executor_losses == 1
    assert [message.index for message in messages] == [0, 1, 2]
    expected = beam_answers(prompt, 4, 40, likely=likely_tokens)[:3]
    assert [(list(message.token_ids), message.score) for message in messages] == expected
    for message in messages:
        assert len(message.logprobs) == 40
        assert sum(entry.logprob for entry in message.logprobs) / 40 == message.score
        assert all(len(entry.top_ids) == 2 for entry in message.logprobs)


async def test_what_beams_do_not_go_with_and_cannot_have_is_refused_by_name(system: System) -> None:
    system.executor_flags = ["--max-rows", "8", "--block-size", "4", "--num-blocks", "40"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        for field, options in {
            "beam.width: is 0": {"beam": BeamSearch()},
            "beam.width: is 129": {"beam": BeamSearch(width=129)},
            "beam.width: is 9; the executor computes 8": {"beam": BeamSearch(width=9)},
            "beam.length_penalty": {"beam": BeamSearch(width=2, length_penalty=float("nan"))},
            "beam.early_stopping": {"beam": BeamSearch(width=2, early_stopping=7)},
            "n: is 3; a search of 2 beams": {"beam": BeamSearch(width=2), "n": 3},
            "sampling.temperature: does not go with beam": {"beam": BeamSearch(width=2), "temperature": 0},
            "sampling.logit_bias": {"beam": BeamSearch(width=2), "logit_bias": {3: 1.0}},
            "stop.strings": {"beam": BeamSearch(width=2), "stop": "x"},
            "best_of: does not go with beam": {"beam": BeamSearch(width=2), "best_of": 2},
            "best_of: is 2; must be 3": {"n": 3, "best_of": 2},
            "best_of: is 129": {"best_of": 129},
            "prompt_logprobs: does not go with best_of": {"best_of": 2, "prompt_logprobs": 0},
            "prompt_logprobs: does not go with beam": {"beam": BeamSearch(width=2), "prompt_logprobs": 0},
            "stop.max_tokens: is 100": {"beam": BeamSearch(width=8), "max_tokens": 100},
        }.items():
            with pytest.raises(InvalidRequestError, match=field):
                await client.complete_samples(list(range(300, 310)), **options)
        assert (await idle_load(client)).used_blocks == 0


async def test_the_best_samples_are_those_whose_log_probabilities_add_up_to_most(system: System) -> None:
    system.start()
    call = Call(list(range(300, 317)), 12, 1.0, 7, "", num_samples=6)
    options = {"max_tokens": 12, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    async with Client(system.address) as client:
        await ready(client)
        every = await client.complete_samples(call.prompt, n=6, logprobs=1, **options)
        totals = [sum(entry.logprob for entry in whole.logprobs) for whole in every]
        order = sorted(range(6), key=lambda i: -totals[i])
        best = await client.complete_samples(call.prompt, n=2, best_of=6, echo=True, **options)
        messages = [message async for message in client.generate(call.prompt, n=2, best_of=6, logprobs=1, **options)]
        assert (await idle_load(client)).used_blocks == 0
    assert [whole.token_ids for whole in best] == [every[i].token_ids for i in order[:2]]
    assert [whole.score for whole in best] == [pytest.approx(totals[i]) for i in order[:2]]
    assert all(whole.logprobs == [] and whole.prompt_token_ids == call.prompt for whole in best)
    assert [(m.index, list(m.token_ids)) for m in messages] == [(i, best[i].token_ids) for i in range(2)]
    assert all(len(message.logprobs) == 12 for message in messages)


def hugging_face(model, search: Search) -> tuple[list[list[int]], list[float]]:
    """Outputs and scores of generate(), best first."""
    torch.set_num_threads(1)
    found = model.generate(
        torch.tensor([search.prompt]),
        attention_mask=torch.ones(1, len(search.prompt), dtype=torch.long),
        num_beams=search.width,
        num_return_sequences=search.returned,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=search.max_tokens,
        eos_token_id=list(search.end_ids),
        pad_token_id=VOCAB_SIZE - 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for row in found.sequences[:, len(search.prompt) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in search.end_ids), len(row))
        outputs.append(row[:end])
    return outputs, found.sequences_scores.tolist()


@pytest.mark.parametrize(
    ("family", "count"), [("llama", 20), ("mistral", 15), pytest.param("llama", 60, marks=pytest.mark.slow)]
)
async def test_answers_and_scores_are_those_of_hugging_face(family: str, count: int, tmp_path: Path) -> None:
    """C3.2, C1.3, C3.4: many searches in one batch, preempted in a small pool; mistral has windows of 8."""
    directory = save_tiny(tmp_path, family)
    wanted = searches(count, VOCAB_SIZE - 1, 24, random.Random(7), tuple(range(3, 300, 9)))
    pool = ["--block-size", "4", "--num-blocks", "64", "--max-rows", "24", "--tokens-per-step", "48"]
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), "--dtype", "float32", *pool))
        services.append(start_scheduler(tmp_path, services[0].wait_until_ready().address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            others = [client.complete(search.prompt, max_tokens=30, temperature=0) for search in wanted[:10]]
            said = await asyncio.gather(*[search.ask(client) for search in wanted], *others)
            load = await idle_load(client)
    assert load.preemptions > 0
    assert load.used_blocks == 0
    model = reference_model(directory)
    num_ended = 0
    for search, wholes in zip(wanted, said, strict=False):
        outputs, scores = hugging_face(model, search)
        np.testing.assert_allclose([whole.score for whole in wholes], scores, atol=MARGIN)
        near = min((abs(a - b) for a, b in pairwise(scores)), default=1.0) < MARGIN
        assert near or [whole.token_ids for whole in wholes] == outputs
        num_ended += sum(whole.token_ids[-1] in search.end_ids for whole in wholes)
    assert num_ended > len(wanted) / 5, "searches were meant to end early, too"
