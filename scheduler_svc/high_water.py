"""When many requests have come and gone, what they had is given back to the system."""

import asyncio

from scheduler_svc.text.memory import give_back_freed_pages, give_back_spare_objects

MANY = 256  # requests at once: what fewer had is no more than the next few will want
RECEDED = 4  # when no more than 1/RECEDED of them are left
QUIET_LOOKS = 20  # with nothing live, until gRPC has let go of the last calls, too


class HighWater:
    """The most requests that were live at once since memory was last given back. Told of each load that comes and goes
    once when most of it has gone and once when all of it has, so the C library, which has to look at all that is free,
    is not asked more often than that."""

    def __init__(self) -> None:
        self._most = 0
        self._num_quiet: int | None = None  # looks since nothing was live, of a load that has receded

    def has_receded(self, num_live: int) -> bool:
        """Now, with so many; the most of next time is counted from here."""
        self._most = max(self._most, num_live)
        if self._most < MANY or num_live > self._most // RECEDED:
            return False
        self._most = num_live
        self._num_quiet = 0
        return True

    def has_gone(self, num_live: int) -> bool:
        """Of a load that has receded nothing is left, since some time."""
        if self._num_quiet is None:
            return False
        self._num_quiet = 0 if num_live else self._num_quiet + 1
        if self._num_quiet < QUIET_LOOKS:
            return False
        self._num_quiet = None
        return True

    def note(self, num_live: int) -> None:
        """So many are live. In a thread: the C library looks for tens of milliseconds."""
        loop = asyncio.get_running_loop()
        if self.has_receded(num_live):
            loop.run_in_executor(None, give_back_freed_pages)
        elif self.has_gone(num_live):
            loop.run_in_executor(None, give_back_spare_objects)
