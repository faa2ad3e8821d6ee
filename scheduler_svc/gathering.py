"""Many requests whose answers leave together: one reader takes what is new of all of them at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

from scheduler_svc.answer import Answer
from scheduler_svc.delivery import SLICE_S, TURNS_BETWEEN, UNTAKEN_TOKENS, Delivery
from scheduler_svc.errors import PagedError
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta
from scheduler_svc.samples import Samples


class GatheredReader(Reader):
    """Of one request. Its `samples` are those whose news are taken; they are let go when all is over."""

    __slots__ = ("_gathering", "_over", "error", "samples")

    # An update in a message with others costs about as much as three tokens in it.
    rest_s_per_stream = 25e-6
    is_gathered = True

    def __init__(self, request_id: str, gathering: "Gathering", *, is_whole: bool) -> None:
        super().__init__(request_id, is_whole=is_whole)
        self.error: PagedError | None = None
        self.samples: Samples | None = None
        self._gathering = gathering
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_waiting(self) -> bool:
        return not self._gathering.is_sending

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def wake(self) -> None:
        self._gathering.note(self)

    def takes(self, answer: object) -> bool:
        if self.is_whole or not isinstance(answer, Answer):
            return False
        self._gathering.note(self)
        # While nobody takes anything, what cannot wait for that has the delivery's turns.
        return not (self._gathering.is_sending and answer.cannot_wait(UNTAKEN_TOKENS))

    def end(self, error: PagedError | None = None) -> None:
        """Nothing more will be taken; harmless when it is over."""
        if not self._over.done():
            self.error = error
            self._over.set_result(None)
        self.samples = None  # which refer to their reader

    async def until_over(self) -> None:
        """Until the last delta has been taken. Raises the error."""
        await self._over
        if self.error is not None:
            raise self.error


class Gathering:
    """What one caller has asked for. In its `turn` it `take`s what there is; then it says when that is on its way, and
    when it has gone."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._ready: dict[GatheredReader, None] = {}  # in the order in which they came to be
        self._news = asyncio.Event()
        self._is_closed = False
        self.is_sending = False

    def close(self) -> None:
        """Nobody takes anything any more."""
        self._is_closed = True
        self._delivery.num_ready -= len(self._ready)
        self._ready.clear()

    def note(self, reader: GatheredReader) -> None:
        """There is something to be taken."""
        if reader not in self._ready and not self._is_closed:
            self._ready[reader] = None
            self._delivery.num_ready += 1
            self._news.set()

    def wake(self) -> None:
        """Whoever waits for news has something else to see to."""
        self._news.set()

    async def news(self, timeout_s: float | None) -> bool:
        """Until there are some, or somebody says `wake`; False where neither has come in time."""
        if timeout_s is None:
            await self._news.wait()
        else:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except TimeoutError:
                return False
        self._news.clear()
        return True

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Messages are made one after another, with turns of the event loop for others between."""
        await self._delivery.making.acquire()
        try:
            yield
        finally:
            self._end_turn(TURNS_BETWEEN)

    def _end_turn(self, turns_before: int) -> None:
        if turns_before:
            asyncio.get_running_loop().call_soon(self._end_turn, turns_before - 1)
        else:
            self._delivery.making.release()

    def take(self) -> Generator[tuple[GatheredReader, Delta], None, None]:
        """What there is, longest waiting first, of each request once at most, for a slice of the event loop's time.
        Whose answer has failed is over; so is, with its last delta, whose answers have ended."""
        more: list[GatheredReader] = []
        end = time.perf_counter() + SLICE_S
        try:
            while self._ready and time.perf_counter() < end:
                reader = next(iter(self._ready))
                del self._ready[reader]
                self._delivery.num_ready -= 1
                samples = reader.samples
                if samples is None:
                    continue
                try:
                    samples.take_in()
                    delta = samples.delta_now()
                except PagedError as error:
                    reader.end(error)
                    continue
                if delta is None:
                    continue
                if samples.are_finished:
                    reader.end()
                elif samples.has_news:
                    more.append(reader)
                yield reader, delta
        finally:
            for reader in more:
                self.note(reader)

    @property
    def has_more(self) -> bool:
        """Whether there is something to be taken."""
        return bool(self._ready)

    def note_sending(self) -> None:
        """What was taken is on its way."""
        self.is_sending = True
        self._delivery.num_messages += 1

    def note_sent(self) -> None:
        """It has gone."""
        self.is_sending = False
