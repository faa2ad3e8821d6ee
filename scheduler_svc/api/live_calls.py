"""The calls that are going on, by who makes them: a call ends when its caller's token lets it in no longer.

A call's task waits for one of two things: for something to say, which can be given up at any moment, and for its caller
to take what was said. In the middle of a message nobody can be told, so that is waited for, but not for long.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from scheduler_svc.api.caller import CALLER, Caller
from scheduler_svc.errors import PagedError

LOOK_S = 1.0  # between two looks at whether all may go on
TAKING_S = 2.0  # that a caller has to take a message before its call ends without a word

log = structlog.get_logger()


class LiveCall:
    """`error` is what it ends with, if it may not go on. Whoever handles it sets `is_sending` around each message and
    calls `check` after it."""

    __slots__ = ("_task", "error", "is_sending", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.error: PagedError | None = None
        self.is_sending = False
        self._task = asyncio.current_task()

    def check(self) -> None:
        """Raises the error."""
        if self.error is not None:
            raise self.error

    def end(self, error: PagedError) -> None:
        """Once."""
        self.error = error
        if self.is_sending:
            asyncio.get_running_loop().call_later(TAKING_S, self._give_up)
        else:
            self._cancel()

    def take_back(self) -> None:
        """In its task, which is being cancelled: raises the error if that is why, for its caller to be told."""
        if self.error is not None and not self.is_sending and self._task is not None:
            self._task.uncancel()
            raise self.error

    def _give_up(self) -> None:
        if self.is_sending:
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LiveCalls:
    """Those of callers whose tokens can be taken back."""

    def __init__(self) -> None:
        self._calls: defaultdict[Caller, set[LiveCall]] = defaultdict(set)

    @contextmanager
    def going_on(self, method: str) -> Iterator[LiveCall]:
        """The call that the current task handles. Raises what it ends with where it may not go on."""
        call, caller = LiveCall(method), CALLER.get(None)
        if caller is None or not caller.digest:
            yield call
            return
        self._calls[caller].add(call)
        try:
            yield call
        except asyncio.CancelledError:
            call.take_back()
            raise
        finally:
            self._calls[caller].discard(call)
            if not self._calls[caller]:
                del self._calls[caller]

    def look(self, check: Callable[[Caller, str], None]) -> None:
        """End those that `check`, which is given caller and method, raises a PagedError for."""
        for caller, calls in list(self._calls.items()):
            ended: dict[str, int] = defaultdict(int)
            for call in calls:
                if call.error is not None:
                    continue
                try:
                    check(caller, call.method)
                except PagedError as error:
                    call.end(error)
                    ended[str(error)] += 1
            for reason, count in ended.items():
                log.warning("calls_ended", token=caller.name, reason=reason, calls=count)
