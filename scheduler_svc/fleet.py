"""The executors of this scheduler: found, attached, lost and let go."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

import structlog
import zmq

from paged.addresses import is_local_endpoint
from paged.v1 import executor_pb2 as pb
from scheduler_svc.cache_watch import CacheWatch
from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.results import Applied
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import Counters
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.discovery import Discovery
from scheduler_svc.dispatch import Dispatch
from scheduler_svc.driver import Driver, LossLimit
from scheduler_svc.errors import PagedError, Unavailable
from scheduler_svc.link.curve import read_curve_keys
from scheduler_svc.link.session import ExecutorSession, LinkOptions, SessionLost
from scheduler_svc.models import Models
from scheduler_svc.served_model import ServedModel
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.text.bundle import MAX_BUNDLE_BYTES

TICK_S = 0.05

log = structlog.get_logger()


class Requests(Protocol):
    """What the fleet tells of the requests that it was given."""

    def on_tick(self) -> None:
        """Every TICK_S."""

    def on_plan(self) -> None:
        """A plan is about to be made."""

    def is_late(self) -> bool:
        """Whether answers leave so late that the next plan had better be made later."""

    def on_tokens(self, applied: Applied) -> None:
        """A result was taken in, and the next plan is made right after this."""

    def on_applied(self, applied: Applied) -> None:
        """A result was taken in, and the next plan has been sent."""

    def on_lost(self, ran: list[Sequence], *, alone: bool) -> None:
        """An executor was lost, in a step of an exclusive plan or not; `ran` wait to be computed anew, and are not
        moved yet."""

    def fail(self, sequence: Sequence, error: PagedError) -> None:
        """The sequence's request cannot be served."""

    def fail_model(self, model: ServedModel, error: PagedError) -> None:
        """Nor can any of this model's."""


