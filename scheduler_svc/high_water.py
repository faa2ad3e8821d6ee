"""When many requests have come and gone, what they had is given back to the system."""

import asyncio

from scheduler_svc.text.memory import give_back_freed_pages

MANY = 256  # requests at once: what fewer had is no more than the next few will want
MANY_BLOCKS = 1 << 14  # forgotten at once by the prefix cache: some megabytes
RECEDED = 4  # when no more than 1/RECEDED of them are left


class HighWater:
    """The most requests that were live at once since memory was last given back. Told of each load that comes and goes
    once, so the C library, which has to look at all that is free, is not asked more often than that."""

    def __init__(self) -> None:
        self._most = 0

    def has_receded(self, num_live: int) -> bool:
        """Now, with so many; the most of next time is counted from here."""
        self._most = max(self._most, num_live)
        if self._most < MANY or num_live > self._most // RECEDED:
            return False
        self._most = num_live
        return True

    def note(self, num_live: int) -> None:
        """So many are live."""
        if self.has_receded(num_live):
            give_back()


def give_back() -> None:
    """In a thread: the C library looks for tens of milliseconds."""
    asyncio.get_running_loop().run_in_executor(None, give_back_freed_pages)
