"""Streams rest for as long as messages would wait for each other otherwise, and no longer than that for long."""

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from scheduler_svc.rests import AIM_S, GAIN, MAX_REST_S, MAX_STRETCH, MIN_REST_S, REST_S_PER_STREAM, Rests
from tests.system.gathered import give, new_delivery, opened


class Loop:
    """An event loop in time of its own, whose streams always have something new once they have rested."""

    def __init__(self, num_streams: int, message_s: float) -> None:
        self.message_s = message_s
        self.now = 0.0
        self._rests = Rests()
        self._num_streams = num_streams
        self._rested_at = deque([0.0] * num_streams)

    @property
    def rest_s(self) -> float:
        return self._rests.rest_s(self._num_streams)

    def run(self, seconds: float) -> float:
        """Returns how long a message has waited for its turn, on average."""
        end, waits = self.now + seconds, []
        while self.now < end:
            self.now = max(self.now, self._rested_at[0])
            waits.append(self.now - self._rested_at.popleft())
            self._rests.note_wait(waits[-1], self._num_streams)
            self.now += self.message_s
            self._rested_at.append(self.now + self.rest_s)
        return sum(waits) / len(waits)


@pytest.mark.parametrize("num_streams", [256, 1000])
@pytest.mark.parametrize("message_s", [150e-6, 250e-6, 400e-6])
def test_where_messages_are_dear_rests_grow_until_they_hardly_wait(message_s: float, num_streams: int) -> None:
    loop = Loop(num_streams, message_s)
    loop.run(20.0)
    assert loop.run(10.0) < 1.5 * AIM_S
    assert loop.rest_s < 1.2 * num_streams * message_s


def test_where_they_are_cheap_rests_stay_as_long_as_they_are() -> None:
    loop = Loop(500, 10e-6)
    loop.run(5.0)
    assert loop.rest_s == 500 * REST_S_PER_STREAM


def test_after_a_slow_while_rests_become_short_again() -> None:
    loop = Loop(1000, 800e-6)
    loop.run(10.0)
    assert loop.rest_s == pytest.approx(MAX_STRETCH * 1000 * REST_S_PER_STREAM)
    loop.message_s = 50e-6
    loop.run(10.0)
    assert loop.rest_s == pytest.approx(1000 * REST_S_PER_STREAM)


def test_few_streams_do_not_rest_and_nobody_rests_for_ever() -> None:
    few = Loop(1, 1e-3)
    few.run(1.0)
    assert few.rest_s == 0.0
    assert Rests().rest_s(round(MIN_REST_S / REST_S_PER_STREAM)) == MIN_REST_S
    assert Rests().rest_s(10**6) == MAX_REST_S


async def test_what_has_waited_in_the_queue_makes_the_next_rests_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("scheduler_svc.delivery.time", SimpleNamespace(perf_counter=lambda: now))
    delivery, num_streams = new_delivery(), 100
    streams = opened(delivery, None, num_streams)
    reading = asyncio.gather(*(samples.next_delta() for samples in streams))
    await asyncio.sleep(0)
    give(delivery, streams, 300)
    now = 1.0
    await reading
    rests_s = [samples.answers[0].rests_until - now for samples in streams]
    assert rests_s[0] == pytest.approx(num_streams * REST_S_PER_STREAM, rel=0.02)
    assert rests_s[-1] == pytest.approx(num_streams * REST_S_PER_STREAM * (1 + GAIN), rel=0.1)
