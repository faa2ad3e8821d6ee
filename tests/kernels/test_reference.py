"""`kernels.reference` against a dense softmax that knows nothing of blocks."""

import itertools

import pytest
import torch

import kernels
from kernels import KernelInputError

BACKEND = kernels.backend(torch.device("cpu"))


def dense(q, keys, values, *, scale, window, soft_cap, sinks):
    """One row: q [queries, heads, dim] at the end of keys/values [context, kv heads, dim]; float64, head by head."""
    num_queries, num_heads, _ = q.shape
    context, group = keys.shape[0], num_heads // keys.shape[1]
    out = torch.zeros(num_queries, num_heads, values.shape[2], dtype=torch.float64)
    for head, i in itertools.product(range(num_heads), range(num_queries)):
        position = context - num_queries + i
        first = 0 if window is None else max(0, position - window + 1)
        if position < first:
            continue
        seen = slice(first, position + 1)
        scores = keys[seen, head // group].double() @ q[i, head].double() * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head : head + 1].double()])
        weights = torch.softmax(scores, 0)[: position + 1 - first]
        out[i, head] = weights @ values[seen, head // group].double()
    return out


class Pool:
    """A cache filled with `poison` in which rows are written block by block, in shuffled blocks."""

    def __init__(
        self, rows, *, block_size=4, heads=4, kv_heads=2, dim=16, value_dim=None, dtype=torch.float32, poison=0.0
    ):
        generator = torch.Generator().manual_seed(len(rows) + 7 * heads + dim)
        self.value_dim = value_dim or dim
        num_blocks = 1 + sum(-(-context // block_size) for _, context in rows)
        self.key_cache = torch.full((num_blocks, block_size, kv_heads, dim), poison, dtype=dtype)
        self.value_cache = torch.full((num_blocks, block_size, kv_heads, self.value_dim), poison, dtype=dtype)
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        most = max((-(-context // block_size) for _, context in rows), default=0)
        self.tables = torch.full((len(rows), most), num_blocks + 1000, dtype=torch.int32)  # unused entries are garbage
        self.rows = []
        for i, (num_queries, context) in enumerate(rows):
            table = [free.pop() for _ in range(-(-context // block_size))]
            self.tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
            q, k, v = (
                torch.randn(count, num, size, generator=generator).to(dtype)
                for count, num, size in (
                    (num_queries, heads, dim),
                    (context, kv_heads, dim),
                    (context, kv_heads, self.value_dim),
                )
            )
            slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(context)]).long()
            BACKEND.write_kv(k, v, self.key_cache, self.value_cache, slots)
            self.rows.append((q, k, v))
        self.q = torch.cat([q for q, _, _ in self.rows]) if rows else torch.zeros(0, heads, dim, dtype=dtype)
        self.query_start = torch.tensor([0, *itertools.accumulate(n for n, _ in rows)], dtype=torch.int32)
        self.contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)

    def attention(self, *, scale=0.25, window=None, soft_cap=None, sinks=None):
        return BACKEND.paged_attention(
            self.q, self.key_cache, self.value_cache, self.tables, self.query_start, self.contexts,
            scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        )  # fmt: skip

    def expected(self, *, scale=0.25, window=None, soft_cap=None, sinks=None):
        if not self.rows:
            return torch.zeros(0, self.q.shape[1], self.value_dim)
        rows = [dense(*row, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks) for row in self.rows]
        return torch.cat(rows).float()


def assert_right(pool, tolerance=1e-5, **options):
    torch.testing.assert_close(
        pool.attention(**options).float(), pool.expected(**options), atol=tolerance, rtol=tolerance
    )


MIXED = [(1, 9), (5, 5), (1, 1), (8, 20), (1, 16), (1, 33), (2, 4)]


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_prefill_and_decode_rows_share_one_call(window, soft_cap, sinks):
    assert_right(Pool(MIXED), window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("order", list(itertools.permutations([(1, 7), (5, 5), (8, 20), (1, 1)])))
def test_the_order_of_the_rows_does_not_matter(order):
    assert_right(Pool(list(order)), window=6)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 1), (9, 3), (5, 1), (10, 2), (28, 4), (12, 2), (32, 1), (24, 8), (8, 8)]
)
def test_any_number_of_query_heads_shares_a_kv_head(heads, kv_heads):
    assert_right(Pool(MIXED, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(1, 1), (8, 8), (80, 80), (96, 64), (112, 112), (192, 128), (16, 24), (256, 256)]
)
def test_key_and_value_heads_have_any_size(dim, value_dim):
    assert_right(Pool(MIXED, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 24, 64])
def test_any_block_size_works_at_every_fill(block_size):
    rows = [(1, context) for context in range(1, 3 * block_size + 2)] if block_size < 16 else MIXED
    assert_right(Pool([*rows, (3, 2 * block_size), (2, block_size)], block_size=block_size))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_half_precision_caches_lose_only_the_rounding_of_the_result(dtype, tolerance):
    assert_right(Pool(MIXED, dtype=dtype), tolerance, window=7)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_what_is_in_unused_slots_changes_no_bit(poison, dtype, window):
    rows = [*MIXED, *((1, context) for context in range(1, 14))]
    clean, poisoned = Pool(rows, dtype=dtype), Pool(rows, dtype=dtype, poison=poison)
    assert torch.equal(clean.attention(window=window), poisoned.attention(window=window))


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 3e2, 1e3])
def test_scores_of_any_size_keep_valid_keys_visible(magnitude):
    pool = Pool(MIXED)
    for sign in (1, -1):
        pool.q = sign * magnitude * torch.cat([q for q, _, _ in pool.rows])
        pool.key_cache.mul_(1.0)
        rows = [
            dense(sign * magnitude * q, k, v, scale=1.0, window=5, soft_cap=None, sinks=None) for q, k, v in pool.rows
        ]
        torch.testing.assert_close(pool.attention(scale=1.0, window=5), torch.cat(rows).float(), atol=1e-3, rtol=1e-3)


def test_the_window_includes_exactly_the_last_tokens():
    pool = Pool([(1, 9), (4, 9)])
    right = pool.attention(window=8)
    for wrong in (7, 9):
        assert (right - pool.attention(window=wrong)).abs().max() > 1e-3


def test_a_row_without_keys_gives_zeros_and_leaves_its_neighbours_alone():
    pool = Pool([(1, 5), (1, 0), (3, 6), (2, 0)])
    out = pool.attention()
    assert (out[1] == 0).all()
    assert (out[5:] == 0).all()
    torch.testing.assert_close(out, pool.expected(), atol=1e-5, rtol=1e-5)


def test_a_sink_alone_gives_zeros():
    pool = Pool([(1, 0), (2, 0)])
    assert (pool.attention(sinks=torch.ones(4)) == 0).all()


def test_an_empty_batch_gives_an_empty_result():
    assert Pool([]).attention().shape == (0, 4, 16)


def test_a_long_prefill_is_cut_into_parts_without_a_seam(monkeypatch):
    whole = Pool([(40, 60), (1, 60)])
    expected = whole.attention(window=11)
    monkeypatch.setattr("kernels.reference.MAX_SCORES", 4 * 60 * 7)
    monkeypatch.setattr("kernels.reference.MAX_GROUP_ELEMENTS", 1)
    torch.testing.assert_close(whole.attention(window=11), expected, atol=1e-6, rtol=1e-6)


def test_views_of_one_buffer_are_as_good_as_caches_of_their_own():
    pool = Pool(MIXED)
    expected = pool.attention()
    both = torch.stack([pool.key_cache, pool.value_cache], dim=1)  # [blocks, 2, block size, heads, dim]
    pool.key_cache, pool.value_cache = both[:, 0], both[:, 1]
    padded = torch.zeros(*pool.q.shape[:2], 20)
    padded[..., :16] = pool.q
    pool.q = padded[..., :16]
    assert torch.equal(pool.attention(), expected)
    k, v = torch.ones(1, 2, 16), torch.full((1, 2, 16), 2.0)
    BACKEND.write_kv(k, v, pool.key_cache, pool.value_cache, torch.tensor([9]))
    assert (both[2, 0, 1] == 1).all()
    assert (both[2, 1, 1] == 2).all()


def test_a_slot_beyond_31_bits_of_elements_is_reached():
    # One kv head whose stride puts block 9 past 2**31 elements; only touched pages are backed by memory.
    stride = (1 << 31) // 8
    storage = torch.empty(0, dtype=torch.float16).set_(
        torch.UntypedStorage(2 * (9 * stride + 64)), 0, (10, 2, 1, 4), (stride, 4, 4, 1)
    )
    k = torch.arange(4, dtype=torch.float16).view(1, 1, 4)
    BACKEND.write_kv(k, k, storage, storage, torch.tensor([19]))
    assert torch.equal(storage[9, 1], k[0])


def test_copies_read_their_sources_before_any_destination_is_written():
    cache = torch.arange(4.0).view(4, 1, 1, 1).clone()
    other = cache.clone() * 10
    BACKEND.copy_blocks(
        [cache, other], torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    )
    assert cache.flatten().tolist() == [0, 1, 1, 2]
    assert other.flatten().tolist() == [0, 10, 10, 20]


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
def test_arguments_of_the_wrong_kind_are_refused_by_name(change, named):
    pool = Pool(MIXED)
    change(pool)
    with pytest.raises(KernelInputError, match=rf"^{named}:"):
        pool.attention()


def test_narrow_slot_numbers_are_refused():
    pool = Pool([(1, 1)])
    with pytest.raises(KernelInputError, match=r"^slots:"):
        BACKEND.write_kv(
            torch.ones(1, 2, 16),
            torch.ones(1, 2, 16),
            pool.key_cache,
            pool.value_cache,
            torch.tensor([1], dtype=torch.int32),
        )


@pytest.mark.parametrize("options", [{"window": 0}, {"soft_cap": 0.0}, {"sinks": torch.ones(3)}])
def test_options_out_of_range_are_refused_by_name(options):
    with pytest.raises(KernelInputError, match=f"^{next(iter(options))}:"):
        Pool(MIXED).attention(**options)
