"""What happens to the prefix cache, told to those who follow it: a router that sends a prompt where its prefix is.

Whoever begins to follow, or was too slow for the buffer, is told first all that is cached at that moment; from there
on each event. Events are numbered one by one, so what was skipped can be counted.

Hashes are enough for who makes them, too. For others, `keep_contents` has kept what the cached blocks hold.
"""

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

STORED, REMOVED, CLEARED = "stored", "removed", "cleared"
Event = tuple[str, bytes]  # kind, and the prefix's hash; none with CLEARED


class TooManyFollowers(Exception):
    """No more than `max_followers` at once."""


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What a cached block holds: its ids as int32 in bytes, behind the prefix of that hash, if it is not the first."""

    parent: bytes | None
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class Told:
    """What a follower has not been told yet. `number` is that of the last event; `starts_anew`: what was told before is
    void, and `events` are all hashes that are cached; `num_missed` events were too many for the follower's buffer."""

    number: int
    events: list[Event]
    starts_anew: bool = False
    num_missed: int = 0


class CacheEvents:
    """Counts events, and keeps them for each follower. Costs nothing while nobody follows."""

    def __init__(self, max_followers: int = 16, max_waiting: int = 1 << 16) -> None:
        self._max_followers = max_followers
        self._max_waiting = max_waiting
        self._followers: list[Follower] = []
        self.is_followed = False
        self.number = 0
        self.hashes: Collection[bytes] = ()  # those of the present cache
        # Of these, as far as they were stored since somebody wanted it, and belong to no salt.
        self.contents: dict[bytes, CachedBlock] = {}
        self.keeps_contents = False

    def keep_contents(self) -> None:
        """From now on, and for good: who comes back wants to find them."""
        self.keeps_contents = True

    def follow(self, on_news: Callable[[], None]) -> "Follower":
        """A new follower, to be closed; `on_news` is called when it has something to take. Raises TooManyFollowers."""
        if len(self._followers) >= self._max_followers:
            raise TooManyFollowers(f"{self._max_followers} follow the prefix cache already")
        follower = Follower(self, self._max_waiting, on_news)
        self._followers.append(follower)
        self.is_followed = True
        return follower

    def drop(self, follower: "Follower") -> None:
        if follower in self._followers:
            self._followers.remove(follower)
            self.is_followed = bool(self._followers)

    def add(self, kind: str, digest: bytes = b"") -> None:
        self.number += 1
        for follower in self._followers:
            follower.add((kind, digest))


class Follower:
    """One reader of the events."""

    def __init__(self, events: CacheEvents, max_waiting: int, on_news: Callable[[], None]) -> None:
        self._events = events
        self._max_waiting = max_waiting
        self._on_news = on_news
        self._waiting: deque[Event] = deque()
        self._starts_anew = True
        self._num_missed = 0

    def add(self, event: Event) -> None:
        if self._starts_anew:
            self._num_missed += self._num_missed > 0  # part of what it will be told as a whole
        elif len(self._waiting) < self._max_waiting:
            self._waiting.append(event)
        else:
            self._num_missed = len(self._waiting) + 1
            self._waiting.clear()
            self._starts_anew = True
        self._on_news()

    def take(self, most: int) -> Told | None:
        """What is new, `most` events at a time unless all is told anew; None if nothing is."""
        number = self._events.number
        if self._starts_anew:
            told = Told(number, [(STORED, digest) for digest in self._events.hashes], True, self._num_missed)
            self._starts_anew, self._num_missed = False, 0
            return told
        if not self._waiting:
            return None
        events = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        return Told(number - len(self._waiting), events)

    def close(self) -> None:
        self._events.drop(self)
