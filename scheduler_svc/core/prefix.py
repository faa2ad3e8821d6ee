"""Which blocks hold which prefix: full blocks are found again by the hash of all tokens up to their end.

`H_i = H(H_{i-1}, tokens_i)`; `H_0` depends on the request's extra keys (the salt), each tagged by its kind and
delimited by its length, so that different meanings can never give the same bytes.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256

from scheduler_svc.core.block_hashes import BlockHashes
from scheduler_svc.core.blocks import NO_BLOCK, BlockPool, PoolMaker
from scheduler_svc.core.cache_events import CLEARED, REMOVED, STORED, CacheEvents
from scheduler_svc.core.flat import lengthened, view, zeros
from scheduler_svc.core.hash_index import HashIndex
from scheduler_svc.core.prefix_tree import Links


@lru_cache(256)
def root_hash(**extra: str) -> bytes:
    """H_0 for these extra keys; one that is empty is the same as none."""
    digest = sha256()
    for tag, value in sorted(extra.items()):
        if value:
            data = value.encode()
            digest.update(f"{tag}:{len(data)}:".encode() + data)
    return digest.digest()


def prefix_hashes(token_ids: list[int], block_size: int, root: bytes) -> BlockHashes:
    """Those of all full blocks of `token_ids`."""
    hashes = BlockHashes()
    hashes.extend(token_ids, block_size, lambda: root)
    return hashes


class PrefixCache:
    """Hash to block, and back. A hash names at most one block; a block has at most one hash while it is unchanged.

    What it replaces in `events` is void."""

    def __init__(
        self, block_ids: Sequence[int], events: CacheEvents, make_pool: PoolMaker = BlockPool, size: int = 0
    ) -> None:
        """Blocks that come to be lent are below `size`, as far as is known."""
        self.pool = make_pool(block_ids, self._forget)
        self.pool.lengthen(size)
        self._index = HashIndex(self.pool.size)
        self._parents = zeros("q", self.pool.size)  # by block, Python's hash of the hash before its own
        self._events = events
        events.hashes = self._index
        events.contents.clear()
        events.add(CLEARED)

    def __len__(self) -> int:
        return len(self._index)

    def lend(self, blocks: Sequence[int]) -> None:
        """These blocks are leased, too, and blank. Raises ValueError as the pool does."""
        self.pool.lend(blocks)
        self._index.grow(self.pool.size)
        self._parents = lengthened(self._parents, self.pool.size)

    def is_published(self, block: int) -> bool:
        return self._index.has(block)

    def holds(self, digest: bytes) -> bool:
        return self._index.find(digest) != NO_BLOCK

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of this chain. Touches nothing."""
        found, block_of = [], self._index.find
        for digest in hashes:
            block = block_of(digest)
            if block == NO_BLOCK:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes, parent: bytes = b"") -> None:
        """From now on this full, used block is found by its hash; unless another block is already. `parent` is the hash
        of the block that it continues, empty for a first one."""
        if self._index.add(block, digest):
            self._parents[block] = hash(parent)
            self.pool.keep(block)
            if self._events.is_followed:
                self._events.add(STORED, digest)

    def withdraw(self, hashes: Iterable[bytes]) -> None:
        """What these hashes name is not to be trusted: nobody finds it any more."""
        for digest in hashes:
            block = self._index.find(digest)
            if block != NO_BLOCK:
                self._forget(block)
                self.pool.drop(block)

    def clear(self) -> int:
        """Nothing that was published so far is found any more; used blocks stay with who holds them. Returns how many
        blocks were forgotten."""
        blocks = self._index.blocks().tolist()
        self._index.clear()
        for block in blocks:
            self.pool.drop(block)
        self._events.contents.clear()
        self._events.add(CLEARED)
        return len(blocks)

    def links(self) -> Links:
        """Which block continues which, at this moment."""
        blocks = self._index.blocks()
        digests = self._index.digests(blocks)
        return Links(blocks, digests, view(self._parents)[blocks], view(self.pool.ref_count)[blocks])

    def audit(self) -> None:
        """Raise AssertionError unless hashes and blocks are a bijection."""
        blocks = self._index.blocks().tolist()
        if len(blocks) != len(self._index):
            raise AssertionError("prefix cache: the number of hashes is off")
        if any(self._index.find(self._index.digest_of(block)) != block for block in blocks):
            raise AssertionError("prefix cache: a block is not found by its hash")

    def _forget(self, block: int) -> None:
        digest = self._index.remove(block)
        self._events.contents.pop(digest, None)
        if self._events.is_followed:
            self._events.add(REMOVED, digest)
