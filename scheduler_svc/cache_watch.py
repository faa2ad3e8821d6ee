"""The prefix caches of all executors, told to those who watch them, each change under its executor's endpoint."""

import asyncio
from collections.abc import AsyncGenerator

from scheduler_svc.core.cache_events import CLEARED, CachedBlock, CacheEvents, Follower, Told
from scheduler_svc.errors import TooManyWatchers

MAX_TOLD_EVENTS = 8192  # of a prefix cache, in one message
EVENTS_PAUSE_S = 0.02  # between messages about prefix caches, so that one tells many


class CacheWatch:
    """Executors come and go while it is watched."""

    def __init__(self, max_watchers: int, max_events: int) -> None:
        self._max_watchers = max_watchers
        self._max_events = max_events
        self._caches: dict[str, CacheEvents] = {}
        self._watchers: set[asyncio.Event] = set()
        self._keeps_contents = False
        self.num_unknown = 0  # blocks that were cached before their contents were kept

    def keep_contents(self) -> None:
        """From now on `content` knows what is stored."""
        if not self._keeps_contents:
            self._keeps_contents = True
            self.num_unknown = sum(len(events.hashes) for events in self._caches.values())
            for events in self._caches.values():
                events.keep_contents()

    def content(self, digest: bytes) -> CachedBlock | None:
        """What the block of this hash holds, if one is cached anywhere and known."""
        for events in self._caches.values():
            found = events.contents.get(digest)
            if found is not None:
                return found
        return None

    def add(self, endpoint: str) -> CacheEvents:
        """What is to be told of the executor there."""
        events = self._caches[endpoint] = CacheEvents(self._max_watchers, self._max_events)
        if self._keeps_contents:
            events.keep_contents()
        self._tell()
        return events

    def remove(self, endpoint: str) -> None:
        """It is gone for good."""
        del self._caches[endpoint]
        self._tell()

    async def watch(self) -> AsyncGenerator[tuple[str, Told], None]:
        """What is cached, and each change, of one executor at a time. Raises TooManyWatchers."""
        if len(self._watchers) >= self._max_watchers:
            raise TooManyWatchers(f"{self._max_watchers} watch the prefix cache, max_cache_watchers is reached")
        news = asyncio.Event()
        self._watchers.add(news)
        followers: dict[str, tuple[CacheEvents, Follower]] = {}
        try:
            while True:
                news.clear()
                for endpoint in [
                    name for name, (events, _) in followers.items() if self._caches.get(name) is not events
                ]:
                    events, follower = followers.pop(endpoint)
                    follower.close()
                    yield endpoint, Told(events.number, [(CLEARED, b"")])
                for endpoint, events in self._caches.items():
                    if endpoint not in followers:
                        followers[endpoint] = events, events.follow(news.set)
                for endpoint, (_, follower) in list(followers.items()):
                    while (told := follower.take(MAX_TOLD_EVENTS)) is not None:
                        yield endpoint, told
                await news.wait()
                await asyncio.sleep(EVENTS_PAUSE_S)
        finally:
            self._watchers.discard(news)
            for _, follower in followers.values():
                follower.close()

    def _tell(self) -> None:
        for news in self._watchers:
            news.set()
