"""Three ways to end a request early; its memory is free at once: python examples/cancel.py [ADDRESS]"""

import asyncio
import sys

from paged.client import Client, DeadlineExceededError, RequestAbortedError

LONG = 2000


async def by_leaving_the_loop(client: Client) -> None:
    num_tokens = 0
    async for message in client.generate("Count: 1, 2, 3,", max_tokens=LONG, ignore_eos=True):
        num_tokens += len(message.token_ids)
        if num_tokens >= 5:
            break
    print(f"left after {num_tokens} tokens")


async def by_a_deadline(client: Client) -> None:
    try:
        await client.complete("Count: 1, 2, 3,", max_tokens=LONG, ignore_eos=True, timeout_s=0.2)
    except DeadlineExceededError as error:
        print(f"ended by its deadline: {error.code.name}")


async def by_somebody_else(client: Client) -> None:
    """As an operator may: every call has an id, given or made up."""
    started = asyncio.Event()

    async def ask() -> None:
        try:
            async for _ in client.generate("Count: 1, 2, 3,", max_tokens=LONG, ignore_eos=True, request_id="counting"):
                started.set()
        except RequestAbortedError as error:
            print(f"ended by somebody: {error.code.name}")

    asking = asyncio.create_task(ask())
    await started.wait()
    await client.abort(["counting"])
    await asking


async def main(address: str) -> None:
    async with Client(address) as client:
        await by_leaving_the_loop(client)
        await by_a_deadline(client)
        await by_somebody_else(client)
        while (await client.load()).used_blocks:
            await asyncio.sleep(0.05)
        print("no block is used")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
