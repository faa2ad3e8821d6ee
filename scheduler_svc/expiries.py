"""Which requests have run out of time, known before each plan: a process that was stopped for a while must not plan for
them before it comes to their timers."""

import math
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

FEW = 1024  # not worth looking for those that have ended


class Expiries:
    """Moments are those of the event loop's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}  # of requests that are live
        self.next_at = math.inf  # nothing is due before

    def add(self, request_id: str, at: float) -> None:
        self._at[request_id] = at
        heappush(self._heap, (at, request_id))
        self.next_at = self._heap[0][0]

    def remove(self, request_id: str) -> None:
        """The request has ended. Harmless if it was never added."""
        self._at.pop(request_id, None)
        if len(self._heap) > 2 * len(self._at) + FEW or not self._at:
            self._heap = [(at, request_id) for request_id, at in self._at.items()]
            heapify(self._heap)
            self.next_at = self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[str]:
        """Those whose time is over, each once."""
        while self._heap and self._heap[0][0] <= now:
            at, request_id = heappop(self._heap)
            if self._at.get(request_id) == at:
                del self._at[request_id]
                yield request_id
        self.next_at = self._heap[0][0] if self._heap else math.inf
