"""Many generations in one call. Each has a task on its request's way into the engine, and then none; what is new of all
of them is said in one message, as soon as the one before has gone."""

import asyncio
import functools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import closing

from google.rpc import status_pb2  # type: ignore[import-untyped]

from paged.v1 import inference_pb2
from scheduler_svc.api.boundary import status_of
from scheduler_svc.api.call_limits import GENERATE_MANY, CallLimits
from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.responses import PlainColumns, fill, merge
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError
from scheduler_svc.gathering import GatheredReader
from scheduler_svc.requests import Delta, GenerationRequest

IDLE_S = 30.0  # that a call may be without a generation
FULL_BYTES = 1 << 18  # a message that has so many takes no further update, each of which has some 300 kB at most
# Failures that may wait to be told while more requests are received: each may have 5 kB, and costs its client nothing.
MAX_UNTOLD_ENDS = 256
ACTIONS_IN_A_TURN = 16  # of the event loop, of those that have come in one message
# What a number or a character takes at most: that is quicker than to count.
MOST_BYTES = 5

Accept = Callable[[inference_pb2.GenerateRequest, Deadline], Awaitable[GenerationRequest]]


class _Generation:
    """One that is in the engine. `held` is for samples that are said in one piece each, at its end."""

    __slots__ = ("_is_named", "held", "num_bytes", "reader")

    def __init__(self, reader: GatheredReader, num_bytes: int, *, streams: bool) -> None:
        self.reader = reader
        self.num_bytes = num_bytes  # of its request
        self.held: dict[int, list[Delta]] | None = None if streams else {}
        self._is_named = False  # the client knows the request's id

    def whole_with(self, delta: Delta) -> Delta | None:
        """The sample, if this is the last of its deltas."""
        if self.held is None:
            raise RuntimeError("a generation that streams holds nothing")
        held = self.held.setdefault(delta.index, [])
        held.append(delta)
        return None if delta.finish is None else merge(self.held.pop(delta.index))

    def say(self, delta: Delta, update: inference_pb2.GenerationUpdate, *, is_last: bool) -> None:
        update.number = self.reader.number
        response = update.response
        if not self._is_named:
            response.request_id = self.reader.request_id
            self._is_named = True
        fill(response, delta)
        if is_last:
            update.end.SetInParent()


