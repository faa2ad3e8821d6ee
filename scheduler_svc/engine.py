"""The engine: ties core, text and link together behind one face for the API.

A result's way: link decodes, core applies, the next plan goes out, and only then are the answers served, longest
waiting first, in slices that leave the event loop free for the next result.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping

import structlog

from paged.v1 import control_pb2
from paged.v1 import executor_pb2 as pb
from scheduler_svc.answer import Answer, Outcome
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.cache_events import CacheEvents, Told, TooManyFollowers
from scheduler_svc.core.prefix import prefix_hashes
from scheduler_svc.core.results import Applied
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.driver import Driver
from scheduler_svc.errors import (
    DuplicateRequest,
    FieldViolation,
    InvalidRequest,
    PagedError,
    QueueFull,
    RequestAborted,
    RequestFailed,
    TooManyWatchers,
    Unavailable,
)
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.link.session import ExecutorSession, LinkOptions
from scheduler_svc.opening import open_request
from scheduler_svc.requests import Delta, GenerationRequest
from scheduler_svc.samples import Samples
from scheduler_svc.served_text import ServedText
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.suspects import Suspects
from scheduler_svc.text.bundle import MAX_BUNDLE_BYTES

SLICE_S = 0.002  # of the event loop for answers before links and calls get their turn
LONG_PROMPT_TOKENS = 4096  # hashed in a worker thread
RETRY_AFTER_S = 1.0
MAX_TOLD_EVENTS = 8192  # of the prefix cache, in one message
EVENTS_PAUSE_S = 0.02  # between messages about the prefix cache, so that one tells many

log = structlog.get_logger()


class Engine:
    """Takes requests, gives answers. `run` until cancelled; everything is on one event loop."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings
        self._cache_events = CacheEvents(settings.max_cache_watchers, settings.max_cache_events)
        self._scheduler = Scheduler(
            prefix_caching=settings.prefix_caching,
            watermark=settings.watermark,
            longest=settings.max_model_len,
            queue=AdmissionQueue(settings.tenant_weights, settings.ageing_tokens),
            cache_events=self._cache_events,
        )
        options = LinkOptions(
            endpoint=settings.executor_endpoint,
            scheduler_id=settings.scheduler_id,
            result_timeout_s=settings.result_timeout_s,
            max_bundle_bytes=MAX_BUNDLE_BYTES,
        )
        self._driver = Driver(self._scheduler, options, settings.idle_plan_s, listener=self)
        self._text = ServedText(settings.cache_dir)
        self._requests: dict[str, Samples] = {}
        self._dirty: deque[Answer] = deque()
        self._counts: dict[Outcome, int] = {"finished": 0, "cancelled": 0, "failed": 0}
        self._suspects = Suspects(settings.max_losses)
        self._masks = GrammarMasks(
            self._scheduler, settings.max_grammar_s, fail=self._fail_sequence, wake=self._driver.wake
        )
        self._is_stopping = False
        self.model: pb.ModelFacts | None = None

    # --- life ---

    async def run(self) -> None:
        """Drive the executor until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._driver.run())
                tasks.create_task(self._give_up_waiting())
        finally:
            self._masks.close()

    def stop(self) -> None:
        """Take no new requests; those that run go on."""
        self._is_stopping = True

    async def drained(self, seconds: float) -> None:
        """Until no request is left, or this time has passed."""
        end = time.monotonic() + seconds
        while self._requests and time.monotonic() < end:
            await asyncio.sleep(0.02)

    def fail_all(self, error: PagedError) -> None:
        """End every request with this error."""
        for samples in list(self._requests.values()):
            self._fail(samples, error)

    @property
    def ready(self) -> bool:
        return self._driver.is_attached and self.model is not None and not self._is_stopping

    # --- text ---

    @property
    def has_chat_template(self) -> bool:
        return self._text.is_loaded and self._text.tokenizer.has_chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        return self._text.tokenizer.sampling_defaults

    async def tokenize(self, text: str, *, bounded: bool = True) -> list[int]:
        return await self._text.tokenize(text, self._max_model_len if bounded else None)

    async def tokenize_chat(self, messages: list[dict[str, str]], *, bounded: bool = True) -> list[int]:
        return await self._text.tokenize_chat(messages, self._max_model_len if bounded else None)

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
        return await self._text.detokenize(ids, skip_special_tokens)

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        return await self._text.spellings(words)

    # --- requests ---

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answers as they come; closing or cancelling the generator frees everything.

        Raises DuplicateRequest, QueueFull, InvalidRequest, Unavailable; later RequestAborted, RequestFailed.
        """
        echo = await self._text.detokenize(request.prompt_ids, True) if request.echo else None
        samples = self._open(request, echo)
        try:
            if request.grammar is not None and self.model is not None:
                tokenizer, vocab_size = self._text.tokenizer, self.model.vocab_size
                await self._masks.begin(request.grammar, samples.answers, tokenizer, vocab_size)
            await self._submit(samples.first)
            while not samples.are_finished:
                yield await samples.next_delta()
        finally:
            self._forget(request.request_id, samples)

    def abort(self, request_ids: list[str]) -> list[str]:
        found = [request_id for request_id in request_ids if request_id in self._requests]
        for request_id in found:
            self._fail(self._requests[request_id], RequestAborted("ended through the control service"))
        return found

    def flush_prefix_cache(self) -> int:
        num_blocks = self._scheduler.flush_prefix_cache()
        log.info("prefix_cache_flushed", blocks=num_blocks)
        return num_blocks

    async def watch_prefix_cache(self) -> AsyncGenerator[Told, None]:
        """What is cached, and each change. Raises TooManyWatchers."""
        news = asyncio.Event()
        try:
            follower = self._cache_events.follow(news.set)
        except TooManyFollowers:
            raise TooManyWatchers(
                f"{self._settings.max_cache_watchers} watch the prefix cache, max_cache_watchers is reached"
            ) from None
        try:
            while True:
                news.clear()
                while (told := follower.take(MAX_TOLD_EVENTS)) is not None:
                    yield told
                await news.wait()
                await asyncio.sleep(EVENTS_PAUSE_S)
        finally:
            follower.close()

    def load(self) -> control_pb2.GetLoadResponse:
        core, counters = self._scheduler.state, self._scheduler.state.counters
        pool = core.cache.pool
        return control_pb2.GetLoadResponse(
            running_sequences=core.num_running,
            waiting_sequences=core.num_waiting,
            peak_running_sequences=counters.peak_running,
            total_blocks=pool.num_leased,
            used_blocks=pool.num_used,
            cached_blocks=pool.num_cached,
            peak_used_blocks=counters.peak_used_blocks,
            unused_slots=core.unused_slots,
            peak_unused_slots=counters.peak_unused_slots,
            preemptions=counters.preemptions,
            finished_requests=self._counts["finished"],
            cancelled_requests=self._counts["cancelled"],
            failed_requests=self._counts["failed"],
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            executor_losses=self._driver.num_losses,
            executor_attached=self._driver.is_attached,
        )

    def _open(self, request: GenerationRequest, echo: str | None) -> Samples:
        self._check_acceptable(request)
        if self.model is not None and max(request.prompt_ids) >= self.model.vocab_size:
            raise Unavailable("the model has changed since the prompt was tokenized; try again")
        eos_token_ids = self.model.eos_token_ids if self.model is not None else ()
        samples = self._requests[request.request_id] = open_request(request, self._text.tokenizer, eos_token_ids, echo)
        return samples

    async def _submit(self, sequence: Sequence) -> None:
        """Into the core's queue; a long prompt is hashed first, in a worker thread."""
        if self._settings.prefix_caching and not sequence.bypass_cache and len(sequence.token_ids) > LONG_PROMPT_TOKENS:
            state = self._scheduler.state
            state.stretch(sequence)
            block_size, root = state.hashed_block_size, state.cache_root(sequence)
            hashes = await asyncio.to_thread(prefix_hashes, sequence.token_ids, block_size, root)
            if (block_size, root) == (state.hashed_block_size, state.cache_root(sequence)):
                sequence.block_hashes = hashes
        if sequence.state is not State.NEW:  # aborted meanwhile
            return
        if self._scheduler.is_attached:
            self._check_fits(sequence)
        self._scheduler.submit(sequence)
        self._driver.wake()

    def _check_acceptable(self, request: GenerationRequest) -> None:
        if self._is_stopping:
            raise Unavailable("the scheduler is shutting down")
        if self.model is None:
            raise Unavailable("no model is known yet; try again later")
        if self._waited_too_long():
            raise Unavailable(f"no executor has been attached for {self._settings.executor_wait_s:g} s")
        if request.request_id in self._requests:
            raise DuplicateRequest(f"request_id: {request.request_id!r} is in use by a live request")
        if self._scheduler.state.num_waiting >= self._settings.max_waiting_requests:
            raise QueueFull(
                f"{self._scheduler.state.num_waiting} sequences wait, max_waiting_requests is reached", RETRY_AFTER_S
            )

    @property
    def _max_model_len(self) -> int:
        longest = self.model.max_model_len if self.model is not None else 0
        return min(longest, self._settings.max_model_len or longest)

    def _check_fits(self, sequence: Sequence) -> None:
        """Raises InvalidRequest for what the executor's memory, or the model's length, can never hold."""
        state = self._scheduler.state
        fits = state.bound(sequence)
        if sequence.group is not None and (width := sequence.group.parameters.width) > state.num_rows:
            found = f"is {width}; the executor computes {state.num_rows} sequences at once at most"
            raise InvalidRequest(FieldViolation("beam.width", found))
        most = min(state.max_model_len, state.capacity_of(sequence)) - sequence.num_prompt
        limit = (
            f"the model's length and the executor's memory leave {max(most, 0)}; ask for less, or give it more blocks"
        )
        if most < 1:
            raise InvalidRequest(FieldViolation("prompt", f"has {sequence.num_prompt} tokens; for an answer {limit}"))
        if not fits:
            raise InvalidRequest(FieldViolation("stop.max_tokens", f"is {sequence.max_tokens}; {limit}"))
        if sequence.sampling.min_tokens > most:
            raise InvalidRequest(FieldViolation("stop.min_tokens", f"is {sequence.sampling.min_tokens}; {limit}"))

    def _fail(self, samples: Samples, error: PagedError) -> None:
        self._end(samples)
        samples.fail(error)
        self._driver.wake()

    def _fail_sequence(self, sequence: Sequence, error: PagedError) -> None:
        self._fail(self._requests[sequence.request_id], error)

    def _forget(self, request_id: str, samples: Samples) -> None:
        """The client has its last message, or has gone."""
        del self._requests[request_id]
        if samples.first.state is not State.NEW:  # else it was refused
            self._counts[samples.outcome] += 1
        self._end(samples)
        samples.fail(RequestAborted("closed"))
        self._driver.wake()

    def _end(self, samples: Samples) -> None:
        """Nothing of the request is left in the core."""
        for answer in reversed(samples.answers):  # those that are held go before the one that holds them
            self._suspects.forget(answer)
            self._scheduler.cancel(answer.sequence)

    # --- what the driver tells ---

    async def on_attached(self, attached: pb.Attached, session: ExecutorSession, hopeless: list[Sequence]) -> None:
        for sequence in hopeless:
            error = Unavailable("the executor that has come back has too little memory for this request")
            self._fail(self._requests[sequence.request_id], error)
        if self.model is not None and self.model.fingerprint != attached.model.fingerprint:
            log.warning("model_changed", old=self.model.fingerprint, new=attached.model.fingerprint)
            self.fail_all(Unavailable("the executor that has come back serves another model"))
            self.model = None  # until its tokenizer has been loaded
        await self._text.load(attached.tokenizer_hash, session)
        self.model = attached.model
        log.info("serving", model=self.model.name, architecture=self.model.architecture)

    def on_tokens(self, applied: Applied) -> None:
        self._masks.on_tokens(applied.updated)

    def on_applied(self, applied: Applied) -> None:
        self._suspects.note_tokens(applied.updated)
        was_empty = not self._dirty
        for sequences in (applied.updated, applied.ended):
            for sequence in sequences:
                answer = sequence.owner
                if not answer.is_dirty:
                    answer.is_dirty = True
                    self._dirty.append(answer)
        if was_empty and self._dirty:
            asyncio.get_running_loop().call_soon(self._serve_answers)

    def on_lost(self, ran: list[Sequence]) -> None:
        for answer in self._suspects.note_loss(ran):
            self._fail(
                self._requests[answer.sequence.request_id],
                RequestFailed("the executor was lost each time it computed this request"),
            )

    def _serve_answers(self) -> None:
        """Turn new tokens into text for those who have waited longest, for one slice of time."""
        end = time.perf_counter() + SLICE_S
        while self._dirty:
            answer = self._dirty.popleft()
            answer.is_dirty = False
            if not answer.is_over:
                self._take(answer)
            if time.perf_counter() > end:
                break
        if self._dirty:
            asyncio.get_running_loop().call_soon(self._serve_answers)

    def _take(self, answer: Answer) -> None:
        request_id, was_over = answer.sequence.request_id, answer.is_over
        try:
            answer.take()
        except Exception:  # a fault of ours in one text must not stop the others
            log.exception("text_failed", request=request_id)
            answer.fail(RequestFailed("the text could not be made"))
        if answer.error is not None:
            if not was_over:
                log.warning("answer_failed", request=request_id, reason=str(answer.error))
            self._fail(self._requests[request_id], answer.error)  # the other samples are of no use now
        elif answer.is_over:
            self._scheduler.cancel(answer.sequence)  # a stop string: the core does not know yet

    # --- without an executor ---

    def _waited_too_long(self) -> bool:
        lost_at = self._driver.lost_at
        return lost_at is not None and time.monotonic() - lost_at > self._settings.executor_wait_s

    async def _give_up_waiting(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            if self._requests and self._waited_too_long():
                self.fail_all(Unavailable(f"no executor for {self._settings.executor_wait_s:g} s"))
