"""How long a call may take: the client's deadline or the server's limit, whichever is sooner."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio

from scheduler_svc.errors import DeadlineExceeded

T = TypeVar("T")


class Deadline:
    """A moment on the running loop's clock. What is awaited through it is cancelled then."""

    def __init__(self, seconds: float, reason: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.at = self._loop.time() + seconds
        self._reason = reason

    @classmethod
    def of(cls, context: grpc.aio.ServicerContext, max_request_s: float) -> "Deadline":
        """Of a call. gRPC ends it at the client's deadline by itself, but one that has passed must not be queued."""
        return cls.within(context.time_remaining(), max_request_s)

    @classmethod
    def within(cls, client_s: float | None, max_request_s: float) -> "Deadline":
        """In so many seconds of the client's, if it has said any."""
        if client_s is not None and client_s <= max_request_s:
            return cls(client_s, "the deadline of the call has passed")
        return cls(max_request_s, f"the request took longer than the server's limit of {max_request_s:g} s")

    def error(self) -> DeadlineExceeded:
        """What a call ends with once it has passed."""
        return DeadlineExceeded(self._reason)

    def check(self) -> None:
        """Raises DeadlineExceeded if it has passed."""
        if self._loop.time() >= self.at:
            raise self.error()

    def call(self, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Have it called when the deadline passes, unless the handle is cancelled before."""
        return self._loop.call_at(self.at, callback)

    async def bounded(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result; raises DeadlineExceeded once it has passed, after the awaitable was cancelled."""
        try:
            async with asyncio.timeout_at(self.at) as timer:
                return await awaitable
        except TimeoutError:
            if timer.expired():
                raise self.error() from None
            raise
