"""Nothing that stays is made in the midst of other work, whose pages it would keep: what is known of blocks is in
columns that are there from the beginning, and of numbers that stay there is one object each."""

import sys
import tracemalloc
from hashlib import sha256

import numpy as np

from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.columns import KEPT_BYTES, SequenceColumns
from scheduler_svc.core.prefix import PrefixCache
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.token_ids import MAX_KEPT, TokenIds

NUM_BLOCKS = 2000


def fill(cache: PrefixCache, name: str) -> None:
    """Every block holds a published prefix, and nobody uses it."""
    parent = b""
    table = cache.pool.allocate(NUM_BLOCKS)
    for block in table:
        digest = sha256(f"{name} {block}".encode()).digest()
        cache.publish(block, digest, parent)
        parent = digest
    cache.pool.release(table)
    assert (len(cache), cache.pool.num_cached) == (NUM_BLOCKS, NUM_BLOCKS)


def test_what_is_known_of_blocks_takes_its_memory_when_they_are_lent():
    cache = PrefixCache(range(1, NUM_BLOCKS + 1), CacheEvents())
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        fill(cache, "first")
        fill(cache, "second")  # all of the first are evicted
        kept = tracemalloc.get_traced_memory()[0] - before
        cache.clear()
        after_clearing = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert max(kept, after_clearing) < NUM_BLOCKS  # not even a byte for each
    assert sys.getsizeof(cache.pool.ref_count) > NUM_BLOCKS  # what there is, is there


def test_equal_tokens_are_one_object_and_none_is_another():
    token_ids = TokenIds()
    for ids in ([7, 70_000, 70_000], [300, 70_000], [], [MAX_KEPT, MAX_KEPT - 1]):
        assert token_ids.of(np.array(ids, np.int32)) == ids
    first, second = token_ids.of(np.array([70_000, 70_000]))
    assert first is second
    assert first is token_ids.of(np.array([70_000]))[0]


def test_a_block_table_that_was_wide_goes_with_the_last_row():
    columns = SequenceColumns(list(range(1000)), 16)
    narrow = columns.block_table.shape
    rows = [columns.enter(Sequence("r", [1] * 5000), list(range(1, 314)), 0, 6000) for _ in range(2)]
    assert columns.block_table.nbytes > KEPT_BYTES
    columns.leave(rows[0])
    assert columns.table(rows[1]) == list(range(1, 314))
    columns.leave(rows[1])
    assert columns.block_table.shape == narrow
