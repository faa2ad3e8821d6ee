"""What a call leaves refers to itself nowhere, however the call ends: it is freed at once, and memory does not wait for
Python's collector, which looks at all objects rarely."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc.aio
import pytest

from paged.client import generate_request
from paged.v1 import inference_pb2
from tests.overload.test_many import served, settled

GENERATE = "/paged.v1.InferenceService/Generate"
CALLS = 40
OK, CANCELLED = grpc.StatusCode.OK, grpc.StatusCode.CANCELLED
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def asked(**options: object) -> bytes:
    return generate_request([300] * 9, **{"max_tokens": 8, **options}).SerializeToString()


def with_grammar(regex: str) -> bytes:
    request = inference_pb2.GenerateRequest.FromString(asked())
    request.grammar.regex = regex
    return request.SerializeToString()


WAYS = {
    "answered": (GENERATE, asked(), OK),
    "samples": (GENERATE, asked(n=3), OK),
    "beams": (GENERATE, asked(beam=inference_pb2.BeamSearch(width=3), n=2), OK),
    "grammar": (GENERATE, with_grammar("[a-c]{1,5}"), OK),
    "left": (GENERATE, asked(max_tokens=1000, ignore_eos=True), CANCELLED),
    "field refused": (GENERATE, asked(n=100_000), INVALID),
    "grammar refused": (GENERATE, with_grammar("[a-"), INVALID),
    "no message": (GENERATE, b"\xff\xff\xff", INVALID),
    "in use": (GENERATE, asked(request_id="r", max_tokens=200, ignore_eos=True), grpc.StatusCode.ALREADY_EXISTS),
    "unknown service": ("/grpc.health.v1.Health/Check", b"\n\x02no", grpc.StatusCode.NOT_FOUND),
    "not served": ("/vllm.grpc.engine.VllmEngine/Embed", b"", grpc.StatusCode.UNIMPLEMENTED),
    "unary refused": ("/paged.v1.InferenceService/Detokenize", b"\xff\xff", INVALID),
}
# For each call gRPC makes a function that refers to itself; with it go the call's name and metadata, and nothing else.
GRPCS_OBJECTS = 5


@contextmanager
def what_waits_for_the_collector() -> Iterator[Counter[str]]:
    """Filled at the end: what nobody had any more and was not freed, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found.update(type(kept).__qualname__ for kept in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def call(channel: grpc.aio.Channel, method: str, data: bytes, *, leaves: bool) -> grpc.StatusCode:
    stream = channel.unary_stream(method)(data)
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in stream:
            if leaves:
                stream.cancel()
    return await stream.code()


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_of_a_call_that_has_ended_waits_for_the_collector(tmp_path: Path, way: str) -> None:
    method, data, code = WAYS[way]
    async with served(tmp_path) as (engine, address), grpc.aio.insecure_channel(address) as channel:

        async def calls() -> list[grpc.StatusCode]:
            ends = (call(channel, method, data, leaves=code is CANCELLED) for _ in range(CALLS))
            codes = await asyncio.gather(*ends)
            await settled(engine)
            return codes

        await calls()  # what is made once is made
        with what_waits_for_the_collector() as found:
            assert code in await calls()
    assert found.total() < (GRPCS_OBJECTS + 1) * CALLS, found
