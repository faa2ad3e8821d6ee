"""When answers leave: whose new tokens are made text next, and which call gets its next message.

One queue, longest waiting first, and one message in a turn of the event loop, so that results, plans and new calls come
between; a call whose last message is still on its way is not given another, and
all that has come for it meanwhile leaves as one. So the busier the process, the more tokens in a message.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import PagedError, ReaderTooSlow
from scheduler_svc.histogram import Histogram
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta

SLICE_S = 0.002  # of a turn of the event loop, for text that is made though its reader is behind
# gRPC tells the event loop of one event a turn: that a message has left, that a call has come. With more messages in a
# turn events pile up, until calls wait for seconds and messages for each other. A turn costs some 5 µs.
MESSAGES_IN_A_TURN = 1
UNTAKEN_TOKENS = 32  # that may wait in the core for a reader who is behind


class Delivery:
    """`take` takes new tokens into an answer, `fail` ends a request with an error.

    A stream of which more than `max_unread_bytes` wait for its reader ends; so does, where all together have more than
    `max_total_unread_bytes`, the one that has most.
    """

    def __init__(
        self,
        *,
        max_unread_bytes: int,
        max_total_unread_bytes: int,
        take: Callable[[Answer], None],
        fail: Callable[[str, PagedError], None],
    ) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._max_total_unread_bytes = max_total_unread_bytes
        self._take = take
        self._fail = fail
        self._queue: deque[Answer] = deque()
        self._has_turn = False  # scheduled on the event loop
        self._readers: set[Reader] = set()
        self.unread_bytes = 0
        self.num_messages = self.num_tokens = 0  # of streams
        self.result_to_write_s = Histogram(100e-6, 10.0, 1.2)

    def open(self, reader: Reader) -> None:
        self._readers.add(reader)

    def close(self, reader: Reader) -> None:
        """Nobody reads any more."""
        self._readers.discard(reader)
        self.unread_bytes -= reader.unread_bytes
        reader.unread_bytes = 0

    def note(self, sequences: Iterable[Sequence]) -> None:
        """A result has changed these: their answers have something new, or an end."""
        now = time.perf_counter()
        for sequence in sequences:
            answer: Answer = sequence.owner
            if answer.noted_at is None:
                answer.noted_at = now
            if not answer.is_queued:
                answer.is_queued = True
                self._queue.append(answer)
        self._have_turn()

    def ask(self, answer: Answer) -> None:
        """Its reader has taken a message, and there is more for it: its turn comes after all who wait already."""
        if not answer.is_queued:
            answer.is_queued = True
            self._queue.append(answer)
        self._have_turn()

    def message(self, answer: Answer) -> Delta:
        """What the next message says, which leaves now. Raises the error that has ended the answer."""
        reader = answer.reader
        unread_bytes, noted_at = reader.unread_bytes, answer.taken_at
        delta = answer.next_delta()
        self.unread_bytes += reader.unread_bytes - unread_bytes
        if not answer.has_news:
            answer.taken_at = None
        if not reader.is_whole:
            self.num_messages += 1
            self.num_tokens += len(delta.token_ids)
            if noted_at is not None:
                self.result_to_write_s.add(time.perf_counter() - noted_at)
        return delta

    def _have_turn(self) -> None:
        if self._queue and not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """For the next messages, and for what cannot wait for its reader before them."""
        self._has_turn = False
        num_messages, end = 0, time.perf_counter() + SLICE_S
        while self._queue and num_messages < MESSAGES_IN_A_TURN and time.perf_counter() < end:
            answer = self._queue.popleft()
            answer.is_queued = False
            reader = answer.reader
            is_ready = reader.is_waiting and not reader.is_whole
            if is_ready or answer.cannot_wait(UNTAKEN_TOKENS):
                self._serve(answer)
                num_messages += is_ready
        self._have_turn()

    def _serve(self, answer: Answer) -> None:
        reader = answer.reader
        unread_bytes = reader.unread_bytes
        if answer.taken_at is None:
            answer.taken_at = answer.noted_at
        answer.noted_at = None
        if not answer.is_over:
            self._take(answer)
            self.unread_bytes += reader.unread_bytes - unread_bytes
        if answer.has_news:
            reader.wake()
        if reader.unread_bytes > self._max_unread_bytes and not reader.is_waiting:
            found = f"max_unread_bytes is {self._max_unread_bytes}"
            self._give_up(reader, found)
        elif self.unread_bytes > self._max_total_unread_bytes:
            found = f"more than those of any other, and max_total_unread_bytes is {self._max_total_unread_bytes}"
            self._give_up(max(self._readers, key=lambda other: other.unread_bytes), found)

    def _give_up(self, reader: Reader, found: str) -> None:
        waiting = reader.unread_bytes
        self.close(reader)
        self._fail(reader.request_id, ReaderTooSlow(f"{waiting} bytes of the answer were not read; {found}"))
