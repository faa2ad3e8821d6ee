"""How soon work goes on after the loss of an executor, and how soon one that is frozen is given up.

*Recovery*: from the SIGKILL of a simulated executor with requests under way to the first plan that computes them anew
being sent, less what the new executor's own start takes (from its being started until it says that it is ready). The
scheduler is the engine as it serves, in this process; the executor is started again at once.

*Freeze*: a step that never ends, in a process that goes on answering on its connection. From the sending of its plan
to the session being given up, less the deadline that the step had.

Exits with 1 where the worst of the rounds passes one of BOUNDS.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import uvloop

from benchmarks.bounds import tell
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.logs import configure_logs
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.settings import SchedulerSettings

EXECUTOR = ["--simulate", "--simulate-fixed-us", "5000", "--log-level", "error"]
NUM_REQUESTS = 64
RESULT_TIMEOUT_S = 1.0
TOO_LONG_S = 60.0
BOUNDS = {"recovery_max_s": 1.0, "freeze_overrun_max_s": 1.0}


class Executor:
    """A simulated one, started at once."""

    def __init__(self, directory: Path, *flags: str, endpoint: str = "tcp://127.0.0.1:0") -> None:
        self._file = directory / f"endpoint-{time.monotonic_ns()}"
        where = ["--endpoint", endpoint, "--endpoint-file", str(self._file), "--exit-with-parent"]
        self.started_at = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-m", "executor_svc", *EXECUTOR, *where, *flags])

    async def ready(self) -> float:
        """When it said so."""
        async with asyncio.timeout(TOO_LONG_S):
            while not self._file.exists():
                await asyncio.sleep(0.001)
        return time.monotonic()

    @property
    def endpoint(self) -> str:
        return self._file.read_text().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def busy_engine(endpoint: str, directory: Path, num_requests: int) -> AsyncIterator[Engine]:
    """With so many long answers under way."""
    settings = SchedulerSettings(
        executor_endpoint=endpoint, cache_dir=directory / "cache", result_timeout_s=RESULT_TIMEOUT_S
    )
    engine = Engine(settings)
    async with asyncio.TaskGroup() as tasks:
        driving = tasks.create_task(engine.run())
        await until(lambda: engine.ready)
        asked = [tasks.create_task(ask(engine, i)) for i in range(num_requests)]
        yield engine
        for task in (*asked, driving):
            task.cancel()


async def ask(engine: Engine, number: int) -> None:
    request = GenerationRequest(f"r{number}", [300 + number] * 40, Sampling(), 3000, ignore_eos=True)
    async with aclosing(engine.generate(request)) as deltas:
        async for _ in deltas:
            pass


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TOO_LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


def noted_plans(engine: Engine) -> list[tuple[float, Plan]]:
    """All that are made from now on, each with the moment at which it is sent."""
    (driver,) = engine.fleet.drivers.values()
    plans: list[tuple[float, Plan]] = []
    make = driver.scheduler.plan

    def noted(*, even_if_empty: bool = False) -> Plan | None:
        plan = make(even_if_empty=even_if_empty)
        if plan is not None:
            plans.append((time.monotonic(), plan))
        return plan

    driver.scheduler.plan = noted  # type: ignore[method-assign]
    return plans


async def recovery_s(directory: Path) -> float:
    """Of one loss."""
    executor = Executor(directory)
    await executor.ready()
    async with busy_engine(executor.endpoint, directory, NUM_REQUESTS) as engine:
        await until(lambda: engine.load().generated_tokens > 4 * NUM_REQUESTS)
        killed_at = time.monotonic()
        executor.kill()
        again = Executor(directory, endpoint=executor.endpoint)
        await until(lambda: engine.fleet.num_losses == 1)
        plans = noted_plans(engine)
        ready_at = await again.ready()
        await until(lambda: any(plan.started for _, plan in plans))
        sent_at = next(moment for moment, plan in plans if plan.started)
    again.kill()
    return sent_at - killed_at - (ready_at - again.started_at)


async def freeze_overrun_s(directory: Path) -> float:
    """By how much the deadline of a step that hangs was missed."""
    script = directory / "script.json"
    script.write_text(json.dumps({"faults": [{"step": 40, "kind": "hang"}]}))
    executor = Executor(directory, "--simulate-script", str(script))
    await executor.ready()
    async with busy_engine(executor.endpoint, directory, 0) as engine:
        plans = noted_plans(engine)
        (driver,) = engine.fleet.drivers.values()
        await until(lambda: not driver.scheduler.state.in_flight)
        plans.clear()
        num_answered = driver.num_steps
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(engine, i)) for i in range(4)]
            await until(lambda: engine.fleet.num_losses == 1)
            lost_at = driver.lost_at or time.monotonic()
            for task in asked:
                task.cancel()
        stuck = plans[driver.num_steps - num_answered][0]
    executor.kill()
    return lost_at - stuck - RESULT_TIMEOUT_S


async def measure(rounds: int) -> dict[str, object]:
    recoveries, overruns = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            recoveries.append(await recovery_s(Path(name)))
        with tempfile.TemporaryDirectory() as name:
            overruns.append(await freeze_overrun_s(Path(name)))
    return {
        "rounds": rounds,
        "recovery_s": round(statistics.median(recoveries), 3),
        "recovery_max_s": round(max(recoveries), 3),
        "freeze_overrun_s": round(statistics.median(overruns), 3),
        "freeze_overrun_max_s": round(max(overruns), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    configure_logs("error", "json")
    sys.exit(tell(uvloop.run(measure(arguments.rounds)), BOUNDS, as_json=arguments.json))


if __name__ == "__main__":
    main()
