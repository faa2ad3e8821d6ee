"""How much may wait: requests that were taken in and have not got in yet, of all tenants together and of each.

What is in a queue is counted by its sequences and their tokens; what is still on its way there (its grammar is
compiled, its prompt hashed) counts as if it were in one already. Where nothing waits, one request is taken whatever it
has: a bound must not forbid what it is there to let through.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.drain_rate import DrainRate
from scheduler_svc.errors import QueueFull
from scheduler_svc.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class BacklogLimits:
    """Of all tenants together."""

    max_sequences: int
    max_tokens: int


@dataclass(slots=True, eq=False)
class Place:
    """One request's part of the backlog, on its way into a queue."""

    tenant: str
    num_sequences: int
    num_tokens: int


class Backlog:
    """`num_queued` tells how many sequences are in queues, or held for one that is; `accounts` knows their tokens."""

    def __init__(
        self,
        limits: BacklogLimits,
        tenants: Tenants,
        accounts: Accounts,
        drain_rate: DrainRate,
        num_queued: Callable[[], int],
    ) -> None:
        self._limits = limits
        self._tenants = tenants
        self._accounts = accounts
        self._drain_rate = drain_rate
        self._num_queued = num_queued
        self._live: Counter[str] = Counter()  # requests, by tenant
        self._opening_tokens: Counter[str] = Counter()  # of those on their way into a queue, by tenant
        self._num_opening = 0  # sequences of these

    def check(self, tenant: str, num_tokens: int = 1) -> None:
        """Raises QueueFull where a request of so many tokens would be refused now."""
        num_waiting = self._num_queued() + self._num_opening
        waiting_tokens = self._accounts.num_waiting_tokens + self._opening_tokens.total()
        if num_waiting >= self._limits.max_sequences:
            self._refuse(f"{num_waiting} sequences wait, max_waiting_requests is reached", num_waiting)
        if num_waiting and waiting_tokens + num_tokens > self._limits.max_tokens:
            found = f"{waiting_tokens} tokens wait, and max_waiting_tokens is {self._limits.max_tokens}"
            self._refuse(found, num_waiting)
        limits = self._tenants.limits(tenant)
        if limits.max_requests is not None and self._live[tenant] >= limits.max_requests:
            found = f"the tenant has {self._live[tenant]} requests at once, as many as it may have"
            self._refuse(found, max(num_waiting, 1))
        own_tokens = self._accounts.waiting_tokens[tenant] + self._opening_tokens[tenant]
        if limits.max_queued_tokens is not None and own_tokens and own_tokens + num_tokens > limits.max_queued_tokens:
            found = f"{own_tokens} tokens of the tenant wait, and it may have {limits.max_queued_tokens}"
            self._refuse(found, num_waiting)

    def enter(self, request: GenerationRequest) -> Place:
        """Count it; `note_opened` and `leave` must follow. Raises QueueFull."""
        num_beams = request.beam.width if request.beam is not None else 1
        place = Place(request.tenant, max(num_beams, request.best_of or request.num_samples), len(request.prompt_ids))
        self.check(place.tenant, place.num_tokens)
        self._live[place.tenant] += 1
        self._num_opening += place.num_sequences
        self._opening_tokens[place.tenant] += place.num_tokens
        return place

    def note_opened(self, place: Place) -> None:
        """It is in a queue, which counts it from now on, or will never be in one."""
        self._num_opening -= place.num_sequences
        _subtract(self._opening_tokens, place.tenant, place.num_tokens)

    def leave(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        _subtract(self._live, tenant, 1)

    def _refuse(self, found: str, num_waiting: int) -> None:
        raise QueueFull(found, self._drain_rate.retry_after_s(num_waiting))


def _subtract(counter: Counter[str], key: str, amount: int) -> None:
    """Names are the clients': none is kept for nothing."""
    counter[key] -= amount
    if not counter[key]:
        del counter[key]
