"""An engine in the test's own process, over a real executor process; without an API, so that a test is its reader."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from scheduler_svc.core.audit import audit
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.discovery import Discovery, Resolve
from scheduler_svc.engine import Engine
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.settings import SchedulerSettings


@contextlib.asynccontextmanager
async def engine_over(
    endpoint: str, cache_dir: Path, *, resolve: Resolve | None = None, **settings: object
) -> AsyncIterator[Engine]:
    """Ready for requests. A name that `resolve` knows is this machine's."""
    settings = {"insecure": resolve is not None, **settings}
    given = SchedulerSettings(executor_endpoint=endpoint, cache_dir=cache_dir, **settings)
    engine = Engine(given, Discovery(given.executor_endpoints, resolve) if resolve is not None else None)
    async with asyncio.TaskGroup() as tasks:  # a fault of the engine ends the test
        driving = tasks.create_task(engine.run())
        async with asyncio.timeout(60):
            while not engine.ready:
                await asyncio.sleep(0.01)
        try:
            yield engine
        finally:
            driving.cancel()


def only_scheduler(engine: Engine) -> Scheduler:
    """That of the engine's one executor."""
    (driver,) = engine.fleet.drivers.values()
    return driver.scheduler


def keep_plans(engine: Engine) -> list[Plan]:
    """All plans from now on, as they are made; the books are checked after each."""
    plans: list[Plan] = []
    scheduler = only_scheduler(engine)
    make_plan = scheduler.plan

    def kept(*, even_if_empty: bool = False) -> Plan | None:
        plan = make_plan(even_if_empty=even_if_empty)
        audit(scheduler.state)
        if plan is not None:
            plans.append(plan)
        return plan

    scheduler.plan = kept  # type: ignore[method-assign]
    return plans


async def samples_ids(engine: Engine, request: GenerationRequest) -> list[list[int]]:
    """The ids of each sample."""
    ids: list[list[int]] = [[] for _ in range(request.num_samples)]
    async with contextlib.aclosing(engine.generate(request)) as deltas:
        async for delta in deltas:
            ids[delta.index] += delta.token_ids
    return ids
