"""Many answers at once in a few calls: by the client, and by the method itself: python examples/many.py [ADDRESS]"""

import asyncio
import sys
from collections import defaultdict

import grpc.aio

from paged.client import Client, generate_request
from paged.v1.inference_pb2 import CancelGeneration, GenerateManyRequest, GenerationAction
from paged.v1.inference_pb2_grpc import InferenceServiceStub


async def by_the_client(address: str) -> None:
    """As ever, but for share_calls."""
    async with Client(address, share_calls=True) as client:

        async def ask(number: int) -> int:
            answer = client.generate(f"Question {number}:", max_tokens=16, ignore_eos=True)
            return sum([len(message.token_ids) async for message in answer])

        print(f"{sum(await asyncio.gather(*map(ask, range(50))))} tokens of 50 answers")


async def by_the_method(address: str) -> None:
    """What a client in any language does: requests have numbers, and what is said of each has its number."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = InferenceServiceStub(channel).GenerateMany()
        actions = []
        for number in (1, 2, 3):
            request = generate_request(f"Question {number}:", max_tokens=1000 if number == 3 else 8, ignore_eos=True)
            actions.append(GenerationAction(number=number, generate=request, timeout_ms=60_000))
        await call.write(GenerateManyRequest(actions=actions))  # one message, or as many as there are actions
        cancel = GenerationAction(number=3, cancel=CancelGeneration())  # of which nothing more is said
        await call.write(GenerateManyRequest(actions=[cancel]))
        await call.done_writing()  # so the call ends with the last answer
        num_tokens: defaultdict[int, int] = defaultdict(int)
        async for message in call:
            for update in message.updates:
                num_tokens[update.number] += len(update.response.token_ids)
                if update.HasField("end"):  # each has a status of its own: 0 is OK
                    print(f"{update.number}: {num_tokens[update.number]} tokens, status {update.end.code}")


async def main(address: str) -> None:
    await by_the_client(address)
    await by_the_method(address)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
