"""A real executor process, and a scheduler in this one: the core, the plan stream, and the model, without the API."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from benchmarks.claims.meter import Meter
from benchmarks.claims.paper import StepWork
from benchmarks.claims.requests import Arrivals
from benchmarks.claims.watched import Occupancy, WatchedScheduler
from paged.cli.processes import Service, while_alive, written
from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.plan import Lease, Plan
from scheduler_svc.core.results import Applied
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.driver import Driver
from scheduler_svc.link.session import ExecutorSession, LinkOptions

READY_S = 900.0
IDLE_PLAN_S = 1.0
RESULT_TIMEOUT_S = 120.0


class ServingFailed(Exception):
    """The executor was lost, or refused what a benchmark wants."""


@dataclass(frozen=True, slots=True)
class Executor:
    """A process that serves; `lease` is what it lends to one who has it to himself."""

    endpoint: str
    service: Service
    lease: Lease
    model: str

    @classmethod
    @asynccontextmanager
    async def started(cls, flags: list[str]) -> AsyncIterator["Executor"]:
        """Raises ServiceFailed where it does not start."""
        with tempfile.TemporaryDirectory(prefix="paged-claims-") as name:
            endpoint_file = Path(name) / "endpoint"
            where = ("--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file))
            service = await Service.start("executor_svc", [*where, *flags], Path(name) / "executor.log")
            try:
                endpoint = await while_alive(written(endpoint_file, READY_S), service)
                lease, model = await while_alive(_facts(endpoint), service)
                yield cls(endpoint, service, lease, model)
            finally:
                await service.stop()


@dataclass(slots=True)
class Steps:
    """Of the steps in which a window was measured."""

    works: list[StepWork]
    seconds: list[float]  # by the executor's own clock: a result that is read late makes no step longer or shorter


class Serving:
    """A session with a scheduler of its own; use `async with Serving(...) as serving`. What waits in the scheduler is
    served at once, and then whoever arrives; `taken_over` are those of them that have got tokens elsewhere. Raises
    ServingFailed."""

    def __init__(self, executor: Executor, scheduler: WatchedScheduler, arrivals: Arrivals | None = None) -> None:
        self.scheduler = scheduler
        self.meter = Meter()
        self.occupancy = Occupancy()
        self.steps = Steps([], [])
        self.num_computed = 0  # tokens, as often as they were
        self._executor = executor
        self._arrivals = arrivals
        self._works: dict[int, StepWork] = {}  # by step
        self._news = asyncio.Event()
        self._lost: str | None = None
        self._step_us = 0  # of all steps so far
        self.taken_over = [sequence for sequence in scheduler.state.queue if sequence.num_output]
        for sequence in scheduler.state.queue:
            sequence.owner = None  # its times are those of another clock
        options = LinkOptions(executor.endpoint, "claims", RESULT_TIMEOUT_S)
        self._driver = Driver(scheduler, options, IDLE_PLAN_S, self)

    async def __aenter__(self) -> "Serving":
        self.scheduler.watch = self._planned
        self._context = zmq.Context()
        self._tasks = [asyncio.create_task(self._driver.run(self._context))]
        await self.until(lambda: self._driver.is_attached)
        self._tasks.append(asyncio.create_task(self._let_in()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.term()

    @property
    def now(self) -> float:
        return time.perf_counter()

    def begin(self) -> None:
        """A window begins."""
        self.meter.begin(self.now)
        self.occupancy, self.steps = Occupancy(), Steps([], [])
        self.num_computed = 0

    def submit(self, sequence: Sequence) -> None:
        self.scheduler.submit(sequence)
        self._driver.wake()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looked at after each result."""

        async def met() -> None:
            while self._lost is None and not condition():
                self._news.clear()
                await self._news.wait()

        await while_alive(met(), self._executor.service)
        if self._lost is not None:
            raise ServingFailed(self._lost)

    async def window(self, seconds: float) -> None:
        """Measure for so long, from now."""
        self.begin()
        end = self.now + seconds
        await self.until(lambda: self.meter.now >= end)

    def _planned(self, plan: Plan) -> None:
        work = self._works[plan.step] = StepWork.of(plan, self.scheduler.state)
        self.num_computed += work.num_tokens
        self.occupancy.add(self.scheduler.state)

    async def _let_in(self) -> None:
        """Those that come at times of their own; others come as results make room for them."""
        while self._arrivals is not None:
            self._take_arrivals()
            next_at = self._arrivals.next_at()
            if next_at is None:
                return
            await asyncio.sleep(max(next_at - self.now, 0))

    def _take_arrivals(self) -> None:
        if self._arrivals is not None:
            for sequence in self._arrivals.due(self.now, self.scheduler.state.num_waiting):
                self.submit(sequence)

    def attached_executors(self) -> list[str]:
        return []

    def on_session(self, driver: Driver, attached: pb.Attached) -> None:
        pass

    async def on_attached(self, driver: Driver, session: ExecutorSession, hopeless: list[Sequence]) -> None:
        num_leased, wanted = self.scheduler.state.cache.pool.num_leased, self.scheduler.num_blocks
        if wanted is not None and num_leased < wanted:
            self._lost = f"{num_leased} blocks are lent where {wanted} were expected: is another scheduler there?"
        if hopeless:
            self._lost = f"{len(hopeless)} sequences can never fit {len(self.scheduler.state.lease.block_ids)} blocks"
        self._news.set()

    def on_plan(self) -> None:
        pass

    def is_late(self) -> bool:
        return False

    def on_tokens(self, applied: Applied) -> None:
        self.meter.take(applied, self.now)

    def on_applied(self, applied: Applied) -> None:
        step_us, self._step_us = self._driver.step_us - self._step_us, self._driver.step_us
        work = self._works.pop(min(self._works))  # a result's plan is the oldest one in flight
        if work.num_tokens:
            self.steps.works.append(work)
            self.steps.seconds.append(step_us / 1e6)
        self._take_arrivals()
        self._news.set()

    def on_lost(self, driver: Driver, ran: list[Sequence], *, alone: bool) -> None:
        self._lost = f"the executor was lost while {len(ran)} sequences ran"
        self._news.set()


async def _facts(endpoint: str) -> tuple[Lease, str]:
    with zmq.Context() as context:
        session = ExecutorSession(context, LinkOptions(endpoint, "claims", RESULT_TIMEOUT_S))
        try:
            attached, lease = await session.attach()
            session.say_goodbye()
            return lease, attached.model.name
        finally:
            session.close()
