"""Biases, allowed tokens and bad words through the whole system: exact, preempted or not, alone or as samples."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from executor_svc.simulated.text import simulated_continuation
from executor_svc.token_rules import NO_RULES, TokenRules, read_rules
from paged.client import Client, InvalidRequestError
from paged.v1 import executor_pb2
from tests.rules import rule_columns
from tests.system.conftest import VOCAB_SIZE, System
from tests.system.requests import EOS_ID, idle_load, ready


@dataclass
class Ruled:
    """A request with rules, as a client and as the oracle of the simulated model take them."""

    prompt: list[int]
    options: dict[str, Any]
    rules: TokenRules = field(default=NO_RULES)

    def expected(self, max_tokens: int, seed: int, index: int) -> list[int]:
        shape = {"vocab_size": VOCAB_SIZE, "temperature": 1.0, "seed": seed, "index": index}
        return simulated_continuation(
            self.prompt, max_tokens, end_token_ids=(EOS_ID,), rules=self.rules, **shape, min_tokens=self.min_tokens
        )

    @property
    def min_tokens(self) -> int:
        return self.options.get("min_tokens", 0)


def ruled(chance: random.Random) -> Ruled:
    """Of a few ids, so that sequences are met often; half of these begin in the prompt."""
    few = [*chance.sample(range(300, 400), 4), EOS_ID]
    bias = {token: round(chance.uniform(-500, 500), 1) for token in chance.sample(range(300, 400), 3)}
    prompt = [chance.choice(few[:4]) for _ in range(chance.randrange(1, 60))]
    banned = [[prompt[-1], few[0]], [few[1]], [few[0], few[2], few[0]], [few[2], few[2]]]
    given = rule_columns(bias=bias, allowed=few, banned=banned)
    options = {"logit_bias": bias, "allowed_token_ids": few, "bad_token_sequences": banned, "min_tokens": 3}
    return Ruled(prompt, options, read_rules(executor_pb2.RowSampling(**given)))


async def test_rules_hold_for_every_sample_in_a_pool_too_small(system: System) -> None:
    system.executor_flags = ["--num-blocks", "40", "--max-rows", "24", "--tokens-per-step", "128"]
    system.start()
    chance = random.Random(6)
    wanted = [ruled(chance) if i % 4 else Ruled([300 + i], {}) for i in range(60)]
    asked = {"max_tokens": 40, "temperature": 1.0, "seed": 7, "n": 2}
    async with Client(system.address) as client:
        await ready(client)
        said = await asyncio.gather(*[client.complete_samples(one.prompt, **asked, **one.options) for one in wanted])
        load = await idle_load(client)
    assert load.preemptions > 0
    assert load.used_blocks == 0
    for one, samples in zip(wanted, said, strict=True):
        assert [sample.token_ids for sample in samples] == [one.expected(40, 7, index) for index in range(2)]


async def test_bad_words_are_those_of_the_tokenizer_alone_and_behind_a_space(system: System) -> None:
    """The simulated tokenizer has a token for each byte; with few ids in all, each of these three is often next."""
    system.executor_flags = ["--simulate-vocab-size", "258"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        letters = (await client.tokenize("@z "))[-3:]
        asked = {"max_tokens": 200, "temperature": 1.0, "seed": 3, "allowed_token_ids": letters}
        free = await client.complete([30], **asked)
        assert "@z" in free.text
        assert " @" in free.text
        tamed = await client.complete([30], bad_words=["@z"], **asked)
        assert "@z" not in tamed.text
        assert " @" in tamed.text
        with pytest.raises(InvalidRequestError, match=r"bad_words\[1\]: is 17 tokens long, above the limit of 16"):
            await client.complete([30], bad_words=["fine", "x" * 16], **asked)
        with pytest.raises(InvalidRequestError, match=r"allowed_token_ids: could leave nothing to draw"):
            await client.complete([30], allowed_token_ids=[30, 31], bad_token_sequences=[[30], [5, 31]])
        assert (await idle_load(client)).failed_requests == 0
