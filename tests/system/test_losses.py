"""Either side may die or freeze in the middle of a run: texts stay exact, a restarted peer is attached at once, and
nothing leaks."""

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from paged.client import Client, UnavailableError
from tests.processes import Service, wait_for
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, mixed_calls, ready

SLOW_STEPS = ["--simulate-fixed-us", "5000"]
NOTICED_S = 5.0  # a broken connection, not the time limit for results, tells of a death


async def run_with_event(
    system: System, calls: list[Call], event: Callable[[], None], after_tokens: int
) -> list[list[int]]:
    """Run the calls; once this many tokens have been generated, call `event` in a thread. Returns the answers."""
    async with Client(system.address) as client:
        await ready(client)
        running = [asyncio.create_task(answer(client, call)) for call in calls]
        while (await client.load()).generated_tokens < after_tokens:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(event)
        return await asyncio.gather(*running)


@pytest.mark.parametrize("num_kills", [1, 3])
async def test_streams_stay_open_and_exact_when_the_executor_is_killed(system: System, num_kills: int) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.scheduler_flags = ["--max-losses", "10"]  # kills may follow each other without a result between
    system.start()
    calls = mixed_calls(60, random.Random(3))

    def kill_and_restart() -> None:
        for kills in range(num_kills):
            wait_for(lambda n=kills: system.scheduler.log.count('"attached"') > n, "the scheduler to attach again")
            system.executor.kill()
            wait_for(lambda n=kills: system.scheduler.log.count('"executor_lost"') > n, "the loss", NOTICED_S)
            system.restart_executor()

    answers = await run_with_event(system, calls, kill_and_restart, after_tokens=300)
    assert answers == [call.expected() for call in calls]
    async with Client(system.address) as client:
        load = await idle_load(client)
        assert load.executor_losses >= num_kills
        assert load.used_blocks == 0
        assert load.failed_requests == 0


