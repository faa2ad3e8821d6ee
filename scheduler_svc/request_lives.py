"""The lives of requests, from where they are taken in to their one end; what the fleet tells of them on the way.

A result's way: link decodes, core applies, the next plan goes out, and only then are the answers served, longest
waiting first, in slices that leave the event loop free for the next result.
"""

import asyncio
import math
from collections.abc import Mapping

import structlog

from scheduler_svc.answer import Answer, Outcome
from scheduler_svc.core.results import Applied
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.delivery import Delivery
from scheduler_svc.discovery import Discovery
from scheduler_svc.drain_rate import DrainRate
from scheduler_svc.errors import DeadlineExceeded, PagedError, QueueFull, RequestAborted, RequestFailed
from scheduler_svc.expiries import Expiries
from scheduler_svc.fleet import Fleet
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.high_water import HighWater
from scheduler_svc.request_times import RequestTimes
from scheduler_svc.request_trace import tell_trace
from scheduler_svc.samples import Samples
from scheduler_svc.served_model import ServedModel
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.small_objects import SmallObjects
from scheduler_svc.suspects import Suspects
from scheduler_svc.wait_limit import WaitLimit

log = structlog.get_logger()


class RequestLives:
    """`begin` and `close` are the two ends of a life; whatever ends a request sooner is an error of all its answers.
    The fleet that serves them tells the rest."""

    def __init__(self, settings: SchedulerSettings, discovery: Discovery, tenants: Tenants) -> None:
        self._samples: dict[str, Samples] = {}
        self.times: dict[str, RequestTimes] = {}  # of each model that has been served
        self.outcomes: dict[Outcome, int] = {"finished": 0, "cancelled": 0, "failed": 0}
        self.delivery = Delivery(
            max_unread_bytes=settings.max_unread_bytes,
            max_total_unread_bytes=settings.max_total_unread_bytes,
            take=self._take,
            fail=self.fail_request,
        )
        self.fleet = Fleet(settings, discovery, self, tenants)
        self.masks = GrammarMasks(settings, fail=self.fail, on_late=self._on_late_mask)
        self.drain_rate = DrainRate()
        self.wait_limit = WaitLimit(settings.max_wait_s)
        self._expiries = Expiries()
        self._suspects = Suspects(settings.max_losses)
        self._high_water = HighWater()
        self._small_objects = SmallObjects()

    @property
    def samples(self) -> Mapping[str, Samples]:
        """Of the requests that are live, by id."""
        return self._samples

    def num_queued(self) -> int:
        """Sequences in queues, or held for one that is."""
        return sum(scheduler.state.num_waiting for scheduler in self.fleet.schedulers)

    # --- begin and end ---

    def begin(self, samples: Samples, expires_at: float) -> None:
        """The request waits from now on. `close` must follow."""
        request_id = samples.reader.request_id
        self._samples[request_id] = samples
        self.wait_limit.begin(request_id, asyncio.get_running_loop().time())
        if expires_at < math.inf:
            self._expiries.add(request_id, expires_at)

    def close(self, samples: Samples) -> None:
        """The client has its last message, or has gone."""
        request_id = samples.reader.request_id
        del self._samples[request_id]
        self._expiries.remove(request_id)
        self.wait_limit.end(request_id)
        self.delivery.close(samples.reader)
        if samples.first.state is not State.NEW and not samples.is_refused:
            self.outcomes[samples.outcome] += 1
            if samples.model not in self.times:  # with eleven histograms, not made for every request
                self.times[samples.model] = RequestTimes()
            self.times[samples.model].note_end(samples)
        if samples.trace is not None:
            tell_trace(samples.trace, samples)
        self._end(samples)
        samples.fail(RequestAborted("closed"))
        for answer in samples.answers:
            answer.sequence.owner = answer.sequence.group = None  # no cycle is left, so all of it is freed at once

    def fail_request(self, request_id: str, error: PagedError) -> None:
        """End a request with this error, if it is live."""
        if request_id in self._samples:
            self._fail(self._samples[request_id], error)

    def fail_all(self, error: PagedError) -> None:
        for samples in list(self._samples.values()):
            self._fail(samples, error)

    def queue_full(self, found: str) -> QueueFull:
        return QueueFull(found, self.drain_rate.retry_after_s(self.num_queued()))

    def end_waits(self, now: float) -> None:
        """Of those who have waited for as long as they may, and are not in. For an executor that is lost they wait as
        long as everybody does."""
        for request_id in list(self.wait_limit.over(now)):
            samples = self._samples[request_id]
            if samples.is_admitted:
                continue
            if any(model.executors for model in self.fleet.models if model.name == samples.model):
                samples.is_refused = True
                self._fail(samples, self.queue_full("it has waited for max_wait_s"))
            else:
                self.wait_limit.begin(request_id, now)

    def _end_expired(self, now: float) -> None:
        if now >= self._expiries.next_at:
            for request_id in self._expiries.due(now):
                found = "the deadline of the request, its own or the server's limit (max_request_s), has passed"
                self.fail_request(request_id, DeadlineExceeded(found))

    def _fail(self, samples: Samples, error: PagedError) -> None:
        self._end(samples)
        samples.fail(error)

    def _end(self, samples: Samples) -> None:
        """Nothing of the request is left in the core."""
        for answer in reversed(samples.answers):  # those that are held go before the one that holds them
            self._suspects.forget(answer)
            self.fleet.dispatch.cancel(answer.sequence)

    # --- what the fleet tells ---

    def on_tick(self) -> None:
        now, held_up = asyncio.get_running_loop().time(), bool(self.fleet.attached) and self.num_queued() > 0
        self.drain_rate.note(now, self.fleet.accounts.num_gone, held_up=held_up)
        for model in self.fleet.models:
            model.note_admissions(now)
        self.end_waits(now)
        self._end_expired(now)
        self._high_water.note(len(self._samples))
        self._small_objects.note(len(self._samples))

    def on_plan(self) -> None:
        now = asyncio.get_running_loop().time()
        self.end_waits(now)
        self._end_expired(now)

    def is_late(self) -> bool:
        return self.delivery.is_late

    def on_tokens(self, applied: Applied) -> None:
        self.masks.on_tokens(applied.updated)

    def on_applied(self, applied: Applied) -> None:
        self._suspects.note_tokens(applied.updated)
        self.delivery.note(applied.updated)
        if applied.ended:
            self.delivery.note(applied.ended)

    def on_lost(self, ran: list[Sequence], *, alone: bool) -> None:
        for answer in self._suspects.note_loss(ran, alone=alone):
            self.fail(answer.sequence, RequestFailed("the executor was lost each time it computed this request"))

    def fail(self, sequence: Sequence, error: PagedError) -> None:
        self._fail(self._samples[sequence.request_id], error)

    def fail_model(self, model: ServedModel, error: PagedError) -> None:
        for samples in [samples for samples in self._samples.values() if samples.model == model.name]:
            self._fail(samples, error)

    # --- what masks and delivery tell ---

    def _on_late_mask(self, sequence: Sequence) -> None:
        self.fleet.dispatch.wake(sequence)
        if sequence.state is State.ENDED:  # its last token was told of already, and no result will tell of this
            self.delivery.note([sequence])

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
            self._fail(self._samples[request_id], answer.error)  # the other samples are of no use now
        elif answer.is_over:
            self.fleet.dispatch.cancel(answer.sequence)  # a stop string: the core does not know yet
