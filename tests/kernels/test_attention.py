"""`paged_attention` of every backend against a dense softmax that knows nothing of blocks."""

import itertools

import pytest
import torch

from tests.kernels.pool import (
    EACH,
    FLOAT_TYPES,
    MIXED,
    PLAIN,
    REFERENCE,
    TOLERANCES,
    Pool,
    assert_right,
    few_interpreted,
)


@pytest.mark.parametrize(
    ("backend", "window", "soft_cap", "sinks"),
    few_interpreted(
        lambda window, soft_cap, sinks: (
            window in (None, 3) or (window in (1, 8) and soft_cap is not None and sinks is not None)
        ),
        EACH,
        [None, 1, 3, 8, 100],
        [None, 0.7],
        [None, torch.tensor([0.3, -1.0, 2.0, 0.0])],
    ),
)
def test_prefill_and_decode_rows_share_one_call(backend, window, soft_cap, sinks):
    assert_right(Pool(MIXED, backend=backend), window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize(
    ("backend", "order"),
    few_interpreted(
        lambda order: order[1] == (8, 20),
        EACH,
        itertools.permutations([(1, 7), (5, 5), (8, 20), (1, 1)]),
    ),
)
def test_the_order_of_the_rows_does_not_matter(backend, order):
    assert_right(Pool(list(order), backend=backend), window=6)


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 100])  # blocks have 4 slots
def test_a_prompt_may_be_computed_in_chunks_of_any_size(backend, chunk):
    """C9.7: each chunk attends to what is cached of the prompt and to itself, next to a row that decodes."""
    pool = Pool([(23, 23), (1, 13)], backend=backend)
    q = pool.rows[0][0]
    parts = []
    for begin in range(0, 23, chunk):
        end = min(begin + chunk, 23)
        pool.q = torch.cat([q[begin:end], pool.rows[1][0]])
        pool.query_start = torch.tensor([0, end - begin, end - begin + 1], dtype=torch.int32)
        pool.contexts = torch.tensor([end, 13], dtype=torch.int32)
        parts.append(pool.attention(window=17)[:-1])
    torch.testing.assert_close(torch.cat(parts), pool.expected(window=17)[:23], atol=1e-5, rtol=1e-5)


def test_rows_without_queries_are_passed_over(backend):
    assert_right(Pool([(0, 5), (2, 7), (0, 0), (0, 9), (1, 6), (0, 3)], backend=backend))


def test_tokens_behind_every_row_get_zeros(backend):
    pool = Pool([(1, 5), (3, 9)], backend=backend)
    expected = pool.attention()
    pool.q = torch.cat([pool.q, torch.ones(37, 4, 16)])
    out = pool.attention()
    torch.testing.assert_close(out[:4], expected, atol=1e-6, rtol=1e-6)
    assert (out[4:] == 0).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(3, 1), (9, 3), (5, 1), (10, 2), (28, 4), (12, 2), (32, 1), (24, 8), (8, 8), (16, 1), (64, 2), (100, 1), (71, 1)],
)
def test_any_number_of_query_heads_shares_a_kv_head(backend, heads, kv_heads):
    """C8.2: groups of 1 to 100, powers of two or not, and larger than a tile."""
    assert_right(Pool([(1, 9), (7, 12), (1, 3)], backend=backend, heads=heads, kv_heads=kv_heads))


def test_a_group_of_heads_works_at_every_length_of_prompt(backend):
    """C8.2: prompts of 1 to 40 (every third in the interpreter), so that tiles of queries end everywhere."""
    rows = [(length, length) for length in range(1, 41, 1 if backend is REFERENCE else 3)]
    assert_right(Pool(rows, backend=backend, heads=3, kv_heads=1))