async def test_a_frozen_executor_is_replaced_by_its_thawed_self(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    calls = mixed_calls(40, random.Random(4))

    def freeze_until_noticed() -> None:
        system.executor.freeze()
        wait_for_log(system.scheduler, "executor_lost", 15)
        system.executor.thaw()

    answers = await run_with_event(system, calls, freeze_until_noticed, after_tokens=200)
    assert answers == [call.expected() for call in calls]
    async with Client(system.address) as client:
        load = await idle_load(client)
        assert load.executor_losses >= 1
        assert load.used_blocks == 0


async def test_a_short_freeze_is_only_a_pause(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    calls = mixed_calls(40, random.Random(5))

    def freeze_for_a_moment() -> None:
        system.executor.freeze()
        time.sleep(1.0)
        system.executor.thaw()

    answers = await run_with_event(system, calls, freeze_for_a_moment, after_tokens=200)
    assert answers == [call.expected() for call in calls]
    async with Client(system.address) as client:
        assert (await idle_load(client)).executor_losses == 0


async def test_a_killed_scheduler_ends_its_calls_and_a_new_one_is_attached_at_once(system: System) -> None:
    # The executor finds out that the old one is gone; it does not wait for its silence to grow long.
    system.executor_flags = ["--num-blocks", "400", "--session-timeout-s", "600", *SLOW_STEPS]
    system.start()
    calls = mixed_calls(40, random.Random(6))
    with pytest.raises(UnavailableError):
        await run_with_event(system, calls, system.scheduler.kill, after_tokens=200)
    system.restart_scheduler()
    async with Client(system.address) as client:
        await ready(client)
        answers = await asyncio.gather(*[answer(client, call) for call in calls])
        assert answers == [call.expected() for call in calls]
        assert (await idle_load(client)).used_blocks == 0
    assert "session_ended" in system.executor.log


async def test_a_frozen_scheduler_gives_way_to_a_new_one(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", "--session-timeout-s", "2", *SLOW_STEPS]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
    system.scheduler.freeze()
    frozen = system.scheduler
    system.address = "127.0.0.1:0"
    system.restart_scheduler()
    calls = mixed_calls(20, random.Random(7))
    async with Client(system.scheduler.address) as client:
        await ready(client)
        answers = await asyncio.gather(*[answer(client, call) for call in calls])
    assert answers == [call.expected() for call in calls]
    # The thawed one finds its session over and waits for a lease; it does not disturb the other.
    frozen.thaw()
    wait_for_log(frozen, "executor_lost", 15)
    async with Client(system.scheduler.address) as client:
        answers = await asyncio.gather(*[answer(client, call) for call in calls])
        assert answers == [call.expected() for call in calls]
        assert (await idle_load(client)).executor_losses == 0


async def test_callers_get_unavailable_when_no_executor_comes_back(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.scheduler_flags = ["--executor-wait-s", "1"]
    system.start()
    call = Call([300, 301, 302], 3000, 0.0, 0, "")
    with pytest.raises(UnavailableError):
        await run_with_event(system, [call], system.executor.kill, after_tokens=20)
    async with Client(system.address) as client:
        with pytest.raises(UnavailableError):  # and not DeadlineExceededError: it is refused, not kept
            await client.complete(call.prompt, timeout_s=5)


def wait_for_log(service: Service, event: str, timeout_s: float) -> None:
    wait_for(lambda: event in service.log, f"{event} in the log", timeout_s)


async def test_a_stopping_scheduler_refuses_new_calls_and_ends_those_that_run(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    call = Call([300, 301, 302], 200, 0.0, 0, "")
    async with Client(system.address) as client:
        await ready(client)
        running = asyncio.create_task(answer(client, call))
        while (await client.load()).generated_tokens < 10:
            await asyncio.sleep(0.01)
        system.scheduler.process.terminate()
        wait_for_log(system.scheduler, "stopping", 15)
        with pytest.raises(UnavailableError):
            await answer(client, call)
        assert await running == call.expected()
    assert await asyncio.to_thread(system.scheduler.process.wait, 15) == 0
    wait_for_log(system.executor, "reason=detached", 5)  # it said so: nobody had to find out


async def test_an_executor_with_another_model_ends_open_streams_instead_of_splicing_them(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    call = Call([300, 301, 302], 3000, 0.0, 0, "")

    def come_back_as_another() -> None:
        system.executor.kill()
        system.restart_executor("--num-blocks", "400", "--simulate-vocab-size", "20000")

    with pytest.raises(UnavailableError):
        await run_with_event(system, [call], come_back_as_another, after_tokens=20)
    async with Client(system.address) as client:
        await ready(client)
        assert (await client.model()).vocab_size == 20000


async def test_a_smaller_executor_ends_only_what_can_never_fit_it(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    calls = [Call([300 + i], 60, 0.0, 0, "") for i in range(4)]
    large = Call([400] * 20, 2000, 0.0, 0, "")

    def come_back_smaller() -> None:
        system.executor.kill()
        system.restart_executor("--num-blocks", "12")

    async with Client(system.address) as client:
        await ready(client)
        too_large = asyncio.create_task(answer(client, large))
        answers = await run_with_event(system, calls, come_back_smaller, after_tokens=40)
        with pytest.raises(UnavailableError):
            await too_large
        assert answers == [call.expected() for call in calls]
        assert (await idle_load(client)).used_blocks == 0


async def test_an_open_ended_answer_is_cut_to_what_a_smaller_executor_can_hold(system: System) -> None:
    system.executor_flags = ["--num-blocks", "40", *SLOW_STEPS]
    system.start()
    prompt = [300, 301, 302]
    async with Client(system.address) as client:
        await ready(client)
        running = asyncio.create_task(client.complete(prompt, temperature=0, ignore_eos=True))
        while (await client.load()).generated_tokens < 20:
            await asyncio.sleep(0.01)
        system.executor.kill()
        system.restart_executor("--num-blocks", "12", "--simulate-max-model-len", "4000", *SLOW_STEPS)
        whole = await running
    # Eleven blocks of sixteen slots; the last token needs none.
    assert len(prompt) + whole.usage.completion_tokens == 11 * 16 + 1
    expected = Call(prompt, whole.usage.completion_tokens, 0.0, 0, "")
    assert list(whole.token_ids) == expected.expected(end_token_ids=())


async def test_a_second_signal_ends_a_scheduler_at_once_and_its_calls_unavailable(system: System) -> None:
    system.executor_flags = ["--num-blocks", "400", *SLOW_STEPS]
    system.start()
    call = Call([300, 301, 302], 3000, 0.0, 0, "")

    def signal_twice() -> None:
        system.scheduler.process.terminate()
        wait_for_log(system.scheduler, "stopping", 15)
        system.scheduler.process.terminate()

    with pytest.raises(UnavailableError):
        await run_with_event(system, [call], signal_twice, after_tokens=20)
    assert await asyncio.to_thread(system.scheduler.process.wait, 15) == 1
