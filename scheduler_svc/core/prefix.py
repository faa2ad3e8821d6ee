"""Which blocks hold which prefix: full blocks are found again by the hash of all tokens up to their end.

`H_i = H(H_{i-1}, tokens_i)`; `H_0` depends on the request's extra keys (the salt), each tagged by its kind and
delimited by its length, so that different meanings can never give the same bytes.
"""

from array import array
from hashlib import sha256

from scheduler_svc.core.blocks import BlockPool, PoolMaker
from scheduler_svc.core.cache_events import CLEARED, REMOVED, STORED, CacheEvents


def root_hash(**extra: str) -> bytes:
    """H_0 for these extra keys; one that is empty is the same as none."""
    digest = sha256()
    for tag, value in sorted(extra.items()):
        if value:
            data = value.encode()
            digest.update(f"{tag}:{len(data)}:".encode() + data)
    return digest.digest()


def next_hash(parent: bytes, token_bytes: bytes) -> bytes:
    """H_i of one full block whose ids are `token_bytes` (int32)."""
    return sha256(parent + token_bytes).digest()


def extend_hashes(hashes: list[bytes], token_ids: list[int], block_size: int, root: bytes) -> None:
    """Append to `hashes` those of the full blocks of `token_ids` that it lacks; `root` is H_0."""
    begin = len(hashes) * block_size
    end = len(token_ids) // block_size * block_size
    if begin >= end:
        return
    data = array("i", token_ids[begin:end]).tobytes()
    parent = hashes[-1] if hashes else root
    step = 4 * block_size
    for offset in range(0, len(data), step):
        parent = next_hash(parent, data[offset : offset + step])
        hashes.append(parent)


def prefix_hashes(token_ids: list[int], block_size: int, root: bytes) -> list[bytes]:
    """Those of all full blocks of `token_ids`."""
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, block_size, root)
    return hashes


class PrefixCache:
    """Hash to block, and back. A hash names at most one block; a block has at most one hash while it is unchanged.

    What it replaces in `events` is void."""

    def __init__(self, block_ids: list[int], events: CacheEvents, make_pool: PoolMaker = BlockPool) -> None:
        self.pool = make_pool(block_ids, self._forget)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._parent_of: dict[int, bytes] = {}  # the hash before the block's own
        self._events = events
        events.hashes = self._block_of.keys()
        events.contents.clear()
        events.add(CLEARED)

    def __len__(self) -> int:
        return len(self._block_of)

    def is_published(self, block: int) -> bool:
        return block in self._hash_of

    def holds(self, digest: bytes) -> bool:
        return digest in self._block_of

    def find(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of this chain. Touches nothing."""
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, digest: bytes, parent: bytes = b"") -> None:
        """From now on this full, used block is found by its hash; unless another block is already. `parent` is the hash
        of the block that it continues, empty for a first one."""
        if digest not in self._block_of and block not in self._hash_of:
            block = self.pool.own(block)
            self._block_of[digest] = block
            self._hash_of[block] = digest
            self._parent_of[block] = parent
            self.pool.keep(block)
            if self._events.is_followed:
                self._events.add(STORED, digest)

    def withdraw(self, hashes: list[bytes]) -> None:
        """What these hashes name is not to be trusted: nobody finds it any more."""
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is not None:
                self._forget(block)
                self.pool.drop(block)

    def clear(self) -> int:
        """Nothing that was published so far is found any more; used blocks stay with who holds them. Returns how many
        blocks were forgotten."""
        blocks = list(self._hash_of)
        self._block_of.clear()
        self._hash_of.clear()
        self._parent_of.clear()
        for block in blocks:
            self.pool.drop(block)
        self._events.contents.clear()
        self._events.add(CLEARED)
        return len(blocks)

    def links(self) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Copies, by block: its hash, and that of the block which it continues."""
        return self._hash_of.copy(), self._parent_of.copy()

    def audit(self) -> None:
        """Raise AssertionError unless hashes and blocks are a bijection."""
        if self._parent_of.keys() != self._hash_of.keys():
            raise AssertionError("prefix cache: blocks with a hash are not those that continue another")
        if {block: digest for digest, block in self._block_of.items()} != self._hash_of:
            raise AssertionError("prefix cache: hash-to-block and block-to-hash differ")

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._parent_of[block]
        del self._block_of[digest]
        self._events.contents.pop(digest, None)
        if self._events.is_followed:
            self._events.add(REMOVED, digest)
