"""Large requests that come at once do not stop everybody else for all of them: C7.10."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from google.protobuf.message import DecodeError

from paged.v1.inference_pb2 import GenerateRequest
from scheduler_svc.api.call_limits import CallLimits
from scheduler_svc.api.inference import InferenceServicer
from scheduler_svc.api.large_requests import LARGE_BYTES, LargeRequests
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine

LARGE = bytes(LARGE_BYTES)


class Turns:
    """Of the event loop, as somebody else has them."""

    def __init__(self) -> None:
        self.count = 0

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        async def others() -> None:
            while True:
                self.count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        yield
        task.cancel()


async def test_between_two_that_have_come_at_once_others_have_a_turn() -> None:
    turns, large, read_at = Turns(), LargeRequests(), []

    def parse(data: bytes) -> int:
        read_at.append(turns.count)
        return len(data)

    async with asyncio.timeout(20), turns.counted():
        assert await asyncio.gather(*(large.read(parse, LARGE) for _ in range(20))) == [LARGE_BYTES] * 20
    assert all(later > before for before, later in pairwise(read_at))


async def test_small_ones_do_not_wait_for_large_ones_nor_for_each_other() -> None:
    large, read = LargeRequests(), []
    waiting = [asyncio.create_task(large.read(read.append, LARGE)) for _ in range(3)]
    await asyncio.sleep(0)
    for number in range(50):
        await large.read(lambda _, number=number: read.append(number), b"small")
    assert read == [LARGE, *range(50)]
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("how", ["fails", "is given up"])
async def test_one_that_fails_or_is_given_up_while_it_waits_holds_up_nobody(how: str) -> None:
    large = LargeRequests()

    def parse(data: bytes) -> int:
        if how == "fails":
            raise ValueError(len(data))
        return len(data)

    one, two = asyncio.create_task(large.read(parse, LARGE)), asyncio.create_task(large.read(parse, LARGE))
    await asyncio.sleep(0)
    two.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(one, two, return_exceptions=True)
        assert await large.read(len, LARGE) == LARGE_BYTES


def test_what_is_large_beside_its_text_is_not_read_before_its_turn(engine: ScriptedEngine) -> None:
    settings = SchedulerSettings()
    servicer = InferenceServicer(engine, settings, CallLimits(settings))
    text = GenerateRequest(text="a text").SerializeToString()

    def beside_it(num_bytes: int) -> bytes:
        """A request id that is no text: whoever reads this notices."""
        return text + b"\x0a" + _varint(num_bytes) + b"\xff" * num_bytes

    assert GenerateRequest.REQUEST_ID_FIELD_NUMBER == 1
    with pytest.raises(DecodeError):
        servicer.check_unread(beside_it(100))
    servicer.check_unread(beside_it(LARGE_BYTES))


def _varint(number: int) -> bytes:
    more = number >> 7
    return bytes([number & 0x7F | 0x80]) + _varint(more) if more else bytes([number])
