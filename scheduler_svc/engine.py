"""The engine: takes requests for the models that executors serve, and gives answers; one face for the API."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator
from typing import cast

import structlog

from paged.v1 import control_pb2
from scheduler_svc.backlog import Backlog, BacklogLimits
from scheduler_svc.block_watch import BlockChanges, watch_blocks
from scheduler_svc.core.bounds import capacity_of, model_len, reach
from scheduler_svc.core.cache_events import Told
from scheduler_svc.core.prefix import prefix_hashes
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.discovery import Discovery
from scheduler_svc.errors import (
    DuplicateRequest,
    FieldViolation,
    InvalidRequest,
    PagedError,
    RequestAborted,
    Unavailable,
)
from scheduler_svc.feasibility import check_in_time
from scheduler_svc.gathering import GatheredReader, Gathering
from scheduler_svc.loads import load_of
from scheduler_svc.opening import open_request
from scheduler_svc.request_lives import RequestLives
from scheduler_svc.requests import Delta, GenerationRequest
from scheduler_svc.samples import Samples
from scheduler_svc.served_model import ServedModel
from scheduler_svc.settings import SchedulerSettings, tenants_of
from scheduler_svc.watch import Watch

LONG_PROMPT_TOKENS = 4096  # hashed in a worker thread

log = structlog.get_logger()


class Engine:
    """Takes requests, gives answers. `run` until cancelled; everything is on one event loop."""

    def __init__(self, settings: SchedulerSettings, discovery: Discovery | None = None) -> None:
        self._settings = settings
        self._is_stopping = False
        self.tenants = tenants_of(settings)
        self.lives = lives = RequestLives(settings, discovery or Discovery(settings.executor_endpoints), self.tenants)
        self.fleet, self.delivery, self.times = lives.fleet, lives.delivery, lives.times
        limits = BacklogLimits(settings.max_waiting_requests, settings.max_waiting_tokens)
        self._backlog = Backlog(limits, self.tenants, self.fleet.accounts, lives.drain_rate, lives.num_queued)
        new_wait_s, wait_s = settings.new_request_wait_s, settings.executor_wait_s
        self._new_request_wait_s = wait_s if new_wait_s is None else min(new_wait_s, wait_s)
        self.watch = Watch(self.fleet, lives.samples, self.load, settings.max_watchers)

    # --- life ---

    async def run(self) -> None:
        """Drive the executors until cancelled."""
        try:
            await self.fleet.run()
        finally:
            self.lives.masks.close()

    def stop(self) -> None:
        """Take no new requests; those that run go on."""
        self._is_stopping = True

    async def drained(self, seconds: float) -> None:
        """Until no request is left, or this time has passed."""
        end = time.monotonic() + seconds
        while self.lives.samples and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def fail_all(self, error: PagedError) -> None:
        """End every request with this error."""
        self.lives.fail_all(error)

    @property
    def ready(self) -> bool:
        """An executor is attached and its steps complete, and requests are taken."""
        executors = (executor for model in self.fleet.models for executor in model.executors)
        return not self._is_stopping and not all(executor.is_stalled for executor in executors)

    # --- models ---

    def model(self, name: str) -> ServedModel:
        """The model of that name, or the only one. Raises ModelNotFound, InvalidRequest, Unavailable."""
        return self.fleet.models.named(name)

    @property
    def models(self) -> list[ServedModel]:
        """All that are ready, by name."""
        return sorted((model for model in self.fleet.models if model.is_ready), key=lambda model: model.name)

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answers as they come; closing or cancelling the generator frees everything.

        Raises DuplicateRequest, QueueFull, DeadlineTooShort, ModelNotFound, InvalidRequest, Unavailable; later
        RequestAborted, RequestFailed, DeadlineExceeded.
        """
        samples = await self._opened(request)
        try:
            while not samples.are_finished:
                yield await samples.next_delta()
        finally:
            self._close(samples)

    def gathering(self) -> Gathering:
        """Somebody who takes the answers to many requests together."""
        return Gathering(self.delivery)

    async def gathered(self, request: GenerationRequest, gathering: Gathering) -> GatheredReader:
        """The request's place in the gathering, through which its answers come until `leave`, which must follow. Raises
        what `generate` does: what that raises later ends the reader."""
        samples = await self._opened(request, gathering)
        return cast(GatheredReader, samples.reader)

    def leave(self, reader: GatheredReader) -> None:
        """Everything of the reader's request is freed."""
        reader.end()
        self._close(self.lives.samples[reader.request_id])

    async def _opened(self, request: GenerationRequest, gathering: Gathering | None = None) -> Samples:
        """`_close` must follow."""
        model = self.model(request.model)
        self._check_acceptable(request, model)
        place, samples = self._backlog.enter(request), None
        try:
            echo = await model.detokenize(request.prompt_ids, True) if request.echo else None
            samples = self._open(request, model, echo, gathering)
            if request.grammar is not None:
                await samples.open_with(self.lives.masks.begin(request.grammar, samples.answers, model.grammars))
            await self._submit(samples.first, model, request)
        except BaseException:
            if samples is not None:
                self._close(samples)
            else:
                self._backlog.leave(request.tenant)
            raise
        finally:
            self._backlog.note_opened(place)
        return samples

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull or Unavailable where a request of the tenant would be refused whatever it is."""
        self._check_running()
        self._backlog.check(tenant)

    def fail_request(self, request_id: str, error: PagedError) -> None:
        """End a request with this error, if it is live."""
        self.lives.fail_request(request_id, error)

    def abort(self, request_ids: list[str]) -> list[str]:
        found = [request_id for request_id in request_ids if request_id in self.lives.samples]
        for request_id in found:
            self.lives.fail_request(request_id, RequestAborted("ended through the control service"))
        return found

    def flush_prefix_cache(self) -> int:
        num_blocks = sum(driver.scheduler.flush_prefix_cache() for driver in self.fleet.attached)
        log.info("prefix_cache_flushed", blocks=num_blocks)
        return num_blocks

    def watch_prefix_cache(self) -> AsyncGenerator[tuple[str, Told], None]:
        """What each executor has cached, and each change. Raises TooManyWatchers."""
        return self.fleet.cache_watch.watch()

    def watch_cached_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        """The blocks that are cached anywhere, with what they hold, and each change. Raises TooManyWatchers."""
        return watch_blocks(self.fleet.cache_watch)

    @property
    def num_unknown_blocks(self) -> int:
        """Those that were cached before anybody watched them."""
        return self.fleet.cache_watch.num_unknown

    def load(self) -> control_pb2.GetLoadResponse:
        return load_of(self.fleet, self.lives.outcomes, self.delivery)

    def _open(
        self, request: GenerationRequest, model: ServedModel, echo: str | None, gathering: Gathering | None
    ) -> Samples:
        self._check_acceptable(request, model)
        if max(request.prompt_ids) >= model.facts.vocab_size:
            raise Unavailable("the model has changed since the prompt was tokenized; try again")
        samples = open_request(request, model.text.tokenizer, model.facts.eos_token_ids, echo, self.delivery, gathering)
        samples.model, samples.trace = model.name, request.trace
        for answer in samples.answers:
            answer.sequence.scheduler = model.waiting  # until it is placed
        self.lives.begin(samples, request.expires_at)
        return samples

    async def _submit(self, sequence: Sequence, model: ServedModel, request: GenerationRequest) -> None:
        """Into the queue of an executor; a long prompt is hashed first, in a worker thread."""
        schedulers = model.schedulers
        if schedulers and not sequence.bypass_cache and len(sequence.token_ids) > LONG_PROMPT_TOKENS:
            state = schedulers[0].state  # hashes are the same for all
            if state.prefix_caching:
                state.stretch(sequence)
                block_size, root = state.hashed_block_size, state.cache_root(sequence)
                hashes = await asyncio.to_thread(prefix_hashes, sequence.token_ids, block_size, root)
                if (block_size, root) == (model.facts.block_size, state.cache_root(sequence)):
                    sequence.block_hashes = hashes
        if sequence.state is not State.NEW:  # aborted meanwhile
            return
        if model.executors:
            self._check_fits(sequence, model)
        now = asyncio.get_running_loop().time()
        if request.expires_at < math.inf:
            check_in_time(request, sequence, model.executors, self.lives.drain_rate, request.expires_at - now)
        if excess := self.lives.wait_limit.excess(sequence, model):
            raise self.lives.queue_full(excess)
        self.fleet.dispatch.submit(sequence, model)

    def _check_acceptable(self, request: GenerationRequest, model: ServedModel) -> None:
        self._check_running()
        without_s = model.without_executor_s
        if without_s > self._new_request_wait_s:
            raise Unavailable(f"no executor has been attached for {without_s:.1f} s")
        if request.request_id in self.lives.samples:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in use by a live request")

    def _check_running(self) -> None:
        if self._is_stopping:
            raise Unavailable("the scheduler is shutting down")

    def _check_fits(self, sequence: Sequence, model: ServedModel) -> None:
        """Raises InvalidRequest for what the model's length, or the memory of its largest executor, can never hold. One
        that is lost counts, as long as it may come back: the request can wait for it."""
        longest = self._settings.max_model_len
        drivers = (*model.executors, *self.fleet.models.expected(model))
        leases = [driver.lease for driver in drivers if driver.lease is not None]
        if len(leases) == 1 and not sequence.sampling.min_tokens and reach(sequence, leases[0], longest):
            return
        largest = max(leases, key=lambda lease: capacity_of(sequence, lease))
        if sequence.group is not None and (width := sequence.group.parameters.width) > largest.most.rows:
            found = f"is {width}; the executor computes {largest.most.rows} sequences at once at most"
            raise InvalidRequest(FieldViolation("beam.width", found))
        most = min(model_len(largest, longest), capacity_of(sequence, largest)) - sequence.num_prompt
        limit = (
            f"the model's length and the executor's memory leave {max(most, 0)}; ask for less, or give it more blocks"
        )
        if most < 1:
            raise InvalidRequest(FieldViolation("prompt", f"has {sequence.num_prompt} tokens; for an answer {limit}"))
        if not any(reach(sequence, lease, longest) for lease in leases):
            raise InvalidRequest(FieldViolation("stop.max_tokens", f"is {sequence.max_tokens}; {limit}"))
        if sequence.sampling.min_tokens > most:
            raise InvalidRequest(FieldViolation("stop.min_tokens", f"is {sequence.sampling.min_tokens}; {limit}"))

    def _close(self, samples: Samples) -> None:
        """The client has its last message, or has gone."""
        self._backlog.leave(samples.first.tenant)
        self.lives.close(samples)
