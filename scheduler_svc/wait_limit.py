"""How long a request may wait to get in. Who is expected to wait longer is refused at once; who has, then.

A bound on how many wait is too long for a slow executor and too short for a fast one: what callers feel is time. How
long a new request will wait is known as well as this: as long as those before it in the order take to get in, at the
rate at which requests have got in lately while there were more than could. Where the last plan has left nobody behind,
a new request does not wait. Nobody who leaves the queue in another way counts, or refusals would look like progress.

The time counts from the moment at which a request is taken in: its grammar may have to wait for a compilation first.
Requests get in when others end, which nobody knows before. So some that were let into the queue are not in by their
time; they end then, and never after.
"""

from collections.abc import Iterator

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.expiries import Expiries
from scheduler_svc.served_model import ServedModel


class WaitLimit:
    """Moments are those of the event loop's clock."""

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._waits = Expiries()

    def excess(self, sequence: Sequence, model: ServedModel) -> str:
        """Why the new sequence must not wait for its model's executors, or nothing."""
        schedulers = model.schedulers
        if not schedulers or not all(s.state.leaves_some_waiting for s in schedulers):
            return ""
        num_ahead = sum(scheduler.state.queue.num_ahead(sequence) for scheduler in schedulers)
        expected_s = model.admission_rate.expected_wait_s(num_ahead)
        if expected_s <= self.max_wait_s:
            return ""
        return f"{num_ahead} go before, some {expected_s:.3g} s; max_wait_s is {self.max_wait_s:g}"

    def begin(self, request_id: str, now: float) -> None:
        """The request waits from now on."""
        self._waits.add(request_id, now + self.max_wait_s)

    def end(self, request_id: str) -> None:
        """The request has ended. Harmless if it never began to wait."""
        self._waits.remove(request_id)

    def over(self, now: float) -> Iterator[str]:
        """Those that have had their time, each once, waiting or not."""
        return self._waits.due(now) if now >= self._waits.next_at else iter(())