class ManyGenerations:
    """One call; its `messages` are asked for once. `accept` makes a request the engine's, or says what is wrong."""

    def __init__(
        self,
        engine: Engine,
        accept: Accept,
        limits: CallLimits,
        max_request_s: float,
    ) -> None:
        self._engine = engine
        self._accept = accept
        self._limits = limits
        self._max_request_s = max_request_s
        self._gathering = engine.gathering()
        # By the client's number: those on their way into the engine, and those that are there.
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._generations: dict[int, _Generation] = {}
        self._over: list[GatheredReader] = []  # of these, to be freed as soon as others have had a turn
        self._whole: inference_pb2.GenerationUpdate | None = None  # that leaves in a message of its own
        self._ends: deque[tuple[int, status_pb2.Status]] = deque()  # of those that have failed, to be told
        self._has_told = asyncio.Event()  # some of them
        self._last_number = -1
        self._takes_plain = False
        self._error: Exception | None = None  # what ends the call
        self._has_all = False  # no more requests will come
        self._is_closing = self._has_told_closing = self._is_over = False

    def close(self) -> None:
        """The client is told to begin no more; the call ends with its last generation."""
        self._is_closing = True
        self._gathering.wake()

    async def messages(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]
    ) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
        """Until all has been said. Raises what ends the call before that."""
        receiving = asyncio.create_task(self._receive(requests))  # ends with the call
        try:
            while self._error is None:
                if self._has_something:
                    async with self._gathering.turn():
                        message = self._message()
                    if message is not None:
                        self._gathering.note_sending()
                        yield message
                        self._gathering.note_sent()
                elif self._opening or self._generations:
                    await self._gathering.news(None)
                elif self._has_all or self._is_closing or not await self._gathering.news(IDLE_S):
                    return
            raise self._error
        finally:
            self._is_over = True
            self._has_told.set()
            self._gathering.close()
            for number in list(self._generations):
                self._free(number)
            opening = list(self._opening.values())
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            receiving.add_done_callback(_look_at)

    async def _receive(self, requests: AsyncIterator[inference_pb2.GenerateManyRequest]) -> None:
        try:
            async for request in requests:
                self._takes_plain |= request.takes_plain
                for place, action in enumerate(request.actions):
                    if self._is_over:
                        return
                    self._act(action, place)
                    if place % ACTIONS_IN_A_TURN == ACTIONS_IN_A_TURN - 1:
                        await asyncio.sleep(0)  # so that those that fail at once have done so
                    while len(self._ends) > MAX_UNTOLD_ENDS and not self._is_over:
                        self._has_told.clear()
                        await self._has_told.wait()
        except Exception as error:  # noqa: BLE001 - it is the call's
            self._error = error
        self._has_all = True
        self._gathering.wake()

    def _act(self, request: inference_pb2.GenerationAction, place: int) -> None:
        """Raises InvalidRequest where the client has lost count, so that nothing it says would be understood."""
        action = request.WhichOneof("action")
        if action is None:
            raise InvalidRequest(FieldViolation(f"actions[{place}].action", "is unset; give generate or cancel"))
        if action == "cancel":
            if request.number in self._opening:
                self._opening[request.number].cancel()
            self._free(request.number)  # its task may have ended just now
            return
        if request.number <= self._last_number:
            found = f"is {request.number}; generations of a call have rising numbers, and the last was"
            raise InvalidRequest(FieldViolation(f"actions[{place}].number", f"{found} {self._last_number}"))
        self._last_number = request.number
        task = self._opening[request.number] = asyncio.create_task(self._begin(request))
        task.add_done_callback(functools.partial(self._note_begun, request.number))

    def _note_begun(self, number: int, _task: object) -> None:
        del self._opening[number]
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        if not (self._opening or self._generations):
            self._gathering.wake()

    async def _begin(self, request: inference_pb2.GenerationAction) -> None:
        number, num_bytes = request.number, request.ByteSize()
        try:
            self._limits.take(num_bytes)
        except PagedError as error:
            self._fail(number, error)
            return
        try:
            timeout_s = request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
            deadline = Deadline.within(timeout_s, self._max_request_s)
            accepted = await self._accept(request.generate, deadline)
            reader = await self._enter(accepted, deadline)
        except BaseException as error:
            self._limits.give_back(num_bytes)
            if not isinstance(error, Exception):
                raise
            self._fail(number, error)
            return
        reader.number = number
        self._generations[number] = _Generation(reader, num_bytes, streams=accepted.streams)
        if self._is_over:
            self._free(number)
        elif reader.is_over:  # it has failed meanwhile
            self._note_over(reader)

    async def _enter(self, request: GenerationRequest, deadline: Deadline) -> GatheredReader:
        entering = self._engine.gathered(request, self._gathering)
        # Whatever else it waits for, the engine sees to its deadline.
        return await (deadline.bounded(entering) if request.echo else entering)

    def _fail(self, number: int, error: Exception) -> None:
        """It is over, and its client will be told why."""
        self._ends.append((number, status_of(error, GENERATE_MANY)))
        self._gathering.wake()

    def _note_over(self, reader: GatheredReader) -> None:
        if reader.number not in self._generations:
            return  # on its way into the engine, and `_begin` sees to it
        if reader.error is not None:
            self._fail(reader.number, reader.error)
        if not self._over:
            asyncio.get_running_loop().call_soon(self._free_over)
        self._over.append(reader)

    def _free_over(self) -> None:
        over, self._over = self._over, []
        for reader in over:
            self._free(reader.number)

    def _free(self, number: int) -> None:
        """Nothing more is said of it. Harmless if it is not there."""
        generation = self._generations.pop(number, None)
        if generation is not None:
            self._engine.leave(generation.reader)
            self._limits.give_back(generation.num_bytes)
            self._wake_if_idle()

    @property
    def _has_something(self) -> bool:
        """Whether there may be something to say."""
        is_to_tell = self._is_closing and not self._has_told_closing
        return is_to_tell or bool(self._ends) or self._whole is not None or self._gathering.has_more

    def _message(self) -> inference_pb2.GenerateManyResponse | None:
        """What there is to say, as far as one message goes; None if that is nothing."""
        message = inference_pb2.GenerateManyResponse()
        if self._is_closing and not self._has_told_closing:
            message.closing = self._has_told_closing = True
        num_bytes = self._tell_ends(message)
        if num_bytes >= FULL_BYTES:
            return message
        if self._whole is not None:
            message.updates.append(self._whole)
            self._whole = None
            return message
        plain = PlainColumns()
        with closing(self._gathering.take()) as news:
            for reader, delta in news:
                if isinstance(delta, tuple):
                    text, token_ids = delta
                    plain.add(reader.number, text, token_ids)
                    num_bytes += MOST_BYTES * (len(text) + len(token_ids))
                else:
                    if delta is not None:
                        num_bytes += self._say(self._generations[reader.number], delta, message, is_last=reader.is_over)
                    if reader.is_over:
                        self._note_over(reader)
                if num_bytes >= FULL_BYTES or self._whole is not None:
                    break
        if plain.numbers:
            plain.say(message, in_columns=self._takes_plain)
        if plain.numbers or message.updates or message.closing:
            return message
        return self._message() if self._whole is not None else None

    def _say(
        self, said: _Generation, delta: Delta, message: inference_pb2.GenerateManyResponse, *, is_last: bool
    ) -> int:
        """In the message, where it has room for it; returns the bytes that it takes there."""
        if said.held is None:
            update = message.updates.add()
            said.say(delta, update, is_last=is_last)
            return update.ByteSize()
        if (whole := said.whole_with(delta)) is not None:
            self._whole = inference_pb2.GenerationUpdate()
            said.say(whole, self._whole, is_last=is_last)
        return 0

    def _tell_ends(self, message: inference_pb2.GenerateManyResponse) -> int:
        """Of those that have failed, as many as the message takes; returns their bytes."""
        num_bytes = 0
        while self._ends and num_bytes < FULL_BYTES:
            number, status = self._ends.popleft()
            update = message.updates.add(number=number)
            update.end.CopyFrom(_end(status))
            num_bytes += update.ByteSize()
            self._has_told.set()
        return num_bytes


def _end(status: status_pb2.Status) -> inference_pb2.GenerationEnd:
    return inference_pb2.GenerationEnd(code=status.code, message=status.message, status=status.SerializeToString())


def _look_at(task: asyncio.Task[None]) -> None:
    """What it ends with after the call has ended interests nobody."""
    if not task.cancelled():
        task.exception()
