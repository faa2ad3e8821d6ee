"""Numbers that stay are objects of their own: not those that were made in the midst of other work, whose pages they
would keep."""

import numpy as np

from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.prefix import PrefixCache
from scheduler_svc.core.token_ids import MAX_KEPT, TokenIds


def another(number: int) -> int:
    """The same number as another object, as numpy makes one each time."""
    return int(str(number))


def test_what_stays_of_a_block_is_the_pools_own_number_however_often_it_is_used():
    cache = PrefixCache(list(range(1000, 1008)), CacheEvents())
    pool = cache.pool
    for digest in (b"a", b"b", b"c"):
        table = [another(block) for block in pool.allocate(5)]
        cache.publish(another(table[0]), digest)
        pool.release(table)
    kept = [*pool.cached, *pool.allocate(pool.num_blank), *cache.links()[0], *cache.find([b"a", b"b", b"c"])]
    assert len(kept) == 8 + 3 + 3
    assert all(block is pool.own(block) for block in kept)
    assert pool.leased == set(range(1000, 1008))


def test_equal_tokens_are_one_object_and_none_is_another():
    token_ids = TokenIds()
    for ids in ([7, 70_000, 70_000], [300, 70_000], [], [MAX_KEPT, MAX_KEPT - 1]):
        assert token_ids.of(np.array(ids, np.int32)) == ids
    first, second = token_ids.of(np.array([70_000, 70_000]))
    assert first is second
    assert first is token_ids.of(np.array([70_000]))[0]
