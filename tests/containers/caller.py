"""Run inside the stack: asks COUNT questions, CONCURRENCY at once, and prints the answers, and who gave how many.

Before that some, one by one: what comes at once, and first, all goes to whoever is connected first.

python -c THIS COUNT MAX_TOKENS CONCURRENCY
"""

import asyncio
import json
import os
import socket
import sys
from contextlib import suppress

from paged.client import Client, PagedClientError, UnavailableError

HOST = "scheduler"
FIRST = 30


async def main(count: int, max_tokens: int, concurrency: int) -> None:
    answers: dict[int, list[int]] = {}
    failed: list[str] = []
    turns = asyncio.Semaphore(concurrency)

    async def ask(client: Client, number: int) -> None:
        prompt = [256, *f"Question {number}".encode()]
        async with turns:
            try:
                whole = await client.complete(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
            except PagedClientError as error:
                failed.append(f"{number}: {error}")
            else:
                answers[number] = whole.token_ids

    async with Client(os.environ["PAGED_ADDRESS"]) as client:
        for _ in range(FIRST):
            await client.complete("Hello", max_tokens=1)
        await asyncio.gather(*(ask(client, number) for number in range(count)))
    print(json.dumps({"answers": answers, "failed": failed, "tokens_by_scheduler": await tokens_by_scheduler()}))


async def tokens_by_scheduler() -> dict[str, int]:
    """That each has made so far, by its address; without those that are just going."""
    made = {}
    for *_, (address, *_) in socket.getaddrinfo(HOST, None, socket.AF_INET, socket.SOCK_STREAM):
        async with Client(f"{address}:50051") as client:
            with suppress(UnavailableError):
                made[str(address)] = (await client.load()).generated_tokens
    return made


asyncio.run(main(*map(int, sys.argv[1:4])))
