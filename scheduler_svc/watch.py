"""What happens, told to people who look on: `paged top` and the block map page. It costs nothing while nobody does.

A watcher asks for the state of this moment, each time that its reader has taken the message before and its period is
over. So who is slow gets fewer messages, none of them old. Watchers of one moment share what is made of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from paged.v1 import control_pb2
from scheduler_svc.core.block_states import BLANK, CACHED, HELD_BY_NONE, NOT_LENT, States, block_states, changed_runs
from scheduler_svc.core.prefix_tree import prefix_tree
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.driver import Driver
from scheduler_svc.errors import NotThere, TooManyWatchers
from scheduler_svc.fleet import Fleet
from scheduler_svc.live_requests import block_tables, in_order, live_request
from scheduler_svc.samples import Samples

MOMENT_S = 0.05
MAX_REQUESTS = 1000

Load = control_pb2.GetLoadResponse


class Watch:
    """Tells of the fleet and of `requests`, by id. `tenant` None means those of all tenants."""

    def __init__(
        self, fleet: Fleet, requests: Mapping[str, Samples], load: Callable[[], Load], max_watchers: int
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._load = load
        self._max_watchers = max_watchers
        self._num_watchers = 0
        self._moment: _Moment | None = None

    @property
    def is_watched(self) -> bool:
        return self._num_watchers > 0

    async def messages(
        self, period_s: float, max_requests: int, tenant: str | None
    ) -> AsyncGenerator[control_pb2.WatchResponse, None]:
        """The present state, and again after each period. Raises TooManyWatchers."""
        if self._num_watchers >= self._max_watchers:
            raise TooManyWatchers(f"{self._max_watchers} watch already, max_watchers is reached")
        self._num_watchers += 1
        try:
            watcher = _Watcher()
            while True:
                began = time.monotonic()
                yield watcher.message(moment := self._now(), self._told(moment, tenant), max_requests)
                await asyncio.sleep(max(began + period_s - time.monotonic(), MOMENT_S))
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._moment = None

    def block_tables(self, request_id: str, tenant: str | None) -> control_pb2.GetBlockTablesResponse:
        """Of a live request. Raises NotThere."""
        samples = self._requests.get(request_id)
        if samples is None or tenant not in (None, samples.first.tenant):
            raise NotThere(f"request_id: no live request is called {request_id[:128]!r}")
        return control_pb2.GetBlockTablesResponse(
            request=live_request(request_id, samples, self._endpoints()), tables=block_tables(samples)
        )

    async def prefix_tree(self, executor: str, max_blocks: int) -> control_pb2.GetPrefixTreeResponse:
        """Of the executor there, or the only one. It is laid out in a worker thread. Raises NotThere."""
        drivers = self._fleet.drivers
        if not executor and len(drivers) == 1:
            (executor,) = drivers
        driver = drivers.get(executor)
        if driver is None:
            known = ", ".join(sorted(drivers)) or "none is known"
            raise NotThere(f"executor: no executor {executor[:128]!r}; {known}")
        links = driver.scheduler.state.cache.links()
        nodes = await asyncio.to_thread(prefix_tree, links, max_blocks)
        return control_pb2.GetPrefixTreeResponse(
            executor=executor,
            num_blocks=len(links.blocks),
            blocks=[
                control_pb2.PrefixBlock(
                    hash=node.digest, parent=node.parent + 1, block=node.block, count=node.count, depth=node.depth
                )
                for node in nodes
            ],
        )

    def _now(self) -> "_Moment":
        moment, now = self._moment, time.monotonic()
        if moment is None or now - moment.at >= MOMENT_S:
            drivers = [driver for _, driver in sorted(self._fleet.drivers.items())]
            moment = self._moment = _Moment(now, self._load(), [_Blocks.of(driver) for driver in drivers])
        return moment

    def _told(self, moment: "_Moment", tenant: str | None) -> "_Requests":
        """The requests of that moment."""
        told = moment.requests.get(tenant)
        if told is None:
            endpoints = self._endpoints()
            own = [(k, samples) for k, samples in self._requests.items() if tenant in (None, samples.first.tenant)]
            ids = {samples: request_id for request_id, samples in own}
            first = in_order(ids)[:MAX_REQUESTS]
            told = _Requests(len(own), [live_request(ids[samples], samples, endpoints) for samples in first])
            moment.requests[tenant] = told
        return told

    def _endpoints(self) -> dict[Scheduler, str]:
        return {driver.scheduler: driver.endpoint for driver in self._fleet.drivers.values()}


@dataclass(frozen=True, slots=True)
class _Requests:
    num: int
    first: list[control_pb2.LiveRequest]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Of one executor, at one moment; `message` lacks what depends on the watcher."""

    message: control_pb2.ExecutorBlocks
    states: States
    num_copies: int
    last_copies: list[int]

    @classmethod
    def of(cls, driver: Driver) -> "_Blocks":
        state = driver.scheduler.state
        states = block_states(state)
        lent, most = state.cache.pool, state.lease.most
        message = control_pb2.ExecutorBlocks(
            endpoint=driver.endpoint,
            block_size=state.lease.block_size,
            session=driver.num_sessions if driver.is_attached else 0,
            num_blocks=len(states),
            blank_blocks=int((states == BLANK).sum()),
            cached_blocks=int((states == CACHED).sum()),
            used_blocks=int((states > HELD_BY_NONE).sum()),
            shared_blocks=int((states > HELD_BY_NONE + 1).sum()),
            copies=driver.counts.copies,
            lent_blocks=lent.num_leased,
            lent_rows=state.columns.num_leased,
            lent_tokens_per_step=state.tokens_per_step,
            most_blocks=most.blocks,
            most_rows=most.rows,
            most_tokens_per_step=most.tokens,
            free_rows=state.columns.num_free_rows,
            waiting_sequences=state.num_waiting,
        )
        return cls(message, states, driver.counts.copies, list(driver.counts.last_copies))


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    load: Load
    blocks: list[_Blocks]
    requests: dict[str | None, _Requests] = field(default_factory=dict)  # by tenant, as watchers ask for them


