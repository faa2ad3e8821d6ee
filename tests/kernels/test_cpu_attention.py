"""What is the native kernels' own: contexts in parts, and the variant without tables that a benchmark compares with."""

import ctypes
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import KernelInputError, Rule
from kernels.cpu import linear
from kernels.cpu.library import ops
from tests.kernels.pool import MIXED, NATIVE, TOLERANCES, Pool, assert_right
from tests.kernels.sharing import pool_that_shares

pytestmark = pytest.mark.skipif(not NATIVE, reason="there are no kernels for this CPU")


@pytest.fixture(params=NATIVE, ids=lambda backend: backend.name)
def native(request):
    return request.param


@pytest.fixture
def threads():
    """More than one, so that work is cut for them; as many as the smallest machine has."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": 700}, {"soft_cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0])}], ids=str
)
def test_a_long_context_in_parts_gives_what_it_gives_in_one(native, threads, dtype, options):
    rows = [(1, 1500), (1, 3), (40, 1100), (1, 0)]
    pool = Pool(rows, backend=native, heads=2, kv_heads=1, dtype=dtype, poison=torch.nan)
    assert_right(pool, TOLERANCES[dtype], **options)


# So many that a thread takes all heads of a row, with steps of every length, and some that do not decode. Some CPUs
# read large heads block by block.
MANY = [(1, context) for context in (1, 16, 17, 100, 128, 129, 145, 300, 400, 513)] * 2 + [(9, 60), (1, 0), (1, 260)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 70}, {"soft_cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])}],
    ids=str,
)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_many_rows_whose_heads_are_read_together(native, threads, dim, dtype, options):
    numbers = torch.bfloat16 if dtype == torch.int8 else dtype
    poison = 0 if dtype == torch.int8 else torch.nan
    sizes = {"heads": 6, "kv_heads": 3, "dim": dim}
    pool = Pool(MANY, backend=native, **sizes, dtype=numbers, cache_dtype=dtype, poison=poison)
    assert_right(pool, 5e-2 if dtype == torch.int8 else TOLERANCES[dtype], scale=dim**-0.5, **options)


# So long that some CPUs read their blocks in the order in which these lie, beside others of which they do not.
WALKED = [(1, context) for context in (260, 400, 513, 1, 300, 700)] + [(9, 600), (1, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 290}, {"soft_cap": 2.0}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5])}],
    ids=str,
)
@pytest.mark.parametrize("dim", [80, 128])
def test_blocks_of_many_rows_may_be_read_as_they_lie(native, threads, dim, dtype, options):
    pool = Pool(WALKED, backend=native, heads=6, kv_heads=3, dim=dim, dtype=dtype, poison=torch.nan)
    assert_right(pool, TOLERANCES[dtype], scale=dim**-0.5, **options)


def test_more_rows_may_be_read_so_than_caches_hold_results_of(native, threads):
    pool = Pool([(1, 257 + row) for row in range(130)], backend=native, dim=64, poison=torch.nan)
    assert_right(pool, scale=0.125)


def test_what_rows_have_besides_shared_blocks_may_be_read_so(native, threads):
    segments = [(0, 4, [0, 1, 2]), (4, 7, [0, 1])]
    sizes = {"heads": 4, "kv_heads": 2, "dim": 64}
    pool, shared = pool_that_shares([110, 95, 80, 75], segments, backend=native, poison=torch.nan, **sizes)
    for window in (None, 270):
        assert_right(pool, shared=shared, scale=0.125, window=window)


def test_a_row_that_is_not_finite_harms_none_whose_blocks_lie_beside_its_own(native, threads):
    pool = Pool([(1, 300)] * 3, backend=native, dim=64)
    expected = pool.attention()
    pool.q[1] = torch.nan
    out = pool.attention()
    assert out[1].isnan().all()
    torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=1e-5)


def test_parts_of_large_scores_are_merged_by_their_true_weights(native, threads):
    pool = Pool([(1, 1500)], backend=native, heads=1, kv_heads=1)
    for score in (1e5, -1e5):
        pool.q.fill_(1.0)
        pool.key_cache.fill_(score / 16)
        pool.rows = [(torch.ones_like(q), torch.full_like(k, score / 16), v) for q, k, v in pool.rows]
        assert_right(pool, scale=1.0)


def test_a_query_that_is_not_finite_gives_nothing_that_is(native, threads):
    pool = Pool([(1, 1500), (3, 40)], backend=native)
    expected = pool.expected()
    pool.q[0] = torch.nan
    out = pool.attention()
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], expected[1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 5, 16])
def test_as_many_queries_as_a_unit_holds_and_more(native, group):
    assert_right(Pool([(150, 170), (1, 40)], backend=native, heads=group, kv_heads=1))


@pytest.mark.parametrize("dim", [64, 128])
def test_tiles_take_blocks_of_any_size(native, dim):
    for block_size in (16, 32, 48, 64, 256):
        pool = Pool(
            [(40, 130), (20, 20), (1, 77)],
            backend=native,
            block_size=block_size,
            dim=dim,
            dtype=torch.bfloat16,
            poison=torch.nan,
        )
        assert_right(pool, TOLERANCES[torch.bfloat16], scale=dim**-0.5, window=90)


def test_without_a_table_the_results_are_those_of_a_table_that_counts_up(native):
    pool = Pool([(1, 32)] * 3, backend=native)
    num_rows, width = pool.tables.shape
    pool.tables.copy_(torch.arange(num_rows * width).view(num_rows, width))
    kernels, sizes = ops(native.level), (num_rows, 4, *pool.caches, 0)
    plan = kernels.plan_attention(None, width, pool.query_start, pool.contexts, [], *sizes)
    out = kernels.paged_attention(pool.q, *pool.caches, plan, 0.25, 0.0, None)
    assert torch.equal(out, pool.attention())


def test_layers_of_other_heads_and_windows_have_plans_of_their_own_over_the_rows_of_a_step(native):
    """What the first layer's call keeps with the rows serves those that are alike, and no others."""
    sizes = [(4, 2, 16), (2, 2, 16), (4, 1, 16), (4, 2, 32)]
    pools = [
        Pool(MIXED, backend=native, heads=heads, kv_heads=kv_heads, block_size=block_size, poison=torch.nan)
        for heads, kv_heads, block_size in sizes
    ]
    rows = pools[0].paged_rows()
    for window in (None, 5, None, 5, 30):
        for pool in pools:
            shared_rows = rows if torch.equal(pool.tables, rows.block_tables) else pool.paged_rows()
            out = native.paged_attention(pool.q, *pool.caches, shared_rows, Rule(0.25, window))
            torch.testing.assert_close(out, pool.expected(window=window), atol=1e-5, rtol=1e-5)


