"""What is told of a request that is traced."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

Fact = str | int | Sequence[str]


class Trace(Protocol):
    """See `scheduler_svc.api.tracing`."""

    @property
    def traceparent(self) -> str:
        """Whose children the executor's spans are to be, in W3C's words."""

    def note_phase(self, name: str, begin: float, end: float) -> None:
        """One that is over, in seconds of `time.perf_counter()`."""

    def describe(self, facts: Mapping[str, Fact]) -> None:
        """Facts of the whole request."""


# Of the call that is being handled, where it is traced.
TRACE: ContextVar[Trace | None] = ContextVar("trace", default=None)
