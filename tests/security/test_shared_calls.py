"""Answers that share calls, with every key that there is: TLS, client certificates, tokens, CURVE on the link."""

import asyncio

import pytest

from paged.client import Client, PermissionDeniedError, UnauthenticatedError
from tests.security.keys import Keys
from tests.system.conftest import System
from tests.system.requests import ready

NUM_PROMPTS = 12


async def text_of(client: Client, prompt: str) -> str:
    return "".join([message.text async for message in client.generate(prompt, max_tokens=20, temperature=0)])


async def test_answers_share_calls_with_all_keys_and_with_no_stranger(system: System, keys: Keys) -> None:
    system.executor_flags = keys.executor_flags
    system.scheduler_flags = [*keys.scheduler_flags, *keys.link_flags]
    reader = keys.token("reader", "--role", "read")
    system.start()

    def client_of(token: str, *, share_calls: bool) -> Client:
        return Client(system.address, credentials=keys.credentials, token=token, share_calls=share_calls)

    async with (
        client_of(keys.operator, share_calls=False) as alone,
        client_of(keys.operator, share_calls=True) as sharing,
        client_of("paged_stranger", share_calls=True) as stranger,
        client_of(reader, share_calls=True) as reading,
    ):
        await ready(alone)
        prompts = [f"prompt {i}" for i in range(NUM_PROMPTS)]
        expected = [await text_of(alone, prompt) for prompt in prompts]
        answers = asyncio.gather(*(text_of(sharing, prompt) for prompt in prompts))
        with pytest.raises(UnauthenticatedError):
            await text_of(stranger, "prompt 0")
        with pytest.raises(PermissionDeniedError, match="no role that may call GenerateMany"):
            await text_of(reading, "prompt 0")
        assert await answers == expected
