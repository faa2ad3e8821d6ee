"""When memory is given back: once for each load that has come and gone, and never for a few requests."""

import asyncio
from pathlib import Path

import pytest

from scheduler_svc import high_water
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.high_water import MANY, RECEDED, HighWater
from scheduler_svc.requests import GenerationRequest
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


async def test_an_engine_gives_back_when_its_requests_have_gone_and_when_its_cache_is_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[None] = []
    monkeypatch.setattr(high_water, "give_back_freed_pages", lambda: times.append(None))
    with cleaned_up([start_executor(tmp_path, "--simulate", "--max-rows", "300")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine, asyncio.timeout(60):

            async def read(number: int) -> None:
                prompt = [300 + number] * 17
                request = GenerationRequest(f"r{number}", prompt, Sampling(temperature=0), max_tokens=20)
                async for _ in engine.generate(request):
                    pass

            await asyncio.gather(*(read(number) for number in range(MANY + 20)))
            while not times:
                await asyncio.sleep(0.01)
            monkeypatch.setattr("scheduler_svc.engine.MANY_BLOCKS", MANY)
            assert engine.flush_prefix_cache() >= MANY
            while len(times) < 2:
                await asyncio.sleep(0.01)
