"""Batches as the kernels take them, made on the device: rows of any lengths in blocks of one cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels import Backend, Rows, Rule, SharedBlocks

GARBAGE_ENTRY = 1 << 30  # in tables, past a row's last block: no such block exists


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer. `value_dim` 0 stands for `dim`."""

    query: int
    kv: int
    dim: int
    value_dim: int = 0

    @property
    def of_values(self) -> int:
        return self.value_dim or self.dim


@dataclass(slots=True)
class Batch:
    """Arguments of `paged_attention`, see `kernels.attention`; `slots` are those of all positions of all rows."""

    q: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    slots: torch.Tensor

    def rows(self, shared: SharedBlocks | None = None) -> Rows:
        return Rows(self.block_tables, self.query_start, self.context_lens, shared)

    def attend(self, backend: Backend, rule: Rule | None = None, shared: SharedBlocks | None = None) -> torch.Tensor:
        """By the usual rule, a scale of 1 / sqrt(head size) and nothing besides, if None."""
        usual = Rule(self.q.shape[2] ** -0.5)
        return backend.paged_attention(self.q, self.key_cache, self.value_cache, self.rows(shared), rule or usual)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of all rows' contexts: what one decode step cannot but read."""
        slot = self.key_cache[0, 0].numel() + self.value_cache[0, 0].numel()
        return len(self.slots) * slot * self.key_cache.element_size()


def make_batch(
    rows: Sequence[tuple[int, int]],
    heads: Heads,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    fill: float | None = None,
    shuffled: bool = True,
) -> Batch:
    """Rows of (number of queries, context). The cache holds `fill` everywhere, or random numbers if None."""
    generator = torch.Generator(device).manual_seed(seed)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int64)
    num_blocks = -(-contexts // block_size)
    total = 1 + int(num_blocks.sum())
    order = torch.Generator().manual_seed(seed)
    ids = 1 + (torch.randperm(total - 1, generator=order) if shuffled else torch.arange(total - 1))
    tables = torch.full((len(rows), max(1, int(num_blocks.max()))), GARBAGE_ENTRY, dtype=torch.int64)
    used = torch.arange(tables.shape[1]) < num_blocks[:, None]
    tables[used] = ids
    row_of = torch.repeat_interleave(torch.arange(len(rows)), contexts)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), contexts.cumsum(0)[:-1]])
    positions = torch.arange(len(row_of)) - first[row_of]
    slots = tables[row_of, positions // block_size] * block_size + positions % block_size

    def cache(dim: int) -> torch.Tensor:
        shape = (total, block_size, heads.kv, dim)
        if fill is not None:
            return torch.full(shape, fill, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    num_queries = [queries for queries, _ in rows]
    return Batch(
        q=torch.randn(sum(num_queries), heads.query, heads.dim, dtype=dtype, device=device, generator=generator),
        key_cache=cache(heads.dim),
        value_cache=cache(heads.of_values),
        block_tables=tables.to(device, torch.int32),
        query_start=torch.tensor([0, *accumulate(num_queries)], dtype=torch.int32, device=device),
        context_lens=contexts.to(device, torch.int32),
        slots=slots.to(device),
    )


def random_kv(batch: Batch, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a value for each of the batch's slots, in its order: `[num_slots, kv heads, dim]`."""
    device = batch.q.device
    generator = torch.Generator(device).manual_seed(seed)
    caches = (batch.key_cache, batch.value_cache)
    k, v = (
        torch.randn(len(batch.slots), *cache.shape[2:], dtype=cache.dtype, device=device, generator=generator)
        for cache in caches
    )
    return k, v
