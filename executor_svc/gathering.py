"""How long a step may wait for sessions that have no plan at hand.

A session whose plan comes a moment after the others' would be in every other step only, and so would those that it
alternates with: each at half its speed, while the executor computes twice as many steps. So those who were in one of
the last two steps are waited for; not for longer, all in all, than a small share of the time that steps take. Who is
slow, or has stopped, is in no step after that, and waited for no more.
"""

from collections.abc import Iterable

GATHER_SHARE = 0.02  # of the time that steps take
MOST_STEPS = 10  # of which what was not waited is kept: enough to bring alternating sessions into one step


class Gathering:
    """Times are in seconds."""

    def __init__(self) -> None:
        self._allowance_s = 0.0
        self._last: frozenset[int] = frozenset()
        self._before: frozenset[int] = frozenset()

    def note_step(self, sessions: Iterable[int], took_s: float) -> None:
        """These sessions had a plan in the step that has ended."""
        self._before, self._last = self._last, frozenset(sessions)
        share_s = GATHER_SHARE * took_s
        self._allowance_s = min(self._allowance_s + share_s, MOST_STEPS * share_s)

    def allowance_s(self, missing: Iterable[int]) -> float:
        """For how long a step may wait, if these sessions have no plan."""
        if (self._last | self._before).isdisjoint(missing):
            return 0.0
        return self._allowance_s

    def note_wait(self, waited_s: float) -> None:
        self._allowance_s = max(0.0, self._allowance_s - waited_s)
