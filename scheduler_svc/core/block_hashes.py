"""The hashes of a sequence's full blocks, one after another: `H_i = H(H_{i-1}, tokens_i)`.

They lie side by side, since as objects of their own they would take three times as much.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from struct import Struct
from typing import overload

HASH_BYTES = 32
_hash_at = Struct(f"{HASH_BYTES}s").unpack_from
_two_at = Struct(f"{HASH_BYTES}s{HASH_BYTES}s").unpack_from


class BlockHashes(Sequence[bytes]):
    """Of 32 bytes each. A slice is a copy."""

    __slots__ = ("_bytes",)

    def __init__(self, whole: bytes | bytearray = b"") -> None:
        self._bytes = bytearray(whole)

    def extend(self, token_ids: list[int], block_size: int, root: Callable[[], bytes]) -> None:
        """By those of the full blocks of `token_ids` that it lacks; `root` gives H_0."""
        hashes = self._bytes
        begin, end = len(hashes) // HASH_BYTES * block_size, len(token_ids) // block_size * block_size
        if begin >= end:
            return
        pack = _packing(block_size)
        parent = bytes(hashes[-HASH_BYTES:]) if hashes else root()
        for first in range(begin, end, block_size):
            parent = sha256(parent + pack(*token_ids[first : first + block_size])).digest()
            hashes += parent

    def with_parent(self, index: int) -> tuple[bytes, bytes]:
        """The hash before that of the block, empty for the first block, and its own."""
        parent, digest = _two_at(self._bytes, HASH_BYTES * (index - 1)) if index else (b"", self[0])
        return parent, digest

    def __len__(self) -> int:
        return len(self._bytes) // HASH_BYTES

    def __iter__(self) -> Iterator[bytes]:
        for begin in range(0, len(self._bytes), HASH_BYTES):
            yield _hash_at(self._bytes, begin)[0]

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "BlockHashes": ...
    def __getitem__(self, index: int | slice) -> "bytes | BlockHashes":
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"step {step}: only what lies side by side")
            return BlockHashes(self._bytes[HASH_BYTES * begin : HASH_BYTES * end])
        if not -len(self) <= index < len(self):
            raise IndexError(f"hash {index} of {len(self)}")
        digest: bytes = _hash_at(self._bytes, HASH_BYTES * (index % len(self)))[0]
        return digest

    def copy(self) -> "BlockHashes":
        return BlockHashes(self._bytes)

    def clear(self) -> None:
        self._bytes.clear()


@cache
def _packing(block_size: int) -> Callable[..., bytes]:
    """Of so many ids as int32; for one block it takes half as long as an array does."""
    return Struct(f"{block_size}i").pack
