"""Grammars through the whole system: exact on the simulated model, which takes the next id up that a mask allows."""

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from executor_svc.simulated.byte_tokenizer import make_bundle
from executor_svc.simulated.text import SimulatedText
from paged.client import Client, InvalidRequestError, ServerError
from paged.v1 import inference_pb2
from scheduler_svc import grammar_masks
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.text.grammars import Grammar, Grammars
from scheduler_svc.text.tokenizer import Tokenizer
from tests.processes import cleaned_up, start_executor
from tests.system.conftest import VOCAB_SIZE, System
from tests.system.engines import engine_over, samples_ids
from tests.system.requests import EOS_ID, Call, answer, idle_load, mixed_calls, ready
from tests.system.test_scripted import script

GRAMMARS = [
    Grammar("regex", "[a-f]{20,40}!"),
    Grammar("regex", "( [a-z]{2,3})+"),
    Grammar("choice", ("yes", "no", "perhaps, but not today", "été")),
    Grammar("json_schema", '{"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 9}'),
    Grammar("lark", 'start: "a" start "b" | "c"'),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_bundle(make_bundle(VOCAB_SIZE, 16384, EOS_ID))
    return Grammars(tokenizer, VOCAB_SIZE)


def expected(grammars: Grammars, grammar: Grammar, call: Call, index: int = 0) -> list[int]:
    """What the answer must be, without core, plans or blocks."""
    text = SimulatedText(
        call.prompt, vocab_size=grammars.vocab_size, temperature=call.temperature, seed=call.seed, index=index
    )
    matcher = grammars.matcher(grammar, [EOS_ID])
    mask = matcher.follow(())
    output: list[int] = []
    while mask is not None and len(output) < call.max_tokens:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        output.append(text.next_token(allowed))
        if output[-1] == EOS_ID:
            break
        mask = matcher.follow(output[-1:])
    return output


def option(grammar: Grammar) -> dict:
    return {grammar.kind: grammar.source}


async def said(client: Client, grammar: Grammar, call: Call) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in range(call.num_samples)]
    async for message in client.generate(
        call.prompt,
        max_tokens=call.max_tokens,
        temperature=call.temperature,
        seed=call.seed,
        n=call.num_samples,
        **option(grammar),
    ):
        ids[message.index] += message.token_ids
    return ids


def constrained(count: int, chance: random.Random) -> list[tuple[Grammar, Call]]:
    calls = []
    for i in range(count):
        prompt = [chance.randrange(300, VOCAB_SIZE) for _ in range(chance.randrange(1, 60))]
        call = Call(prompt, chance.randrange(1, 80), 1.0, chance.getrandbits(63), "", chance.choice([1, 1, 3]))
        calls.append((GRAMMARS[i % len(GRAMMARS)], call))
    return calls


async def test_each_answer_is_exact_beside_others_in_a_pool_too_small(system: System, grammars: Grammars) -> None:
    system.executor_flags = ["--num-blocks", "60", "--max-rows", "24", "--tokens-per-step", "64"]
    system.start()
    chance = random.Random(4)
    wanted = constrained(50, chance)
    others = mixed_calls(30, chance)
    async with Client(system.address) as client:
        await ready(client)
        answers, plain = await asyncio.gather(
            asyncio.gather(*[said(client, *one) for one in wanted]),
            asyncio.gather(*[answer(client, call) for call in others]),
        )
        load = await idle_load(client)
    assert plain == [call.expected() for call in others]
    for (grammar, call), ids in zip(wanted, answers, strict=True):
        assert ids == [expected(grammars, grammar, call, index) for index in range(call.num_samples)]
    assert load.preemptions > 0, "the pool was meant to be too small"
    assert load.used_blocks == 0
    assert "error" not in system.scheduler.log


async def test_answers_go_on_where_they_were_after_the_loss_of_the_executor(system: System, grammars: Grammars) -> None:
    system.executor_flags = ["--simulate-fixed-us", "8000"]
    system.start()
    chance = random.Random(5)
    wanted = [
        (Grammar("regex", "[a-f ]{80}"), Call([300 + i], 90, 1.0, chance.getrandbits(63), "", 2)) for i in range(4)
    ]
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.gather(*[said(client, *one) for one in wanted])
        async with asyncio.timeout(30):
            while (await client.load()).generated_tokens < 80:
                await asyncio.sleep(0.02)
        system.executor.kill()
        system.restart_executor()
        answers = await asked
        assert (await idle_load(client)).executor_losses == 1
    for (grammar, call), ids in zip(wanted, answers, strict=True):
        assert ids == [expected(grammars, grammar, call, index) for index in range(2)]


