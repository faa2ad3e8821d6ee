"""Places of tables that grow: the lowest that are free are taken first."""

import heapq


class Places:
    """Numbers from 0 on. A table has to have as many places as the largest number taken says."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._num_known = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._num_known += 1
        return self._num_known - 1

    def give_back(self, place: int) -> None:
        heapq.heappush(self._free, place)

    def clear(self) -> None:
        """All are free."""
        self._free.clear()
        self._num_known = 0
