"""C7.4: a plan or a result that is lost, doubled or out of its order is noticed by its number, and what ran is computed
anew; no text is continued wrongly."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import zmq

from scheduler_svc.core.audit import audit_idle
from scheduler_svc.engine import Engine
from tests.processes import cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.engines import engine_over, only_scheduler
from tests.system.message_proxy import MessageProxy, Mishap
from tests.system.requests import Call, mixed_calls
from tests.system.test_executors import ask, until

HIGH_WATER_MARK, PAUSE_S = 10, 3.0
# An executor that keeps no more messages for a scheduler that does not read.
NARROW = f"import runpy, sys, executor_svc.router as r; r._SEND_QUEUE = {HIGH_WATER_MARK}; del sys.argv[:2]; "
NARROW += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
MOST_PLANS_BEHIND = 2  # that are sent before a result has come
EXECUTOR = ["--simulate", "--num-blocks", "300", "--simulate-fixed-us", "1000"]


async def after_tokens(engine: Engine, count: int) -> None:
    begin = engine.load().generated_tokens
    await until(lambda: engine.load().generated_tokens >= begin + count)


async def test_c7_4_a_plan_or_result_that_is_lost_doubled_or_swapped_is_noticed_and_no_text_is_wrong(
    tmp_path: Path,
) -> None:
    calls = mixed_calls(50, random.Random(1))
    with cleaned_up([]) as services:
        services.append(start_executor(tmp_path, *EXECUTOR).wait_until_ready())
        with MessageProxy(services[0].address) as proxy:
            async with engine_over(proxy.endpoint, tmp_path / "cache", result_timeout_s=2.0) as engine:
                asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
                losses = 0
                for kind in ("plan", "result"):
                    for mishap in get_args(Mishap):
                        await after_tokens(engine, 30)
                        proxy.suffer(kind, mishap)
                        losses += 1
                        await until(lambda count=losses: engine.fleet.num_losses == count)
                        assert proxy.num_suffered == losses
                assert await asyncio.gather(*asked) == [call.expected() for call in calls]
                audit_idle(only_scheduler(engine).state)
                assert engine.fleet.num_losses == losses == 6


async def test_c7_4_what_is_sent_before_the_executor_is_there_arrives_when_it_is(tmp_path: Path) -> None:
    call = Call([300, 301, 302], 40, 0.0, 0, "")
    with cleaned_up([]) as services:
        first = start_executor(tmp_path, *EXECUTOR).wait_until_ready()
        services.append(first)
        endpoint = first.address
        first.kill()
        scheduler = start_scheduler(tmp_path, endpoint)
        services.append(scheduler)
        scheduler.wait_until_ready()
        services.append(start_executor(tmp_path, *EXECUTOR, endpoint=endpoint))
        wait_for(lambda: '"serving"' in scheduler.log, "the first session")
        async with engine_over(endpoint, tmp_path / "cache") as engine:
            assert await ask(engine, 0, call) == call.expected()


@pytest.fixture
def narrow_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process, the scheduler's and the proxy's, keep no more messages."""
    make: Callable[[], zmq.Context] = zmq.Context

    def narrow() -> zmq.Context:
        context = make()
        context.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        context.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        return context

    monkeypatch.setattr(zmq, "Context", narrow)


@pytest.mark.usefixtures("narrow_sockets")
@pytest.mark.parametrize("who", ["executor", "scheduler"])
async def test_c7_4_nothing_is_lost_or_piles_up_at_a_low_high_water_mark_while_one_side_stands_still(
    tmp_path: Path, who: str
) -> None:
    """Fifty requests run. What is to be shown takes its time: three seconds in which one of the two does nothing."""
    calls = [Call([300 + i] * 20, 200, 0.0, 0, "") for i in range(50)]
    with cleaned_up([]) as services:
        flags = [*EXECUTOR, "--num-blocks", "2000", "--max-rows", "64"]
        services.append(start_executor(tmp_path, *flags, launcher=["-c", NARROW]).wait_until_ready())
        with MessageProxy(services[0].address) as proxy:
            async with engine_over(proxy.endpoint, tmp_path / "cache") as engine:
                asked = [asyncio.create_task(ask(engine, i, call)) for i, call in enumerate(calls)]
                await until(lambda: engine.load().running_sequences == len(calls))
                kind = "plan" if who == "executor" else "result"
                before, losses = proxy.num_carried[kind], engine.fleet.num_losses
                if who == "executor":
                    services[0].freeze()
                    await asyncio.sleep(PAUSE_S)
                    services[0].thaw()
                else:
                    time.sleep(PAUSE_S)  # nothing of the scheduler runs
                sent = proxy.num_carried[kind] - before
                assert await asyncio.gather(*asked) == [call.expected() for call in calls]
                audit_idle(only_scheduler(engine).state)
                assert sent <= 2 * MOST_PLANS_BEHIND, "what was in flight, and what the last answers led to"
                assert engine.fleet.num_losses - losses <= 1
                assert proxy.num_suffered == 0
