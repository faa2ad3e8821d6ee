"""Who holds which KV block: the pool of blocks that an executor has lent.

A leased block is in exactly one of three places, so `num_blank + num_cached + num_used == num_leased`:

* blank: free, holds nothing worth keeping;
* cached: free, holds the K/V of a published prefix, in the order in which they will be evicted;
* used: held by at least one block table; `ref_count` says by how many.

Allocating, sharing and releasing one block are O(1).

What is known of blocks is in columns indexed by block, as long as the largest id, which take their memory when blocks
are lent, and none later: objects made in the midst of other work would keep its pages for as long as a block is cached.
Both free places are lists within `_next`: blank blocks are linked in one direction, from `_blank`; the cached ones in
both, in a ring through block 0, which is never lent, so the next to be evicted comes after it.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from scheduler_svc.core.flat import lengthened, view, zeros

# From the ids of the leased blocks, and what is called with a cached block that is about to be used for something else.
PoolMaker = Callable[[Sequence[int], Callable[[int], None]], "BlockPool"]
NO_BLOCK = 0


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was taken."""


class BlockPool:
    """Reference counts and free lists of the leased blocks. The only place where either changes.

    `on_evict(block)` is called when a cached block is about to be used for something else.
    """

    def __init__(self, block_ids: Sequence[int], on_evict: Callable[[int], None]) -> None:
        self._on_evict = on_evict
        self.ref_count = zeros("i", 1)
        self._next = zeros("i", 1)
        self._previous = zeros("i", 1)
        self.is_leased = zeros("b", 1)
        self.is_kept = zeros("b", 1)  # whether it holds a published prefix
        self._blank = self._last_blank = NO_BLOCK  # the next to be taken; the last one counts while there is a first
        self.num_leased = self.num_cached = self._num_blank = 0
        self.num_freed = 0  # times that a block has become free
        self.lend(block_ids)

    @property
    def size(self) -> int:
        """Of columns that are indexed by block."""
        return len(self.ref_count)

    @property
    def leased(self) -> set[int]:
        """Costs a pass over all blocks."""
        return set(np.flatnonzero(view(self.is_leased)).tolist())

    @property
    def cached(self) -> list[int]:
        """The cached blocks, next to be evicted first. Costs a pass over them."""
        blocks, block = [], self._next[NO_BLOCK]
        while block != NO_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    @property
    def num_blank(self) -> int:
        return self._num_blank

    @property
    def num_free(self) -> int:
        return self.num_blank + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_leased - self.num_free

    def is_free(self, block: int) -> bool:
        return self.ref_count[block] == 0

    def lend(self, blocks: Sequence[int]) -> None:
        """These blocks are leased, too, and blank. Raises ValueError if one is leased already, or is block 0."""
        ids = np.array(blocks, np.int32)
        if not len(ids):
            return
        self.lengthen(int(ids.max()) + 1)
        leased = view(self.is_leased)
        if ids.min() <= NO_BLOCK or leased[ids].any() or len(np.unique(ids)) != len(ids):
            raise ValueError(f"a block of these {len(ids)} is there twice, or leased already, or is no block")
        leased[ids] = True
        # The first of them is taken first, and what was blank before even earlier.
        following = view(self._next)
        following[ids] = np.append(ids[1:], NO_BLOCK)
        if self._blank == NO_BLOCK:
            self._blank = int(ids[0])
        else:
            self._next[self._last_blank] = int(ids[0])
        self._last_blank = int(ids[-1])
        self.num_leased += len(ids)
        self._num_blank += len(ids)
        self.num_freed += len(ids)

    def lengthen(self, size: int) -> None:
        """Blocks that come to be lent are below `size`, as far as is known."""
        self.ref_count = lengthened(self.ref_count, size)
        self._next, self._previous = lengthened(self._next, size), lengthened(self._previous, size)
        self.is_leased, self.is_kept = lengthened(self.is_leased, size), lengthened(self.is_kept, size)

    def take_back(self, count: int) -> list[int]:
        """So many free blocks are leased no more, blank ones first. Raises OutOfBlocks."""
        taken = self._take(count)
        view(self.is_leased)[taken] = False
        self.num_leased -= count
        return taken

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, blank ones first, each with one reference. Raises OutOfBlocks."""
        taken, ref_count = self._take(count), self.ref_count
        for block in taken:
            ref_count[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more table holds these blocks; a cached one is used again."""
        ref_count = self.ref_count
        for block in blocks:
            count = ref_count[block]
            if count == 0:
                self._uncache(block)
            ref_count[block] = count + 1

    def release(self, table: Sequence[int]) -> None:
        """One table fewer holds these blocks. Released from the tail, so that a prefix outlives its continuation."""
        ref_count, is_kept = self.ref_count, self.is_kept
        for block in reversed(table):
            count = ref_count[block] - 1
            ref_count[block] = count
            if count == 0:
                self.num_freed += 1
                if is_kept[block]:
                    self._cache(block)
                else:
                    self._blanken(block)

    def keep(self, block: int) -> None:
        """This used block holds a published prefix: when nobody uses it any more it becomes cached, not blank."""
        self.is_kept[block] = True

    def drop(self, block: int) -> None:
        """Undo `keep`: the block's content is worth nothing."""
        if self.is_kept[block] and self.ref_count[block] == 0:
            self._uncache(block)
            self._blanken(block)
        self.is_kept[block] = False

    def _take(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} free")
        taken, block, following = [], self._blank, self._next
        num_blank = min(count, self._num_blank)
        for _ in range(num_blank):
            taken.append(block)
            block = following[block]
        self._blank = block
        self._num_blank -= num_blank
        taken.extend(self._evict() for _ in range(count - num_blank))
        return taken

    def _evict(self) -> int:
        block = self._next[NO_BLOCK]
        self._uncache(block)
        self.is_kept[block] = False
        self._on_evict(block)
        return block

    def _blanken(self, block: int) -> None:
        """It is the next to be taken."""
        if self._blank == NO_BLOCK:
            self._last_blank = block
        self._next[block] = self._blank
        self._blank = block
        self._num_blank += 1

    def _cache(self, block: int) -> None:
        """It is the last to be evicted."""
        following, previous = self._next, self._previous
        last = previous[NO_BLOCK]
        following[last] = previous[NO_BLOCK] = block
        following[block] = NO_BLOCK
        previous[block] = last
        self.num_cached += 1

    def _uncache(self, block: int) -> None:
        following, previous = self._next, self._previous
        before, after = previous[block], following[block]
        following[before] = after
        previous[after] = before
        self.num_cached -= 1
