"""Deadlines: what they cannot be met by is refused at once, and whose time is over is never computed (case C7.5)."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.drain_rate import KNOWN_AFTER_S, UNKNOWN_RETRY_S, DrainRate
from scheduler_svc.engine import Engine
from scheduler_svc.errors import DeadlineExceeded, DeadlineTooShort
from scheduler_svc.requests import GenerationRequest
from tests.processes import cleaned_up, start_executor
from tests.system.engines import engine_over, keep_plans, only_scheduler, samples_ids

STEP_S = 0.02


@contextlib.asynccontextmanager
async def engine_of(directory: Path, *flags: str, **settings: object) -> AsyncIterator[Engine]:
    """Over an executor whose steps take STEP_S."""
    flags = ("--simulate", "--simulate-fixed-us", str(STEP_S * 1e6), "--tokens-per-step", "16", *flags)
    with cleaned_up([start_executor(directory, *flags)]) as (executor,):
        executor.wait_until_ready()
        async with engine_over(executor.address, directory, **settings) as engine:
            yield engine
            audit(only_scheduler(engine).state)
            assert engine.load().used_blocks == 0


def request(
    number: int, left_s: float, num_prompt: int = 8, max_tokens: int = 4, **options: object
) -> GenerationRequest:
    options = {"ignore_eos": True, "max_tokens": max_tokens, **options}
    prompt, expires_at = [300 + number] * num_prompt, asyncio.get_running_loop().time() + left_s
    return GenerationRequest(f"r{number}", prompt, Sampling(temperature=0.0), expires_at=expires_at, **options)  # type: ignore[arg-type]


async def test_after_a_stop_of_the_process_nothing_is_planned_for_those_whose_time_is_over(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "--max-rows", "2") as engine:
        plans, loop = keep_plans(engine), asyncio.get_running_loop()
        asked = [request(number, 0.05 + 0.1 * number, max_tokens=10) for number in range(30)]
        running = [asyncio.create_task(samples_ids(engine, each)) for each in asked]
        while len(plans) < 3:
            await asyncio.sleep(0.001)
        time.sleep(1.0)  # what is to be shown: nothing of this process runs
        stopped_at, num_before = loop.time(), len(plans)
        answers = await asyncio.gather(*running, return_exceptions=True)
        started = {start.token_ids[0] - 300 for plan in plans[num_before:] for start in plan.started}
        over = {number for number, each in enumerate(asked) if each.expires_at <= stopped_at}
        assert len(over) > 5
        assert not started & over
        assert all(isinstance(answers[number], DeadlineExceeded) for number in over)
        assert {type(answer) for answer in answers} <= {list, DeadlineExceeded, DeadlineTooShort}


async def test_a_deadline_that_has_passed_when_the_request_comes_is_never_planned(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "--max-rows", "2") as engine:
        plans = keep_plans(engine)
        answers = await asyncio.gather(
            *(samples_ids(engine, request(number, -0.001 * number)) for number in range(3)),
            samples_ids(engine, request(3, 60)),
            return_exceptions=True,
        )
        assert [isinstance(answer, DeadlineExceeded) for answer in answers] == [True, True, True, False]
        assert [start.token_ids[0] for plan in plans for start in plan.started] == [303]


async def test_a_deadline_in_the_middle_of_a_prompt_ends_it_there(tmp_path: Path) -> None:
    async with engine_of(tmp_path, "--max-rows", "2") as engine:
        plans = keep_plans(engine)
        with pytest.raises(DeadlineExceeded):
            await samples_ids(engine, request(0, 6 * STEP_S, num_prompt=4000))
        num_computed = sum(int(plan.num_tokens.sum()) for plan in plans)
        assert 16 <= num_computed < 4000


@pytest.mark.parametrize(
    ("options", "in_time"),
    [
        ({"streams": False}, False),
        ({"streams": True}, True),  # its first tokens come in time
        ({"streams": False, "ignore_eos": False}, True),  # it may end at any token
        pytest.param({"streams": False, "stop_strings": ("never said",)}, True, marks=pytest.mark.slow),
        pytest.param({"streams": False, "stop_token_ids": (7,)}, True, marks=pytest.mark.slow),
    ],
)
async def test_an_answer_whose_tokens_alone_take_too_long_is_not_begun(
    tmp_path: Path, options: dict[str, object], in_time: bool
) -> None:
    async with engine_of(tmp_path, "--max-rows", "2") as engine:
        await samples_ids(engine, request(0, 60))  # and how long a step takes is known
        plans = keep_plans(engine)
        asked = request(1, 10 * STEP_S, max_tokens=200, **options)
        with pytest.raises(DeadlineExceeded) as caught:
            await samples_ids(engine, asked)
        assert (type(caught.value) is DeadlineTooShort) is not in_time
        assert any(plan.started for plan in plans) is in_time
        assert len((await samples_ids(engine, request(2, 60, max_tokens=20, streams=False)))[0]) == 20


async def test_who_would_have_to_pass_more_than_have_ever_gone_is_refused_and_who_goes_first_is_not(
    tmp_path: Path,
) -> None:
    async with engine_of(tmp_path, "--max-rows", "2", tenant_weights={"first": 1000}) as engine:
        long = [asyncio.create_task(samples_ids(engine, request(n, 600, max_tokens=2000))) for n in range(30)]
        while only_scheduler(engine).state.num_waiting < 28 or not engine.load().generated_tokens:
            await asyncio.sleep(0.001)
        now, gone = asyncio.get_running_loop().time(), engine.fleet.accounts.num_gone
        rate = engine.lives.drain_rate = DrainRate()
        rate.note(now - 2 * KNOWN_AFTER_S, gone)  # for so long nobody has gone
        rate.note(now, gone)
        with pytest.raises(DeadlineTooShort, match="28 that wait go before"):
            await samples_ids(engine, request(40, 8.0))
        with pytest.raises(DeadlineExceeded) as caught:
            await samples_ids(engine, request(41, 2.0, tenant="first"))
        assert type(caught.value) is DeadlineExceeded
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)


async def test_many_who_come_at_once_after_a_rest_are_all_taken(tmp_path: Path) -> None:
    """That nobody has gone for a while, because nobody was there, is no reason to refuse them."""
    async with engine_of(tmp_path, "--max-rows", "2") as engine:
        await samples_ids(engine, request(0, 60))
        now, gone = asyncio.get_running_loop().time(), engine.fleet.accounts.num_gone
        rate = engine.lives.drain_rate = DrainRate()
        rate.note(now - 2 * KNOWN_AFTER_S, gone, held_up=False)
        while rate.retry_after_s(0) == UNKNOWN_RETRY_S:  # as the engine itself sees it
            await asyncio.sleep(0.001)
        answers = await asyncio.gather(*(samples_ids(engine, request(number, 60)) for number in range(1, 21)))
        assert [len(ids) for (ids,) in answers] == [4] * 20
