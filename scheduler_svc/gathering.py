"""Many requests whose answers leave together: one reader takes what is new of all of them at once."""

import asyncio
from collections.abc import Generator

from scheduler_svc.answer import Answer
from scheduler_svc.delivery import Delivery
from scheduler_svc.errors import PagedError
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta
from scheduler_svc.samples import Samples

MAX_READY = 1024  # requests that get their text made while a message is on its way
# The first news of a result wait for others of the same one, which come in slices of the event loop's time.
WAIT_S_PER_REQUEST, MAX_WAIT_S, MIN_WAIT_S = 100e-6, 0.005, 0.001


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
        gathering.num_open += 1
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_waiting(self) -> bool:
        return self._gathering.has_room_for(self)

    @property
    def is_over(self) -> bool:
        return self._over.done()

    def wake(self) -> None:
        self._gathering.note(self)

    def pass_over(self, answer: object) -> None:
        # What is whole does not leave before its end, when nobody is passed over.
        if not self.is_whole and isinstance(answer, Answer):
            self._gathering.note_passed_over(answer)

    def end(self, error: PagedError | None = None) -> None:
        """Nothing more will be taken; harmless when it is over."""
        if not self._over.done():
            self.error = error
            self._gathering.num_open -= 1
            self._over.set_result(None)
        self.samples = None  # which refer to their reader

    async def until_over(self) -> None:
        """Until the last delta has been taken. Raises the error."""
        await self._over
        if self.error is not None:
            raise self.error


class Gathering:
    """What one caller has asked for. It `take`s what there is, and says when that is on its way and when it has gone.

    While a message is on its way, text for the next is made of `MAX_READY` requests, of each once; what comes beyond
    that waits for it to be gone.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._ready: dict[GatheredReader, None] = {}  # in the order in which they came to be
        self._passed_over: list[Answer] = []
        self._news = asyncio.Event()
        self._is_sending = False
        self.num_open = 0

    def has_room_for(self, reader: GatheredReader) -> bool:
        return not self._is_sending or (reader not in self._ready and len(self._ready) < MAX_READY)

    def note(self, reader: GatheredReader) -> None:
        """There is something to be taken."""
        self._ready[reader] = None
        self._news.set()

    def note_passed_over(self, answer: Answer) -> None:
        """There was no room for it."""
        self._passed_over.append(answer)

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
        wait_s = min(self.num_open * WAIT_S_PER_REQUEST, MAX_WAIT_S)
        if self._ready and wait_s >= MIN_WAIT_S:
            await asyncio.sleep(wait_s)
        self._news.clear()
        return True

    def take(self) -> Generator[tuple[GatheredReader, Delta], None, None]:
        """What waits, longest waiting first, of each request once at most. Whose answer has failed is over; so is, with
        its last delta, whose answers have ended."""
        more: list[GatheredReader] = []
        try:
            while self._ready:
                reader = next(iter(self._ready))
                del self._ready[reader]
                samples = reader.samples
                if samples is None:
                    continue
                try:
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

    def note_sending(self) -> None:
        """What was taken is on its way."""
        self._is_sending = True
        self._delivery.num_messages += 1

    def note_sent(self) -> None:
        """It has gone."""
        self._is_sending = False
        passed_over, self._passed_over = self._passed_over, []
        for answer in passed_over:
            self._delivery.ask(answer)
