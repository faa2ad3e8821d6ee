"""When memory is given back: once for each load that has come and gone, and never for a few requests."""

import asyncio
import sys
from pathlib import Path

import pytest

from scheduler_svc import high_water
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.high_water import MANY, QUIET_LOOKS, RECEDED, HighWater
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.text.memory import give_back_spare_objects
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over


def given_back(*nums_live: int) -> list[int]:
    """The places in which it is."""
    water = HighWater()
    return [place for place, num_live in enumerate(nums_live) if water.has_receded(num_live)]


def test_few_requests_are_not_worth_it():
    assert given_back(0, MANY - 1, 0, MANY - 1, 0) == []


def test_a_load_that_goes_is_worth_it_once():
    assert given_back(MANY, MANY // RECEDED + 1, MANY // RECEDED, 3, 0, 0) == [2]


def test_so_is_each_that_comes_after_it():
    assert given_back(4 * MANY, MANY, MANY - 1, 0, MANY, 0, 0) == [1, 3, 5]


def test_the_rest_of_a_load_is_given_back_when_all_has_been_gone_for_some_time() -> None:
    water = HighWater()
    assert not water.has_gone(0), "nothing has been there"
    assert water.has_receded(MANY) is False
    assert water.has_receded(3) is True
    looks = [*[3] * QUIET_LOOKS, *[0] * (QUIET_LOOKS - 1), 1, *[0] * (QUIET_LOOKS + 5)]
    assert [place for place, num_live in enumerate(looks) if water.has_gone(num_live)] == [3 * QUIET_LOOKS - 1]


async def test_an_engine_gives_back_when_its_requests_have_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []
    monkeypatch.setattr(high_water, "give_back_freed_pages", lambda: given.append("pages"))
    monkeypatch.setattr(high_water, "give_back_spare_objects", lambda: given.append("objects"))
    with cleaned_up([start_executor(tmp_path, "--simulate", "--max-rows", "300")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine, asyncio.timeout(60):

            async def read(number: int) -> None:
                prompt = [300 + number] * 17
                request = GenerationRequest(f"r{number}", prompt, Sampling(temperature=0), max_tokens=20)
                async for _ in engine.generate(request):
                    pass

            await asyncio.gather(*(read(number) for number in range(MANY + 20)))
            while len(given) < 2:
                await asyncio.sleep(0.01)
            assert given == ["pages", "objects"]


def test_spare_objects_are_let_go_of() -> None:
    """Python keeps tuples that nobody has any more, thousands of each length."""
    give_back_spare_objects()
    before = sys.getallocatedblocks()
    del [tuple(range(number, number + 5)) for number in range(1000)][:]
    assert sys.getallocatedblocks() > before + 900
    give_back_spare_objects()
    assert sys.getallocatedblocks() < before + 100
