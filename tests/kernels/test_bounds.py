"""What is outside of a row's context changes nothing, however large or far away it is."""

import pytest
import torch

from kernels import KernelInputError, Rows, Rule
from kernels.triton.attention_kernel import attention_kernel
from kernels.triton.launches import attention_constants, num_tiles, score_factors
from kernels.triton.tiles import tile_for
from tests.kernels.pool import EACH, FLOAT_TYPES, MIXED, TRITON, Pool, dense, few_interpreted


@pytest.mark.parametrize(
    ("backend", "dtype", "poison", "window"),
    few_interpreted(
        lambda poison, window: poison != -torch.inf if window else poison != torch.inf,
        FLOAT_TYPES,
        [torch.nan, torch.inf, -torch.inf],
        [None, 3],
    ),
)
def test_what_is_in_unused_slots_changes_no_bit(backend, poison, dtype, window):
    """C9.2: every length up to 3 B + 1, decode and prefill."""
    rows = [*((1, context) for context in range(1, 14)), (5, 5), (8, 19)]
    options = {"backend": backend, "dtype": dtype, "heads": 2, "kv_heads": 1}
    clean, poisoned = Pool(rows, **options), Pool(rows, **options, poison=poison)
    assert torch.equal(clean.attention(window=window), poisoned.attention(window=window))


@pytest.mark.parametrize(
    ("backend", "garbage"),
    few_interpreted(lambda garbage: garbage in (-1, 2**31 - 1), EACH, [-1, 2**31 - 1, -(2**31), 0]),
)
def test_table_entries_behind_a_context_are_never_followed(backend, garbage):
    """C9.4: each row's padding is garbage that leads out of memory, or to a block of NaN."""
    pool = Pool(MIXED, backend=backend, poison=torch.nan)
    expected = pool.attention()
    for table, context in zip(pool.tables, pool.contexts.tolist(), strict=True):
        table[-(-context // pool.block_size) :] = garbage
    assert torch.equal(pool.attention(), expected)


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, 0])
def test_blocks_before_the_window_may_be_gone(backend, garbage):
    """Those that no query of the step sees: their entries may point to block 0, which holds anything."""
    pool = Pool([(1, 33), (6, 30), (1, 5)], backend=backend, poison=torch.nan)
    expected = pool.attention(window=7)
    for table, (num_queries, context) in zip(pool.tables, [(1, 33), (6, 30), (1, 5)], strict=True):
        table[: max(0, context - num_queries - 6) // pool.block_size] = garbage
    assert torch.equal(pool.attention(window=7), expected)


@pytest.mark.parametrize(
    ("backend", "score"),
    few_interpreted(lambda score: score in (1e-4, 1e5, -1e5), EACH, [1e-4, 1.0, 3e2, 1e4, 1e5, -1e4, -1e5]),
)
def test_scores_of_any_size_keep_valid_keys_visible(backend, score):
    """C9.3: keys differ by less than a score's rounding, so every visible key weighs the same."""
    pool = Pool(MIXED, backend=backend, dim=16)
    pool.q.fill_(1.0)
    for i, (q, k, v) in enumerate(pool.rows):
        pool.rows[i] = torch.ones_like(q), torch.full_like(k, score / 16), v
    pool.key_cache.fill_(score / 16)
    torch.testing.assert_close(
        pool.attention(scale=1.0, window=5), pool.expected(scale=1.0, window=5), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 3e2, 1e3])
def test_scores_of_many_sizes_in_one_row_are_right(backend, magnitude):
    pool = Pool(MIXED, backend=backend)
    for sign in (1, -1):
        pool.q = sign * magnitude * torch.cat([q for q, _, _ in pool.rows])
        rows = [
            dense(sign * magnitude * q, k, v, scale=1.0, window=5, soft_cap=None, sinks=None) for q, k, v in pool.rows
        ]
        torch.testing.assert_close(pool.attention(scale=1.0, window=5), torch.cat(rows).float(), atol=1e-3, rtol=1e-3)


