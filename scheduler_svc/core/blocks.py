"""Who holds which KV block: the pool of blocks that an executor has lent.

A leased block is in exactly one of three places, so `num_blank + num_cached + num_used == num_leased`:

* blank: free, holds nothing worth keeping;
* cached: free, holds the K/V of a published prefix, in the order in which they will be evicted;
* used: held by at least one block table; `ref_count` says by how many.

Allocating, sharing and releasing one block are O(1).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

# From the ids of the leased blocks, and what is called with a cached block that is about to be used for something else.
PoolMaker = Callable[[list[int], Callable[[int], None]], "BlockPool"]


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""


class BlockPool:
    """Reference counts and free lists of the leased blocks. The only place where either changes.

    `on_evict(block)` is called when a cached block is about to be used for something else.
    """

    def __init__(self, block_ids: Iterable[int], on_evict: Callable[[int], None]) -> None:
        self._blank = list(block_ids)
        self._blank.reverse()  # popped from the end: lowest id first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        self._keep: set[int] = set()
        self.num_leased = len(self._blank)
        self.num_freed = 0  # times that a block has become free
        self.ref_count = [0] * (max(self._blank, default=0) + 1)

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_leased - self.num_free

    def is_free(self, block: int) -> bool:
        return self.ref_count[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, blank ones first, each with one reference. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} free")
        taken = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in taken:
            self.ref_count[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks; a cached one is used again."""
        for block in blocks:
            if self.ref_count[block] == 0:
                del self._cached[block]
            self.ref_count[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One table fewer holds these blocks. Released from the tail, so that a prefix outlives its continuation."""
        for block in reversed(table):
            count = self.ref_count[block] - 1
            self.ref_count[block] = count
            if count == 0:
                self.num_freed += 1
                if block in self._keep:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def keep(self, block: int) -> None:
        """This used block holds a published prefix: when nobody uses it any more it becomes cached, not blank."""
        self._keep.add(block)

    def drop(self, block: int) -> None:
        """Undo `keep`: the block's content is worth nothing."""
        self._keep.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._keep.discard(block)
        self._on_evict(block)
        return block
