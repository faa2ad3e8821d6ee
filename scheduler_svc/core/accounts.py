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
from dataclasses import dataclass

from scheduler_svc.core.sequence import Rank, Sequence
from scheduler_svc.core.tenants import Tenants

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
    """Those of all tenants, whose weights are in `tenants`."""

    def __init__(self, tenants: Tenants | None = None, ageing_tokens: float = AGEING_TOKENS) -> None:
        self._tenants = Tenants() if tenants is None else tenants
        self._ageing_tokens = ageing_tokens
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._many_accounts = FEW_ACCOUNTS
        self._priorities: Counter[int] = Counter()  # of live sequences
        self._served = 0.0
        self._num_waiting = 0
        self._waiting_weight = 0.0
        self._num_requests = 0
        self.waiting_tokens: Counter[str] = Counter()  # known of the sequences that wait, by tenant
        self.num_waiting_tokens = 0  # of all of them
        self.num_gone = 0  # how often a sequence has ceased to wait, for whatever reason

    @property
    def has_tiers(self) -> bool:
        """Whether there are live sequences of different priorities."""
        return len(self._priorities) > 1

    def charge(self, sequence: Sequence) -> None:
        """Rank a new sequence, and those that it holds right behind it."""
        group = [sequence, *sequence.held]
        account = self._account(sequence)
        self._take_weight(account, self._tenants.limits(sequence.tenant).weight)
        for member in group:
            member.num_reserved = _reserved(member)
        account.charged, account.last = self._finishes(account, group)
        account.num_live += len(group)
        self._priorities[sequence.priority] += len(group)
        self._num_requests += 1
        for member in group:
            place = self._place(account.last, sequence.priority)
            member.rank = Rank(place, self._num_requests, member.sampling.index)

    def rank_of(self, sequence: Sequence) -> Rank:
        """What `charge` would rank the new sequence, now; it is not charged."""
        account = self._accounts.get((sequence.tenant, sequence.priority))
        if account is None:
            account = _Account(self._tenants.limits(sequence.tenant).weight)
        _, finish = self._finishes(account, [sequence, *sequence.held])
        return Rank(self._place(finish, sequence.priority), self._num_requests + 1, sequence.sampling.index)

    def note_waiting(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence that has its rank waits, again or for the first time, with so many tokens."""
        self.waiting_tokens[sequence.tenant] += num_tokens
        self.num_waiting_tokens += num_tokens
        self._num_waiting += 1
        account = self._account(sequence)
        account.num_waiting += 1
        if account.num_waiting == 1:
            self._waiting_weight += account.weight

    def note_gone(self, sequence: Sequence, num_tokens: int) -> None:
        """It waits no more, for whatever reason; `num_tokens` as when it began to."""
        self.num_gone += 1
        self.num_waiting_tokens -= num_tokens
        self.waiting_tokens[sequence.tenant] -= num_tokens
        if not self.waiting_tokens[sequence.tenant]:
            del self.waiting_tokens[sequence.tenant]
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

    def _finishes(self, account: _Account, group: list[Sequence]) -> tuple[float, float]:
        """What the account is charged with, and virtually finishes at, once it has been charged for the group."""
        cost = group[0].num_prompt + sum(map(_reserved, group))
        charged = max(account.charged, self._served) + cost / account.weight
        # What earlier requests did not use makes this one's finish earlier, but not earlier than theirs.
        return charged, max(charged, account.last) if account.num_live else charged

    def _place(self, finish: float, priority: int) -> float:
        return finish - priority * self._ageing_tokens

    def _take_weight(self, account: _Account, weight: float) -> None:
        """It may have been given another since its tenant's last request."""
        if account.num_waiting:
            self._waiting_weight += weight - account.weight
        account.weight = weight

    def _account(self, sequence: Sequence) -> _Account:
        key = (sequence.tenant, sequence.priority)
        account = self._accounts.get(key)
        if account is None:
            self._forget_idle()
            account = self._accounts[key] = _Account(self._tenants.limits(sequence.tenant).weight)
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


def _reserved(sequence: Sequence) -> int:
    """Output tokens that it is charged with until it ends."""
    num_output = OPEN_OUTPUT_TOKENS if sequence.max_tokens is None else sequence.max_tokens
    return min(num_output, MAX_RESERVED_TOKENS) * sequence.num_rows