async def test_an_answer_ends_with_its_grammar_and_says_so(system: System) -> None:
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        whole = await client.complete("Well?", choice=["yes", "no"], min_tokens=50, max_tokens=60, ignore_eos=True)
        assert whole.text in ("yes", "no")
        assert whole.finish.reason == inference_pb2.FINISH_REASON_STOP
        assert whole.finish.WhichOneof("matched") is None
        assert whole.usage.completion_tokens == len(whole.token_ids) == len(whole.text)

        cut = await client.complete("Well?", regex="[a-c]{30}", max_tokens=7)
        assert re.fullmatch("[a-c]{7}", cut.text)
        assert cut.finish.reason == inference_pb2.FINISH_REASON_LENGTH

        stopped = await client.complete("Well?", regex="[ab]{5}xyz[ab]{5}", stop=["xy"], logprobs=1)
        assert re.fullmatch("[ab]{5}", stopped.text)
        assert stopped.finish.stop_string == "xy"
        assert len(stopped.logprobs) == len(stopped.token_ids) == 7

        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        whole = await client.complete("Well?", json_schema=schema | {"additionalProperties": False}, temperature=0)
        assert json.loads(whole.text).keys() == {"ok"}


@pytest.mark.parametrize("streams", [True, False])
async def test_answers_whose_masks_come_after_the_next_plan_go_on_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """As where the machine is slow and many answers have grammars: nothing else tells that such an answer has ended."""
    monkeypatch.setattr(grammar_masks, "SLICE_S", -1.0)
    with cleaned_up([start_executor(tmp_path, "--simulate")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine, asyncio.timeout(60):

            async def ids_of_all(regex: str) -> list[list[int]]:
                request = GenerationRequest(
                    "", [300], Sampling(temperature=1.0), 9, grammar=Grammar("regex", regex), streams=streams
                )
                each = [replace(request, request_id=f"r{i}", prompt_ids=[300, i]) for i in range(24)]
                return [ids for (ids,) in await asyncio.gather(*(samples_ids(engine, one) for one in each))]

            assert {len(ids) for ids in await ids_of_all("[a-c]{1,5}")} <= {1, 2, 3, 4, 5}
            assert {len(ids) for ids in await ids_of_all("[ab]{9}")} == {9}


async def test_what_cannot_be_used_is_refused_by_name_and_reason_and_nothing_is_queued(system: System) -> None:
    system.scheduler_flags = ["--max-grammar-s", "0.5"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        await client.complete("Well?", regex="a", max_tokens=3)
        for options, field, reason in (
            ({"regex": "a("}, "grammar.regex", "unclosed group"),
            ({"regex": "(?=a)b"}, "grammar.regex", "look-ahead"),
            ({"regex": r"x[^\s\S]"}, "grammar.regex", ""),
            ({"json_schema": {"type": "integer", "multipleOf": 999983}}, "grammar.json_schema", ""),
            ({"json_schema": '{"type": 7}'}, "grammar.json_schema", ""),
            ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "grammar.json_schema", "look-ahead"),
            ({"lark": 'start: "a" <end>'}, "grammar.lark", ""),
            ({"lark": "start: /(?=a)b/"}, "grammar.lark", "look-ahead"),
            ({"regex": "(" + "a" * 5000}, "grammar.regex", "unclosed group"),
            ({"choice": ["a", ""]}, "grammar.choice.options[1]", "empty"),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await client.complete("Well?", max_tokens=3, **options)
            (violation,) = refused.value.violations
            assert violation.field == field
            assert reason in violation.description
            assert len(violation.description.splitlines()) == 1
        load = await idle_load(client)
        assert (load.finished_requests, load.failed_requests, load.cancelled_requests) == (1, 0, 0)


async def test_a_token_that_no_mask_allowed_ends_its_request_alone(system: System) -> None:
    """The script makes the simulated model say what it was not allowed to."""
    prompt, plain = [300, 301], Call([400, 401], 200, 0.0, 0, "")
    script(system, replies=[{"prompt": prompt, "output": [ord("z"), ord("z")]}])
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        beside = asyncio.ensure_future(answer(client, plain))
        with pytest.raises(ServerError, match="not allowed"):
            await client.complete(prompt, regex="[ab]+", max_tokens=10)
        assert await beside == plain.expected()
        assert (await idle_load(client)).failed_requests == 1


async def test_a_grammar_of_which_rules_about_tokens_leave_nothing_is_the_requests_fault_wherever_it_shows(
    system: System,
) -> None:
    a, b, z = ord("a"), ord("b"), ord("z")
    one = {"choice": ["a", "b"]}
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        for options, num_tokens in (
            ({"regex": "[ab]+", "allowed_token_ids": [z]}, 0),
            ({**one, "bad_token_sequences": [[a], [b]]}, 0),
            ({**one, "bad_token_sequences": [[300, a], [301, 300, b]]}, 0),  # after the prompt
            ({"regex": "zab", "allowed_token_ids": [z, a]}, 2),
            ({"regex": "za?", "allowed_token_ids": [z, EOS_ID], "min_tokens": 9}, 1),
        ):
            with pytest.raises(InvalidRequestError) as refused:
                await client.complete([301, 300], max_tokens=9, **options)
            (violation,) = refused.value.violations
            assert violation.field.startswith("grammar.")
            assert f"after {num_tokens} tokens of output" in violation.description
        done = await client.complete([301, 300], max_tokens=9, **one, bad_token_sequences=[[300, a], [300, 300, b]])
        assert done.text == "b"
        load = await idle_load(client)
        assert (load.not_finite_sequences, load.failed_requests, load.finished_requests) == (0, 2, 1)
