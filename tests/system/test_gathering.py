"""Answers that leave together: what they say, when, and when the next plan waits for them."""

import asyncio
import random
from pathlib import Path

import pytest

from scheduler_svc.core.sequence import EndReason
from scheduler_svc.delivery import Delivery
from scheduler_svc.driver import MAX_HOLD_S
from scheduler_svc.gathering import Gathering
from scheduler_svc.requests import Delta, PlainDelta
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler
from tests.system.gathered import FOREVER_S, give, new_delivery, opened, take
from tests.system.test_delivery import read_all, request
from tests.text.test_detokenizer import tokenizer_of


@pytest.fixture
def delivery() -> Delivery:
    return new_delivery()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "word_piece"])
@pytest.mark.parametrize("seed", range(5))
async def test_a_plain_delta_says_what_the_long_way_would_have(delivery: Delivery, kind: str, seed: int) -> None:
    gathering = Gathering(delivery)
    chance = random.Random(seed)
    quick, slow = opened(delivery, gathering, 2, kind)
    assert slow.only is not None
    slow.only._may_be_plain = False
    said: dict[str, list[Delta | PlainDelta]] = {"r0": [], "r1": []}

    def read() -> None:
        while gathering.has_more:  # it may be more than a slice
            for reader, delta in gathering.take():
                said[reader.request_id].append(delta)

    for count in (chance.randint(1, 4) for _ in range(12)):
        give(delivery, [quick, slow], *(chance.randrange(4, 260) for _ in range(count)))
        read()
    for samples in (quick, slow):
        samples.first.end_reason = EndReason.LENGTH
    delivery.note([quick.first, slow.first])
    read()
    assert [isinstance(delta, tuple) for delta in said["r0"]] == [False] + [True] * 11 + [False]
    assert [(delta.text, delta.token_ids) for delta in said["r1"][1:-1] if isinstance(delta, Delta)] == said["r0"][1:-1]
    assert (said["r0"][0], said["r0"][-1]) == (said["r1"][0], said["r1"][-1])
    assert delivery.unread_bytes == 0


async def test_a_text_that_cannot_be_made_is_told_the_long_way(delivery: Delivery) -> None:
    gathering = Gathering(delivery)
    (samples,) = opened(delivery, gathering, 1)

    class Failing:
        def push(self, ids: object) -> str:
            raise KeyError(ids)

    assert samples.only is not None
    samples.only._plain = Failing()
    give(delivery, [samples], 300)
    take(gathering)
    give(delivery, [samples], 300)
    with pytest.raises(KeyError):
        take(gathering)


async def test_a_call_with_many_streams_rests_when_all_is_taken_and_one_with_few_does_not(delivery: Delivery) -> None:
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 400)
    give(delivery, streams[:4], 300)
    assert len(take(gathering)) == 4
    give(delivery, streams, 300)
    assert len(take(gathering)) == 400
    give(delivery, streams, 301)
    assert not gathering.has_more
    assert list(gathering.take()) == []
    async with asyncio.timeout(10):
        while not gathering.has_more:
            await gathering.news(None)
    assert take(gathering) == [(tokenizer_of("byte_level").decode([301], True), [301])] * 400


async def test_those_for_whom_there_was_no_time_leave_with_those_who_have_come_since(
    delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a message would bring those few, and all others would wait for the call's turn after it."""
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 4)
    give(delivery, streams[:3], 300)
    monkeypatch.setattr("scheduler_svc.gathering.WHOLE_S", -1.0)
    assert [reader for reader, _ in gathering.take()] == [streams[0].reader]
    monkeypatch.setattr("scheduler_svc.gathering.WHOLE_S", FOREVER_S)
    gathering.note_sending()
    gathering.note_sent()
    give(delivery, [streams[3], streams[0]], 301)
    assert [reader for reader, _ in gathering.take()] == [streams[number].reader for number in (1, 2, 3, 0)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("scheduler_svc.delivery.LATE_S", -1.0)
    return monkeypatch


@pytest.mark.usefixtures("late")
async def test_answers_are_late_until_they_are_taken(delivery: Delivery) -> None:
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 3)
    assert not delivery.is_late
    give(delivery, streams, 300)
    assert delivery.is_late
    take(gathering)
    assert not delivery.is_late


async def test_who_does_not_take_what_there_is_makes_nothing_late(delivery: Delivery, late: pytest.MonkeyPatch) -> None:
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 3)
    give(delivery, streams[:1], 300)
    assert list(gathering.take())
    gathering.note_sending()  # and no more is heard
    give(delivery, streams, 300)
    assert delivery.is_late
    late.setattr("scheduler_svc.gathering.SLOW_S", -1.0)
    assert not delivery.is_late


@pytest.mark.usefixtures("late")
async def test_a_few_streams_make_nothing_late(delivery: Delivery) -> None:
    gathering, other = Gathering(delivery), Gathering(delivery)
    few, many = opened(delivery, gathering, 2), opened(delivery, other, 30)
    give(delivery, [*few, *many], 300)
    assert delivery.is_late
    delivery.num_streams = 32
    take(other)
    assert not delivery.is_late


async def test_a_plan_waits_while_answers_are_late_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_late = True
    monkeypatch.setattr(Delivery, "is_late", property(lambda delivery: is_late))
    with cleaned_up([start_executor(tmp_path, "--simulate")]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, tmp_path) as engine:
            assert await read_all(engine, request("bounded", 5)) == 5
            monkeypatch.setattr("scheduler_svc.driver.MAX_HOLD_S", FOREVER_S)
            held = asyncio.create_task(read_all(engine, request("held", 5)))
            (driver,) = engine.fleet.drivers.values()
            async with asyncio.timeout(60):
                while driver._held is None:
                    await asyncio.sleep(MAX_HOLD_S / 10)
            assert not only_scheduler(engine).state.num_running
            is_late = False
            assert await held == 5
