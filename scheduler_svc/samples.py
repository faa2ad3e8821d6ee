"""All answers to one request: its samples, served as they have something to say."""

import asyncio
from collections import deque

from scheduler_svc.answer import Answer, Outcome
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import PagedError
from scheduler_svc.requests import Delta


class Samples:
    """`next_delta` waits for any of the answers. An error of one of them is the request's. `model` is its served
    name."""

    model = ""

    def __init__(self, answers: list[Answer], changed: asyncio.Event) -> None:
        self.answers = answers
        self._changed = changed  # set by any of the answers
        self._unfinished = deque(answers)

    @property
    def first(self) -> Sequence:
        """The sample that computes the prompt for all."""
        return self.answers[0].sequence

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

    async def next_delta(self) -> Delta:
        """All that waits of one answer, as soon as anything does; one after another where several have news. Raises the
        error that has ended one of them."""
        while True:
            for _ in range(len(self._unfinished)):
                answer = self._unfinished.popleft()
                delta = answer.next_delta() if answer.has_news else None
                if delta is None or delta.finish is None:
                    self._unfinished.append(answer)
                if delta is not None:
                    return delta
            self._changed.clear()
            await self._changed.wait()
