"""Hashes side by side are a list of them."""

from hashlib import sha256

import numpy as np
import pytest

from scheduler_svc.core.block_hashes import BlockHashes
from scheduler_svc.core.prefix import prefix_hashes


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def test_they_are_read_as_a_list_is() -> None:
    same = [digest(number) for number in range(7)]
    assert not BlockHashes()
    hashes = BlockHashes(b"".join(same))
    assert (list(hashes), len(hashes), list(reversed(hashes))) == (same, 7, same[::-1])
    assert [hashes[i] for i in range(-7, 7)] == [*same, *same]
    for piece in (slice(3), slice(2, 5), slice(5, 2), slice(None), slice(-2, None), slice(4, 100)):
        assert list(hashes[piece]) == same[piece]
    for outside in (7, -8):
        with pytest.raises(IndexError):
            hashes[outside]
    with pytest.raises(ValueError, match="step 2"):
        hashes[::2]


def test_what_is_hashed_in_parts_is_what_is_hashed_at_once() -> None:
    ids, root = list(range(300, 340)), digest(9)
    whole = prefix_hashes(ids, 4, root)
    assert len(set(whole)) == 10
    assert whole[0] == sha256(root + np.array(ids[:4], np.int32).tobytes()).digest()
    assert whole[1] == sha256(whole[0] + np.array(ids[4:8], np.int32).tobytes()).digest()
    parts = BlockHashes()
    for end in (3, 4, 11, 12, 12, 40):
        parts.extend(ids[:end], 4, lambda: root)
        assert list(parts) == list(whole[: end // 4])
    assert [parts.with_parent(i) for i in (0, 1, 9)] == [(b"", whole[0]), (whole[0], whole[1]), (whole[8], whole[9])]


def test_a_copy_goes_its_own_way() -> None:
    root = digest(9)
    hashes = prefix_hashes([1, 2], 2, root)
    copies = [hashes.copy(), hashes[:1]]
    hashes.extend([1, 2, 3, 4], 2, lambda: root)
    for copy in copies:
        copy.extend([1, 2, 5, 6], 2, lambda: root)
        assert list(copy) == list(prefix_hashes([1, 2, 5, 6], 2, root))
    assert list(hashes) == list(prefix_hashes([1, 2, 3, 4], 2, root))
    hashes.clear()
    assert not hashes
    assert len(copies[0]) == 2
