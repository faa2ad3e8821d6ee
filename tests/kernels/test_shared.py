"""Blocks that rows have in common may be read once for all of them: the results are those of rows by themselves."""

import dataclasses

import pytest
import torch

from kernels import KernelInputError, Rule, SharedBlocks
from kernels.triton.shared import attend_shared
from kernels.triton.tiles import Tile
from tests.kernels.pool import EACH, FLOAT_TYPES, TOLERANCES, TRITON, Pool, assert_right, few_interpreted
from tests.kernels.sharing import pool_that_shares, scale, share, shared_blocks

SINKS = torch.tensor([0.3, -1.0])
ALL = {"window": 21, "soft_cap": 0.7, "sinks": SINKS}
OPTIONS = {"plain": {}, "cap": {"soft_cap": 0.7}, "sinks": {"sinks": SINKS}, "all": ALL}
# Blocks have 4 slots. Row 3 shares nothing, row 7 has no context; rows 0, 2 and 5, 6 share more than the others.
CONTEXTS = [45, 33, 47, 30, 34, 52, 61, 0]
NESTED = [(0, 6, [0, 1, 2, 4, 5, 6]), (6, 9, [0, 2]), (6, 10, [5, 6])]


@pytest.mark.parametrize(
    ("backend", "dtype", "named"), few_interpreted(lambda named: named in ("plain", "all"), FLOAT_TYPES, OPTIONS)
)
def test_segments_and_what_rows_have_besides_give_the_whole(backend, dtype, named):
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend, dtype=dtype)
    assert_right(pool, TOLERANCES[dtype], shared=shared, **OPTIONS[named])


@pytest.mark.parametrize(
    ("backend", "window"), few_interpreted(lambda window: window in (1, 13, 22), EACH, [1, 5, 9, 13, 14, 22, 30, 60])
)
def test_a_window_hides_of_a_segment_what_it_hides_from_each_row(backend, window):
    """Rows of different lengths see parts of different lengths of it, some of them none."""
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend, poison=torch.nan)
    assert_right(pool, shared=shared, window=window * scale(backend))


def test_blocks_behind_every_window_may_all_be_block_0(backend):
    """What a window has left behind points there; it is common to many rows, and means nothing."""
    contexts = [41, 47, 44]
    pool, shared = pool_that_shares(contexts, [(0, 5, [0, 1, 2])], backend=backend, poison=torch.nan)
    pool.tables[:, :5] = 0
    assert_right(pool, shared=shared, window=12 * scale(backend))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (4, 2), (71, 1)])
def test_any_number_of_query_heads_may_share_a_key_value_head(backend, heads, kv_heads):
    pool, shared = pool_that_shares([21, 18, 23], [(0, 4, [0, 1, 2])], backend=backend, heads=heads, kv_heads=kv_heads)
    assert_right(pool, shared=shared)


@pytest.mark.parametrize(("dim", "value_dim"), [(80, 80), (24, 16), (64, 128)])
def test_heads_of_any_size_share(backend, dim, value_dim):
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend, dim=dim, value_dim=value_dim)
    assert_right(pool, shared=shared)


def test_more_rows_than_a_tile_holds_may_share(backend):
    contexts = [22 + i % 7 for i in range(35)]
    segments = [(0, 3, list(range(35))), (3, 5, list(range(3, 33, 2)))]
    pool, shared = pool_that_shares(contexts, segments, backend=backend)
    assert_right(pool, shared=shared)


def test_rows_with_more_than_one_query_take_no_part(backend):
    by = scale(backend)
    pool = Pool([(1, 45 * by), (5, 20), (1, 33 * by), (3, 3)], backend=backend, heads=2, kv_heads=1)
    share(pool, [0, 2], 0, 7)
    assert_right(pool, shared=shared_blocks([(0, 7, [0, 2])], 4))


def test_segments_without_rows_and_places_behind_the_last_one_mean_nothing(backend):
    """Columns of a fixed length, as they are recorded, are longer than what is in them."""
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend, poison=torch.nan)
    unused = torch.full((3,), 0, dtype=torch.int32)
    padded = SharedBlocks(
        first=torch.cat([shared.first, unused]),
        end=torch.cat([shared.end, unused]),
        row_start=torch.cat([shared.row_start, unused + len(shared.rows)]),
        rows=torch.cat([shared.rows, torch.full((9,), len(CONTEXTS), dtype=torch.int32)]),
        own_start=shared.own_start,
    )
    assert_right(pool, shared=padded)
    nothing = dataclasses.replace(
        padded,
        row_start=padded.row_start * 0,
        rows=torch.full_like(padded.rows, len(CONTEXTS)),
        own_start=padded.own_start * 0,
    )
    assert_right(pool, shared=nothing)


def test_a_row_whose_query_is_not_finite_harms_no_other_row_of_its_segment(backend):
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend)
    expected = pool.expected()
    pool.q[2] = torch.nan
    out = pool.attention(shared=shared)
    assert out[2].isnan().all()
    others = [0, 1, *range(3, 8)]
    torch.testing.assert_close(out[others], expected[others], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("score", [1e5, -1e5])
def test_large_scores_of_segments_are_merged_by_their_true_weights(backend, score):
    pool, shared = pool_that_shares([45, 33], [(0, 6, [0, 1])], backend=backend)
    pool.q.fill_(1.0)
    pool.key_cache.fill_(score / 16)
    pool.rows = [(torch.ones_like(q), torch.full_like(k, score / 16), v) for q, k, v in pool.rows]
    assert_right(pool, shared=shared, scale=1.0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("first", lambda t: t.long()),
        ("end", lambda t: t[:-1]),
        ("row_start", lambda t: t[:-1]),
        ("rows", lambda t: t.to("meta")),
        ("own_start", lambda t: t[:-1]),
        ("rows", lambda t: t[None]),
    ],
)
def test_segments_of_the_wrong_kind_are_refused_by_name(backend, name, change):
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=backend)
    wrong = dataclasses.replace(shared, **{name: change(getattr(shared, name))})
    with pytest.raises(KernelInputError, match=rf"^shared\.{name}:"):
        pool.attention(shared=wrong)


def test_where_rows_are_members_is_found_row_after_row():
    _, shared = pool_that_shares(CONTEXTS, NESTED)
    places, start = (column.tolist() for column in shared.by_row)
    found = [[shared.rows[place].item() for place in places[start[row] : start[row + 1]]] for row in range(8)]
    assert found == [[0, 0], [1], [2, 2], [], [4], [5, 5], [6, 6], []]
    assert [place for place in places if shared.rows[place] == 5] == [4, 8]  # the segment that comes first, first


TILE = Tile(block_m=16, queries=8, heads=2, keys=16, warps=4, stages=1)  # edges of tiles everywhere


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("splits", [(1, 1), (1, 3), (2, 1), (5, 7)])
def test_segments_and_the_rest_in_any_number_of_parts_give_the_whole(monkeypatch, splits, options):
    """Parts without keys are never read: what their memory held before, NaN here, stays out of the merge."""
    pool, shared = pool_that_shares(CONTEXTS, NESTED, backend=TRITON, poison=torch.nan)
    empty = torch.Tensor.new_empty

    def full_of_nan(self, *shape, **kinds):
        tensor = empty(self, *shape, **kinds)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", full_of_nan)
    own = dataclasses.replace(TILE, queries=1)
    call = pool.q, *pool.caches, pool.paged_rows(), Rule(0.25, **options), shared
    out = attend_shared(*call, own=(own, splits[0]), common=(TILE, splits[1]))
    torch.testing.assert_close(out, pool.expected(**options), atol=1e-5, rtol=1e-5)
