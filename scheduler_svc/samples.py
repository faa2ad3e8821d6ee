"""All answers to one request: its samples, served as they have something to say."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from scheduler_svc.answer import Answer, Outcome
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.delivery import Delivery
from scheduler_svc.errors import PagedError
from scheduler_svc.requests import Delta
from scheduler_svc.trace import Trace


class Samples:
    """`next_delta` waits for any of the answers, which have one reader. An error of one of them is the request's.
    `model` is its served name. `is_refused`: there was no room for the request, after all. `trace` is there where it is
    traced."""

    __slots__ = (
        "_delivery",
        "_opening",
        "_unfinished",
        "answers",
        "is_refused",
        "model",
        "only",
        "opened_at",
        "reader",
        "trace",
    )

    def __init__(self, answers: list[Answer], delivery: Delivery) -> None:
        self.model = ""
        self.is_refused = False
        self.trace: Trace | None = None
        self.answers = tuple(answers)
        self.only = answers[0] if len(answers) == 1 else None
        self.opened_at = time.perf_counter()
        self.reader = answers[0].reader
        self._delivery = delivery
        self._unfinished = self.answers
        self._opening: asyncio.Future[None] | None = None

    @property
    def first(self) -> Sequence:
        """The sample that computes the prompt for all."""
        return self.answers[0].sequence

    @property
    def is_admitted(self) -> bool:
        """Whether it got in, once at least."""
        return self.answers[0].admitted_at is not None

    @property
    def are_finished(self) -> bool:
        """Whether every last delta has been taken."""
        return not self._unfinished

    @property
    def outcome(self) -> Outcome:
        """What has become of the request, at its end."""
        outcomes = {answer.outcome for answer in self.answers}
        return "failed" if "failed" in outcomes else "cancelled" if "cancelled" in outcomes else "finished"

    def fail(self, error: PagedError) -> None:
        """End all answers that are not over with this error."""
        for answer in self.answers:
            answer.fail(error)
        if self._opening is not None:
            self._opening.cancel()

    async def open_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Until the work is done that has to be before they can be submitted; given up where they fail meanwhile, which
        `next_delta` tells."""
        self._opening = asyncio.ensure_future(work)
        try:
            await self._opening
        except asyncio.CancelledError:
            if self.answers[0].error is None:  # it is the call that was cancelled
                raise
        finally:
            self._opening = None

    @property
    def has_news(self) -> bool:
        """Whether there is a delta."""
        return any(answer.has_news for answer in self._unfinished)

    async def next_delta(self) -> Delta:
        """All that waits of one answer, when its turn has come; one after another where several have news. Raises the
        error that has ended one of them, without waiting."""
        has_failed = False
        for answer in self._unfinished:
            if answer.error is not None:
                has_failed = True
            elif answer.has_more:
                self._delivery.ask(answer)
        if not has_failed:
            await self.reader.turn()
        while (delta := self.delta_now()) is None:
            await self.reader.turn()
        return delta

    def take_in(self) -> None:
        """Make text of all that is new, without a turn of the delivery's."""
        for answer in self._unfinished:
            if answer.noted_at is not None:
                self._delivery.make_text(answer)

    def delta_now(self) -> Delta | None:
        """All that waits of one answer; None where nothing does. Raises the error that has ended one of them."""
        answer = self._with_news()
        if answer is None:
            return None
        delta = self._delivery.message(answer)
        if delta.finish is not None:
            self._unfinished = self._without(answer)
        return delta

    def _with_news(self) -> Answer | None:
        """One of the answers that have something to say, before others one that has failed; who was found is found last
        the next time."""
        found = None
        for answer in self._unfinished:
            if answer.error is not None:
                return answer
            if found is None and answer.has_news:
                found = answer
        if found is not None and len(self._unfinished) > 1:
            self._unfinished = (*self._without(found), found)
        return found

    def _without(self, answer: Answer) -> tuple[Answer, ...]:
        """Those that are unfinished, but for this one."""
        return tuple(other for other in self._unfinished if other is not answer)
