"""An executor that is told to stop: its requests go on elsewhere, or end in its grace time; nothing is lost by it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.requests import BeamOptions, GenerationRequest
from tests.processes import Service, cleaned_up, start_executor
from tests.system.engines import engine_over, samples_ids
from tests.system.requests import Call, mixed_calls

SLOW = ["--simulate", "--num-blocks", "200", "--max-rows", "8", "--simulate-fixed-us", "5000"]


@contextlib.asynccontextmanager
async def engine_of(directory: Path, num_executors: int, *flags: str) -> AsyncIterator[tuple[Engine, list[Service]]]:
    def new(number: int) -> Service:
        own = directory / str(number)
        own.mkdir()
        return start_executor(own, *SLOW, *flags)

    with cleaned_up([new(number) for number in range(num_executors)]) as services:
        endpoints = [service.wait_until_ready().address for service in services]
        async with engine_over(",".join(endpoints), directory / "cache") as engine:
            await until(lambda: num_attached(engine) == num_executors)
            yield engine, services
            for driver in engine.fleet.attached:
                audit(driver.scheduler.state)
            assert engine.load().used_blocks == 0


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def num_attached(engine: Engine) -> int:
    return sum(len(model.executors) for model in engine.fleet.models)


async def ask(engine: Engine, number: int, call: Call, **options: object) -> list[list[int]]:
    sampling = Sampling(temperature=call.temperature, seed=call.seed)
    return await samples_ids(
        engine,
        GenerationRequest(f"r{number}", call.prompt, sampling, call.max_tokens, cache_salt=call.cache_salt, **options),  # type: ignore[arg-type]
    )


async def exit_code(service: Service) -> int:
    return await asyncio.to_thread(service.process.wait, 20)


async def test_what_runs_and_waits_there_goes_on_with_another_and_it_ends_before_its_time(tmp_path: Path) -> None:
    async with engine_of(tmp_path, 2, "--shutdown-grace-s", "600") as (engine, services):
        calls = mixed_calls(60, random.Random(1))
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
        beam = BeamOptions(3, 1.0, EarlyStopping.NO)
        searched = asyncio.create_task(ask(engine, 98, Call([300] * 20, 40, 0.0, 0, ""), beam=beam))
        several = asyncio.create_task(ask(engine, 99, Call([301] * 20, 80, 1.0, 5, ""), num_samples=4))
        await until(lambda: all(part.running_sequences and part.waiting_sequences for part in engine.load().executors))
        services[0].process.terminate()
        assert await exit_code(services[0]) == 0
        assert num_attached(engine) == 1
        assert await asyncio.gather(*asked) == [[call.expected()] for call in calls]
        expected = Call([301] * 20, 80, 1.0, 5, "")
        assert await several == [expected.expected(index=index) for index in range(4)]
        assert len(await searched) == 1
        assert engine.load().executor_losses == 0


async def test_with_no_other_what_runs_ends_there_and_what_waits_is_for_the_next(tmp_path: Path) -> None:
    async with engine_of(tmp_path, 1, "--shutdown-grace-s", "600") as (engine, services):
        calls = [Call([300 + i] * 20, 60, 0.0, 0, "") for i in range(12)]
        asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
        await until(lambda: engine.load().generated_tokens > 40)
        endpoint = services[0].address
        services[0].process.terminate()
        assert await exit_code(services[0]) == 0
        done = [task for task in asked if task.done()]
        assert len(done) >= 7, "as many as had rows but for who had just got one"
        assert not engine.ready
        own = tmp_path / "next"
        own.mkdir()
        services.append(start_executor(own, *SLOW, endpoint=endpoint))
        assert await asyncio.gather(*asked) == [[call.expected()] for call in calls]
        assert engine.load().executor_losses == 0
        assert engine.load().preemptions == 0


async def test_what_outlives_its_time_is_computed_anew_and_suspected_of_nothing(tmp_path: Path) -> None:
    async with engine_of(tmp_path, 1, "--shutdown-grace-s", "0.2") as (engine, services):
        call, endpoint = Call([300] * 20, 300, 0.0, 0, ""), services[0].address
        asked = asyncio.create_task(ask(engine, 0, call))
        for number in range(3):  # one that is lost over a request so often would convict it
            before = engine.load().generated_tokens
            await until(lambda before=before: engine.load().generated_tokens > before + 5)
            services[-1].process.terminate()
            assert await exit_code(services[-1]) == 0
            own = tmp_path / f"next {number}"
            own.mkdir()
            services.append(start_executor(own, *SLOW, "--shutdown-grace-s", "0.2", endpoint=endpoint))
        assert await asked == [call.expected()]
        assert engine.load().executor_losses == 0


@pytest.mark.parametrize("grace_s", ["0", "600"])
async def test_an_idle_executor_ends_at_once(tmp_path: Path, grace_s: str) -> None:
    async with engine_of(tmp_path, 1, "--shutdown-grace-s", grace_s) as (engine, services):
        assert await ask(engine, 0, Call([300], 3, 0.0, 0, "")) == [Call([300], 3, 0.0, 0, "").expected()]
        services[0].process.terminate()
        assert await exit_code(services[0]) == 0
        assert not engine.load().executor_losses or grace_s == "0"