def test_one_key_may_outweigh_all_others(backend):
    """C9.3: a score of 1e4 among small ones, at every place in the context."""
    pool = Pool([(1, 40)] * 40, backend=backend, heads=1, kv_heads=1)
    for i, (q, k, v) in enumerate(pool.rows):
        q.fill_(1.0)
        k[i] = 1e4 / 16
        slot = pool.tables[i, i // pool.block_size].item() * pool.block_size + i % pool.block_size
        backend.write_kv(k[i : i + 1], v[i : i + 1], pool.key_cache, pool.value_cache, torch.tensor([slot]))
    pool.q = torch.cat([q for q, _, _ in pool.rows])
    values = torch.stack([v[i] for i, (_, _, v) in enumerate(pool.rows)])
    torch.testing.assert_close(pool.attention(scale=1.0), values, atol=1e-5, rtol=1e-5)


def test_a_key_that_is_not_finite_stays_with_its_row(backend):
    pool = Pool([(1, 9), (4, 9), (1, 9)], backend=backend)
    expected = pool.attention()
    pool.key_cache[pool.tables[1, 0].item()] = torch.nan
    out = pool.attention()
    assert out[1:5].isnan().all()
    assert torch.equal(out[[0, 5]], expected[[0, 5]])


# Addresses beyond 31 and 32 bits (C9.1): storages as large as the addresses need, of which only touched pages take
# memory.


def sparse(shape, strides, dtype=torch.float16):
    num_elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    storage = torch.UntypedStorage(num_elements * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)


def one_row(block, context):
    """One query, whose context lies in one block."""
    return Rows(*(torch.tensor(numbers, dtype=torch.int32) for numbers in ([[block]], [0, 1], [context])))


@pytest.mark.parametrize(("block", "block_stride"), [(9000, 276480), (5, 1 << 31), (3, 1 << 30)])
def test_blocks_far_apart_are_written_and_read(plain_backend, block, block_stride):
    """Block 9000 of 276,480 elements starts at element 2,488,320,000, byte 4,976,640,000."""
    key_cache, value_cache = (sparse((block + 1, 2, 1, 8), (block_stride, 8, 8, 1)) for _ in range(2))
    k, v = torch.randn(2, 2, 1, 8).half()
    plain_backend.write_kv(k, v, key_cache, value_cache, torch.tensor([2 * block, 2 * block + 1]))
    first = block * block_stride
    flat = key_cache.as_strided((16,), (1,), first)
    assert torch.equal(flat, k.flatten())
    rows = one_row(block, context=2)
    out = plain_backend.paged_attention(torch.ones(1, 1, 8).half(), key_cache, value_cache, rows, Rule(0.0))
    torch.testing.assert_close(out[0], v.float().mean(0).half(), atol=2e-3, rtol=2e-3)


def test_slot_numbers_beyond_31_bits_are_written_and_read(plain_backend):
    block, block_size = (1 << 27) + 3, 16
    caches = [sparse((block + 1, block_size, 1, 1), (block_size, 1, 1, 1)) for _ in range(2)]
    values = torch.arange(1.0, 17.0).half().view(16, 1, 1)
    slots = block * block_size + torch.arange(16)
    assert slots[0] > 2**31
    plain_backend.write_kv(values, values, *caches, slots)
    assert torch.equal(caches[0][block].flatten(), values.flatten())
    rows = one_row(block, context=16)
    out = plain_backend.paged_attention(torch.ones(1, 1, 1).half(), *caches, rows, Rule(0.0))
    assert out.item() == 8.5


def test_queries_and_keys_of_a_step_may_be_far_apart(backend):
    """A slice of a wide fused projection: token 2 starts at element 2**32."""
    pool = Pool([(1, 5), (2, 7)], backend=backend, dtype=torch.float16)
    expected = pool.attention()
    q = sparse(pool.q.shape, (1 << 31, 16, 1))
    q.copy_(pool.q)
    pool.q = q
    assert torch.equal(pool.attention(), expected)
    k = sparse((3, 2, 16), (1 << 31, 16, 1))
    k.copy_(torch.randn(3, 2, 16))
    backend.write_kv(k, k, pool.key_cache, pool.value_cache, torch.arange(3))
    expected = Pool([(1, 5), (2, 7)], backend=backend, dtype=torch.float16)
    backend.write_kv(k.contiguous(), k.contiguous(), expected.key_cache, expected.value_cache, torch.arange(3))
    assert torch.equal(pool.value_cache, expected.value_cache)


def test_results_far_behind_the_first_are_stored_in_their_places():
    """C9.1, `out` of a long packed batch: token 1 is stored at element 2**31, token 2 at 2**32.

    That many results are not computed here. The kernel puts a token's results as far apart as it has parts of each, so
    it is told of 2**27 parts, and the first, which has all of these contexts, is launched.
    """
    pool = Pool([(2, 5), (1, 9)], backend=TRITON, heads=1, kv_heads=1, dtype=torch.float16)
    tile, num_parts = tile_for("mixed", 1, 16, 16, torch.float16, 1 << 17), 1 << 27
    out = sparse((3, 16), (num_parts * 16, 1))
    attention_kernel[(num_tiles(tile, 3, 2), 1, 1)](
        pool.q, *pool.caches, pool.tables, pool.query_start, pool.contexts, None, None, out, None, None,
        *score_factors(0.25, None), 0, 12, 3, 2, num_parts,
        *pool.q.stride()[:2], *pool.key_cache.stride()[:3], *pool.value_cache.stride()[:3], pool.tables.stride(0),
        HAS_TABLE=True, HAS_WINDOW=False, HAS_CAP=False, HAS_SINKS=False, HAS_SHARED=False, SPLIT=False,
        **attention_constants(1, pool.key_cache.shape, 16, torch.float16, tile),
    )  # fmt: skip
    torch.testing.assert_close(out.float(), pool.expected()[:, 0], atol=2e-3, rtol=2e-3)


def test_a_table_of_more_positions_than_32_bits_count_is_refused():
    pool = Pool([(1, 5)], backend=TRITON)
    pool.tables = torch.empty(1, 1 << 29, dtype=torch.int32)  # takes no memory: nothing of it is touched
    with pytest.raises(KernelInputError, match=r"^block_tables: has 536870912 blocks of 4 tokens"):
        pool.attention()
