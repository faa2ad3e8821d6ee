"""What sessions want, as far as they are to be believed, and who may want more than a fair share."""

from dataclasses import dataclass, field

from executor_svc.leases import NOTHING, Amounts

HOLD_S = 1.0  # for so long a demand must have fallen before it counts


@dataclass(slots=True)
class Want:
    """One number that a session says it needs. A rise counts at once, a fall when it has lasted `HOLD_S`: what goes up
    and down with every request is not given away and called back each time."""

    believed: int
    said: int
    falls_at: float | None = None  # seconds of the service's clock
    highest: int = 0  # since it fell

    def say(self, value: int, now: float) -> None:
        self.said = value
        if value >= self.believed:
            self.believed, self.falls_at = value, None
        elif self.falls_at is None:
            self.falls_at, self.highest = now + HOLD_S, value
        else:
            self.highest = max(self.highest, value)

    def at(self, now: float) -> int:
        if self.falls_at is not None and now >= self.falls_at:
            self.believed = self.highest
            self.falls_at, self.highest = (now + HOLD_S, self.said) if self.said < self.believed else (None, 0)
        return self.believed


@dataclass(slots=True)
class Demand:
    """Of one session. `least` is what the first of its requests, number `claim`, cannot go on without."""

    wants: tuple[Want, Want, Want]
    least: Amounts = NOTHING
    claim: int = 0

    @classmethod
    def taken_for(cls, amounts: Amounts) -> "Demand":
        """Until it has said anything."""
        blocks, rows, tokens = (Want(amount, amount) for amount in amounts)
        return cls((blocks, rows, tokens))

    def say(self, amounts: Amounts, least: Amounts, claim: int, now: float) -> None:
        for want, value in zip(self.wants, amounts, strict=True):
            want.say(value, now)
        self.least, self.claim = least, claim

    def at(self, now: float) -> Amounts:
        return Amounts(*(want.at(now) for want in self.wants))


@dataclass(slots=True)
class Line:
    """Sessions whose first request needs more than their share, in the order of asking. The first of them gets it,
    until that request has ended; the next one of the same session has to ask anew."""

    _claims: dict[int, int] = field(default_factory=dict)  # session to claim

    @property
    def first(self) -> int | None:
        """Its session."""
        return next(iter(self._claims), None)

    def join(self, session: int, claim: int) -> None:
        """Harmless for one that stands in line already."""
        self._claims.setdefault(session, claim)

    def note(self, session: int, claim: int) -> None:
        """What the session says now: a claim that is another one has lost its place."""
        if self._claims.get(session, claim) != claim:
            del self._claims[session]

    def leave(self, session: int) -> None:
        self._claims.pop(session, None)
