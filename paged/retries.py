"""When a call is made once more: as long as nothing of its answer has come, and not for ever."""

import random
import time
from dataclasses import dataclass

from paged.errors import PagedClientError, ResourceExhaustedError, UnavailableError


@dataclass(frozen=True, slots=True)
class Retries:
    """A call that ends with UNAVAILABLE before its first message is made again, by the scheduler whose turn it is then;
    so is one that finds a queue full, where the server says after what time. `max_attempts` 1 means never. A pause is
    drawn between half and all of `first_pause_s`, which doubles each time up to `longest_pause_s`; it is at least what
    the server says. A call with a deadline does not outlive it.
    """

    max_attempts: int = 5
    first_pause_s: float = 0.05
    longest_pause_s: float = 2.0


DEFAULT_RETRIES = Retries()


class Attempts:
    """Those of one call. `timeout_s` is for all together."""

    def __init__(self, retries: Retries, timeout_s: float | None) -> None:
        self._retries = retries
        self._end = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_failed = 0

    @property
    def left_s(self) -> float | None:
        """Time that is left, in seconds."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)

    def pause_s(self, error: PagedClientError) -> float | None:
        """Seconds to wait before the next attempt after this error; None if there is none."""
        self._num_failed += 1
        if self._num_failed >= self._retries.max_attempts or not _may_pass(error):
            return None
        longest = min(self._retries.first_pause_s * 2 ** (self._num_failed - 1), self._retries.longest_pause_s)
        pause_s = max(longest * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        left_s = self.left_s
        return None if left_s is not None and pause_s >= left_s else pause_s


def _may_pass(error: PagedClientError) -> bool:
    if isinstance(error, ResourceExhaustedError):
        return error.retry_after_s is not None
    return isinstance(error, UnavailableError)
