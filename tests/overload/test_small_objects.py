"""Where Python's small objects lie: among the C library's while there come to be more requests."""

import asyncio
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.core.sequence import Sampling
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.small_objects import FEW, MANY, SmallObjects
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over

NUM_OBJECTS = 1000
STREAMS, TOKENS = 20, 200

pytestmark = pytest.mark.skipif(sys.version_info >= (3, 13), reason="they stay in arenas")


@pytest.fixture
def small_objects() -> Iterator[SmallObjects]:
    objects = SmallObjects()
    yield objects
    objects.note(0)


def are_in_arenas() -> bool:
    """Whether new ones are: Python counts those alone."""
    before = sys.getallocatedblocks()
    kept = [[number] for number in range(NUM_OBJECTS)]
    return sys.getallocatedblocks() - before >= len(kept)


def where_with(small_objects: SmallObjects, *nums_live: int) -> str:
    """After each: (a)rena or (p)ages."""
    found = ""
    for num_live in nums_live:
        small_objects.note(num_live)
        found += "a" if are_in_arenas() else "p"
    return found


def test_new_objects_leave_the_arenas_while_there_come_to_be_more_requests(small_objects: SmallObjects) -> None:
    assert where_with(small_objects, 0, MANY, MANY + 1, MANY + 2, MANY + 2, MANY + 9) == "aappap"


def test_requests_that_follow_others_are_no_more_than_those(small_objects: SmallObjects) -> None:
    assert where_with(small_objects, 2 * MANY, MANY, 2 * MANY, FEW + 1, 2 * MANY, 2 * MANY + 1) == "paaaap"


def test_they_are_counted_anew_when_few_are_left(small_objects: SmallObjects) -> None:
    assert where_with(small_objects, 2 * MANY, FEW, MANY + 1, 0, MANY + 1) == "papap"


def test_an_object_may_grow_and_go_wherever_others_are_made_by_then(small_objects: SmallObjects) -> None:
    kept: list[list[list[int]]] = []
    for num_live in (0, MANY + 1, 0):
        small_objects.note(num_live)
        kept.append([[number] for number in range(NUM_OBJECTS)])
        for lists in kept:
            for number, numbers in enumerate(lists):
                numbers.extend(range(number % 50))
    for num_times, lists in zip((3, 2, 1), kept, strict=True):
        for number, numbers in enumerate(lists):
            assert numbers == [number, *list(range(number % 50)) * num_times]
    small_objects.note(MANY + 1)
    kept.clear()
    small_objects.note(0)
    assert are_in_arenas()


def test_they_stay_where_they_are_when_somebody_else_has_hooks(small_objects: SmallObjects) -> None:
    tracemalloc.start()
    try:
        small_objects.note(MANY + 1)
        kept = [object() for _ in range(NUM_OBJECTS)]
        assert tracemalloc.get_traced_memory()[0] >= NUM_OBJECTS * sys.getsizeof(kept[0])
    finally:
        tracemalloc.stop()
    small_objects.note(MANY + 2)
    assert not are_in_arenas()


async def test_an_engine_tells_how_many_requests_are_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[int] = []
    monkeypatch.setattr(SmallObjects, "note", lambda _self, num_live: noted.append(num_live))
    with cleaned_up([start_executor(tmp_path, "--simulate")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine, asyncio.timeout(60):
            gathering = engine.gathering()
            readers = []
            for number in range(STREAMS):
                request = GenerationRequest(f"r{number}", [300] * 17, Sampling(), max_tokens=TOKENS, ignore_eos=True)
                readers.append(await engine.gathered(request, gathering))
            while not noted or noted[-1] != STREAMS:
                await asyncio.sleep(0.01)
            for reader in readers:
                engine.leave(reader)
            while noted[-1]:
                await asyncio.sleep(0.01)
