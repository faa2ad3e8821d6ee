"""When answers leave: whose new tokens are made text next, and which call gets its next message.

One queue, longest waiting first, some messages in a turn of the event loop, and turns between, in which results, plans
and new calls have their way. After a message a stream rests: what comes for it meanwhile leaves as one message, since a
message costs as much as many tokens. The more streams there are, and the dearer their messages, the longer they rest
(`rests.py`); with few they do not at all.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from scheduler_svc.answer import Answer
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.errors import PagedError, ReaderTooSlow
from scheduler_svc.histogram import Histogram
from scheduler_svc.reader import Reader
from scheduler_svc.requests import Delta
from scheduler_svc.rests import Rests

if TYPE_CHECKING:
    from scheduler_svc.gathering import Gathering

SLICE_S = 0.002  # of a turn of the event loop, for text that is made though its reader is behind
MESSAGES_IN_A_TURN = 4  # so that a result, or what gRPC has to say, waits for a millisecond or two
TURNS_BETWEEN = 2  # what gRPC has to say of a new call takes several
UNTAKEN_TOKENS = 32  # that may wait in the core for a reader who is behind
LATE_S, LATE_SHARE = 0.01, 0.1  # from result to message, and of the streams that are served
QUEUE_LATE_S = 0.1  # of the first in the queue: several times what rests aim at, for bursts are no lateness
TIMER_S = 0.001  # the event loop's timers know no less, and one that is early would be asked for again at once


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
        self._rests = Rests()
        self._resting: deque[Answer] = deque()  # in the order in which they have rested enough
        self._gatherings: set[Gathering] = set()
        self.num_streams = 0  # that have something new, or rest
        self.making = asyncio.Lock()  # whoever makes a message of many answers
        self.making_s = 0.0  # what these have taken since there were turns for others
        self._has_turn = False  # scheduled on the event loop
        self._timer: asyncio.TimerHandle | None = None  # for the first who rests, until `_timer_at`
        self._timer_at = 0.0
        self._readers: set[Reader] = set()
        self.unread_bytes = 0
        self.num_messages = self.num_tokens = 0  # of streams
        self.result_to_write_s = Histogram.geometric(100e-6, 10.0, 1.2)

    def open(self, reader: Reader) -> None:
        self._readers.add(reader)

    def close(self, reader: Reader) -> None:
        """Nobody reads any more."""
        self._readers.discard(reader)
        self.unread_bytes -= reader.unread_bytes
        reader.unread_bytes = 0

    def open_gathering(self, gathering: "Gathering") -> None:
        self._gatherings.add(gathering)

    def close_gathering(self, gathering: "Gathering") -> None:
        self._gatherings.discard(gathering)

    def note(self, sequences: Iterable[Sequence]) -> None:
        """A result has changed these: their answers have something new, or an end."""
        now = time.perf_counter()
        for sequence in sequences:
            answer: Answer = sequence.owner
            waits = answer.waits_with_others and sequence.end_reason is None  # most of them, most of the time
            if answer.noted_at is None:
                answer.noted_at = now
                if waits:
                    answer.reader.wake()
            if not waits:
                self._line_up(answer, now)
        self.num_streams = len(self._queue) + len(self._resting)
        for gathering in self._gatherings:
            self.num_streams += gathering.num_streams
            for answer in gathering.behind(now):
                self._line_up(answer, now)
        self._have_turn()

    @property
    def is_late(self) -> bool:
        """Whether so much leaves so late that new tokens had better come later: the next in the queue, or a large
        part of what leaves with others."""
        now = time.perf_counter()
        if self._queue and now - self._queue[0].queued_at > QUEUE_LATE_S:
            return True
        num_late = sum(gathering.num_late(now, LATE_S) for gathering in self._gatherings)
        return num_late > LATE_SHARE * self.num_streams

    def ask(self, answer: Answer) -> None:
        """Its reader has taken a message, and there is more for it: its turn comes after all who wait already."""
        self._line_up(answer, time.perf_counter())
        self._have_turn()

    def _line_up(self, answer: Answer, since: float) -> None:
        if answer.is_queued or (answer.is_resting and not answer.is_urgent):
            return
        if not answer.reader.takes(answer):
            answer.is_queued, answer.queued_at = True, since
            self._queue.append(answer)

    def message(self, answer: Answer) -> Delta:
        """What the next message says, which leaves now. Raises the error that has ended the answer."""
        reader = answer.reader
        unread_bytes, noted_at = reader.unread_bytes, answer.taken_at
        if answer.first_token_at is None:
            answer.first_token_at = noted_at
        delta = answer.next_delta()
        self.unread_bytes += reader.unread_bytes - unread_bytes
        if not answer.has_news:
            answer.taken_at = None
        if not reader.is_whole:
            now = time.perf_counter()
            self.num_messages += not reader.is_gathered
            self.num_tokens += len(delta.token_ids)
            if noted_at is not None:
                self.result_to_write_s.add(now - noted_at)
            rest_s = self._rests.rest_s(self.num_streams)
            if rest_s and not (reader.is_gathered or delta.finish or answer.is_resting):
                answer.is_resting, answer.rests_until = True, now + rest_s
                self._resting.append(answer)
                if len(self._resting) == 1:  # others rest longer
                    self._have_turn()
        return delta

    def note_left(self, num_tokens: int, noted: Mapping[float, int]) -> None:
        """In a message of many answers so many tokens have left that `plain_delta` has given; of `noted`, when they had
        been, so many answers."""
        now = time.perf_counter()
        self.num_tokens += num_tokens
        for noted_at, count in noted.items():
            self.result_to_write_s.add(now - noted_at, count)

    def _have_turn(self, turns_before: int = 0) -> None:
        if self._has_turn:
            return
        if self._queue:
            self._has_turn = True
            self._let_pass(turns_before)
        elif self._resting:
            rested_at = self._resting[0].rests_until
            if self._timer is None or rested_at < self._timer_at:
                if self._timer is not None:
                    self._timer.cancel()
                rest_s, self._timer_at = max(rested_at - time.perf_counter(), TIMER_S), rested_at
                self._timer = asyncio.get_running_loop().call_later(rest_s, self._on_rested)

    def _let_pass(self, num_turns: int) -> None:
        """Have a turn after so many that are for others."""
        loop = asyncio.get_running_loop()
        if num_turns:
            loop.call_soon(self._let_pass, num_turns - 1)
        else:
            loop.call_soon(self._turn)

    def _on_rested(self) -> None:
        self._timer = None
        self._end_rests(time.perf_counter())
        self._have_turn()

    def _end_rests(self, now: float) -> None:
        while self._resting and self._resting[0].rests_until <= now:
            answer = self._resting.popleft()
            answer.is_resting = False
            if answer.has_more:
                self._line_up(answer, answer.rests_until)

    def _turn(self) -> None:
        """For the next messages, and for what cannot wait for its reader before them."""
        self._has_turn = False
        now = time.perf_counter()
        self._end_rests(now)
        num_messages, end = 0, now + SLICE_S
        while self._queue and num_messages < MESSAGES_IN_A_TURN and time.perf_counter() < end:
            answer = self._queue.popleft()
            answer.is_queued = False
            reader = answer.reader
            if not answer.has_more:  # it was taken meanwhile
                continue
            may_leave = reader.is_waiting and not reader.is_whole and (not answer.is_resting or answer.has_ended)
            if may_leave:
                self._rests.note_wait(now - answer.queued_at, self.num_streams)
            if may_leave or answer.cannot_wait(UNTAKEN_TOKENS):
                self._serve(answer, may_leave)
                num_messages += may_leave
        self._have_turn(TURNS_BETWEEN)

    def _serve(self, answer: Answer, may_leave: bool) -> None:
        """Make text of what is new. Its reader gets it now if it `may_leave`, or if it is the end."""
        reader = answer.reader
        self.make_text(answer)
        if answer.has_news and (may_leave or answer.is_over):
            reader.wake()
        if reader.unread_bytes > self._max_unread_bytes and not reader.is_waiting:
            found = f"max_unread_bytes is {self._max_unread_bytes}"
            self._give_up(reader, found)
        elif self.unread_bytes > self._max_total_unread_bytes:
            found = f"more than those of any other, and max_total_unread_bytes is {self._max_total_unread_bytes}"
            self._give_up(max(self._readers, key=lambda other: other.unread_bytes), found)

    def make_text(self, answer: Answer) -> None:
        """Of what is new of it."""
        unread_bytes = answer.reader.unread_bytes
        if answer.taken_at is None:
            answer.taken_at = answer.noted_at
        answer.noted_at = None
        if not answer.is_over:
            self._take(answer)
            self.unread_bytes += answer.reader.unread_bytes - unread_bytes

    def _give_up(self, reader: Reader, found: str) -> None:
        waiting = reader.unread_bytes
        self.close(reader)
        self._fail(reader.request_id, ReaderTooSlow(f"{waiting} bytes of the answer were not read; {found}"))
