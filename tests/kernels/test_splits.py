"""The Triton kernel's tiles, and contexts cut into parts that are merged again."""

import dataclasses
import itertools

import pytest
import torch

from kernels import KernelInputError, Rule
from kernels.triton.attention import attend, contiguous_attention
from kernels.triton.tiles import Tile, kind_of, num_splits, tile_for
from tests.kernels.pool import TRITON, Pool

SMALL = Tile(block_m=16, queries=8, heads=2, keys=16, warps=4, stages=1)  # edges of tiles everywhere
DECODE = dataclasses.replace(SMALL, queries=1)
ROWS = [(1, 70), (9, 33), (1, 1), (1, 0), (1, 17)]
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])


def attend_in_parts(pool, splits, tile=SMALL, *, scale=0.25, **options):
    return attend(pool.q, *pool.caches, pool.paged_rows(), Rule(scale, **options), tile, splits)


@pytest.mark.parametrize("options", [{}, {"window": 21, "soft_cap": 0.7, "sinks": SINKS}], ids=["plain", "all"])
@pytest.mark.parametrize("splits", [1, 2, *(pytest.param(count, marks=pytest.mark.slow) for count in range(3, 8)), 8])
def test_a_context_in_parts_gives_what_it_gives_in_one(splits, options):
    """Rows are short enough that some parts are empty at every count above 1."""
    pool = Pool(ROWS, backend=TRITON)
    out = attend_in_parts(pool, splits, **options)
    torch.testing.assert_close(out, pool.expected(**options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [2, 5, 20])
def test_decode_rows_are_cut_as_others(splits):
    pool = Pool([(1, 70), (1, 16), (1, 0), (1, 33)], backend=TRITON)
    out = attend_in_parts(pool, splits, DECODE, window=60, sinks=SINKS)
    torch.testing.assert_close(out, pool.expected(window=60, sinks=SINKS), atol=1e-5, rtol=1e-5)


def test_parts_without_keys_are_never_read(monkeypatch):
    """What the memory of an empty part held before, NaN here, stays out of the merge."""
    pool = Pool(ROWS, backend=TRITON)
    empty = torch.Tensor.new_empty

    def full_of_nan(self, *shape, **options):
        tensor = empty(self, *shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    out = attend_in_parts(pool, 7, window=21, sinks=SINKS)
    torch.testing.assert_close(out, pool.expected(window=21, sinks=SINKS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", [1e5, -1e5])
def test_parts_of_large_scores_are_merged_by_their_true_weights(score):
    """C9.3: sums of exponentials of 1e5 exist only as logarithms."""
    pool = Pool([(1, 70), (3, 40)], backend=TRITON)
    pool.q.fill_(1.0)
    pool.key_cache.fill_(score / 16)
    for i, (q, k, v) in enumerate(pool.rows):
        pool.rows[i] = torch.ones_like(q), torch.full_like(k, score / 16), v
    torch.testing.assert_close(attend_in_parts(pool, 4, scale=1.0), pool.expected(scale=1.0), atol=1e-5, rtol=1e-5)


def test_the_first_tile_of_a_query_may_be_hidden_altogether():
    """C9.3: with a window of 3 the later queries of a tile see nothing of the keys that it begins with."""
    pool = Pool([(40, 60)], backend=TRITON, heads=1, kv_heads=1)
    tile = Tile(block_m=64, queries=64, heads=1, keys=16, warps=4, stages=1)
    torch.testing.assert_close(attend_in_parts(pool, 1, tile, window=3), pool.expected(window=3), atol=1e-5, rtol=1e-5)


def test_few_long_rows_are_cut_and_many_are_not():
    assert num_splits(num_programs=8, longest=131072, num_processors=132) == 33
    assert num_splits(num_programs=1, longest=131072, num_processors=132) == 128
    assert num_splits(num_programs=2048, longest=131072, num_processors=132) == 1
    assert num_splits(num_programs=8, longest=300, num_processors=132) == 1
    assert num_splits(num_programs=8, longest=4096, num_processors=132) == 16


@pytest.mark.parametrize("group", [*range(1, 18), 32, 64, 71, 128])
@pytest.mark.parametrize("kind", ["decode", "mixed", "wide"])
@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_every_tile_holds_whole_queries_of_equally_many_heads(group, kind, shared):
    sizes = itertools.product([(1, 1), (80, 80), (128, 128), (192, 128), (256, 256)], [torch.float16, torch.float32])
    for (head_dim, value_dim), dtype in sizes:
        tile = tile_for(kind, group, head_dim, value_dim, dtype, shared)
        assert 1 <= tile.queries * tile.heads <= tile.block_m
        assert tile.heads * -(-group // tile.heads) - group < tile.heads
        assert tile.block_m >= 16
        assert tile.queries == 1 or kind != "decode"
        held = tile.block_m * head_dim + (tile.stages - 1) * tile.keys * (head_dim + value_dim)
        assert held * dtype.itemsize <= shared


def test_heads_too_large_for_the_gpu_are_refused_with_what_it_has():
    assert tile_for("decode", 16, 576, 512, torch.bfloat16, 163 * 1024).block_m == 16
    for dtype, shared in ((torch.bfloat16, 99 * 1024), (torch.float32, 227 * 1024)):
        with pytest.raises(KernelInputError, match=f"heads of 576 with values of 512 .* {shared} bytes"):
            tile_for("decode", 16, 576, 512, dtype, shared)


def test_heads_as_large_as_those_of_latent_attention_are_right():
    pool = Pool([(1, 9), (3, 20)], backend=TRITON, heads=6, kv_heads=1, dim=576, value_dim=512, dtype=torch.float16)
    torch.testing.assert_close(pool.attention(scale=0.04).float(), pool.expected(scale=0.04), atol=2e-3, rtol=2e-3)


def test_the_kind_of_a_batch_is_told_from_its_shape():
    assert kind_of(num_tokens=64, num_rows=64, group=8) == "decode"
    assert kind_of(num_tokens=65, num_rows=64, group=8) == "mixed"
    assert kind_of(num_tokens=1024, num_rows=64, group=8) == "wide"


@pytest.mark.parametrize("rows", [[(1, 31)] * 3, [(5, 32), (1, 29), (32, 32)], [(1, 520)]], ids=str)
def test_without_a_table_the_results_are_those_of_a_table_that_counts_up(rows):
    """The variant that shows what a table costs, over whole contexts and one in parts, does not read the table."""
    pool = Pool(rows, backend=TRITON)
    num_rows, width = pool.tables.shape
    pool.tables.copy_(torch.arange(num_rows * width).view(num_rows, width))
    pool.key_cache, pool.value_cache = torch.randn(2, num_rows * width, *pool.key_cache.shape[1:])
    expected = pool.attention()
    pool.tables.fill_(2**31 - 1)
    out = contiguous_attention(pool.q, *pool.caches, pool.paged_rows(), Rule(0.25))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_that_is_not_finite_gives_nothing_that_is(splits):
    """A part whose every score is NaN is not one without keys: zeros for it would hide that the row is lost."""
    pool = Pool([(1, 70), (3, 40)], backend=TRITON)
    expected = pool.expected()
    pool.q[0] = torch.nan
    out = attend_in_parts(pool, splits)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], expected[1:], atol=1e-5, rtol=1e-5)
