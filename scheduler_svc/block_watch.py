"""The cached blocks of all executors as one set, with what they hold, told to those who watch it.

A block that several executors have is told once, when the first has it, and as gone when the last has lost it.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from scheduler_svc.cache_watch import CacheWatch
from scheduler_svc.core.cache_events import CLEARED, CachedBlock, Told

BLOCKS_IN_A_TURN = 1024  # of the event loop


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Blocks by their hashes; each that is stored comes behind its parent."""

    removed: list[bytes] = field(default_factory=list)
    stored: dict[bytes, CachedBlock] = field(default_factory=dict)


async def watch_blocks(cache_watch: CacheWatch) -> AsyncGenerator[BlockChanges, None]:
    """What is cached, then each change. Blocks under a salt are left out. Raises TooManyWatchers."""
    cache_watch.keep_contents()
    told: set[bytes] = set()
    async with aclosing(cache_watch.watch()) as news:
        async for _, change in news:
            # Each block that the change is about is cached now or is not: what came in between need not be told.
            concerned = iter(_concerned(change, told))
            while some := list(islice(concerned, BLOCKS_IN_A_TURN)):
                changes = _changes(some, told, cache_watch)
                if changes.removed or changes.stored:
                    yield changes
                await asyncio.sleep(0)


def _concerned(change: Told, told: set[bytes]) -> list[bytes]:
    digests = [digest for kind, digest in change.events if kind != CLEARED]
    if change.starts_anew or len(digests) < len(change.events):
        digests += told
    return digests


def _changes(digests: list[bytes], told: set[bytes], cache_watch: CacheWatch) -> BlockChanges:
    """What must be told of these now; it counts as told."""
    changes = BlockChanges()
    for digest in digests:
        content = cache_watch.content(digest)
        if content is None and digest in told:
            told.remove(digest)
            changes.removed.append(digest)
        chain = []
        while content is not None and digest not in told:
            told.add(digest)
            chain.append((digest, content))
            if content.parent is None:
                break
            digest = content.parent
            content = cache_watch.content(digest)
        changes.stored.update(reversed(chain))
    return changes
