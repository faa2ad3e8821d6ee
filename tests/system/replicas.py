"""Several schedulers over several executors, and what may happen to them: killed, stopped, frozen, started again."""

import asyncio
import contextlib
import itertools
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from paged.client import Client, UnavailableError
from paged.v1 import control_pb2
from tests.processes import Service, start_executor, start_scheduler
from tests.system.requests import ready

START_S = 180.0  # several real executors at once, on a busy machine
LONGEST_FREEZE_S = 7.0  # longer than what executors wait for a silent scheduler, and schedulers for a silent executor


@dataclass
class Replicas:
    """A replica that is started again listens where it did before."""

    directory: Path
    services: list[Service]
    executor_flags: list[str]
    scheduler_flags: list[str] = field(default_factory=list)
    executors: dict[str, Service] = field(default_factory=dict)  # by endpoint
    schedulers: dict[str, Service] = field(default_factory=dict)  # by address
    away: list[list[float]] = field(default_factory=list)  # from when a scheduler was told to end until it served again
    ending: list[Service] = field(default_factory=list)  # told to stop, or killed

    def start(self, num_schedulers: int, num_executors: int) -> None:
        self.start_executors(num_executors)
        self.start_schedulers(num_schedulers)

    def start_executors(self, count: int) -> None:
        started = [self.new_executor(i, "tcp://127.0.0.1:0") for i in range(count)]
        self.executors = {service.wait_until_ready(START_S).address: service for service in started}

    def start_schedulers(self, count: int) -> None:
        begun = [self.new_scheduler(i, "127.0.0.1:0") for i in range(count)]
        self.schedulers = {service.wait_until_ready(START_S).address: service for service in begun}

    @property
    def endpoints(self) -> list[str]:
        """Of the executors, as schedulers are told."""
        return list(self.executors)

    @property
    def target(self) -> str:
        """All schedulers, for a client that takes them in turn."""
        return "ipv4:" + ",".join(self.schedulers)

    def new_executor(self, number: int, endpoint: str) -> Service:
        place = self.directory / f"executor{number}"
        place.mkdir(exist_ok=True)
        service = start_executor(place, *self.executor_flags, endpoint=endpoint)
        self.services.append(service)
        return service

    def new_scheduler(self, number: int, address: str) -> Service:
        service = start_scheduler(
            self.directory, ",".join(self.endpoints), *self.scheduler_flags, address=address, name=f"scheduler{number}"
        )
        self.services.append(service)
        return service

    async def disturb_executors(self, chance: random.Random, pause_s: float) -> None:
        """Until cancelled; then all run."""
        while True:
            number = chance.randrange(len(self.executors))
            endpoint, service = list(self.executors.items())[number]
            with self._put_right(service):
                await asyncio.sleep(chance.uniform(0, pause_s))
                await self._suffer(service, chance)
            if service.process.poll() is not None:
                self.executors[endpoint] = self.new_executor(number, endpoint)
                await asyncio.to_thread(self.executors[endpoint].wait_until_ready, START_S)

    async def disturb_schedulers(self, chance: random.Random, pause_s: float) -> None:
        """Until cancelled; then all run."""
        while True:
            number = chance.randrange(len(self.schedulers))
            address, service = list(self.schedulers.items())[number]
            with self._put_right(service):
                await asyncio.sleep(chance.uniform(0, pause_s))
                away = [time.monotonic(), math.inf]
                self.away.append(away)
                if not await self._suffer(service, chance):
                    self.away.remove(away)
            if service.process.poll() is not None:
                self.schedulers[address] = self.new_scheduler(number, address)
                await asyncio.to_thread(self.schedulers[address].wait_until_ready, START_S)
                async with Client(address) as client:
                    await ready(client, 60)
                away[1] = time.monotonic()

    async def _suffer(self, service: Service, chance: random.Random) -> bool:
        """Whether it has ended by that."""
        fate = chance.choice(["kill", "stop", "freeze", "freeze for long"])
        if fate in ("kill", "stop"):
            self.ending.append(service)
            service.process.send_signal(signal.SIGKILL if fate == "kill" else signal.SIGTERM)
            await asyncio.to_thread(service.process.wait, 60)
            return True
        service.freeze()
        await asyncio.sleep(chance.uniform(0, 1) if fate == "freeze" else chance.uniform(1, LONGEST_FREEZE_S))
        return False

    @contextlib.contextmanager
    def _put_right(self, service: Service) -> Iterator[None]:
        try:
            yield
        finally:
            if service.process.poll() is None:
                service.thaw()

    def revive(self) -> None:
        """Whatever does not run is started."""
        for service in self.ending:
            service.process.wait(60)
        for number, (endpoint, service) in enumerate(list(self.executors.items())):
            if service.process.poll() is not None:
                self.executors[endpoint] = self.new_executor(number, endpoint)
        for number, (address, service) in enumerate(list(self.schedulers.items())):
            if service.process.poll() is not None:
                self.schedulers[address] = self.new_scheduler(number, address)
        for service in (*self.executors.values(), *self.schedulers.values()):
            service.wait_until_ready(START_S)

    async def all_serve(self, timeout_s: float) -> None:
        """Until each scheduler knows the model: with a real one's tokenizer that is long after it has executors."""
        for address in self.schedulers:
            async with Client(address) as client:
                await ready(client, timeout_s)

    async def idle_loads(self, timeout_s: float = 40) -> list[control_pb2.GetLoadResponse]:
        """Of each scheduler, once nothing runs or waits and all executors are attached to it."""

        def is_idle(load: control_pb2.GetLoadResponse) -> bool:
            attached = [part.endpoint for part in load.executors if part.attached]
            return len(attached) == len(self.executors) and not (load.running_sequences or load.waiting_sequences)

        return await self.loads_when(lambda loads: all(map(is_idle, loads)), timeout_s)

    async def loads_when(
        self, condition: Callable[[list[control_pb2.GetLoadResponse]], bool], timeout_s: float = 40
    ) -> list[control_pb2.GetLoadResponse]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Client(address)) for address in self.schedulers]
            loads: list[control_pb2.GetLoadResponse] = []
            try:
                async with asyncio.timeout(timeout_s):
                    while not (loads and condition(loads)):
                        with contextlib.suppress(UnavailableError):
                            loads = [await client.load() for client in clients]
                        await asyncio.sleep(0.05)
            except TimeoutError:
                raise AssertionError(f"still after {timeout_s} s: {loads}") from None
            return loads


