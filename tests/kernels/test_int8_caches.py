"""Caches in 8 bits: attention over them is attention over the rounded numbers that they hold."""

import pytest
import torch

from kernels import REFERENCE, KernelInputError, Rule, native_backend
from kernels.cpu import supported
from tests.kernels.pool import MIXED, TOLERANCES, TRITON, Pool, assert_right
from tests.kernels.sharing import share, shared_blocks
from tests.kernels.test_projected import layer

LEVELS = [pytest.param(level, marks=pytest.mark.slow if i else ()) for i, level in enumerate(supported())]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: TOLERANCES[torch.bfloat16]}  # queries and weights have 16 bits
DTYPES = list(TOLERANCE)


@pytest.fixture(params=LEVELS)
def native(request):
    return native_backend(request.param)


class Int8Pool(Pool):
    """Rows in a cache that was all NaN; what is expected of them is what they are when rounded."""

    def __init__(self, rows, *, backend, **options):
        super().__init__(rows, backend=backend, cache_dtype=torch.int8, poison=-1, **options)
        self.rows = [(q, rounded(k), rounded(v)) for q, k, v in self.rows]


def rounded(x):
    """To 8 bits with a scale for each token and head, and back: x is `[tokens, heads, dim]`."""
    most = x.float().abs().amax(-1, keepdim=True)
    return torch.round(x.float() * (127 / most)) * (most / 127)


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
def test_prompts_and_decode_rows_share_one_call(native, window, soft_cap, sinks):
    assert_right(Int8Pool(MIXED, backend=native), 2e-4, window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(1, 1), (7, 3), (16, 24), (80, 80), (128, 128), (192, 128), (512, 64)])
def test_heads_have_any_size(native, dim, value_dim, dtype):
    pool = Int8Pool([(1, 9), (5, 8), (1, 170)], backend=native, dim=dim, value_dim=value_dim, dtype=dtype)
    assert_right(pool, TOLERANCE[dtype], scale=dim**-0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (10, 2), (28, 4), (71, 1)])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_any_group_of_heads_in_blocks_of_any_size(native, heads, kv_heads, block_size):
    rows = [(1, 9), (7, 12), (1, 67), (2, 130)]
    pool = Int8Pool(rows, backend=native, heads=heads, kv_heads=kv_heads, block_size=block_size)
    assert_right(pool, 2e-4)


def test_rows_that_share_blocks(native):
    pool = Int8Pool([(1, 180), (1, 133), (1, 188), (1, 120)], backend=native, heads=4, kv_heads=2)
    share(pool, [0, 1, 2], 0, 6)
    assert_right(pool, 2e-4, shared=shared_blocks([(0, 6, [0, 1, 2])], 4), window=150)


@pytest.mark.parametrize("rows", [MIXED, [(1, 1500), (1, 9)]], ids=["short", "in parts"])
def test_projected_tokens_are_written_and_seen(native, rows):
    torch.set_num_threads(2)
    try:
        pool, exact = Int8Pool(rows, backend=native), Pool(rows, backend=REFERENCE, block_size=16)
        out = project(pool)
        again = pool.attention()
        expected = project(exact)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)  # of what rounding the cache does
    torch.testing.assert_close(again, exact.attention(), atol=0.05, rtol=0.05)


def project(pool):
    return pool.backend.attend_projected(*layer(pool), *pool.caches, pool.paged_rows(), Rule(0.25))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tokens_of_very_different_size_keep_their_accuracy(native, size):
    """Each has scales of its own: a large one does not make zeros of its neighbours."""
    pool = Int8Pool([(1, 40)], backend=native)
    q, k, v = pool.rows[0]
    v = torch.where(torch.arange(40)[:, None, None] < 20, v, v * size)
    slots = torch.cat([torch.arange(16) + 16 * int(block) for block in pool.tables[0]])[:40].long()
    native.write_kv(k, v, pool.key_cache, pool.value_cache, slots)
    pool.rows = [(q, k, rounded(v))]
    out, expected = pool.attention(), pool.expected()
    assert (out - expected).abs().max() <= 5e-4 * expected.abs().max()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of_keys", [True, False])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(native, of_keys, value):
    pool = Int8Pool([(1, 20), (1, 25)], backend=native)
    right = pool.attention()
    k, v = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    (k if of_keys else v)[0, 1, 3] = value
    native.write_kv(k, v, pool.key_cache, pool.value_cache, torch.tensor([int(pool.tables[0, 1]) * 16 + 2]))
    out = pool.attention()
    assert out[0, 2:].isnan().all()
    assert out[0, :2].isfinite().all()
    assert torch.equal(out[1], right[1])


def test_zeros_are_kept(native):
    pool = Int8Pool([(1, 20)], backend=native)
    zeros = torch.zeros(20, 2, 16)
    slots = torch.cat([torch.arange(16) + 16 * int(block) for block in pool.tables[0]])[:20].long()
    native.write_kv(zeros, zeros, pool.key_cache, pool.value_cache, slots)
    assert (pool.attention() == 0).all()


def test_a_copied_block_is_as_good_as_the_first(native):
    pool = Int8Pool([(1, 40), (1, 40)], backend=native)
    expected = pool.attention()
    caches = [pool.key_cache, pool.value_cache]
    native.copy_blocks(caches, pool.tables[0], pool.tables[1])
    pool.q[1] = pool.q[0]
    assert torch.equal(pool.attention()[1], expected[0])


def test_a_block_is_little_more_than_half_of_one_in_16_bits(native):
    sizes = [
        native.allocate_caches(9, 16, 8, 128, 128, t, torch.device("meta"))[0].untyped_storage().nbytes()
        for t in (torch.int8, torch.bfloat16)
    ]
    assert sizes[0] / sizes[1] == pytest.approx((128 + 4) / (2 * 128), rel=0.005)


def test_where_there_are_none_they_are_refused(native):
    cpu = torch.device("cpu")
    for backend, block_size, dim in ((REFERENCE, 16, 16), (TRITON, 16, 16), (native, 8, 16), (native, 16, 513)):
        with pytest.raises(KernelInputError, match=r"^(dtype|key_dim): .* 8 bits"):
            backend.allocate_caches(2, block_size, 1, dim, 16, torch.int8, cpu)
