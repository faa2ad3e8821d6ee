"""The best of several samples: nothing is said before all have ended, and then of the likeliest alone."""

from dataclasses import replace

from scheduler_svc.answer import Answer
from scheduler_svc.delivery import Delivery
from scheduler_svc.requests import Delta
from scheduler_svc.samples import Samples


class BestOf(Samples):
    """`num_returned` of the answers, by the sum of the log-probabilities of their tokens, the likeliest first."""

    __slots__ = ("_is_ranked", "_num_returned", "_with_logprobs")

    def __init__(self, answers: list[Answer], delivery: Delivery, num_returned: int, *, with_logprobs: bool) -> None:
        super().__init__(answers, delivery)
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs
        self._is_ranked = False

    async def next_delta(self) -> Delta:
        """The next piece of an answer; `index` is its rank. Raises the error that has ended one of the samples."""
        while (delta := self.delta_now()) is None:
            await self.reader.turn()
        return delta

    def delta_now(self) -> Delta | None:
        if not self._is_ranked:
            if (error := next((answer.error for answer in self.answers if answer.error is not None), None)) is not None:
                raise error
            if not all(answer.is_over for answer in self.answers):
                return None
            ranked = sorted(self.answers, key=lambda answer: -answer.total_logprob)
            self._unfinished = tuple(ranked[: self._num_returned])
            self._is_ranked = True
        answer = self._unfinished[0]
        delta = replace(answer.next_delta(), index=self._num_returned - len(self._unfinished))
        if delta.finish is not None:
            self._unfinished = self._unfinished[1:]
            delta = replace(delta, score=answer.total_logprob)
        return delta if self._with_logprobs else replace(delta, logprobs=[])
