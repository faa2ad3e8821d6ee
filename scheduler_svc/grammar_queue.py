"""Whose grammar is compiled next: one grammar at a time, tenants in turns, and so many wait at most.

One may take seconds. So a tenant's heavy grammars must hold up its own requests, and of another tenant's no more than
the one that is being compiled. Requests that wait for the same grammar of the same tenant wait in one place.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from scheduler_svc.drain_rate import UNKNOWN_RETRY_S
from scheduler_svc.errors import QueueFull
from scheduler_svc.text.grammars import Grammar, Grammars

Compile = Callable[[Grammars, Grammar], Awaitable[None]]
Key = tuple[str, Grammars, Grammar]


@dataclass(slots=True, eq=False)
class _Job:
    """`done` has what came of it, for those who wait."""

    key: Key
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    num_waiting: int = 0

    @property
    def tenant(self) -> str:
        return self.key[0]


class GrammarQueue:
    """`compile_one` raises what its callers are to be told; it may be cancelled."""

    def __init__(self, compile_one: Compile, max_waiting: int, max_tenant_waiting: int) -> None:
        self._compile_one = compile_one
        self._max_waiting = max_waiting
        self._max_tenant_waiting = max_tenant_waiting
        self._jobs: dict[Key, _Job] = {}  # that are not done
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, who comes next first
        self._current: tuple[_Job, asyncio.Future[None]] | None = None
        self._runner: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Whoever waits is not waited for any more."""
        if self._runner is not None:
            self._runner.cancel()

    async def compiled(self, tenant: str, grammars: Grammars, grammar: Grammar) -> None:
        """Until the grammar has had its turn. Raises QueueFull, and what its compilation does. Who is cancelled leaves
        at once; what nobody waits for is given up."""
        key = (tenant, grammars, grammar)
        job = self._jobs.get(key) or self._enter(key)
        job.num_waiting += 1
        try:
            await asyncio.shield(job.done)
        finally:
            job.num_waiting -= 1
            if not job.num_waiting and not job.done.done():
                self._give_up(job)
            del job  # the error that it holds will hold this frame: neither would be freed

    def _enter(self, key: Key) -> _Job:
        num_waiting = sum(map(len, self._queues.values()))
        if num_waiting >= self._max_waiting:
            found = f"{num_waiting} grammars wait to be compiled, max_waiting_grammars is reached"
            raise QueueFull(found, UNKNOWN_RETRY_S)
        own = self._queues.get(key[0], ())
        if len(own) >= self._max_tenant_waiting:
            found = f"{len(own)} grammars of the tenant wait to be compiled, max_tenant_waiting_grammars is reached"
            raise QueueFull(found, UNKNOWN_RETRY_S)
        job = self._jobs[key] = _Job(key)
        self._queues.setdefault(job.tenant, deque()).append(job)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run(), name="grammars")
        return job

    async def _run(self) -> None:
        """While there is anything to do."""
        while self._queues:
            job = self._next()
            _, grammars, grammar = job.key
            work = asyncio.ensure_future(self._compile_one(grammars, grammar))
            self._current = job, work
            try:
                await asyncio.wait([work])
            finally:  # also where we are cancelled
                self._current = None
                work.cancel()
            self._forget(job)
            _settle(job, work)

    def _next(self) -> _Job:
        tenant, queue = self._queues.popitem(last=False)
        job = queue.popleft()
        if queue:
            self._queues[tenant] = queue  # behind the others
        return job

    def _give_up(self, job: _Job) -> None:
        if self._current is not None and self._current[0] is job:
            self._current[1].cancel()
            self._forget(job)  # who comes now waits for another one
            return
        queue = self._queues[job.tenant]
        queue.remove(job)
        if not queue:
            del self._queues[job.tenant]
        self._forget(job)

    def _forget(self, job: _Job) -> None:
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]


def _settle(job: _Job, work: asyncio.Future[None]) -> None:
    error = None if work.cancelled() else work.exception()
    if work.cancelled() or not job.num_waiting:
        job.done.cancel()
    elif error is not None:
        job.done.set_exception(error)
    else:
        job.done.set_result(None)
