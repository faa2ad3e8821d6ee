"""In which order sequences get in, and in the reverse of which they must give way; `Accounts` gives each its rank."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.sequence import Rank, Sequence


class AdmissionQueue:
    """The sequences that wait for one executor, in order. Several queues share the accounts of their tenants.

    The order is strict: while the first does not fit, nobody passes it.
    """

    def __init__(self, accounts: Accounts | None = None) -> None:
        self._accounts = Accounts() if accounts is None else accounts
        self._waiting: list[Sequence] = []
        self._queued: dict[Sequence, tuple[int, int]] = {}  # rows and tokens that each was counted with
        self.num_rows = 0  # that those who wait will take
        self.num_tokens = 0  # known of them, each beam counted

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    @property
    def has_tiers(self) -> bool:
        """Whether there are live sequences of different priorities."""
        return self._accounts.has_tiers

    def enter(self, sequence: Sequence) -> None:
        """Rank a new sequence, and those that it holds right behind it; it waits from now on."""
        self._accounts.charge(sequence)
        self.push(sequence)

    def push(self, sequence: Sequence) -> None:
        """A sequence that has its rank waits, again or for the first time."""
        insort(self._waiting, sequence, key=_rank)
        counted = sequence.num_rows + len(sequence.held), sequence.num_known
        self._accounts.note_waiting(sequence, sequence.num_known)
        self._queued[sequence] = counted
        self._count(counted, 1)

    def first(self) -> Sequence | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, sequence: Sequence) -> None:
        """It waits no more, for whatever reason."""
        index = bisect_left(self._waiting, sequence.rank, key=_rank)
        while self._waiting[index] is not sequence:
            index += 1
        del self._waiting[index]
        counted = self._queued.pop(sequence)
        self._accounts.note_gone(sequence, counted[1])
        self._count(counted, -1)

    def num_ahead(self, sequence: Sequence) -> int:
        """How many would wait before this new one."""
        return bisect_left(self._waiting, self._accounts.rank_of(sequence), key=_rank) if self._waiting else 0

    def settle(self, sequence: Sequence) -> None:
        """A sequence that was ranked ends: its tenant's account gets what it used for what it has asked for."""
        self._accounts.settle(sequence)

    def _count(self, counted: tuple[int, int], sign: int) -> None:
        num_rows, num_tokens = counted
        self.num_rows += sign * num_rows
        self.num_tokens += sign * num_tokens


def _rank(sequence: Sequence) -> Rank:
    return sequence.rank
