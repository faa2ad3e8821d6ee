"""The index of hashes is a dict of hashes to blocks, whatever is done to it."""

import random
from hashlib import sha256

import pytest

from scheduler_svc.core.hash_index import HashIndex


def digest(number: int) -> bytes:
    return sha256(bytes([number])).digest()


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_a_dict_would(seed: int) -> None:
    chance = random.Random(seed)
    index, block_of = HashIndex(8), {}
    size = 8
    for _ in range(3000):
        block, name = chance.randrange(1, size), digest(chance.randrange(60))
        action = chance.random()
        if action < 0.6:
            is_new = block not in block_of.values() and name not in block_of
            assert index.add(block, name) == is_new
            if is_new:
                block_of[name] = block
        elif action < 0.97 and index.has(block):
            del block_of[index.remove(block)]
        elif action < 0.99:
            size = min(size + chance.randrange(8), 48)
            index.grow(size)
        elif action > 0.995:
            index.clear()
            block_of.clear()
        assert len(index) == len(block_of)
        assert index.find(name) == block_of.get(name, 0)
        assert index.has(block) == (block in block_of.values())
    assert size == 48, "it was meant to grow"
    assert {name: index.find(name) for name in index} == block_of
    assert index.blocks().tolist() == sorted(block_of.values())
    assert [row.tobytes() for row in index.digests(index.blocks())] == [index.digest_of(b) for b in index.blocks()]


def test_blocks_whose_hashes_have_one_place_are_told_apart() -> None:
    """As many as there are places: some share one."""
    index = HashIndex(33)
    for block in range(1, 33):
        assert index.add(block, digest(block))
    for gone in (7, 32, 1):
        assert index.remove(gone) == digest(gone)
    for block in range(1, 33):
        assert index.find(digest(block)) == (0 if block in (7, 32, 1) else block)