@dataclass(slots=True)
class _Watcher:
    """What one watcher has been told."""

    before: _Moment | None = None
    told: dict[tuple[str, int], _Blocks] = field(default_factory=dict)  # by endpoint and session

    def message(self, moment: _Moment, requests: _Requests, max_requests: int) -> control_pb2.WatchResponse:
        message = control_pb2.WatchResponse(
            load=moment.load,
            requests=requests.first[:max_requests],
            num_requests=requests.num,
            executors=[self._changes(blocks) for blocks in moment.blocks],
        )
        if self.before is not None and moment.at > self.before.at:
            message.rates.CopyFrom(_rates(self.before, moment))
        self.before = moment
        self.told = {(blocks.message.endpoint, blocks.message.session): blocks for blocks in moment.blocks}
        return message

    def _changes(self, blocks: _Blocks) -> control_pb2.ExecutorBlocks:
        message = control_pb2.ExecutorBlocks()
        message.CopyFrom(blocks.message)
        before = self.told.get((message.endpoint, message.session))
        known = np.full(0, NOT_LENT, np.uint8) if before is None else before.states
        message.runs.extend(
            control_pb2.BlockRun(begin=begin, states=states) for begin, states in changed_runs(known, blocks.states)
        )
        if before is not None and (num_new := blocks.num_copies - before.num_copies) > 0:
            message.copied_blocks.extend(blocks.last_copies[-num_new:])
        return message


def _rates(before: _Moment, after: _Moment) -> control_pb2.Rates:
    period_s = after.at - before.at

    def rate(count: Callable[[_Moment], int]) -> float:
        return max(count(after) - count(before), 0) / period_s  # counts of an executor that is gone go with it

    return control_pb2.Rates(
        period_ms=round(period_s * 1000),
        prompt_tokens_per_s=rate(lambda moment: moment.load.prompt_tokens),
        generated_tokens_per_s=rate(lambda moment: moment.load.generated_tokens),
        finished_requests_per_s=rate(lambda moment: moment.load.finished_requests),
        steps_per_s=rate(lambda moment: sum(executor.steps for executor in moment.load.executors)),
        copied_blocks_per_s=rate(lambda moment: sum(blocks.num_copies for blocks in moment.blocks)),
    )
