"""Generations that share calls: a message then brings what is new of many, which costs both ends less (GenerateMany).

There is one for each scheduler, so that they get equal shares and none has more messages than it must. gRPC sends calls
to schedulers in turn: others are begun until they come to where there is one already.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from paged.addresses import has_one_address
from paged.channel import SCHEDULER_KEY
from paged.errors import (
    DETAILS_KEY,
    DeadlineExceededError,
    PagedClientError,
    ResourceExhaustedError,
    UnavailableError,
    client_error,
    translated,
)
from paged.v1 import inference_pb2

MAX_UNKNOWN_CALLS = 6  # of which it is not known yet where they have come to, as in a burst at the beginning
# Later generations begin in new calls: those may go to schedulers that are new.
MAX_AGE_S = 30.0
# That a new client waits once for the other addresses, when one has been connected: all its calls would go to that one.
# Then, as long at most, for its calls to have found all schedulers.
FIRST_S = 0.2
# A larger request has a call of its own: one that is too large for the scheduler ends its call, and others would wait
# behind it.
MAX_REQUEST_BYTES = 1 << 18
MAX_UNREAD_BYTES = 4 * 1024 * 1024  # of one generation, that come sooner than they are read
# A deadline is the scheduler's to tell; where nothing comes of it for so long, it is ours.
GRACE_S = 1.0
# What is to be said leaves in as few messages as these take: each waits for the one before, and a busy event loop comes
# back to that after tens of milliseconds.
MAX_ACTIONS, MAX_PACKED_BYTES = 64, 1 << 17
# gRPC's own word for a call that had ended while something was being written: how, it does not know.
CORE_ERROR = "Internal error from Core"
# Of a call: too many are open, or the scheduler is of a time before there were any.
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NotTaken(Exception):
    """It is too large, or the scheduler takes no such call (any more): the generation is to be a call of its own."""


Plain = tuple[str, list[int]]  # text and tokens of a message that has nothing else
Listener = Callable[[inference_pb2.GenerateResponse | Plain], None]


class Generation:
    """One of those of a call: an iterator of its messages, which raises PagedClientError, NotTaken. `close` it when it
    is left. A `listener` hears of each message as it comes, in place of the iterator, which then only ends."""

    def __init__(self, number: int, forget: Callable[["Generation"], None], listener: Listener | None) -> None:
        self.number = number
        self._forget = forget
        self._listener = listener
        self._messages: deque[inference_pb2.GenerateResponse | Plain] = deque()
        self._unread_bytes = 0
        self._has_ended = False
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self.expiry: asyncio.TimerHandle | None = None

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> inference_pb2.GenerateResponse:
        while not self._messages:
            if self._has_ended:
                raise self._end()
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        message = self._messages.popleft()
        if self._messages:
            self._unread_bytes -= _num_bytes(message)
        else:
            self._unread_bytes = 0
        if not isinstance(message, tuple):
            return message
        response = inference_pb2.GenerateResponse()
        response.text, token_ids = message
        response.token_ids.extend(token_ids)
        return response

    def add(self, message: inference_pb2.GenerateResponse | Plain) -> None:
        if self._listener is not None:
            self._listener(message)
            return
        if self._messages or self._waiting is None:
            self._unread_bytes += _num_bytes(message)
            if self._unread_bytes > MAX_UNREAD_BYTES and self._messages:
                self.close()
                found = f"more than {MAX_UNREAD_BYTES} bytes of the answer have come and were not read"
                self.end(ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, found))
                return
        self._messages.append(message)
        self._wake()

    def end(self, error: Exception | None = None) -> None:
        """After what has come already. Once."""
        if not self._has_ended:
            self._has_ended, self._error = True, error
            self._let_go()
            self._wake()

    def close(self) -> None:
        """The scheduler need not go on; harmless after the end."""
        if not self._has_ended:
            self._forget(self)
            self._let_go()

    def _end(self) -> Exception:
        # Not kept: with its traceback it refers to whoever raises it.
        error, self._error = self._error, None
        return StopAsyncIteration() if error is None else error

    def _let_go(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class _Call:
    """One call of GenerateMany, with its metadata. `note_scheduler` hears when it is known where it has come to."""

    def __init__(
        self, generate_many: Callable[..., Any], metadata: Any, note_scheduler: Callable[["_Call"], None]
    ) -> None:
        self._call = generate_many(metadata=metadata)
        self.metadata = metadata
        self._note_scheduler = note_scheduler
        self.scheduler: str | None = None
        self.is_answered = asyncio.Event()  # by whom, or not at all
        self._last_number = 0
        self._unsent: deque[inference_pb2.GenerationAction] = deque()
        self._has_unsent = asyncio.Event()
        self._generations: dict[int, Generation] = {}
        self._takes_until = time.monotonic() + MAX_AGE_S
        self._closes = False
        self._has_answered = False
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    def __len__(self) -> int:
        return len(self._generations)

    def takes(self, metadata: Any) -> bool:
        """Whether one may begin that has these: with a token of before, it would end when that does."""
        return not self._closes and time.monotonic() < self._takes_until and metadata == self.metadata

    def begin(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None, listener: Listener | None
    ) -> Generation:
        self._last_number += 1
        generation = self._generations[self._last_number] = Generation(self._last_number, self._cancel, listener)
        action = inference_pb2.GenerationAction(number=self._last_number, generate=request)
        if timeout_s is not None:
            action.timeout_ms = min(math.ceil(1000 * timeout_s), 2**32 - 1)
            error = DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no end within {timeout_s:g} s")
            expiry_s = timeout_s + GRACE_S
            generation.expiry = asyncio.get_running_loop().call_later(expiry_s, self._expire, generation, error)
        self._send(action)
        return generation

    def end_if_unused(self) -> None:
        """Nothing more will begin in it."""
        self._closes = True
        if not self._generations:
            self._has_unsent.set()

    def cancel(self) -> None:
        self._closes = True
        self._call.cancel()

    def _send(self, action: inference_pb2.GenerationAction) -> None:
        self._unsent.append(action)
        self._has_unsent.set()

    def _cancel(self, generation: Generation) -> None:
        if self._generations.pop(generation.number, None) is not None:
            cancelled = inference_pb2.CancelGeneration()
            self._send(inference_pb2.GenerationAction(number=generation.number, cancel=cancelled))

    def _expire(self, generation: Generation, error: PagedClientError) -> None:
        generation.close()
        generation.end(error)

    async def _write(self) -> None:
        """What has to be said, in order; then that there is no more."""
        try:
            while self._unsent or not self._closes or self._generations:
                if self._unsent:
                    await self._call.write(self._packed())
                else:
                    self._has_unsent.clear()
                    await self._has_unsent.wait()
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            self._closes = True  # whoever reads hears why

    def _packed(self) -> inference_pb2.GenerateManyRequest:
        """A message with what comes next; one action may be larger than several together."""
        actions, num_bytes = [self._unsent.popleft()], 0
        while self._unsent and len(actions) < MAX_ACTIONS:
            num_bytes += actions[-1].ByteSize()
            if num_bytes > MAX_PACKED_BYTES:
                break
            actions.append(self._unsent.popleft())
        return inference_pb2.GenerateManyRequest(actions=actions, takes_plain=True)

    async def _read(self) -> None:
        try:
            told = dict(await self._call.initial_metadata() or ())
            if SCHEDULER_KEY in told:
                self.scheduler = str(told[SCHEDULER_KEY])
                self._note_scheduler(self)
            self.is_answered.set()
            async for message in self._call:
                self._take(message)
            error: BaseException = _ended("the call has ended")
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as raised:
            error = await translated(self._call, raised)
        except ValueError as raised:
            self._call.cancel()
            found = f"a message of the scheduler contradicts itself: {raised}"
            error = client_error(grpc.StatusCode.INTERNAL, found, ())
        self._closes = True
        self._has_unsent.set()
        self.is_answered.set()
        failure = _failure(error, has_answered=self._has_answered)
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.end(failure)

    def _take(self, message: inference_pb2.GenerateManyResponse) -> None:
        self._has_answered = True
        self._closes |= message.closing
        if message.HasField("plain"):
            self._take_plain(message.plain)
        for update in message.updates:
            generation = self._generations.get(update.number)
            if generation is None:  # cancelled
                continue
            if update.HasField("response"):
                generation.add(update.response)
            if update.HasField("end"):
                self._generations.pop(update.number, None)
                error = _error(update.end)
                # The emptiest call would be this one, and all would begin where nothing is served.
                self._closes |= isinstance(error, UnavailableError)
                generation.end(error)
        if self._closes and not self._generations:
            self._has_unsent.set()

    def _take_plain(self, plain: inference_pb2.PlainUpdates) -> None:
        token_ids, begin = list(plain.token_ids), 0
        for number, text, num_tokens in zip(plain.numbers, plain.texts, plain.num_tokens, strict=True):
            end = begin + num_tokens
            generation = self._generations.get(number)
            if generation is not None:
                generation.add((text, token_ids[begin:end]))
            begin = end


class Many:
    """The calls of one client. `generate_many` is the stub's, `channel` is connected to `target`."""

    def __init__(self, generate_many: Callable[..., Any], channel: grpc.aio.Channel, target: str) -> None:
        self._generate_many = generate_many
        self._channel = channel
        self._has_one_address = has_one_address(target)
        self._calls: list[_Call] = []
        self._ending: list[_Call] = []  # in which nothing more begins
        self._num_same = 0  # calls, the last ones, that came to where there was one
        self._finding: asyncio.Task[None] | None = None

    async def settled(self, metadata: Any) -> None:
        """Comes before each `begin`, and takes a while before the first one."""
        if not self._has_one_address:
            if self._finding is None:
                self._finding = asyncio.create_task(self._find_all(metadata))
            if not self._finding.done():
                await asyncio.wait([self._finding])

    async def _find_all(self, metadata: Any) -> None:
        self._channel.get_state(try_to_connect=True)
        await asyncio.sleep(FIRST_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                while self._may_come_elsewhere():
                    call = self._open(metadata)
                    await call.is_answered.wait()
                    if call.scheduler is None:
                        return

    def begin(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        metadata: Any,
        listener: Listener | None = None,
    ) -> Generation:
        """In the call that has fewest; those that have equally few take turns. Raises NotTaken."""
        if request.ByteSize() > MAX_REQUEST_BYTES:
            raise NotTaken
        calls = [call for call in self._calls if call.takes(metadata)]
        if len(calls) < len(self._calls):
            self._num_same = 0  # in place of what has ended there may be somebody new
            for call in self._calls:
                if call not in calls:
                    self._leave(call)
        self._ending = [call for call in self._ending if len(call)]
        self._calls = calls
        is_worth_it = len(calls) <= math.isqrt(sum(map(len, calls)))
        is_other = not calls or (is_worth_it and self._may_come_elsewhere())
        call = self._open(metadata) if is_other else min(calls, key=len)
        calls.remove(call)
        calls.append(call)
        return call.begin(request, timeout_s, listener)

    def _open(self, metadata: Any) -> _Call:
        call = _Call(self._generate_many, metadata, self._note_scheduler)
        self._calls.append(call)
        return call

    def _may_come_elsewhere(self) -> bool:
        """Whether one more call may come to where there is none. Not once as many as there are, and one more for turns
        that other calls of the channel have had, have come to where there was one."""
        num_unknown = sum(call.scheduler is None for call in self._calls)
        return self._num_same <= len(self._calls) and num_unknown < MAX_UNKNOWN_CALLS and not self._has_one_address

    def _note_scheduler(self, call: _Call) -> None:
        if call not in self._calls:
            return
        if any(other is not call and other.scheduler == call.scheduler for other in self._calls):
            self._num_same += 1
            self._calls.remove(call)
            self._leave(call)
        else:
            self._num_same = 0

    def _leave(self, call: _Call) -> None:
        """Nothing more begins in it."""
        call.end_if_unused()
        self._ending.append(call)

    async def close(self) -> None:
        if self._finding is not None:
            self._finding.cancel()
        calls = [*self._calls, *self._ending]
        for call in calls:
            call.cancel()
        await asyncio.gather(*(task for call in calls for task in call.tasks), return_exceptions=True)


def _num_bytes(message: inference_pb2.GenerateResponse | Plain) -> int:
    return 4 * (len(message[0]) + len(message[1])) if isinstance(message, tuple) else message.ByteSize()


def _error(end: inference_pb2.GenerationEnd) -> PagedClientError | None:
    if not end.code:
        return None
    code = _CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return client_error(code, end.message, ((DETAILS_KEY, end.status),))


def _failure(error: BaseException, *, has_answered: bool) -> Exception:
    """Of the generations of a call that has ended so."""
    if not isinstance(error, PagedClientError):
        return _ended("the client was closed")
    if error.code is grpc.StatusCode.INTERNAL and error.message == CORE_ERROR:
        return _ended("the call has ended") if has_answered else NotTaken()
    return NotTaken() if error.code in _REFUSALS and not has_answered else error


def _ended(how: str) -> PagedClientError:
    return UnavailableError(grpc.StatusCode.UNAVAILABLE, how)
