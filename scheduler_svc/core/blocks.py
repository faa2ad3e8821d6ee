"""Who holds which KV block: the pool of blocks that an executor has lent.

A leased block is in exactly one of three places, so `num_blank + num_cached + num_used == num_leased`:

* blank: free, holds nothing worth keeping;
* cached: free, holds the K/V of a published prefix, in the order in which they will be evicted;
* used: held by at least one block table; `ref_count` says by how many.

Allocating, sharing and releasing one block are O(1).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet

# From the ids of the leased blocks, and what is called with a cached block that is about to be used for something else.
PoolMaker = Callable[[list[int], Callable[[int], None]], "BlockPool"]


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""


class BlockPool:
    """Reference counts and free lists of the leased blocks. The only place where either changes.

    `on_evict(block)` is called when a cached block is about to be used for something else.
    """

    def __init__(self, block_ids: Iterable[int], on_evict: Callable[[int], None]) -> None:
        self._blank: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict
        self._keep = bytearray()  # by block: whether it holds a published prefix
        # One number object for each block. What a table says of it is another one each time, among the objects of all
        # that happens then; kept for as long as the block is cached, it would keep their page.
        self._ids: list[int] = []
        self._leased: set[int] = set()
        self.num_freed = 0  # times that a block has become free
        self.ref_count: list[int] = []
        self.lend(list(block_ids))

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    @property
    def leased(self) -> AbstractSet[int]:
        return self._leased

    @property
    def cached(self) -> AbstractSet[int]:
        """The cached blocks, next to be evicted first."""
        return self._cached.keys()

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

    def lend(self, blocks: Sequence[int]) -> None:
        """These blocks are leased, too, and blank. Raises ValueError if one is leased already."""
        if len(set(blocks)) != len(blocks) or not self._leased.isdisjoint(blocks):
            raise ValueError(f"a block of these {len(blocks)} is there twice, or leased already")
        num_new = max(blocks, default=0) + 1 - len(self.ref_count)
        self._ids.extend([-1] * num_new)
        self.ref_count.extend([0] * num_new)
        self._keep.extend(bytes(max(num_new, 0)))
        for block in blocks:
            self._ids[block] = block
        self._leased.update(blocks)
        # Popped from the end: the first of them first, and those before even earlier.
        self._blank[:0] = reversed(blocks)
        self.num_freed += len(blocks)

    def own(self, block: int) -> int:
        """The same number of a leased block, as the object that may be kept."""
        return self._ids[block]

    def take_back(self, count: int) -> list[int]:
        """So many free blocks are leased no more, blank ones first. Raises OutOfBlocks."""
        taken = self._take(count)
        self._leased.difference_update(taken)
        return taken

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, blank ones first, each with one reference. Raises OutOfBlocks."""
        taken = self._take(count)
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
                if self._keep[block]:
                    self._cached[self._ids[block]] = None
                else:
                    self._blank.append(self._ids[block])

    def keep(self, block: int) -> None:
        """This used block holds a published prefix: when nobody uses it any more it becomes cached, not blank."""
        self._keep[block] = True

    def drop(self, block: int) -> None:
        """Undo `keep`: the block's content is worth nothing."""
        self._keep[block] = False
        if block in self._cached:
            del self._cached[block]
            self._blank.append(self._ids[block])
            if not self._cached:
                self._cached.clear()  # its table, which was as large as all of them

    def _take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} free")
        return [self._blank.pop() if self._blank else self._evict() for _ in range(count)]

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._keep[block] = False
        self._on_evict(block)
        return block
