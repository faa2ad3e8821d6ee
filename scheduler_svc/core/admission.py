"""In which order sequences get in: first come, first served; a preempted one goes before all that never ran."""

from collections import OrderedDict
from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence


class AdmissionQueue:
    """The sequences that wait. All operations are O(1).

    The order is strict: while the first does not fit, nobody passes it, so nobody waits for ever.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting.values())

    def push(self, sequence: Sequence) -> None:
        self._waiting[id(sequence)] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """For a preempted sequence: it keeps its rank. Of several victims, push the last in rank first."""
        self.push(sequence)
        self._waiting.move_to_end(id(sequence), last=False)

    def first(self) -> Sequence | None:
        return next(iter(self._waiting.values()), None)

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[id(sequence)]
