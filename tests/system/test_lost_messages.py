"""C7.4: a plan or a result that is lost, doubled or out of its order is noticed by its number, and what ran is computed
anew; no text is continued wrongly."""

import asyncio
import random
from pathlib import Path
from typing import get_args

from scheduler_svc.core.audit import audit_idle
from scheduler_svc.engine import Engine
from tests.processes import cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.engines import engine_over, only_scheduler
from tests.system.message_proxy import MessageProxy, Mishap
from tests.system.requests import Call, mixed_calls
from tests.system.test_executors import ask, until

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
