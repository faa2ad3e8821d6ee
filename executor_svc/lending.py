"""Who is lent how much: shares by demand, what is to be returned for them, and what is granted when it has been.

Nothing moves until somebody goes short of its share by more than a little, and then all who have more than theirs are
called upon at once; what is nobody's is granted right away. A call stands until it has been served. So leases neither
follow each change of demand, nor wait for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.demands import Demand, Line
from executor_svc.leases import NOTHING, Amounts, Lease, Ownership
from executor_svc.shares import fair_shares

MOST_SESSIONS = 64
FLOOR_PARTS = 32  # a session has this part of everything at least, while nobody has a claim to more than a share
SLACK_PARTS = 32  # going short by less than this part of everything moves nothing


@dataclass(slots=True, eq=False)
class _Borrower:
    session: int
    demand: Demand
    recalled: Amounts | None = None  # what it was told to keep, until it has returned the rest
    recalled_at: float = 0.0  # seconds of the service's clock


@dataclass(frozen=True, slots=True)
class Change:
    """What a session is to be told: what it has been granted, and what it may keep if it has more."""

    session: int
    granted: Lease | None
    recall: Amounts | None


class Lender:
    """Decides; `Ownership` knows who has what. Times are seconds of the service's clock."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._borrowers: dict[int, _Borrower] = {}
        self._line = Line()
        most = ownership.most
        self._most_sessions = min(MOST_SESSIONS, most.blocks, most.rows, most.tokens // 2)
        self.is_settled = True  # whether nothing has changed since `rebalance`

    @property
    def most(self) -> Amounts:
        """The largest lease there is."""
        return self._ownership.most

    def held_by(self, session: int) -> Amounts:
        return self._ownership.held_by(session)

    def first_lease(self, now: float, num_newcomers: int) -> Lease | None:
        """For one of so many who wait for a first one; None while not even a floor is free."""
        if not self._has_place:
            return None
        target = self._targets(now, num_newcomers)[len(self._borrowers)]
        floors = Amounts(*(min(*pair) for pair in zip(target, self._floors, strict=True)))
        free = self._ownership.free
        blocks, tokens = min(free.blocks, target.blocks), min(free.tokens, target.tokens)
        rows = min(free.rows, target.rows, tokens - 1)
        if blocks < max(1, floors.blocks) or rows < max(1, floors.rows):
            return None
        return self._ownership.choose(Amounts(blocks, rows, tokens))

    def open(self, session: int, lease: Lease) -> None:
        """It has said nothing of its demand yet: one that is alone may need all there is."""
        self._ownership.lend(session, lease)
        wants = NOTHING if self._borrowers else self._ownership.most
        self._borrowers[session] = _Borrower(session, Demand.taken_for(wants))
        self.is_settled = False

    def close(self, session: int) -> None:
        """All that it has is nobody's."""
        self._borrowers.pop(session, None)
        self._line.leave(session)
        self._ownership.take_back(session)
        self.is_settled = False

    def clear(self) -> None:
        """No session has anything."""
        self._borrowers.clear()
        self._line = Line()
        self._ownership.clear()
        self.is_settled = False

    def note_demand(self, session: int, wants: Amounts, least: Amounts, claim: int, now: float) -> None:
        self._borrowers[session].demand.say(wants, least, claim, now)
        self._line.note(session, claim)
        self.is_settled = False

    def give_back(self, session: int, returned: Lease) -> None:
        """The session's own, of which nothing is in use any more."""
        self._ownership.give_back(session, returned)
        borrower = self._borrowers[session]
        if borrower.recalled is not None and not _exceeds(self._ownership.held_by(session), borrower.recalled):
            borrower.recalled = None
        self.is_settled = False

    def rebalance(self, now: float, num_newcomers: int) -> list[Change]:
        """Grant what is nobody's, and call back what others lack. Returns what is new, session by session."""
        self.is_settled = True
        borrowers = list(self._borrowers.values())
        targets = self._targets(now, num_newcomers)
        shares = list(zip(borrowers, targets, strict=False))
        granted = self._grant(shares, _sum_of(targets[len(borrowers) :]))
        called = self._recall(shares, now, anyhow=num_newcomers > 0 and self._has_place)
        return [
            Change(borrower.session, granted.get(borrower.session), borrower.recalled)
            for borrower in borrowers
            if borrower.session in granted or borrower.session in called
        ]

    def overdue(self, now: float, patience_s: float) -> list[int]:
        """Sessions that were told to return something longer ago than that, and have not."""
        return [
            borrower.session
            for borrower in self._borrowers.values()
            if borrower.recalled is not None and now - borrower.recalled_at > patience_s
        ]

    @property
    def _has_place(self) -> bool:
        return len(self._borrowers) < self._most_sessions

    @property
    def _floors(self) -> Amounts:
        return Amounts(*(max(1, most // FLOOR_PARTS) for most in self._ownership.most))

    def _grant(self, shares: Sequence[tuple[_Borrower, Amounts]], promised: Amounts) -> dict[int, Lease]:
        """Whoever lacks most of its share gets first; what newcomers need stays."""
        granted = {}
        for borrower, target in sorted(shares, key=lambda share: self._lacking(*share), reverse=True):
            held, free = self._ownership.held_by(borrower.session), self._ownership.free
            room = target if borrower.recalled is None else _least(target, borrower.recalled)
            blocks = _clamp(room.blocks - held.blocks, free.blocks - promised.blocks)
            tokens = _clamp(room.tokens - held.tokens, free.tokens - promised.tokens)
            most_rows = min(room.rows, held.tokens + tokens - 1)
            rows = _clamp(most_rows - held.rows, free.rows - promised.rows)
            if blocks or rows or tokens:
                lease = self._ownership.choose(Amounts(blocks, rows, tokens))
                self._ownership.lend(borrower.session, lease)
                granted[borrower.session] = lease
        return granted

    def _lacking(self, borrower: _Borrower, target: Amounts) -> int:
        return target.blocks - self._ownership.held_by(borrower.session).blocks

    def _recall(self, shares: Sequence[tuple[_Borrower, Amounts]], now: float, *, anyhow: bool) -> set[int]:
        """If anybody is short, or anyhow: call upon all who have more than their share and were not called upon yet."""
        if not (anyhow or any(self._is_short(*share, now) for share in shares)):
            return set()
        called = set()
        for borrower, target in shares:
            if borrower.recalled is None and _exceeds(self._ownership.held_by(borrower.session), target):
                borrower.recalled, borrower.recalled_at = target, now
                called.add(borrower.session)
        return called

    def _is_short(self, borrower: _Borrower, target: Amounts, now: float) -> bool:
        held, wants = self._ownership.held_by(borrower.session), borrower.demand.at(now)
        least = borrower.demand.least
        for has, share, want, need, most in zip(held, target, wants, least, self._ownership.most, strict=True):
            lacks = min(want, share) - has
            if lacks > most // SLACK_PARTS or has < min(need, share) or (lacks > 0 and not has):
                return True
        return False

    def _targets(self, now: float, num_newcomers: int) -> list[Amounts]:
        """The share of each borrower, and of as many newcomers as there is a place for."""
        num = min(len(self._borrowers) + num_newcomers, self._most_sessions)
        while True:
            first = self._line.first
            targets = self._shares(now, num, first)
            for borrower, target in zip(self._borrowers.values(), targets, strict=False):
                if _exceeds(borrower.demand.least, target):
                    self._line.join(borrower.session, borrower.demand.claim)
            if self._line.first == first:
                return targets

    def _shares(self, now: float, num: int, claimant: int | None) -> list[Amounts]:
        sessions = list(self._borrowers)
        wants = [borrower.demand.at(now) for borrower in self._borrowers.values()]
        wants += [self._floors] * (num - len(wants))
        place = sessions.index(claimant) if claimant is not None else None
        least = self._borrowers[claimant].demand.least if claimant is not None else NOTHING
        most = self._ownership.most
        blocks = _share_out(most.blocks, [want.blocks for want in wants], place, least.blocks)
        # Each has a token per step more than rows, so that prompts get on while all rows decode.
        num_rows = min(most.rows, most.tokens - num)
        if least.rows > num_rows:
            rows = [least.rows if i == place else 0 for i in range(num)]
        else:
            rows = _share_out(num_rows, [want.rows for want in wants], place, least.rows)
        tokens = fair_shares(
            most.tokens, [want.tokens for want in wants], [count + 1 if count else 0 for count in rows]
        )
        return [Amounts(*amounts) for amounts in zip(blocks, rows, tokens, strict=True)]


def _share_out(total: int, wants: list[int], claimant: int | None, least: int) -> list[int]:
    """By demand, with a floor for each; the claimant has what it cannot go on without, even below others' floors."""
    num = len(wants)
    if not num:
        return []
    floor = min(max(1, total // FLOOR_PARTS), total // num)
    floors = [floor] * num
    if claimant is not None and num > 1:
        own = min(total, max(floor, least))
        floors = [min(floor, (total - own) // (num - 1))] * num
        floors[claimant] = own
    return fair_shares(total, wants, floors)


def _sum_of(amounts: Sequence[Amounts]) -> Amounts:
    return Amounts(*map(sum, zip(*amounts, strict=True))) if amounts else NOTHING


def _exceeds(amounts: Amounts, others: Amounts) -> bool:
    """In anything."""
    return any(amount > other for amount, other in zip(amounts, others, strict=True))


def _least(amounts: Amounts, others: Amounts) -> Amounts:
    return Amounts(*map(min, amounts, others))


def _clamp(amount: int, most: int) -> int:
    return max(0, min(amount, most))