def test_a_plan_for_other_sizes_is_refused(native):
    pool, kernels = Pool([(1, 20), (3, 9)], backend=native), ops(native.level)
    batch = pool.tables, pool.tables.stride(0), pool.query_start, pool.contexts, []
    others = {
        "heads": Pool([(1, 20)], backend=native, heads=8, kv_heads=4),
        "blocks": Pool([(1, 20)], backend=native, block_size=32),
    }
    for num_tokens, num_heads, caches in (
        (3, 4, pool.caches),
        (4, 2, pool.caches),
        (4, 8, others["heads"].caches),
        (4, 4, others["blocks"].caches),
    ):
        plan = kernels.plan_attention(*batch, num_tokens, num_heads, *caches, 0)
        with pytest.raises(RuntimeError, match="plan: is one for other sizes"):
            kernels.paged_attention(pool.q, *pool.caches, plan, 0.25, 0.0, None)
    with pytest.raises(RuntimeError, match="plan: is none"):
        kernels.paged_attention(pool.q, *pool.caches, torch.zeros(8), 0.25, 0.0, None)


def test_a_plan_outlives_the_tables_it_was_made_of(native):
    pool, kernels = Pool([(1, 40), (1, 33)], backend=native), ops(native.level)
    expected = pool.attention()
    tables = pool.tables.clone()
    plan = kernels.plan_attention(tables, tables.stride(0), pool.query_start, pool.contexts, [], 2, 4, *pool.caches, 0)
    del tables
    others = [torch.full_like(pool.tables, 2**31 - 1) for _ in range(100)]
    assert torch.equal(kernels.paged_attention(pool.q, *pool.caches, plan, 0.25, 0.0, None), expected)
    del others


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_memory_is_made_to_be_there_in_the_background_and_what_is_written_meanwhile_stays(native):
    shape = 4000, 16, 4, 64, 64, torch.bfloat16, torch.device("cpu")
    caches, others = native.allocate_caches(*shape), native.allocate_caches(*shape)
    k, v = torch.randn(2, 16, 4, 64).bfloat16()
    slots = torch.arange(16) + 3999 * 16  # the last block's
    native.populate(caches)
    native.write_kv(k, v, *caches, slots)
    deadline = time.monotonic() + 100
    while min(share_in_memory(cache) for cache in caches) < 0.9:
        assert time.monotonic() < deadline, "memory is not there"
        time.sleep(0.01)
    native.write_kv(k, v, *others, slots)
    assert all(torch.equal(one, other) for one, other in zip(caches, others, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_memory_is_not_made_to_be_there_beside_a_kernel(native):
    weight = linear.pack(torch.ones(4096, 1024).bfloat16(), level=native.level)
    with ThreadPoolExecutor(1) as beside:
        for num_rows in (2000 << i for i in range(10)):
            cache, _ = native.allocate_caches(4000, 16, 4, 64, 64, torch.bfloat16, torch.device("cpu"))
            product = beside.submit(linear.linear, torch.ones(num_rows, 1024).bfloat16(), weight)
            time.sleep(0.1)
            native.populate([cache])
            time.sleep(0.3)
            share = share_in_memory(cache)
            if not product.done():
                assert share < 0.05
                break
        else:
            raise AssertionError("no product took long enough to look beside it")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_memory_of_blocks_is_made_to_be_there_and_what_they_hold_stays(native):
    caches = native.allocate_caches(4000, 16, 4, 64, 64, torch.bfloat16, torch.device("cpu"))
    k, v = torch.randn(2, 16, 4, 64).bfloat16()
    native.write_kv(k, v, *caches, torch.arange(16) + 3998 * 16)
    before = [cache[3998].clone() for cache in caches]
    native.touch_blocks(caches, torch.tensor([5, 2000, 3998]))
    for cache, held in zip(caches, before, strict=True):
        assert all(share_in_memory(cache[block]) == 1 for block in (5, 2000, 3998))
        assert share_in_memory(cache) < 0.5
        assert torch.equal(cache[3998], held)


def share_in_memory(tensor):
    """Of its pages, from its first number to its last, as the system tells."""
    page = resource.getpagesize()
    begin = tensor.data_ptr() // page * page
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.data_ptr() + last * tensor.itemsize
    pages = (ctypes.c_ubyte * ((end - begin) // page + 1))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(pages) * page), pages) == 0
    return sum(byte & 1 for byte in pages) / len(pages)


def test_caches_that_are_not_as_they_were_allocated_are_refused(native):
    pool = Pool([(1, 20)], backend=native)
    with pytest.raises(KernelInputError, match=r"^key_cache: .*no cache of these kernels"):
        native.paged_attention(pool.q, pool.key_cache.bfloat16(), pool.value_cache, pool.paged_rows(), Rule(1.0))
    with pytest.raises(KernelInputError, match=r"^q: heads of 15 do not fit"):
        native.paged_attention(pool.q[..., :15], *pool.caches, pool.paged_rows(), Rule(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_parts_of_a_head_in_many_blocks_do_not_want_the_same_places_of_a_cache(native, dtype):
    caches = native.allocate_caches(64, 16, 8, 128, 128, dtype, torch.device("meta"))
    for cache in caches:
        places = {block * cache.stride(0) * cache.itemsize % 65536 // 64 for block in range(64)}
        assert len(places) == 64
        assert cache.untyped_storage().nbytes() <= 1.01 * sum(cache.nbytes for cache in caches)  # one memory


def test_other_types_and_sizes_of_blocks_are_the_references(native):
    for dtype, block_size in ((torch.float16, 16), (torch.float32, 8)):
        keys, values = native.allocate_caches(3, block_size, 2, 8, 4, dtype, torch.device("cpu"))
        assert (keys.shape, values.shape) == ((3, block_size, 2, 8), (3, block_size, 2, 4))
