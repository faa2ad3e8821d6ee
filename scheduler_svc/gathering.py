"""Many requests whose answers leave together: one reader takes what is new of all of them at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager

from scheduler_svc.answer import Answer
from scheduler_svc.delivery import SLICE_S, TIMER_S, TURNS_BETWEEN, UNTAKEN_TOKENS, Delivery
from scheduler_svc.errors import PagedError
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta, PlainDelta
from scheduler_svc.rests import MIN_REST_S
from scheduler_svc.samples import Samples

# An update in a message with others costs about as much as three tokens in it.
REST_S_PER_STREAM = 15e-6
MAX_REST_S = 0.03
# What is left over waits for the call's next turn, behind all others: more than turns of the loop have otherwise.
WHOLE_S = 0.004
# After which a message that is on its way is waited for by no plan, and is so late that texts are made without it.
SLOW_S, BEHIND_S = 0.01, 0.05


class GatheredReader(Reader):
    """Of one request. Its `samples` are those whose news are taken; they are let go when all is over: with the last
    delta, or the `error` that has ended it. `is_ready`: there is something to be taken. `number` is what the caller
    calls it."""

    __slots__ = ("_gathering", "error", "is_over", "is_ready", "number", "samples")

    is_gathered = True

    def __init__(self, request_id: str, gathering: "Gathering", *, is_whole: bool) -> None:
        super().__init__(request_id, is_whole=is_whole)
        self.error: PagedError | None = None
        self.samples: Samples | None = None
        self.is_ready = self.is_over = False
        self.number = -1
        self._gathering = gathering

    @property
    def is_waiting(self) -> bool:
        return not self._gathering.is_sending

    def wake(self) -> None:
        self._gathering.note(self)

    def takes(self, answer: Answer) -> bool:
        if self.is_whole:
            return False
        self._gathering.note(self)
        # While nobody takes anything, what cannot wait for that has the delivery's turns.
        return self._gathering.takes_soon or not answer.cannot_wait(UNTAKEN_TOKENS)

    def end(self, error: PagedError | None = None) -> None:
        """Nothing more will be taken; harmless when it is over."""
        if not self.is_over:
            self.is_over, self.error = True, error
        self.samples = None  # which refer to their reader


class Gathering:
    """What one caller has asked for. In its `turn` it `take`s what there is; then it says when that is on its way, and
    when it has gone. When all of it has been taken it rests, as a single stream does in `Delivery`."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._ready: list[GatheredReader] = []  # in the order in which they came to be
        self._taking: list[GatheredReader] = []  # those that were ready when somebody last took, last first
        self._num_taken = 0  # of these
        self._ready_at = self._taking_at = 0.0  # when the first of them came to be
        self._resting: asyncio.TimerHandle | None = None
        self._noted: dict[float, int] = {}  # for `Delivery.note_left`
        self._num_tokens = 0
        self._news = asyncio.Event()
        self._is_closed = False
        self.is_sending = False
        self._sent_at = 0.0
        delivery.open_gathering(self)

    def close(self) -> None:
        """Nobody takes anything any more."""
        self._is_closed = True
        self._delivery.close_gathering(self)
        self._ready.clear()
        self._taking.clear()
        if self._resting is not None:
            self._resting.cancel()

    @property
    def num_streams(self) -> int:
        """That have something to be taken, or rest."""
        num_ready = len(self._ready) + len(self._taking)
        return num_ready if self._resting is None else max(num_ready, self._num_taken)

    @property
    def takes_soon(self) -> bool:
        """Whether whoever takes what there is neither rests nor waits for its message to leave."""
        return self._resting is None and not self.is_sending

    def note(self, reader: GatheredReader) -> None:
        """There is something to be taken."""
        if not reader.is_ready and not self._is_closed:
            reader.is_ready = True
            if not self._ready:
                self._ready_at = time.perf_counter()
            self._ready.append(reader)
            if self._resting is None:
                self._news.set()

    def num_late(self, now: float, late_s: float) -> int:
        """Streams that have had something to be taken for so long, unless it is the caller who does not take it."""
        if self.is_sending and now - self._sent_at > SLOW_S:
            return 0
        since = self._taking_at if self._taking else self._ready_at
        return self.num_streams if (self._taking or self._ready) and now - since > late_s else 0

    def behind(self, now: float) -> Iterator[Answer]:
        """Answers of which more has come than may wait for a message that is late."""
        if self.is_sending and now - self._sent_at > BEHIND_S:
            for reader in (*self._taking, *self._ready):
                for answer in reader.samples.answers if reader.samples is not None else ():
                    if answer.noted_at is not None and answer.cannot_wait(UNTAKEN_TOKENS):
                        yield answer

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
        """Messages are made one after another; when they have taken a slice of the event loop's time, turns for others
        come first."""
        await self._delivery.making.acquire()
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._delivery.making_s += time.perf_counter() - begin
            if self._delivery.making_s < SLICE_S:
                self._end_turn(0)
            else:
                self._delivery.making_s = 0.0
                self._end_turn(TURNS_BETWEEN)

    def _end_turn(self, turns_before: int) -> None:
        if turns_before:
            asyncio.get_running_loop().call_soon(self._end_turn, turns_before - 1)
        else:
            self._delivery.making.release()

    def take(self) -> Generator[tuple[GatheredReader, Delta | PlainDelta | None], None, None]:
        """What there is, longest waiting first, of each request once at most, for WHOLE_S of the event loop's time.
        None is of one that has failed, and is over; so is, with its last delta, whose answers have ended."""
        if self._resting is None and self._ready:  # behind those for whom there was no time before
            if not self._taking:
                self._taking_at = self._ready_at
            self._taking[:0], self._ready = self._ready[::-1], []
            self._num_taken = len(self._taking)
        end, more = time.perf_counter() + WHOLE_S, []
        taking, noted, num_tokens = self._taking, self._noted, 0
        try:
            while taking:
                reader = taking.pop()
                reader.is_ready = False
                samples = reader.samples
                if samples is None:
                    continue
                answer = samples.only
                if answer is not None and (delta := answer.plain_delta()) is not None:
                    noted_at, answer.noted_at = answer.noted_at, None
                    if noted_at is not None:
                        noted[noted_at] = noted.get(noted_at, 0) + 1
                    num_tokens += len(delta[1])
                    yield reader, delta
                else:
                    taken = self._take_any(reader, samples)
                    if taken is not None and samples.has_news:
                        more.append(reader)
                    if taken is not None or reader.is_over:
                        yield reader, taken
                if time.perf_counter() > end:
                    break
        finally:
            self._num_tokens += num_tokens
            for reader in more:
                self.note(reader)

    def _take_any(self, reader: GatheredReader, samples: Samples) -> Delta | None:
        try:
            samples.take_in()
            delta = samples.delta_now()
        except PagedError as error:
            reader.end(error.with_traceback(None))  # which would refer to the reader
            return None
        if samples.are_finished:
            reader.end()
        return delta

    @property
    def has_more(self) -> bool:
        """Whether there is something to be taken now."""
        return bool(self._taking or (self._ready and self._resting is None))

    def note_sending(self) -> None:
        """What was taken is on its way."""
        self.is_sending, self._sent_at = True, time.perf_counter()
        self._delivery.num_messages += 1
        self._delivery.note_left(self._num_tokens, self._noted)
        self._num_tokens = 0
        self._noted.clear()
        rest_s = min(self._delivery.num_streams * REST_S_PER_STREAM, MAX_REST_S)
        if rest_s >= MIN_REST_S and not self._taking and self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(max(rest_s, TIMER_S), self._on_rested)

    def _on_rested(self) -> None:
        self._resting = None
        if self._ready:
            self._news.set()

    def note_sent(self) -> None:
        """It has gone."""
        self.is_sending = False