async def through_disturbances(
    replicas: Replicas, calls: list[Callable[[Client], Awaitable[None]]], *, concurrency: int, seed: int, pause_s: float
) -> int:
    """Make the calls, taking schedulers in turn, while replicas of both kinds are disturbed. Returns how many have
    ended with UNAVAILABLE; each of those while a scheduler was away."""
    room, spared, num_unavailable = asyncio.Semaphore(concurrency), [], 0

    async def one(client: Client, call: Callable[[Client], Awaitable[None]]) -> None:
        nonlocal num_unavailable
        async with room:
            begin = time.monotonic()
            try:
                await call(client)
            except UnavailableError as error:
                num_unavailable += 1
                if not any(begin <= until for _, until in replicas.away):
                    spared.append(str(error))

    async with Client(replicas.target) as own, Client(replicas.target, share_calls=True) as shared:
        chances = [random.Random(seed), random.Random(seed + 1)]
        disturbing = [
            asyncio.create_task(replicas.disturb_executors(chances[0], pause_s)),
            asyncio.create_task(replicas.disturb_schedulers(chances[1], pause_s)),
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                for call, client in zip(calls, itertools.cycle((own, shared))):
                    tasks.create_task(one(client, call))
        finally:
            for task in disturbing:
                task.cancel()
            ended = await asyncio.gather(*disturbing, return_exceptions=True)
    faults = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    assert not faults, faults
    assert not spared, spared
    await asyncio.to_thread(replicas.revive)
    return num_unavailable
