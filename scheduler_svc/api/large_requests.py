"""Large requests are read one after another, and most of the time in between is for others.

To read a request of megabytes stops the event loop for some milliseconds for each of them: its bytes are checked, and
its text is copied. A single one is hardly noticed. Of fifty that have come at once, each would be read in the same turn
of the loop, and streams and health would wait for all of them. Most that are so large are too long anyway, which can be
seen without reading them.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 1 << 18  # smaller ones take less than half a millisecond
REST = 10  # times as long as reading took: what is done with the text next takes twice as long again

Request = TypeVar("Request")
Check = Callable[[bytes], None]  # raises what is certainly wrong with a request, by its bytes alone


class LargeRequests:
    """The place where they wait for each other."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def read(self, parse: Callable[[bytes], Request], data: bytes, check: Check | None = None) -> Request:
        """`parse(data)`; at once where it is small. Raises what `parse` does, and of large ones what `check` does."""
        if len(data) < LARGE_BYTES:
            return parse(data)
        if check is not None:
            check(data)
        await self._one.acquire()
        begin = time.perf_counter()
        try:
            return parse(data)
        finally:
            took = time.perf_counter() - begin
            asyncio.get_running_loop().call_later(REST * took, self._one.release)
