"""How many calls may be going on, and how much their requests may have.

Calls of methods that are open to anybody are counted apart, each connection's by themselves: whoever has no credentials
can use up what his own connections have, and nothing of what others have.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc.aio

from scheduler_svc.api.arrivals import Arrivals, Patience
from scheduler_svc.api.permissions import OPEN_METHODS
from scheduler_svc.errors import FieldViolation, InvalidRequest, QueueFull, TooManyCalls
from scheduler_svc.settings import SchedulerSettings

GENERATE_MANY = "/paged.v1.InferenceService/GenerateMany"
MAX_OPEN_CALLS_A_PEER = 32  # of one connection, which may watch each service's health
MAX_OPEN_REQUEST_BYTES = 4096  # with which a name of a service has room
OPEN_REQUEST_S = 5.0  # for the few bytes of a request that anybody may send
MAX_OPEN_REQUESTS = 16  # of these on their way: what has its bytes with it is on its way for no time at all
SPARED_S = 1.0  # in which a request of a caller whom we know may arrive, however many others do
RETRY_AFTER_S = 1.0


class CallLimits:
    """Of calls that had to show who makes them. `arrivals` has the limits of their requests' way here."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._max_calls = settings.max_concurrent_calls
        self._max_total_bytes = settings.max_total_request_bytes
        self._num_calls = self._num_bytes = 0
        # Of each that is late as much may have come as a message may have.
        max_late = max(1, settings.max_total_request_bytes // settings.max_message_bytes)
        self.arrivals = Arrivals(settings.max_receive_s, max_late, SPARED_S)

    def enter(self, context: grpc.aio.ServicerContext) -> None:
        """The call begins, and counts until its last byte is gone. Raises QueueFull."""
        self._check_calls()
        self._num_calls += 1
        _at_the_end(self._leave)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """A request has so many. Raises QueueFull, but not for the only one."""
        self._check_bytes(num_bytes)
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    def take(self, num_bytes: int) -> None:
        """A request of so many bytes begins in a call with others; it counts like one that has a call of its own, until
        it is given back. Raises QueueFull, and has taken nothing."""
        self._check_calls()
        self._check_bytes(num_bytes)
        self._num_calls += 1
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """What `take` has taken."""
        self._num_calls -= 1
        self._num_bytes -= num_bytes

    def _check_calls(self) -> None:
        if self._num_calls >= self._max_calls:
            found = f"{self._num_calls} calls are going on, and max_concurrent_calls is {self._max_calls}"
            raise QueueFull(found, RETRY_AFTER_S)

    def _check_bytes(self, num_bytes: int) -> None:
        if self._num_bytes and self._num_bytes + num_bytes > self._max_total_bytes:
            found = f"requests of {self._num_bytes} bytes are being served, and this one has {num_bytes}"
            limit = f"max_total_request_bytes is {self._max_total_bytes}"
            raise QueueFull(f"{found}; {limit}", RETRY_AFTER_S)

    def _leave(self) -> None:
        self._num_calls -= 1


class OpenCallLimits:
    """Of calls that anybody may make: the same face."""

    def __init__(self) -> None:
        self._num_calls: Counter[str] = Counter()  # by peer
        self.arrivals = Arrivals(OPEN_REQUEST_S, MAX_OPEN_REQUESTS)

    def enter(self, context: grpc.aio.ServicerContext) -> None:
        """Raises TooManyCalls."""
        peer = context.peer()
        if self._num_calls[peer] >= MAX_OPEN_CALLS_A_PEER:
            raise TooManyCalls(f"{MAX_OPEN_CALLS_A_PEER} calls of this connection ask for health already")
        self._num_calls[peer] += 1
        _at_the_end(lambda: self._leave(peer))

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """They have next to nothing, and who watches for hours is not served for hours. Raises InvalidRequest."""
        if num_bytes > MAX_OPEN_REQUEST_BYTES:
            found = f"has {num_bytes} bytes, above the limit of {MAX_OPEN_REQUEST_BYTES} for this method"
            raise InvalidRequest(FieldViolation("request", found))
        yield

    def _leave(self, peer: str) -> None:
        self._num_calls[peer] -= 1
        if not self._num_calls[peer]:
            del self._num_calls[peer]


class LongCallLimits:
    """Of calls whose requests come whenever there are any, as `requests` within the limits of all: the same face.

    Nothing tells whether the next is on its way or nobody has any, so of each as much may have come as a message may
    have, and only their number bounds that.
    """

    def __init__(self, requests: CallLimits, max_calls: int) -> None:
        self._requests = requests
        self._max_calls = max_calls
        self._num_calls = 0
        self.arrivals = Patience()
        self.holding = requests.holding

    def enter(self, context: grpc.aio.ServicerContext) -> None:
        """Raises QueueFull, TooManyCalls."""
        if self._num_calls >= self._max_calls:
            raise TooManyCalls(f"{self._num_calls} calls of GenerateMany are open, and max_many_calls allows no more")
        self._requests.enter(context)
        self._num_calls += 1
        _at_the_end(self._leave)

    def _leave(self) -> None:
        self._num_calls -= 1


Limits = CallLimits | OpenCallLimits | LongCallLimits


class AllCallLimits:
    """Of one server."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.requests = CallLimits(settings)
        self._open = OpenCallLimits()
        self._long = LongCallLimits(self.requests, settings.max_many_calls)

    def of(self, method: str) -> Limits:
        if method in OPEN_METHODS:
            return self._open
        return self._long if method == GENERATE_MANY else self.requests


def _at_the_end(callback: Callable[[], None]) -> None:
    """Of the call, once its last byte is gone: then the task ends in which gRPC handles it. The call's context would
    keep a callback that keeps the context, and with it all of the call for the collector."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a call is handled by no task")
    task.add_done_callback(lambda _task: callback())
