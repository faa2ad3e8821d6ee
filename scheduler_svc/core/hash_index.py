"""Which block has which hash: a hash table in columns, since objects for each block of a million would take far more.

A hash belongs to one of `_first`'s places, where a chain of blocks begins that goes on in `_next`. There are at least
as many places as blocks, so a chain is one or two blocks long.
"""

from collections.abc import Collection, Iterator
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.block_hashes import HASH_BYTES
from scheduler_svc.core.flat import lengthened, view, zeros

_digest_at = Struct(f"{HASH_BYTES}s").unpack_from
END, ABSENT = 0, -1  # of a chain: no block is called 0; and of a block that is in none


class HashIndex(Collection[bytes]):
    """Hashes of 32 bytes each, one a block, no two alike."""

    def __init__(self, size: int) -> None:
        """For blocks below `size`."""
        self._digests = memoryview(b"")
        self._next = zeros("i", 0)
        self._first, self._mask = zeros("i", 1), 0
        self._num = 0
        self.grow(size)

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[bytes]:
        return map(self.digest_of, self.blocks().tolist())

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and self.find(digest) != END

    def grow(self, size: int) -> None:
        """Blocks are below `size` from now on, if they were not."""
        num_before = len(self._next)
        if size <= num_before:
            return
        longer = bytearray(1) * (HASH_BYTES * size)
        longer[: len(self._digests)] = self._digests
        self._digests = memoryview(longer)
        self._next = lengthened(self._next, size)
        view(self._next)[num_before:] = ABSENT
        blocks = self.blocks().tolist()
        self._mask = (1 << (size - 1).bit_length()) - 1
        self._first = zeros("i", self._mask + 1)
        for block in blocks:
            self._link(block, self.digest_of(block))

    def find(self, digest: bytes) -> int:
        """The block with this hash, or 0."""
        block = self._first[hash(digest) & self._mask]
        while block and _digest_at(self._digests, HASH_BYTES * block) != (digest,):
            block = self._next[block]
        return block

    def has(self, block: int) -> bool:
        return self._next[block] != ABSENT

    def digest_of(self, block: int) -> bytes:
        """Of one that has a hash."""
        (digest,) = _digest_at(self._digests, HASH_BYTES * block)
        return digest

    def add(self, block: int, digest: bytes) -> bool:
        """Whether the block has this hash now: not if it has one already, or another block has this."""
        first, following, digests = self._first, self._next, self._digests
        if following[block] != ABSENT:
            return False
        place = hash(digest) & self._mask
        other = begin = first[place]
        while other:
            if _digest_at(digests, HASH_BYTES * other) == (digest,):
                return False
            other = following[other]
        digests[HASH_BYTES * block : HASH_BYTES * (block + 1)] = digest
        following[block] = begin
        first[place] = block
        self._num += 1
        return True

    def remove(self, block: int) -> bytes:
        """Its hash, which it has no more."""
        digest = self.digest_of(block)
        place, following = hash(digest) & self._mask, self._next
        before = self._first[place]
        if before == block:
            self._first[place] = following[block]
        else:
            while following[before] != block:
                before = following[before]
            following[before] = following[block]
        following[block] = ABSENT
        self._num -= 1
        return digest

    def clear(self) -> None:
        view(self._first)[:] = END
        view(self._next)[:] = ABSENT
        self._num = 0

    def blocks(self) -> NDArray[np.int64]:
        """Those that have a hash, in their order. Costs a pass over all."""
        return np.flatnonzero(view(self._next) != ABSENT)

    def digests(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """[number of blocks, 32], copied."""
        return np.frombuffer(self._digests, np.uint8).reshape(-1, HASH_BYTES)[blocks]

    def _link(self, block: int, digest: bytes) -> None:
        place = hash(digest) & self._mask
        self._next[block] = self._first[place]
        self._first[place] = block
