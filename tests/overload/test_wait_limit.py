"""Nobody waits longer than `max_wait_s`: who would is refused at once, and who has ends then."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.drain_rate import WAITED_S, WINDOW_S, AdmissionRate
from scheduler_svc.engine import Engine
from scheduler_svc.errors import QueueFull
from scheduler_svc.requests import GenerationRequest
from tests.processes import Service, cleaned_up, start_executor
from tests.system.engines import engine_over, only_scheduler, samples_ids

STEPS = ["--simulate", "--simulate-fixed-us", "2000", "--max-rows", "2"]
FOR_EVER_S, PLACE_S = 3600.0, 1000.0


@contextlib.asynccontextmanager
async def engine_of(directory: Path, **settings: object) -> AsyncIterator[tuple[Engine, list[Service]]]:
    with cleaned_up([start_executor(directory, *STEPS)]) as services:
        services[0].wait_until_ready()
        async with engine_over(services[0].address, directory / "cache", **settings) as engine:
            yield engine, services
            audit(only_scheduler(engine).state)
            await until(lambda: engine.load().used_blocks == 0)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def asking(engine: Engine, number: int, max_tokens: int = 3000, **options: object) -> asyncio.Task[list[list[int]]]:
    asked = GenerationRequest(
        f"r{number}",
        [300 + number] * 8,
        Sampling(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
        **options,  # type: ignore[arg-type]
    )
    return asyncio.create_task(samples_ids(engine, asked))


async def both_rows_taken(engine: Engine) -> list[asyncio.Task[list[list[int]]]]:
    running = [asking(engine, number) for number in range(2)]
    await until(lambda: engine.load().running_sequences == 2)
    return running


async def waiting(engine: Engine, number: int, **options: object) -> asyncio.Task[list[list[int]]]:
    """One that is let wait, once a plan has shown that it must."""
    before = only_scheduler(engine).state.num_left_waiting
    task = asking(engine, number, **options)
    await until(lambda: only_scheduler(engine).state.num_left_waiting > before or task.done())
    return task


async def leave(*tasks: asyncio.Task[list[list[int]]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def one_gets_in_each(engine: Engine, seconds: float) -> None:
    """As if so much had been seen until now."""
    (model,) = engine.fleet.models
    now, num_admitted = asyncio.get_running_loop().time(), only_scheduler(engine).state.counters.admitted
    model.admission_rate = AdmissionRate()
    model.admission_rate.note(now - seconds, num_admitted - 1, some_wait=True)
    model.admission_rate.note(now, num_admitted, some_wait=True)


async def test_who_has_waited_for_as_long_as_it_may_ends_and_who_is_in_goes_on(tmp_path: Path) -> None:
    async with engine_of(tmp_path, max_wait_s=FOR_EVER_S) as (engine, _):
        running = await both_rows_taken(engine)
        engine.lives.wait_limit.max_wait_s = 0.1
        for number, options in ((2, {}), (3, {"num_samples": 3})):
            with pytest.raises(QueueFull, match="has waited for max_wait_s") as caught:
                await asyncio.wait_for(asking(engine, number, **options), 30)
            assert caught.value.retry_after_s > 0
        assert not any(task.done() for task in running)
        await leave(*running)
        engine.lives.wait_limit.max_wait_s = FOR_EVER_S
        assert [len(ids) for ids in await asking(engine, 4, max_tokens=200)] == [200]
        assert engine.load().failed_requests == 0, "what is refused has not failed"
        assert engine.load().cancelled_requests == 2


async def test_who_would_wait_longer_is_refused_at_once_but_not_who_goes_first(tmp_path: Path) -> None:
    settings = {"max_wait_s": 2.5 * PLACE_S, "tenant_weights": {"first": 1000}}
    async with engine_of(tmp_path, **settings) as (engine, _):
        running = await both_rows_taken(engine)
        one_gets_in_each(engine, PLACE_S)
        running += [await waiting(engine, number) for number in (2, 3)]
        with pytest.raises(QueueFull, match="2 go before, some 3e"):
            await asking(engine, 4)
        assert engine.load().waiting_sequences == 2
        running.append(await waiting(engine, 5, tenant="first"))
        assert not any(task.done() for task in running)
        await leave(*running)


async def test_where_there_is_room_nobody_is_refused_whatever_was_seen_before(tmp_path: Path) -> None:
    async with engine_of(tmp_path, max_wait_s=PLACE_S / 2) as (engine, _):
        one_gets_in_each(engine, PLACE_S)
        assert [len((await task)[0]) for task in [asking(engine, number, 20) for number in range(2)]] == [20, 20]


async def test_for_an_executor_that_is_lost_they_wait_as_long_as_for_any(tmp_path: Path) -> None:
    async with engine_of(tmp_path, max_wait_s=FOR_EVER_S) as (engine, services):
        running = await both_rows_taken(engine)
        last = await waiting(engine, 2, max_tokens=30)
        endpoint = services[0].address
        services[0].kill()
        await until(lambda: not engine.load().executor_attached)
        engine.lives.end_waits(asyncio.get_running_loop().time() + FOR_EVER_S)
        own = tmp_path / "next"
        own.mkdir()
        services.append(start_executor(own, *STEPS[:-1], "8", endpoint=endpoint))
        assert [len(ids) for ids in await last] == [30]
        await leave(*running)


def test_how_long_one_waits_follows_from_how_fast_others_got_in_while_some_had_to_wait() -> None:
    rate = AdmissionRate()
    rate.note(0.0, 10, some_wait=True)
    assert rate.expected_wait_s(100) == 0.0
    rate.note(WAITED_S / 2, 10, some_wait=True)
    assert rate.expected_wait_s(100) == 0.0, "too little was seen"
    rate.note(WAITED_S, 10, some_wait=True)
    assert rate.expected_wait_s(0) == pytest.approx(WAITED_S), "nobody has got in, one would now at best"
    assert rate.expected_wait_s(7) == pytest.approx(8 * WAITED_S)
    rate.note(10.0, 30, some_wait=True)
    assert rate.expected_wait_s(0) == pytest.approx(0.5)
    assert rate.expected_wait_s(7) == pytest.approx(4.0)
    rate.note(15.0, 1000, some_wait=False)  # none of these had to wait
    assert rate.expected_wait_s(7) == pytest.approx(4.0)
    rate.note(16.0, 4, some_wait=True)  # with an executor those it had let in are gone
    assert rate.expected_wait_s(0) == pytest.approx(11 / 20)
    rate.note(16.0 + 2 * WINDOW_S, 4, some_wait=False)
    assert rate.expected_wait_s(100) == 0.0, "that is long ago"
