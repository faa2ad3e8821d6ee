"""An executor is given up when a step of it does not end, and for a while when it is lost again and again."""

import asyncio
import json

import pytest

from paged.client import Client, UnavailableError
from tests.processes import wait_for
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, ready

SLOW_STEPS = ["--simulate-fixed-us", "5000"]
CALL = Call([300, 301, 302], 150, 0.0, 0, "")


async def test_a_step_that_never_ends_is_given_up_by_both_sides_and_the_text_goes_on_with_the_next_process(
    system: System,
) -> None:
    """Connection and heartbeats are alive all the time. What is left after the loss takes fewer steps than 100."""
    script = system.directory / "script.json"
    script.write_text(json.dumps({"faults": [{"step": 100, "kind": "hang"}]}))
    system.executor_flags = ["--simulate-script", str(script), "--step-timeout-s", "2", *SLOW_STEPS]
    system.scheduler_flags = ["--result-timeout-s", "1"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.create_task(answer(client, CALL))
        await asyncio.to_thread(wait_for, lambda: "no result within 1.0 s" in system.scheduler.log, "the deadline", 10)
        assert system.executor.process.poll() is None, "its process lives"
        assert await asyncio.to_thread(system.executor.process.wait, 10) == 1
        assert "step_stuck" in system.executor.log
        system.restart_executor()
        assert await asked == CALL.expected()
        assert (await idle_load(client)).executor_losses == 1


def lose(system: System, count: int) -> None:
    """Loss number `count`; the executor is started again at once."""
    wait_for(lambda: system.scheduler.log.count('"attached"') == count, "the scheduler to attach")
    system.executor.kill()
    wait_for(lambda: system.scheduler.log.count('"executor_lost"') == count, "the loss")
    system.restart_executor()


async def test_an_executor_that_is_lost_too_often_is_left_alone_and_its_calls_end(system: System) -> None:
    system.executor_flags = SLOW_STEPS
    system.scheduler_flags = ["--max-executor-losses", "2", "--loss-window-s", "600", "--executor-wait-s", "1"]
    system.start()
    long = Call([300, 301], 4000, 0.0, 0, "")
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.create_task(answer(client, long))
        for count in (1, 2):
            await asyncio.to_thread(lose, system, count)
        system.executor.wait_until_ready()
        with pytest.raises(UnavailableError):
            await asked
        assert "executor_barred" in system.scheduler.log
        assert not (await client.load()).executor_attached
    assert system.scheduler.log.count('"attached"') == 2
    assert "session_began" not in system.executor.log[system.executor.log.rindex("ready") :]


@pytest.mark.slow
async def test_once_its_losses_are_old_it_is_attached_again(system: System) -> None:
    system.executor_flags = SLOW_STEPS
    system.scheduler_flags = ["--max-executor-losses", "1", "--loss-window-s", "2"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        asked = asyncio.create_task(answer(client, CALL))
        await asyncio.to_thread(lose, system, 1)
        assert await asked == CALL.expected()
        assert (await client.load()).executor_losses == 1
    assert system.scheduler.log.count('"executor_barred"') == 1