class Fleet:
    """`run` until cancelled. Each executor has a driver and a scheduler of its own. Raises BadKeys."""

    def __init__(self, settings: SchedulerSettings, discovery: Discovery, requests: Requests, tenants: Tenants) -> None:
        self._settings = settings
        self._discovery = discovery
        self._requests = requests
        self._keys = None
        if settings.curve_key_file is not None and settings.curve_executor_key is not None:
            self._keys = read_curve_keys(settings.curve_key_file, settings.curve_executor_key)
        self.accounts = Accounts(tenants, settings.ageing_tokens)
        self._tasks: dict[Driver, asyncio.Task[None]] = {}
        self._driver_of: dict[Scheduler, Driver] = {}
        self._gone = Counters()  # of executors that were let go
        self._gone_losses = 0
        self.cache_watch = CacheWatch(settings.max_cache_watchers, settings.max_cache_events)
        self.drivers: dict[str, Driver] = {}  # by endpoint
        self.models = Models(settings, self.drivers.values(), self._new_scheduler)
        self.dispatch = Dispatch(self._driver_of)

    async def run(self) -> None:
        context = zmq.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look(tasks, context))
                tasks.create_task(self._tick())
        finally:
            context.destroy()

    @property
    def attached(self) -> Iterator[Driver]:
        return (driver for driver in self.drivers.values() if driver.is_attached)

    @property
    def schedulers(self) -> list[Scheduler]:
        """All that may hold requests."""
        return [*self._driver_of, *(model.waiting for model in self.models)]

    @property
    def counters(self) -> Counters:
        """Of all executors since the start; peaks are sums of those there are."""
        return Counters.sum([self._gone, *(scheduler.state.counters for scheduler in self._driver_of)])

    @property
    def num_losses(self) -> int:
        return self._gone_losses + sum(driver.num_losses for driver in self.drivers.values())

    # --- found and let go ---

    async def _look(self, tasks: asyncio.TaskGroup, context: zmq.Context) -> None:
        while True:
            found = await self._discovery.look()
            for driver in self.drivers.values():
                driver.is_found = driver.endpoint in found
            for endpoint in found:
                if endpoint not in self.drivers:
                    driver = self._new_driver(endpoint)
                    self._tasks[driver] = tasks.create_task(driver.run(context))
            await asyncio.sleep(self._settings.resolve_s)

    def _new_driver(self, endpoint: str) -> Driver:
        if self._keys is None and not is_local_endpoint(endpoint):
            log.warning("executor_link_unguarded", endpoint=endpoint, remedy="--curve-key-file, --curve-executor-key")
        scheduler = self._new_scheduler(self.cache_watch.add(endpoint))
        options = LinkOptions(
            endpoint=endpoint,
            scheduler_id=self._settings.scheduler_id,
            result_timeout_s=self._settings.result_timeout_s,
            max_bundle_bytes=MAX_BUNDLE_BYTES,
            keys=self._keys,
        )
        limit = LossLimit(self._settings.max_executor_losses, self._settings.loss_window_s)
        driver = Driver(scheduler, options, self._settings.idle_plan_s, listener=self, loss_limit=limit)
        self.drivers[endpoint] = driver
        self._driver_of[scheduler] = driver
        return driver

    def _new_scheduler(self, cache_events: CacheEvents | None = None) -> Scheduler:
        return Scheduler(
            prefix_caching=self._settings.prefix_caching,
            watermark=self._settings.watermark,
            longest=self._settings.max_model_len,
            queue=AdmissionQueue(self.accounts),
            cache_events=cache_events,
        )

    def _let_go(self, driver: Driver) -> None:
        """Its address is no executor's any more."""
        log.info("executor_gone", endpoint=driver.endpoint)
        self._tasks.pop(driver).cancel()
        self._scatter(driver, suspects=True)
        self._gone = Counters.sum([self._gone, driver.scheduler.state.counters]).without_peaks()
        self._gone_losses += driver.num_losses
        del self.drivers[driver.endpoint], self._driver_of[driver.scheduler]
        self.cache_watch.remove(driver.endpoint)

    # --- now and then ---

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._requests.on_tick()
            for driver in list(self.drivers.values()):
                if not driver.is_attached and not driver.is_found:
                    self._let_go(driver)
                elif driver.lost_s > self._settings.executor_wait_s:
                    self._scatter(driver, suspects=True)
                elif driver.is_leaving:
                    self._see_off(driver)
            for model in self.models:
                self._place_waiting(model)
                self.dispatch.relieve(model)
                self._give_up(model)

    def _scatter(self, driver: Driver, *, suspects: bool) -> None:
        model = self.models.of(driver)
        if model is not None and len(driver.scheduler.state.queue):
            self.dispatch.scatter(driver.scheduler, model, suspects=suspects)

    def _see_off(self, driver: Driver) -> None:
        """An executor that has been told to stop gets nothing new, and others take over what they can."""
        model = self.models.of(driver)
        if model is None:
            return
        model.end(driver)
        driver.scheduler.close()
        self.dispatch.vacate(driver.scheduler, model)
        self._scatter(driver, suspects=True)
        driver.leave()

    def _place_waiting(self, model: ServedModel) -> None:
        too_large = self.dispatch.place_waiting(model)
        for sequence in too_large if not self.models.expects(model) else ():
            error = Unavailable("the executor that has come back has too little memory for this request")
            self._requests.fail(sequence, error)

    def _give_up(self, model: ServedModel) -> None:
        """A model without an executor for too long serves nobody."""
        wait_s = self._settings.executor_wait_s
        if model.without_executor_s <= wait_s:
            return
        for sequence in list(model.waiting.state.queue):
            self._requests.fail(sequence, Unavailable(f"no executor for {wait_s:g} s"))
        if self.models.forget(model):
            self._requests.fail_model(model, Unavailable(f"no executor serves {model.name!r} any more"))

    # --- what drivers tell ---

    def attached_executors(self) -> list[str]:
        return [driver.attached.executor_id for driver in self.attached if driver.attached is not None]

    def on_session(self, driver: Driver, attached: pb.Attached) -> None:
        if attached.executor_id in self.attached_executors():
            raise SessionLost(f"executor {attached.executor_id} is attached by another address", refused=True)
        before = self.models.of(driver)
        ended = self.models.refuse_or_replace(driver, attached)
        if ended is not None:
            self._requests.fail_model(ended, Unavailable("the executor that has come back serves another model"))
        if before is not None and before.name != attached.model.name:
            self._scatter(driver, suspects=True)  # they are the other model's

    async def on_attached(self, driver: Driver, session: ExecutorSession, hopeless: list[Sequence]) -> None:
        for sequence in hopeless:
            error = Unavailable("the executor that has come back has too little memory for this request")
            self._requests.fail(sequence, error)
        model = self.models.of(driver)
        if model is None or driver.attached is None:
            raise RuntimeError("an executor of no model")
        await model.load(session)
        difference = model.difference(driver.attached)
        if difference:  # another one was faster
            raise SessionLost(f"not used beside others of model {model.name!r}: {difference}", refused=True)
        model.begin(driver)
        log.info("serving", model=model.name, architecture=model.facts.architecture, executors=len(model.executors))
        self._place_waiting(model)

    def on_plan(self) -> None:
        self._requests.on_plan()

    def is_late(self) -> bool:
        return self._requests.is_late()

    def on_tokens(self, applied: Applied) -> None:
        self._requests.on_tokens(applied)

    def on_applied(self, applied: Applied) -> None:
        self._requests.on_applied(applied)

    def on_lost(self, driver: Driver, ran: list[Sequence], *, alone: bool) -> None:
        model = self.models.of(driver)
        if model is not None:
            model.end(driver)
        self._requests.on_lost(ran, alone=alone)
        self._scatter(driver, suspects=False)
