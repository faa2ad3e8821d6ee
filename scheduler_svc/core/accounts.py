"""What tenants have asked for and got, and the rank of each request that follows from it.

One order over all sequences, running and waiting, whatever executor they are on, fixed when a sequence is submitted, so
that a preempted one keeps its rank, one that is moved to another executor does, too, and no two can push each other out
in turns. It is that of `virtual finish - priority * ageing_tokens`:

* Each tenant has an account for each priority, of tokens divided by its weight: of the prompts and outputs that it has
  asked for, and at their ends of the outputs that it got instead. A request finishes, virtually, at its account with
  the request in it. Who has asked for less goes first; of one tenant's requests of one priority always the first. What
  it has asked for at a low priority never holds up what it asks for at a higher one.
* An account never lags behind `served`, the tokens computed for all, divided by the weights of those who wait: nobody
  saves up while idle.
* A priority is worth a head start of `ageing_tokens`. `served` goes on with every token, so whoever waits is passed
  only by those who come before that much more has been served: nobody waits for ever.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.sequence import Rank, Sequence

AGEING_TOKENS = 1_000_000
MAX_RESERVED_TOKENS = 1 << 16  # of an output in its tenant's account; what is longer is charged once it is there
OPEN_OUTPUT_TOKENS = 1024  # charged for an output without max_tokens until its length is known: open is not free
FEW_ACCOUNTS = 1024  # not worth looking for those that say nothing any more
MOST_IDLE_ACCOUNTS = 1 << 16


@dataclass(slots=True)
class _Account:
    """Of one tenant, at one priority. Both finishes are in tokens divided by `weight`."""

    weight: float
    charged: float = 0.0  # virtual finish of all that it has asked for
    last: float = 0.0  # virtual finish that its latest request got
    num_live: int = 0  # sequences submitted and not ended
    num_waiting: int = 0


class Accounts:
    """Those of all tenants. `weights` are theirs by name; all others have 1."""

    def __init__(self, weights: Mapping[str, float] | None = None, ageing_tokens: float = AGEING_TOKENS) -> None:
        self._weights = dict(weights or {})
        self._ageing_tokens = ageing_tokens
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._many_accounts = FEW_ACCOUNTS
        self._priorities: Counter[int] = Counter()  # of live sequences
        self._served = 0.0
        self._num_waiting = 0
        self._waiting_weight = 0.0
        self._num_requests = 0

    @property
    def has_tiers(self) -> bool:
        """Whether there are live sequences of different priorities."""
        return len(self._priorities) > 1

    def charge(self, sequence: Sequence) -> None:
        """Rank a new sequence, and those that it holds right behind it."""
        group = [sequence, *sequence.held]
        for member in group:
            num_output = OPEN_OUTPUT_TOKENS if member.max_tokens is None else member.max_tokens
            member.num_reserved = min(num_output, MAX_RESERVED_TOKENS) * member.num_rows
        account = self._account(sequence)
        cost = sequence.num_prompt + sum(member.num_reserved for member in group)
        account.charged = max(account.charged, self._served) + cost / account.weight
        # What earlier requests did not use makes this one's finish earlier, but not earlier than theirs.
        finish = max(account.charged, account.last) if account.num_live else account.charged
        account.last = finish
        account.num_live += len(group)
        self._priorities[sequence.priority] += len(group)
        self._num_requests += 1
        place = finish - sequence.priority * self._ageing_tokens
        for member in group:
            member.rank = Rank(place, self._num_requests, member.sampling.index)

    def note_waiting(self, sequence: Sequence) -> None:
        """A sequence that has its rank waits, again or for the first time."""
        self._num_waiting += 1
        account = self._account(sequence)
        account.num_waiting += 1
        if account.num_waiting == 1:
            self._waiting_weight += account.weight

    def note_gone(self, sequence: Sequence) -> None:
        """It waits no more, for whatever reason."""
        self._num_waiting -= 1
        account = self._account(sequence)
        account.num_waiting -= 1
        if account.num_waiting == 0:
            self._waiting_weight = self._waiting_weight - account.weight if self._num_waiting else 0.0

    def settle(self, sequence: Sequence) -> None:
        """A sequence that was ranked ends: its tenant's account gets what it used for what it has asked for."""
        account = self._account(sequence)
        # Of a prompt that was never computed nothing is given back: a tenant that cancels gains nothing by it.
        num_output = sequence.num_output
        if sequence.group is not None:
            num_output = sequence.group.search.num_tokens * sequence.num_rows
        # The prompt of several samples is theirs together, as it was when they were charged.
        computed_prompt = sequence.num_cached is not None and sequence.sampling.index == 0
        used = num_output + sequence.num_prompt * computed_prompt
        self._served += used / max(self._waiting_weight, account.weight)
        account.charged += (num_output - sequence.num_reserved) / account.weight
        sequence.num_reserved = 0
        account.num_live -= 1
        self._priorities[sequence.priority] -= 1
        if not self._priorities[sequence.priority]:
            del self._priorities[sequence.priority]

    def _account(self, sequence: Sequence) -> _Account:
        key = (sequence.tenant, sequence.priority)
        account = self._accounts.get(key)
        if account is None:
            self._forget_idle()
            account = self._accounts[key] = _Account(self._weights.get(sequence.tenant, 1.0))
        return account

    def _forget_idle(self) -> None:
        """Accounts that a new one would equal are as good as none. Names are the clients', so there may be many: who
        takes that many needs none of them twice, and what the idle ones owe is let go."""
        if len(self._accounts) >= self._many_accounts:
            kept = {key: a for key, a in self._accounts.items() if a.num_live or a.charged > self._served}
            if len(kept) > MOST_IDLE_ACCOUNTS:
                kept = {key: account for key, account in kept.items() if account.num_live}
            self._accounts = kept
            self._many_accounts = max(FEW_ACCOUNTS, 2 * len(kept))
