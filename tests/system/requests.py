"""Requests of mixed lengths with shared prefixes, and what the simulated model must answer to each."""

import asyncio
import contextlib
import random
from dataclasses import dataclass

from executor_svc.simulated.text import simulated_continuation
from paged.client import Client, UnavailableError
from paged.v1 import control_pb2
from tests.system.conftest import VOCAB_SIZE

EOS_ID = 257


@dataclass(frozen=True)
class Call:
    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int
    cache_salt: str
    num_samples: int = 1

    def expected(self, end_token_ids: tuple[int, ...] = (EOS_ID,), index: int = 0) -> list[int]:
        return list(
            simulated_continuation(
                self.prompt,
                self.max_tokens,
                vocab_size=VOCAB_SIZE,
                temperature=self.temperature,
                seed=self.seed,
                index=index,
                end_token_ids=end_token_ids,
            )
        )


def mixed_calls(count: int, chance: random.Random, longest: int = 240) -> list[Call]:
    """Two thirds begin like others; a third is sampled; some have a salt."""
    stems = [[chance.randrange(300, VOCAB_SIZE) for _ in range(longest)] for _ in range(5)]
    calls = []
    for _ in range(count):
        stem = chance.choice(stems)[: chance.randrange(0, longest // 2)] if chance.random() < 0.67 else []
        tail = [chance.randrange(300, VOCAB_SIZE) for _ in range(chance.randrange(1, longest // 3))]
        temperature = 1.0 if chance.random() < 0.33 else 0.0
        salt = chance.choice(["", "", "red", "blue"])
        calls.append(Call(stem + tail, chance.randrange(1, 100), temperature, chance.getrandbits(63), salt))
    return calls


async def answer(client: Client, call: Call, cancel_after: int | None = None) -> list[int]:
    """The ids of the answer; with `cancel_after`, the call is given up once it has that many."""
    (ids,) = await answers(client, call, cancel_after)
    return ids


async def answers(client: Client, call: Call, cancel_after: int | None = None) -> list[list[int]]:
    """The same for each sample; `cancel_after` is for all together."""
    ids: list[list[int]] = [[] for _ in range(call.num_samples)]
    stream = client.generate(
        call.prompt,
        max_tokens=call.max_tokens,
        temperature=call.temperature,
        seed=call.seed,
        cache_salt=call.cache_salt,
        n=call.num_samples,
    )
    async for message in stream:
        ids[message.index] += message.token_ids
        if cancel_after is not None and sum(map(len, ids)) >= cancel_after:
            await stream.aclose()
            break
    return ids


async def ready(client: Client, timeout_s: float = 20) -> None:
    """Until the scheduler knows a model and has an executor."""
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(UnavailableError):
                await client.model()
                if (await client.load()).executor_attached:
                    return
            await asyncio.sleep(0.02)


async def idle_load(client: Client, timeout_s: float = 20) -> control_pb2.GetLoadResponse:
    """The load once nothing runs or waits."""
    async with asyncio.timeout(timeout_s):
        while True:
            load = await client.load()
            if not (load.running_sequences or load.waiting_sequences):
                return load
            await asyncio.sleep(0.02)
