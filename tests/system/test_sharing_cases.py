"""Known faults of others where sequences share blocks, each by its number, through the whole system."""

import asyncio
import contextlib
import gc
from pathlib import Path

import pytest

from executor_svc.model.load import load
from paged.client import Client
from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sampling, Sequence
from scheduler_svc.engine import Engine
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.samples import Samples
from tests.model.conftest import random_ids, settings_for
from tests.model.driver import Driver, row_sampling
from tests.model.driver import Sequence as Driven
from tests.processes import cleaned_up, start_executor
from tests.system.conftest import System
from tests.system.engines import engine_over, keep_plans, only_scheduler, samples_ids
from tests.system.requests import Call, idle_load, ready
from tests.system.test_samples import running_engine
from tests.tiny_models import WINDOW, save_tiny

FIRST_NAME = 259  # ids from here on are written as words of their own


def drawn_alone(driver: Driver, prompt: list[int], seed: int, index: int, count: int) -> list[int]:
    sequence = Driven(list(prompt), len(prompt), row_sampling(temperature=1.0, seed=seed, index=index))
    driver.generate([sequence], count)
    driver.reuse(sequence.table)
    return sequence.outputs


async def test_c1_3_samples_that_part_past_the_window_are_those_of_their_seeds_alone_whoever_is_aborted(
    tmp_path: Path,
) -> None:
    directory, prompt, seeds = save_tiny(tmp_path, "mistral"), random_ids(1, 3 * WINDOW), (5, 6, 7)
    driver = Driver(load(settings_for(directory, block_size=4)), 1)
    alone = {seed: [drawn_alone(driver, prompt, seed, index, 24) for index in range(3)] for seed in seeds}
    pool = ["--block-size", "4", "--num-blocks", "200", "--max-rows", "12", "--tokens-per-step", "40"]

    def request(seed: int, *stop_strings: str) -> GenerationRequest:
        sampling = Sampling(temperature=1.0, seed=seed)
        name = f"{seed}{stop_strings}"
        return GenerationRequest(name, prompt, sampling, 24, stop_strings, ignore_eos=True, num_samples=3)

    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, "--model", str(directory), "--dtype", "float32", *pool))
        endpoint = services[0].wait_until_ready().address
        async with engine_over(endpoint, tmp_path / "cache") as engine:
            plans = keep_plans(engine)
            said = await asyncio.gather(*[samples_ids(engine, request(seed)) for seed in seeds])
            assert dict(zip(seeds, said, strict=True)) == alone
            assert sum(len(plan.joined) for plan in plans) == 3 * 2
            # What a sample says first that the others never say ends it alone, in the midst of its answer.
            others = {*alone[5][0], *alone[5][2]}
            place = next(i for i, id_ in enumerate(alone[5][1]) if i >= 4 and id_ >= FIRST_NAME and id_ not in others)
            first, aborted, last = await samples_ids(engine, request(5, f"<extra_{alone[5][1][place]}>"))
            assert [first, last] == [alone[5][0], alone[5][2]]
            assert aborted == alone[5][1][: len(aborted)]
            assert place <= len(aborted) <= place + 1 < 24
            assert engine.load().used_blocks == 0


def num_records() -> int:
    """What lives of requests, at their head and below it."""
    gc.collect()
    return sum(issubclass(type(known), Samples | Answer | Sequence) for known in gc.get_objects())


async def assert_forgotten(engine: Engine, plans: list) -> None:
    """What was made before is over, and the executor is told so within two plans that mention no row besides."""
    state = only_scheduler(engine).state
    assert (state.num_running, state.num_waiting, state.cache.pool.num_used) == (0, 0, 0)
    async with asyncio.timeout(20):
        while not plans or state.in_flight:
            await asyncio.sleep(0)
    assert len(plans) <= 2
    for plan in plans:
        assert len(plan.rows) == len(plan.joined) == len(plan.started) == len(plan.forks) == 0


@pytest.mark.parametrize("max_rows", [2, 8])
@pytest.mark.parametrize("num_ended", [0, 2])
async def test_c1_6_a_cancelled_request_leaves_no_sample_behind(system: System, max_rows: int, num_ended: int) -> None:
    """After the third message, or when two of four have ended; fifty times under the same id."""
    call = Call([301, 302, 303], 500, 1.0, 7, "")
    ends = tuple(call.expected((), index)[4] for index in range(num_ended))
    async with running_engine(system, "--max-rows", str(max_rows), "--simulate-fixed-us", "500") as engine:
        plans, num_before = keep_plans(engine), num_records()
        for _ in range(50):
            request = GenerationRequest(
                "r", call.prompt, Sampling(1.0, seed=7), 500, stop_token_ids=ends, ignore_eos=True, num_samples=4
            )
            num_messages = num_finished = 0
            async with contextlib.aclosing(engine.generate(request)) as deltas:
                async for delta in deltas:
                    num_messages, num_finished = num_messages + 1, num_finished + (delta.finish is not None)
                    if num_messages >= 3 and num_finished >= num_ended:
                        break
            plans.clear()
            await assert_forgotten(engine, plans)
            assert engine.lives.samples == {}
        assert engine.load().cancelled_requests == 50
        plans.clear()
        del deltas, request
        assert num_records() == num_before


@pytest.mark.parametrize("num_ended", [0, 2])
async def test_c1_6_fifty_cancelled_calls_leave_nothing(system: System, num_ended: int) -> None:
    system.start()
    call = Call([301, 302, 303], 500, 1.0, 7, "")
    ends = tuple(call.expected((), index)[4] for index in range(num_ended))
    asked = {"n": 4, "max_tokens": 500, "temperature": 1.0, "seed": 7, "ignore_eos": True, "stop_token_ids": ends}
    async with Client(system.address) as client:
        await ready(client)
        for count in range(1, 51):
            num_messages = num_finished = 0
            messages = client.generate(call.prompt, request_id="r", **asked)
            async for message in messages:
                num_messages, num_finished = num_messages + 1, num_finished + message.HasField("finish")
                if num_messages >= 3 and num_finished >= num_ended:
                    break
            await messages.aclose()
            load = await idle_load(client)
            assert (load.cancelled_requests, load.used_blocks, load.unused_slots) == (count, 0, 0)
    assert "error" not in system.scheduler.log
