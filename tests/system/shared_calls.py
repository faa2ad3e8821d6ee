"""Calls of GenerateMany: how they are opened, what is said in them, and what is heard."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from paged.client import generate_request
from paged.v1 import inference_pb2, inference_pb2_grpc
from tests.system.test_delivery import LONG

SOON_S = 60.0
ENDLESS = {"max_tokens": LONG, "ignore_eos": True}

Stub = Callable[..., Any]


@asynccontextmanager
async def generate_many(address: str, options: Sequence[tuple[str, Any]] = ()) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        yield stub.GenerateMany


def begun(number: int, **options: Any) -> inference_pb2.GenerateManyRequest:
    request = generate_request(options.pop("prompt", [300] * 8), **{"temperature": 0, **options})
    return saying(inference_pb2.GenerationAction(number=number, generate=request))


def saying(*actions: inference_pb2.GenerationAction) -> inference_pb2.GenerateManyRequest:
    return inference_pb2.GenerateManyRequest(actions=actions)


async def read_to_the_end(call: Any) -> dict[int, list[inference_pb2.GenerationUpdate]]:
    """What the call says of each generation."""
    updates: dict[int, list[inference_pb2.GenerationUpdate]] = {}
    async with asyncio.timeout(SOON_S):
        async for message in call:
            assert len({update.number for update in message.updates}) == len(message.updates)
            for update in message.updates:
                updates.setdefault(update.number, []).append(update)
    return updates
