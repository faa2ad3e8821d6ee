"""A paged cache with known rows in it, and a dense softmax that knows nothing of blocks to compare with."""

import itertools

import pytest
import torch

from kernels import REFERENCE, Backend, Rows, Rule, native_backend
from kernels import triton as triton_kernels
from kernels.cpu import supported
from kernels.cpu.levels import emulated

TRITON = Backend(
    "triton",
    triton_kernels.paged_attention,
    triton_kernels.write_kv,
    triton_kernels.copy_blocks,
    triton_kernels.allocate_caches,
)
NATIVE = [native_backend(level) for level in (*supported(), *emulated())]
PLAIN = [REFERENCE, TRITON]  # those whose caches are [num_blocks, block_size, num_kv_heads, head_dim]
BACKENDS = [*PLAIN, *NATIVE]
EACH = [pytest.param(backend, id=backend.name) for backend in BACKENDS]

# What each computes with here: Triton's interpreter is wrong about bfloat16, so the kernels refuse it there; float16 on
# a CPU is the reference's.
FLOAT_TYPES = [
    pytest.param(backend, dtype, id=f"{backend.name}-{str(dtype).removeprefix('torch.')}")
    for backend in BACKENDS
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if not (backend is TRITON and dtype is torch.bfloat16) and not (backend in NATIVE and dtype is torch.float16)
]


def few_interpreted(few, backends, *columns):
    """Cases of `parametrize`: each of EACH or FLOAT_TYPES with all combinations of the columns' values. Triton's
    interpreter takes seconds for one: of its cases the gate has those for which `few` is true of the values, and
    .ci/slow all.
    """
    cases = []
    for backend, values in itertools.product(backends, itertools.product(*columns)):
        is_rare = backend.values[0] is TRITON and not few(*values)
        names = [backend.id, *("tensor" if isinstance(value, torch.Tensor) else str(value) for value in values)]
        marks = pytest.mark.slow if is_rare else ()
        cases.append(pytest.param(*backend.values, *values, id="-".join(names), marks=marks))
    return cases


TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of a result, by its dtype

MIXED = [(1, 9), (5, 5), (1, 1), (8, 20), (1, 16), (1, 33), (2, 4)]  # (queries, context) of each row


def dense(q, keys, values, *, scale, window, soft_cap, sinks):
    """One row: q [queries, heads, dim] at the end of keys/values [context, kv heads, dim]; float64, head by head."""
    num_queries, num_heads, _ = q.shape
    context, group = keys.shape[0], num_heads // keys.shape[1]
    position = torch.arange(context - num_queries, context)[:, None]
    key_position = torch.arange(context)
    hidden = key_position > position
    if window is not None:
        hidden |= key_position <= position - window
    out = torch.zeros(num_queries, num_heads, values.shape[2], dtype=torch.float64)
    for head in range(num_heads):
        scores = q[:, head].double() @ keys[:, head // group].double().T * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[head].double().expand(num_queries, 1)], 1)
        weights = torch.softmax(scores, 1)[:, :context].nan_to_num(0.0)  # no key at all: zeros
        out[:, head] = weights @ values[:, head // group].double()
    return out


class Pool:
    """A cache filled with `poison` in which rows are written block by block, in shuffled blocks."""

    def __init__(
        self,
        rows,
        *,
        backend=REFERENCE,
        block_size=None,
        heads=4,
        kv_heads=2,
        dim=16,
        value_dim=None,
        dtype=torch.float32,
        cache_dtype=None,
        poison=0.0,
    ):
        generator = torch.Generator().manual_seed(len(rows) + 7 * heads + dim)
        self.backend = backend
        self.value_dim = value_dim or dim
        self.block_size = block_size = block_size or (4 if backend in PLAIN else 16)
        num_blocks = 1 + sum(-(-context // block_size) for _, context in rows)
        self.key_cache, self.value_cache = backend.allocate_caches(
            num_blocks, block_size, kv_heads, dim, self.value_dim, cache_dtype or dtype, torch.device("cpu")
        )
        self.key_cache.fill_(poison)
        self.value_cache.fill_(poison)
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
            backend.write_kv(k, v, self.key_cache, self.value_cache, slots)
            self.rows.append((q, k, v))
        self.q = torch.cat([q for q, _, _ in self.rows]) if rows else torch.zeros(0, heads, dim, dtype=dtype)
        self.query_start = torch.tensor([0, *itertools.accumulate(n for n, _ in rows)], dtype=torch.int32)
        self.contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)

    @property
    def caches(self):
        return self.key_cache, self.value_cache

    def paged_rows(self, shared=None):
        """The rows as they are now; to a kernel, those of one step."""
        return Rows(self.tables, self.query_start, self.contexts, shared)

    def attention(self, *, shared=None, scale=0.25, **options):
        return self.backend.paged_attention(self.q, *self.caches, self.paged_rows(shared), Rule(scale, **options))

    def expected(self, *, scale=0.25, window=None, soft_cap=None, sinks=None):
        if not self.rows:
            return torch.zeros(0, self.q.shape[1], self.value_dim)
        rows = [dense(*row, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks) for row in self.rows]
        return torch.cat(rows).float()


def assert_right(pool, tolerance=1e-5, shared=None, **options):
    torch.testing.assert_close(
        pool.attention(shared=shared, **options).float(), pool.expected(**options), atol=tolerance, rtol=tolerance
    )
