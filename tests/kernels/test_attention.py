"""`paged_attention` of every backend against a dense softmax that knows nothing of blocks."""

import itertools

import pytest
import torch

from kernels import KernelInputError
from tests.kernels.pool import FLOAT_TYPES, MIXED, Pool, assert_right, dense


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_prefill_and_decode_rows_share_one_call(backend, window, soft_cap, sinks):
    assert_right(Pool(MIXED, backend=backend), window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("order", list(itertools.permutations([(1, 7), (5, 5), (8, 20), (1, 1)])))
def test_the_order_of_the_rows_does_not_matter(backend, order):
    assert_right(Pool(list(order), backend=backend), window=6)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 1), (9, 3), (5, 1), (10, 2), (28, 4), (12, 2), (32, 1), (24, 8), (8, 8)]
)
def test_any_number_of_query_heads_shares_a_kv_head(backend, heads, kv_heads):
    assert_right(Pool(MIXED, backend=backend, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(1, 1), (8, 8), (80, 80), (96, 64), (112, 112), (192, 128), (16, 24), (256, 256)]
)
def test_key_and_value_heads_have_any_size(backend, dim, value_dim):
    assert_right(Pool(MIXED, backend=backend, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 24, 64])
def test_any_block_size_works_at_every_fill(backend, block_size):
    rows = [(1, context) for context in range(1, 3 * block_size + 2)] if block_size < 16 else MIXED
    assert_right(Pool([*rows, (3, 2 * block_size), (2, block_size)], backend=backend, block_size=block_size))


@pytest.mark.parametrize(("backend", "dtype"), FLOAT_TYPES)
def test_half_precision_caches_lose_only_the_rounding_of_the_result(backend, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert_right(Pool(MIXED, backend=backend, dtype=dtype), tolerance, window=7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("backend", "dtype"), FLOAT_TYPES)
@pytest.mark.parametrize("window", [None, 3])
def test_what_is_in_unused_slots_changes_no_bit(backend, poison, dtype, window):
    rows = [*MIXED, *((1, context) for context in range(1, 14))]
    clean, poisoned = Pool(rows, backend=backend, dtype=dtype), Pool(rows, backend=backend, dtype=dtype, poison=poison)
    assert torch.equal(clean.attention(window=window), poisoned.attention(window=window))


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 3e2, 1e3])
def test_scores_of_any_size_keep_valid_keys_visible(backend, magnitude):
    pool = Pool(MIXED, backend=backend)
    for sign in (1, -1):
        pool.q = sign * magnitude * torch.cat([q for q, _, _ in pool.rows])
        pool.key_cache.mul_(1.0)
        rows = [
            dense(sign * magnitude * q, k, v, scale=1.0, window=5, soft_cap=None, sinks=None) for q, k, v in pool.rows
        ]
        torch.testing.assert_close(pool.attention(scale=1.0, window=5), torch.cat(rows).float(), atol=1e-3, rtol=1e-3)


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


def test_views_of_one_buffer_are_as_good_as_caches_of_their_own(backend):
    pool = Pool(MIXED, backend=backend)
    expected = pool.attention()
    both = torch.stack([pool.key_cache, pool.value_cache], dim=1)  # [blocks, 2, block size, heads, dim]
    pool.key_cache, pool.value_cache = both[:, 0], both[:, 1]
    padded = torch.zeros(*pool.q.shape[:2], 20)
    padded[..., :16] = pool.q
    pool.q = padded[..., :16]
    assert torch.equal(pool.attention(), expected)
    k, v = torch.ones(1, 2, 16), torch.full((1, 2, 16), 2.0)
    backend.write_kv(k, v, pool.key_cache, pool.value_cache, torch.tensor([9]))
    assert (both[2, 0, 1] == 1).all()
    assert (both[2, 1, 1] == 2).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda pool: setattr(pool, "tables", pool.tables.long()), "block_tables"),
        (lambda pool: setattr(pool, "contexts", pool.contexts.to(torch.uint8)), "context_lens"),
        (lambda pool: setattr(pool, "query_start", pool.query_start[:-1]), "query_start"),
        (lambda pool: setattr(pool, "q", pool.q[..., :8]), "q"),
        (lambda pool: setattr(pool, "q", pool.q[:, :3]), "q"),
        (lambda pool: setattr(pool, "q", pool.q.double()), "q"),
        (lambda pool: setattr(pool, "value_cache", pool.value_cache[:-1]), "value_cache"),
        (lambda pool: setattr(pool, "value_cache", pool.value_cache.half()), "value_cache"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(backend, change, named):
    pool = Pool(MIXED, backend=backend)
    change(pool)
    with pytest.raises(KernelInputError, match=rf"^{named}:"):
        pool.attention()


@pytest.mark.parametrize("options", [{"window": 0}, {"soft_cap": 0.0}, {"sinks": torch.ones(3)}])
def test_options_out_of_range_are_refused_by_name(backend, options):
    with pytest.raises(KernelInputError, match=f"^{next(iter(options))}:"):
        Pool(MIXED, backend=backend).attention(**options)