@pytest.mark.parametrize(
    ("dim", "value_dim"),
    [
        *((size, size) for size in (1, 8, 16, 64, 80, 96, 112, 120, 128, 160, 192, 256)),
        (96, 64),
        (192, 128),
        (16, 24),
        (1, 40),
    ],
)
@pytest.mark.parametrize(("backend", "dtype"), FLOAT_TYPES)
def test_key_and_value_heads_have_any_size(backend, dtype, dim, value_dim):
    """C8.3; a KV head's neighbours, in its slot and in the next block, hold NaN."""
    pool = Pool([(1, 9), (5, 8), (1, 4)], backend=backend, dim=dim, value_dim=value_dim, dtype=dtype, poison=torch.nan)
    if backend in PLAIN:
        spread_keys, spread_values = (
            torch.full((*cache.shape[:2], 4, cache.shape[3]), torch.nan, dtype=dtype)
            for cache in (pool.key_cache, pool.value_cache)
        )
        spread_keys[:, :, 1:3], spread_values[:, :, 1:3] = pool.key_cache, pool.value_cache
        pool.key_cache, pool.value_cache = spread_keys[:, :, 1:3], spread_values[:, :, 1:3]
    assert_right(pool, TOLERANCES[dtype], scale=dim**-0.5)


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 8, 12, 16, 24, 64, 256, 1024])
def test_any_block_size_works_at_every_fill(backend, block_size):
    """C9.8, and contexts of 1, B - 1, B, B + 1, k B."""
    edges = {1, block_size - 1, block_size, block_size + 1, 2 * block_size, 3 * block_size + 1}
    rows = [(1, context) for context in sorted(edges) if 0 < context <= 520] + [(3, 40), (2, 17)]
    assert_right(Pool(rows, backend=backend, block_size=block_size, heads=2, kv_heads=1))


@pytest.mark.parametrize(("backend", "dtype"), FLOAT_TYPES)
def test_half_precision_caches_lose_only_the_rounding_of_the_result(backend, dtype):
    assert_right(Pool(MIXED, backend=backend, dtype=dtype), TOLERANCES[dtype], window=7)


@pytest.mark.parametrize(("q_dtype", "cache_dtype"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_the_cache_may_have_another_dtype_than_the_queries(backend, q_dtype, cache_dtype):
    pool = Pool(MIXED, backend=backend, dtype=torch.float16)
    expected = pool.expected(window=7)
    pool.q = pool.q.to(q_dtype)
    pool.key_cache, pool.value_cache = pool.key_cache.to(cache_dtype), pool.value_cache.to(cache_dtype)
    out = pool.attention(window=7)
    assert out.dtype == q_dtype
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[q_dtype], rtol=TOLERANCES[q_dtype])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_windows_end_to_the_token_at_every_edge_of_a_tile(backend, window):
    assert_right(Pool([(1, 80), (40, 70), (1, window), (1, window + 1)], backend=backend, heads=2), window=window)


def test_the_window_includes_exactly_the_last_tokens(backend):
    pool = Pool([(1, 9), (4, 9)], backend=backend)
    right = pool.attention(window=8)
    for wrong in (7, 9):
        assert (right - pool.attention(window=wrong)).abs().max() > 1e-3


def test_a_row_without_keys_gives_zeros_and_leaves_its_neighbours_alone(backend):
    pool = Pool([(1, 5), (1, 0), (3, 6), (2, 0)], backend=backend)
    out = pool.attention()
    assert (out[1] == 0).all()
    assert (out[5:] == 0).all()
    torch.testing.assert_close(out, pool.expected(), atol=1e-5, rtol=1e-5)


def test_a_sink_alone_gives_zeros(backend):
    pool = Pool([(1, 0), (2, 0)], backend=backend)
    assert (pool.attention(sinks=torch.ones(4)) == 0).all()


def test_an_empty_batch_gives_an_empty_result(backend):
    assert Pool([], backend=backend).attention().shape == (0, 4, 16)


def test_a_long_prefill_is_cut_into_parts_without_a_seam(backend, monkeypatch):
    whole = Pool([(40, 60), (1, 60)], backend=backend)
    expected = whole.attention(window=11)
    monkeypatch.setattr("kernels.reference.MAX_SCORES", 4 * 60 * 7)
    monkeypatch.setattr("kernels.reference.MAX_GROUP_ELEMENTS", 1)
    torch.testing.assert_close(whole.attention(window=11), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 19}, {"soft_cap": 2.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16, 32])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
def test_every_head_size_with_every_group_and_option(backend, dim, group, options):
    """Contexts of 1, B - 1, B, B + 1, 3 B and long, mixed; in shuffled blocks among NaN."""
    rows = [(1, 1), (6, 15), (1, 16), (2, 17), (1, 48), (9, 130)]
    pool = Pool(rows, backend=backend, block_size=16, heads=2 * group, kv_heads=2, dim=dim, poison=torch.nan)
    if "sinks" in options:
        options = {"sinks": torch.linspace(-2, 2, 2 * group)}
    assert_right(pool, 2e-5, scale=dim**-0.5, **options)
