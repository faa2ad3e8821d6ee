"""Faults of every kind at random: executors and schedulers killed and frozen, the ways between them cut and stalled;
and calls that are made until they have been answered, each of which knows its answer."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from paged.client import Client, UnavailableError
from tests.processes import Service
from tests.system.proxy import Proxy
from tests.system.replicas import Replicas
from tests.system.requests import ready

LONGEST_PAUSE_S = 60.0
LONG_FREEZE_S = 4.0  # longer than heartbeats are waited for


@dataclass
class Wanted:
    """A request, as the client's options, and its one right answer: the ids of each index."""

    kind: str
    prompt: list[int]
    options: dict
    expected: list[list[int]]
    attempts: int = 0

    async def ask(self, client: Client) -> None:
        """Once. AssertionError if anything that comes is wrong, lost or there twice; UnavailableError as it comes."""
        self.attempts += 1
        said: list[list[int]] = [[] for _ in self.expected]
        finished: set[int] = set()
        try:
            async for message in client.generate(self.prompt, **self.options):
                assert message.index not in finished, "something came after the end"
                said[message.index] += message.token_ids
                if message.HasField("finish"):
                    finished.add(message.index)
        except UnavailableError:
            for ids, right in zip(said, self.expected, strict=True):
                assert ids == right[: len(ids)], (self.kind, ids, right)
            raise
        assert said == self.expected, self.kind
        assert len(finished) == len(said)


@dataclass
class Linked(Replicas):
    """Replicas with a proxy before each executor: what schedulers are told is the proxy's endpoint."""

    proxies: dict[str, Proxy] = field(default_factory=dict)  # by the executor's endpoint

    @property
    def endpoints(self) -> list[str]:
        return [f"tcp://127.0.0.1:{proxy.port}" for proxy in self.proxies.values()]

    async def start_linked(self, num_schedulers: int, num_executors: int) -> None:
        await asyncio.to_thread(self.start_executors, num_executors)
        for endpoint in self.executors:
            self.proxies[endpoint] = await Proxy(int(endpoint.rpartition(":")[2])).start()
        await asyncio.to_thread(self.start_schedulers, num_schedulers)

    async def close(self) -> None:
        for proxy in self.proxies.values():
            await proxy.close()


class Chaos:
    """`run` until so many faults have happened. Whatever has suffered one is there again before it suffers another."""

    def __init__(
        self,
        replicas: Linked,
        chance: random.Random,
        pause_s: float,
        *,
        spare_schedulers: bool = False,
        answers_between: int = 0,
    ) -> None:
        self._replicas = replicas
        self._chance = chance
        self._pause_s = pause_s  # at most, between faults of one kind of replica
        self._kinds = [self._of_an_executor, self._of_a_link]
        if not spare_schedulers:
            self._kinds.append(self._of_a_scheduler)
        self._answers_between = answers_between  # calls that must end between two faults of one kind of replica
        self.num_answered = 0
        self._left = 0
        self.counts: Counter[str] = Counter()

    async def run(self, num_faults: int) -> None:
        self._left = num_faults
        async with asyncio.TaskGroup() as tasks:
            for fault in self._kinds:
                tasks.create_task(self._again_and_again(fault))

    async def _again_and_again(self, fault: Callable[[], Awaitable[str]]) -> None:
        while self._left > 0:
            self._left -= 1
            self.counts[await fault()] += 1
            await asyncio.sleep(self._chance.uniform(0, self._pause_s))
            wanted = self.num_answered + self._answers_between
            async with asyncio.timeout(LONGEST_PAUSE_S):
                while self.num_answered < wanted:
                    await asyncio.sleep(0.05)

    async def _of_an_executor(self) -> str:
        number = self._chance.randrange(len(self._replicas.executors))
        endpoint, service = list(self._replicas.executors.items())[number]
        if self._chance.random() < 0.4:
            return "executor frozen" + await self._freeze(service)
        await asyncio.to_thread(service.kill)
        self._replicas.executors[endpoint] = again = self._replicas.new_executor(number, endpoint)
        await asyncio.to_thread(again.wait_until_ready)
        return "executor killed"

    async def _of_a_scheduler(self) -> str:
        number = self._chance.randrange(len(self._replicas.schedulers))
        address, service = list(self._replicas.schedulers.items())[number]
        if self._chance.random() < 0.5:
            return "scheduler frozen" + await self._freeze(service)
        await asyncio.to_thread(service.kill)
        self._replicas.schedulers[address] = again = self._replicas.new_scheduler(number, address)
        await asyncio.to_thread(again.wait_until_ready)
        async with Client(address) as client:
            await ready(client, 60)
        return "scheduler killed"

    async def _of_a_link(self) -> str:
        proxy = self._chance.choice(list(self._replicas.proxies.values()))
        kind = self._chance.choice(["cut", "all cut", "stalled"])
        if kind == "stalled":
            async with proxy.stalled():
                await asyncio.sleep(self._chance.choice([0.2, 0.5, LONG_FREEZE_S]))
            return "link stalled"
        async with asyncio.timeout(60):
            while not proxy.cut(self._chance if kind == "cut" else None):
                await asyncio.sleep(0.01)
        return f"link {kind}"

    async def _freeze(self, service: Service) -> str:
        seconds = self._chance.choice([0.1, 0.5, LONG_FREEZE_S])
        service.freeze()
        try:
            await asyncio.sleep(seconds)
        finally:
            service.thaw()
        return " for long" if seconds == LONG_FREEZE_S else ""


async def through_chaos(
    chaos: Chaos, target: str, make: Callable[[], Wanted], *, concurrency: int, num_faults: int, end_s: float
) -> list[Wanted]:
    """So many calls at once, new ones for those that are answered, until all faults have happened; then all must end
    within `end_s`. Returns what was wanted; all of it has been answered."""
    over = asyncio.Event()
    made: list[Wanted] = []

    async def one(client: Client) -> None:
        while not over.is_set():
            wanted = make()
            made.append(wanted)
            while True:
                with contextlib.suppress(UnavailableError):
                    await wanted.ask(client)
                    chaos.num_answered += 1
                    break
                await asyncio.sleep(0.1)

    async with Client(target) as own, Client(target, share_calls=True) as shared, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(one((own, shared)[number % 2])) for number in range(concurrency)]
        await chaos.run(num_faults)
        over.set()
        _, hung = await asyncio.wait(asking, timeout=end_s)
        assert not hung, f"{len(hung)} calls hang"
    return made
