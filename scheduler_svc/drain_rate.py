"""How fast the queue gets shorter: what a refused caller is told to wait, what a deadline is measured against, and how
long one that comes now would wait."""

from array import array
from bisect import bisect_left, bisect_right

WINDOW_S = 30.0
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0
UNKNOWN_RETRY_S = 1.0  # before anything has been seen
KNOWN_AFTER_S = 5.0  # of watching a queue that is never empty: less says nothing about what could happen
WAITED_S = 0.5  # in which some had to wait: less says little about how fast they get in


class DrainRate:
    """`note` regularly how many have left the queue since the start; times are seconds of one clock."""

    def __init__(self) -> None:
        # Columns of one sample each time: objects for each would keep pages of the load that they are from.
        self._at, self._num_gone = array("d"), array("q")
        self._held_up_since = float("-inf")

    def note(self, now: float, num_gone: int, *, held_up: bool = True) -> None:
        """`held_up`: somebody waits for an executor that is there. Else more could have gone than has."""
        if not held_up:
            self._held_up_since = now
        self._at.append(now)
        self._num_gone.append(num_gone)
        num_before = bisect_right(self._at, now - WINDOW_S) - 1  # all but the last one before the window
        num_over = min(num_before, len(self._at) - 2)
        if num_over > 0:
            del self._at[:num_over], self._num_gone[:num_over]

    def retry_after_s(self, num_waiting: int) -> float:
        """The time in which so many leave, at the mean rate of the window; whoever comes back then finds room even if
        all others who were refused meanwhile come back, too."""
        if len(self._at) < 2:
            return UNKNOWN_RETRY_S
        seconds = num_waiting * (self._at[-1] - self._at[0]) / max(self._num_gone[-1] - self._num_gone[0], 1)
        return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)

    def most_within(self, seconds: float) -> float:
        """The most that have left in so short a time at any moment of the window, as far back as others waited all the
        time; more than any number where too little has been seen to say so. Of a time longer than what has been seen,
        in proportion, and as if one more had left right after it: a queue that has stood still for seconds may move."""
        first = bisect_left(self._at, self._held_up_since)
        times, counts = self._at[first:], self._num_gone[first:]
        seen_s = times[-1] - times[0] if times else 0.0
        if seen_s < KNOWN_AFTER_S:
            return float("inf")
        if seconds >= seen_s:
            return (counts[-1] - counts[0] + 1) * seconds / seen_s
        most, begin = 0, 0
        for end, (at, num_gone) in enumerate(zip(times, counts, strict=True)):
            # One sample early: what had left by the one after may have done so at any moment between the two.
            while begin + 1 < end and times[begin + 1] <= at - seconds:
                begin += 1
            most = max(most, num_gone - counts[begin])
        return float(most)


class AdmissionRate:
    """How fast those get in who have to wait for it, of one model. Times are seconds of one clock."""

    def __init__(self) -> None:
        # Of each time between two looks in which some waited: its end, how long it was, how many got in.
        self._ends, self._lengths, self._nums = array("d"), array("d"), array("q")
        self._seconds = 0.0  # of those kept in which some waited
        self._num_admitted = 0  # in these
        self._last_at, self._last_num = -1.0, 0

    def note(self, now: float, num_admitted: int, *, some_wait: bool) -> None:
        """Regularly: how many have got in since the start, and whether the last plans have left any behind."""
        if self._last_at >= 0 and some_wait:
            seconds, num_more = now - self._last_at, max(num_admitted - self._last_num, 0)
            self._ends.append(now)
            self._lengths.append(seconds)
            self._nums.append(num_more)
            self._add(seconds, num_more)
        self._last_at, self._last_num = now, num_admitted
        if num_over := bisect_right(self._ends, now - WINDOW_S):
            self._add(-sum(self._lengths[:num_over]), -sum(self._nums[:num_over]))
            del self._ends[:num_over], self._lengths[:num_over], self._nums[:num_over]

    def expected_wait_s(self, num_ahead: int) -> float:
        """Of one that so many wait before; 0 where too little has been seen to say. Where nobody has got in, as if one
        did now: it will be longer, but nobody knows by how much."""
        if self._seconds < WAITED_S:
            return 0.0
        return (num_ahead + 1) * self._seconds / max(self._num_admitted, 1)

    def _add(self, seconds: float, num_admitted: int) -> None:
        self._seconds += seconds
        self._num_admitted += num_admitted
