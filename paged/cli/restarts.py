"""How soon a service that has ended is started again, and when no more."""

from collections import deque


class Restarts:
    """Pauses double from `first_pause_s` up to `longest_pause_s`, and begin anew for a service that ran for
    `settled_s`. After `most` ends within `window_s` there is no other start."""

    def __init__(
        self,
        *,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 5.0,
        settled_s: float = 30.0,
        most: int = 30,
        window_s: float = 300.0,
    ) -> None:
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._settled_s = settled_s
        self._window_s = window_s
        self._pause_s = first_pause_s
        self._ends: deque[float] = deque(maxlen=most)

    def pause_s(self, now: float, ran_s: float) -> float | None:
        """Seconds until the next start, for a service that has ended now (seconds of any clock) and had run for so
        long; None: there is none."""
        self._ends.append(now)
        if len(self._ends) == self._ends.maxlen and now - self._ends[0] <= self._window_s:
            return None
        if ran_s >= self._settled_s:
            self._pause_s = self._first_pause_s
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, self._longest_pause_s)
        return pause_s
