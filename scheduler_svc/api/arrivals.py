"""How long a request may take to arrive, and how many may be on their way.

Of a method with one request gRPC gives its handler nothing before all of that is there, and waits for it without a
bound. So no handler of ours is one of those: each begins with its call's headers, and receives its request here.
"""

import asyncio
from contextlib import suppress

import grpc.aio

from scheduler_svc.api.errors import abort, forget_frames_at_the_end, to_status
from scheduler_svc.errors import DeadlineExceeded, PagedError, TooManyCalls


class Arrivals:
    """A message may take `limit_s`. Those that have taken longer than `spared_s` are `max_late` at most: with one more,
    the call of the one that has taken longest ends, so that nobody can keep others out by taking his time."""

    def __init__(self, limit_s: float, max_late: int, spared_s: float = 0.0) -> None:
        self._limit_s = limit_s
        self._max_late = max_late
        self._spared_s = min(spared_s, limit_s)
        self._late: dict[_Arrival, None] = {}  # since when they are, oldest first
        self._ending: set[asyncio.Task[None]] = set()

    async def receive(self, context: grpc.aio.ServicerContext) -> bytes | None:
        """The next message of the call, None after the last. A call that is ended meanwhile ends as one that was
        aborted by its handler."""
        arrival = _Arrival(context)
        if self._spared_s:
            arrival.timer = asyncio.get_running_loop().call_later(self._spared_s, self._note_late, arrival)
        else:
            self._note_late(arrival)
        try:
            message = await context.read()
        except grpc.aio.AbortError as error:  # raised by another task at first
            forget_frames_at_the_end(error)
            raise
        finally:
            self._forget(arrival)
        return None if message is grpc.aio.EOF else message

    def _note_late(self, arrival: "_Arrival") -> None:
        self._late[arrival] = None
        error = DeadlineExceeded(f"its request has not arrived within {self._limit_s:g} s")
        left_s = self._limit_s - self._spared_s
        arrival.timer = asyncio.get_running_loop().call_later(left_s, self._end, arrival, error)
        if len(self._late) > self._max_late:
            oldest = next(iter(self._late))
            self._end(oldest, TooManyCalls(f"{len(self._late)} requests are on their way, and this one takes longest"))

    def _forget(self, arrival: "_Arrival") -> None:
        arrival.timer.cancel()
        self._late.pop(arrival, None)

    def _end(self, arrival: "_Arrival", error: PagedError) -> None:
        """Its handler waits for gRPC, which must not be cancelled in the middle of that: the status ends the wait."""
        self._forget(arrival)
        ending = asyncio.create_task(_told(arrival.context, error))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class Patience:
    """The same face, for calls whose messages come whenever there are any."""

    async def receive(self, context: grpc.aio.ServicerContext) -> bytes | None:
        message = await context.read()
        return None if message is grpc.aio.EOF else message


class _Arrival:
    """One message. `timer` is for what happens next if it does not come."""

    __slots__ = ("context", "timer")

    timer: asyncio.TimerHandle

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self.context = context


async def _told(context: grpc.aio.ServicerContext, error: PagedError) -> None:
    with suppress(grpc.aio.BaseError):
        await abort(context, to_status(error))
