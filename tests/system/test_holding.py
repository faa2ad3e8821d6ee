"""The next plan waits while a large part of the answers is late: so long at most, for nobody who does not read, and no
longer than they are late."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.plan import Lease, Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.delivery import LATE_S, LATE_SHARE, QUEUE_LATE_S, UNTAKEN_TOKENS, Delivery
from scheduler_svc.driver import HOLD_S, MAX_HOLD_S, Driver
from scheduler_svc.gathering import BEHIND_S, SLOW_S, Gathering
from scheduler_svc.lead import USUAL_PLANS
from scheduler_svc.link.session import LinkOptions
from tests.core.run import asked
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, keep_plans, only_scheduler
from tests.system.gathered import FOREVER_S, give, new_delivery, opened, take
from tests.system.test_delivery import request

NUM_STREAMS = 100
A_BIT = 1.01
TURNS = 20  # of the event loop: more than anything here takes


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def delivery() -> Delivery:
    return new_delivery()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("scheduler_svc.delivery.time", clock)
    monkeypatch.setattr("scheduler_svc.gathering.time", clock)
    return clock


async def test_answers_are_late_from_the_first_that_is_not_taken(delivery: Delivery, clock: Clock) -> None:
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 3)
    give(delivery, streams[:1], 300)
    clock.now = LATE_S
    give(delivery, streams, 300)
    assert not delivery.is_late
    clock.now = LATE_S * A_BIT
    assert delivery.is_late
    take(gathering)
    give(delivery, streams, 300)
    assert not delivery.is_late


@pytest.mark.parametrize("more", [0, 1])
async def test_it_takes_more_than_a_share_of_all_streams(delivery: Delivery, clock: Clock, more: int) -> None:
    num_late = round(LATE_SHARE * NUM_STREAMS) + more
    late, others = Gathering(delivery), Gathering(delivery)
    give(delivery, opened(delivery, late, num_late), 300)
    clock.now = LATE_S * A_BIT
    give(delivery, opened(delivery, others, NUM_STREAMS - num_late), 300)
    assert delivery.is_late == bool(more)


async def test_a_message_on_its_way_is_waited_for_until_it_is_slow(delivery: Delivery, clock: Clock) -> None:
    gathering = Gathering(delivery)
    streams = opened(delivery, gathering, 3)
    give(delivery, streams, 300)
    assert len(list(gathering.take())) == 3
    give(delivery, streams, 300)
    clock.now = sent_at = LATE_S * A_BIT
    gathering.note_sending()
    clock.now = sent_at + SLOW_S / A_BIT
    assert delivery.is_late
    clock.now = sent_at + SLOW_S * A_BIT
    assert not delivery.is_late, "its reader does not read"
    gathering.note_sent()
    assert delivery.is_late, "it does read, and they still wait"


async def test_answers_with_calls_of_their_own_are_late_when_the_first_of_them_is(
    delivery: Delivery, clock: Clock
) -> None:
    first, second = opened(delivery, None, 2)
    reading = asyncio.gather(first.next_delta(), second.next_delta())
    await asyncio.sleep(0)
    for now, samples in enumerate((first, second)):
        clock.now = float(now)
        give(delivery, [samples], 300)
    clock.now = QUEUE_LATE_S / A_BIT
    assert not delivery.is_late
    clock.now = QUEUE_LATE_S * A_BIT
    assert delivery.is_late
    await reading
    assert not delivery.is_late


async def test_who_does_not_read_makes_no_call_of_others_late(delivery: Delivery, clock: Clock) -> None:
    (unread,) = opened(delivery, None, 1)
    give(delivery, [unread], 300)
    await turns()
    clock.now = 10 * QUEUE_LATE_S
    assert not delivery.is_late


async def test_texts_are_made_without_a_reader_who_is_far_behind_and_not_before(
    delivery: Delivery, clock: Clock
) -> None:
    gathering = Gathering(delivery)
    behind, little = opened(delivery, gathering, 2)
    gathering.note_sending()
    give(delivery, [behind], *[300] * UNTAKEN_TOKENS)
    clock.now = BEHIND_S / A_BIT
    give(delivery, [behind, little], 300)
    await turns()
    assert delivery.unread_bytes == 0
    clock.now = BEHIND_S * A_BIT
    delivery.note([])
    await turns()
    assert behind.answers[0].noted_at is None
    assert delivery.unread_bytes == behind.reader.unread_bytes > 0
    assert little.reader.unread_bytes == 0, "of which there is little"


class Session:
    """One whose results never come; `idle_s` is the test's."""

    def __init__(self) -> None:
        self.idle_s = 0.0
        self.plans: list[Plan] = []

    def send(self, plan: Plan) -> int:
        self.plans.append(plan)
        self.idle_s = 0.0
        return 1

    def end(self, reason: str) -> None:
        raise AssertionError(reason)


