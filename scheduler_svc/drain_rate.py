"""How fast the queue gets shorter: what a refused caller is told to wait, what a deadline is measured against, and how
long one that comes now would wait."""

from collections import deque

WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
UNKNOWN_RETRY_S = 1.0  # before anything has been seen
KNOWN_AFTER_S = 5.0  # of watching a queue that is never empty: less says nothing about what could happen
WAITED_S = 0.5  # in which some had to wait: less says little about how fast they get in


class DrainRate:
    """`note` regularly how many have left the queue since the start; times are seconds of one clock."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._held_up_since = float("-inf")

    def note(self, now: float, num_gone: int, *, held_up: bool = True) -> None:
        """`held_up`: somebody waits for an executor that is there. Else more could have gone than has."""
        if not held_up:
            self._held_up_since = now
        samples = self._samples
        samples.append((now, num_gone))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()

    def retry_after_s(self, num_waiting: int) -> float:
        """The time in which so many leave, at the mean rate of the window; whoever comes back then finds room even if
        all others who were refused meanwhile come back, too."""
        if len(self._samples) < 2:
            return UNKNOWN_RETRY_S
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        seconds = num_waiting * (end - begin) / max(last - first, 1)
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def most_within(self, seconds: float) -> float:
        """The most that have left in so short a time at any moment of the window, as far back as others waited all the
        time; more than any number where too little has been seen to say so. Of a time longer than what has been seen,
        in proportion."""
        samples = [sample for sample in self._samples if sample[0] >= self._held_up_since]
        seen_s = samples[-1][0] - samples[0][0] if samples else 0.0
        if seen_s < KNOWN_AFTER_S:
            return float("inf")
        if seconds >= seen_s:
            return (samples[-1][1] - samples[0][1]) * seconds / seen_s
        most, begin = 0, 0
        for end, (at, num_gone) in enumerate(samples):
            # One sample early: what had left by the one after may have done so at any moment between the two.
            while begin + 1 < end and samples[begin + 1][0] <= at - seconds:
                begin += 1
            most = max(most, num_gone - samples[begin][1])
        return float(most)


class AdmissionRate:
    """How fast those get in who have to wait for it, of one model. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float, int]] = deque()  # when, after how long, how many had got in
        self._seconds = 0.0  # of those kept in which some waited
        self._num_admitted = 0  # in these
        self._last: tuple[float, int] | None = None

    def note(self, now: float, num_admitted: int, *, some_wait: bool) -> None:
        """Regularly: how many have got in since the start, and whether the last plans have left any behind."""
        if self._last is not None and some_wait:
            seconds, num_more = now - self._last[0], max(num_admitted - self._last[1], 0)
            self._kept.append((now, seconds, num_more))
            self._add(seconds, num_more)
        self._last = now, num_admitted
        while self._kept and self._kept[0][0] <= now - WINDOW_S:
            _, seconds, num_more = self._kept.popleft()
            self._add(-seconds, -num_more)

    def expected_wait_s(self, num_ahead: int) -> float:
        """Of one that so many wait before; 0 where too little has been seen to say. Where nobody has got in, as if one
        did now: it will be longer, but nobody knows by how much."""
        if self._seconds < WAITED_S:
            return 0.0
        return (num_ahead + 1) * self._seconds / max(self._num_admitted, 1)

    def _add(self, seconds: float, num_admitted: int) -> None:
        self._seconds += seconds
        self._num_admitted += num_admitted
