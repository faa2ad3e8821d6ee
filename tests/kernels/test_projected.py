"""`attend_projected` gives what norm, rotation, write and attention give one after another."""

import pytest
import torch

from kernels import REFERENCE, KernelInputError, Projection, Rule
from tests.kernels.pool import MIXED, NATIVE, TOLERANCES, Pool

DTYPES = [torch.float32, torch.bfloat16]


def layer(pool, *, kv_heads=2, norm=True, rotary="half", rotated=None):
    """The output of a projection for the pool's queries, the projection, cos and sin, and the slots of the rows' last
    tokens."""
    generator = torch.Generator().manual_seed(5)
    heads, dim, dtype = pool.q.shape[1], pool.q.shape[2], pool.q.dtype
    weights = [torch.rand(dim, generator=generator) + 0.5 for _ in range(2)] if norm else [None, None]
    projection = Projection(heads, kv_heads, dim, *weights, rotary=rotary)
    qkv = torch.randn(len(pool.q), projection.width, generator=generator).to(dtype)
    angles = torch.rand(len(qkv), dim if rotated is None else rotated, generator=generator) * 6
    cos, sin = (None, None) if rotated == 0 else (angles.cos(), angles.sin())
    slots = []
    for table, context, start, end in zip(
        pool.tables.tolist(),
        pool.contexts.tolist(),
        pool.query_start.tolist(),
        pool.query_start.tolist()[1:],
        strict=False,
    ):
        size = pool.block_size
        slots += [table[p // size] * size + p % size for p in range(context - (end - start), context)]
    return qkv, projection, cos, sin, torch.tensor(slots)


def both(native, rows=MIXED, *, dtype=torch.float32, options=None, **kinds):
    """The results of the kernel and of the reference, and what the caches' rows then give by attention alone."""
    sizes = {name: kinds.pop(name) for name in ("heads", "dim") if name in kinds}
    results = []
    for backend in (native, REFERENCE):
        pool = Pool(rows, backend=backend, dtype=dtype, block_size=16, **sizes)
        rule = Rule(0.25, **(options or {}))
        out = backend.attend_projected(*layer(pool, **kinds), *pool.caches, pool.paged_rows(), rule)
        again = pool.attention()
        results.append((out, again))
    return results


@pytest.mark.parametrize("native", NATIVE, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"norm": False},
        {"rotary": "interleaved"},
        {"rotated": 0},
        {"rotated": 6},
        {"rotated": 6, "rotary": "interleaved"},
        {"dim": 32},
        {"dim": 64, "norm": False},
        {"dim": 80},
        {"dim": 128},
        {"dim": 128, "rotated": 0},
        {"dim": 128, "rotated": 64},
        {"dim": 128, "rotary": "interleaved"},
        {"heads": 6, "dim": 7, "rotated": 4},
    ],
    ids=str,
)
def test_one_call_gives_what_its_parts_give(native, dtype, kinds):
    (out, again), (expected, expected_again) = both(native, dtype=dtype, **kinds)
    tolerance = 2 * TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(again, expected_again, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("native", NATIVE, ids=lambda backend: backend.name)
@pytest.mark.parametrize("options", [{"window": 7}, {"soft_cap": 0.7}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}])
def test_the_options_of_attention_hold(native, options):
    (out, _), (expected, _) = both(native, options=options)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", NATIVE, ids=lambda backend: backend.name)
def test_a_long_context_in_parts_sees_the_token_that_is_written(native, monkeypatch):
    torch.set_num_threads(2)
    try:
        (out, again), (expected, expected_again) = both(native, rows=[(1, 1500), (1, 9)])
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(again, expected_again, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", NATIVE, ids=lambda backend: backend.name)
def test_many_rows_whose_heads_are_read_together_see_the_tokens_that_are_written(native):
    rows = [(1, context) for context in (1, 16, 17, 129, 145, 300)] * 2 + [(5, 40)]
    (out, again), (expected, expected_again) = both(native, rows=rows)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(again, expected_again, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("native", NATIVE, ids=lambda backend: backend.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_whose_blocks_are_read_as_they_lie_see_the_tokens_that_are_written(native, dtype):
    rows = [(1, context) for context in (260, 400, 513, 1)] + [(5, 40)]
    torch.set_num_threads(2)
    try:
        (out, again), (expected, expected_again) = both(native, rows=rows, dtype=dtype, dim=64)
    finally:
        torch.set_num_threads(1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(again, expected_again, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("native", [REFERENCE, *NATIVE], ids=lambda backend: backend.name)
def test_wrong_arguments_are_refused_by_name(native):
    pool = Pool(MIXED, backend=native, block_size=16)
    qkv, projection, cos, sin, slots = layer(pool)

    def call(qkv=qkv, projection=projection, cos=cos, sin=sin, slots=slots):
        native.attend_projected(qkv, projection, cos, sin, slots, *pool.caches, pool.paged_rows(), Rule(1.0))

    wrong = {
        "qkv": {"qkv": qkv[:, 1:]},
        "cos": {"cos": cos[1:]},
        "sin": {"sin": None},
        "slots": {"slots": slots.int()},
        "key_norm": {"projection": Projection(4, 2, 16, None, torch.ones(16, device="meta"))},
    }
    for name, argument in wrong.items():
        with pytest.raises(KernelInputError, match=f"^{name}:"):
            call(**argument)


@pytest.mark.parametrize("weight", [torch.ones(15), torch.ones(16).bfloat16()])
def test_a_norm_of_the_wrong_kind_is_refused_when_a_projection_is_made(weight):
    with pytest.raises(KernelInputError, match=r"^query_norm:"):
        Projection(4, 2, 16, weight)