class Answers:
    """What a driver asks and tells; `are_late` is the test's."""

    def __init__(self) -> None:
        self.are_late = True
        self.num_asked = 0

    def is_late(self) -> bool:
        self.num_asked += 1
        return self.are_late

    def on_plan(self) -> None:
        pass


class Held:
    """A driver with something to plan, in time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = asyncio.get_running_loop().time()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self._now)
        self.session, self.answers, scheduler = Session(), Answers(), Scheduler()
        told: Any = self.answers
        self.driver = Driver(scheduler, LinkOptions("ipc://nowhere", "test", 1.0), 1.0, told)
        scheduler.attach(Lease(list(range(1, 41)), list(range(4)), 64, 4, plans_in_flight=USUAL_PLANS + 1))
        scheduler.submit(asked("a", 8, 40))
        session: Any = self.session
        self.driver._session = session

    @property
    def num_plans(self) -> int:
        return len(self.session.plans)

    async def pass_by(self, seconds: float) -> None:
        self._now += seconds
        self.session.idle_s += seconds
        await turns()


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held(monkeypatch)
    held.driver.wake()
    await turns()
    return held


async def test_a_plan_is_held_while_answers_are_late_and_made_at_the_next_look(held: Held) -> None:
    for looks in range(1, 6):
        assert (held.num_plans, held.answers.num_asked) == (0, looks)
        await held.pass_by(HOLD_S * A_BIT)
    held.answers.are_late = False
    await turns()
    assert held.num_plans == 0
    await held.pass_by(HOLD_S * A_BIT)
    assert held.num_plans == USUAL_PLANS


async def test_whatever_else_makes_it_look_finds_that_they_are_late_no_more(held: Held) -> None:
    held.answers.are_late = False
    held.driver.wake()
    await turns()
    assert held.num_plans == USUAL_PLANS


async def test_many_who_look_meanwhile_make_no_more_looks_of_it(held: Held) -> None:
    for _ in range(10):
        held.driver.wake()
        await turns()
    num_asked = held.answers.num_asked
    await held.pass_by(HOLD_S * A_BIT)
    assert held.answers.num_asked == num_asked + 1


async def test_a_plan_is_held_for_so_long_and_the_one_after_it_again(held: Held) -> None:
    held.session.idle_s = MAX_HOLD_S / A_BIT - HOLD_S
    await held.pass_by(HOLD_S)
    assert held.num_plans == 0
    held.session.idle_s = MAX_HOLD_S
    await held.pass_by(HOLD_S)
    assert held.num_plans == 1, "late or not; but the next one starts to be held anew"
    await held.pass_by(MAX_HOLD_S / 2)
    assert held.num_plans == 1
    await held.pass_by(MAX_HOLD_S / 2)
    assert held.num_plans == 2


@pytest.fixture
def no_beats(tmp_path: Path) -> Iterator[str]:
    """Where plans are made for no other reason: the address of an executor."""
    with cleaned_up([start_executor(tmp_path, "--simulate", "--session-timeout-s", "600")]) as (executor,):
        yield executor.wait_until_ready().address


async def test_an_engine_waits_for_who_takes_what_there_is_and_not_for_who_does_not_read(
    no_beats: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.delivery.LATE_S", -1.0)  # at once
    monkeypatch.setattr("scheduler_svc.driver.MAX_HOLD_S", FOREVER_S)
    monkeypatch.setattr("scheduler_svc.gathering.SLOW_S", FOREVER_S)
    async with engine_over(no_beats, tmp_path, idle_plan_s=60) as engine, asyncio.timeout(60):
        plans, gathering = keep_plans(engine), engine.gathering()
        readers = [await engine.gathered(request(f"r{number}", 400), gathering) for number in range(3)]

        async def held_back() -> None:
            """All that was planned has come, more could be, and nothing is."""
            (driver,), state = engine.fleet.drivers.values(), only_scheduler(engine).state
            while not gathering.has_more or driver._held is None or state.in_flight:
                assert state.num_running or state.num_waiting, "they have run to their end"
                await asyncio.sleep(0.001)
            num_plans = len(plans)
            await turns()
            assert len(plans) == num_plans

        await held_back()
        num_plans = len(plans)
        take(gathering)
        while len(plans) == num_plans:
            await asyncio.sleep(0.001)
        await held_back()
        assert list(gathering.take())
        gathering.note_sending()
        await held_back()
        monkeypatch.setattr("scheduler_svc.gathering.SLOW_S", -1.0)  # nobody reads, as is known at once
        while engine.load().running_sequences:
            await asyncio.sleep(0.01)
        assert sum(len(plan.rows) for plan in plans) >= 3 * 400
        for reader in readers:
            engine.leave(reader)
        gathering.close()
