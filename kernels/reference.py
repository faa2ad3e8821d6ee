"""The oracle: paged attention in plain torch with fp32 arithmetic, right before it is fast.

Rows with one query token (decode) are gathered in groups of similar context and done in one batched product; rows
with several (prefill) are done one by one, a bounded number of queries at a time. Unused slots may hold anything,
NaN included, and a weight of zero would not make that harmless (0 * NaN is NaN): they are never read. Padding reads
a slot of the row's own instead.
"""

from collections.abc import Iterator, Sequence

import torch

from kernels.attention import Rows, Rule, check_attention
from kernels.checks import FLOAT_DTYPES, KernelInputError, check_copies, check_write
from kernels.projection import Projection

MAX_PADDING = 1.25  # decode rows share a group when the longest has at most this many times the slots of the shortest
MAX_GROUP_ELEMENTS = 1 << 24  # fp32 elements of keys gathered at once (64 MiB)
MAX_SCORES = 1 << 22  # scores held at once in a prefill row (16 MiB)


def allocate_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a value cache, `[num_blocks, block_size, num_kv_heads, key_dim or value_dim]`, zero.

    Raises KernelInputError.
    """
    if dtype not in FLOAT_DTYPES:
        raise KernelInputError(
            f"dtype: is {dtype}, must be one of {', '.join(map(str, FLOAT_DTYPES))}; only native kernels of a CPU keep "
            "keys and values in 8 bits, in blocks of a multiple of 16 tokens"
        )
    keys, values = (
        torch.zeros(num_blocks, block_size, num_kv_heads, dim, dtype=dtype, device=device)
        for dim in (key_dim, value_dim)
    )
    return keys, values


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put token i's key and value into slot `slots[i]`, in the cache's dtype.

    k, v: `[num_tokens, num_kv_heads, head_dim]`; caches: `[num_blocks, block_size, num_kv_heads, head_dim]`;
    slots: int64 `[num_tokens]`, block * block_size + offset. Raises KernelInputError.
    """
    check_write(k, v, key_cache, value_cache, slots)
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = k.to(key_cache.dtype)
    value_cache[blocks, offsets] = v.to(value_cache.dtype)


def copy_blocks(caches: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy block `source[i]` to block `destination[i]` in every cache, as if all at once.

    source, destination: int64 or int32 `[num_copies]`. Raises KernelInputError.
    """
    check_copies(caches, source, destination)
    source, destination = source.long(), destination.long()
    for cache in caches:
        cache[destination] = cache[source]


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
) -> torch.Tensor:
    """Causal attention of each row's queries over the row's context.

    q: `[num_tokens, num_heads, head_dim]`. Tokens that belong to no row get zeros, and so does a query without keys. Of
    shared blocks nothing is made here.

    Returns `[num_tokens, num_heads, value head_dim]` in q's dtype. Raises KernelInputError.
    """
    check_attention(q, key_cache, value_cache, rows, rule)
    out = q.new_zeros(q.shape[0], q.shape[1], value_cache.shape[3])
    tables, starts, contexts = rows.block_tables, rows.query_start.tolist(), rows.context_lens.tolist()
    heads = _Heads(key_cache, value_cache, rule)
    decode = [i for i in range(len(contexts)) if starts[i + 1] - starts[i] == 1 and contexts[i] > 0]
    for group, first_slots, num_slots in _decode_groups(decode, contexts, key_cache, rule.window):
        tokens = [starts[i] for i in group]
        attended = heads.decode(q[tokens], tables[group], rows.context_lens[group], first_slots, num_slots)
        out[tokens] = attended.to(q.dtype)
    for i, context in enumerate(contexts):
        num_queries = starts[i + 1] - starts[i]
        if num_queries > 1:
            row = slice(starts[i], starts[i + 1])
            out[row] = heads.prefill(q[row], tables[i], context).to(q.dtype)
    return out


def attend_projected(
    qkv: torch.Tensor,
    projection: Projection,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
) -> torch.Tensor:
    """All that an attention layer does between its projections: norm, rotary embedding, `write_kv`, `paged_attention`.

    qkv: `[num_tokens, projection.width]`. cos, sin: `[num_tokens, rotated dimensions]`, or None where nothing is
    rotated. The rest is as of the two functions. Returns `[num_tokens, num_heads * head_dim]` in qkv's dtype. Raises
    KernelInputError.
    """
    projection.check(qkv, cos, sin)
    q, k, v = projection.heads(qkv, cos, sin)
    write_kv(k, v, key_cache, value_cache, slots)
    return paged_attention(q, key_cache, value_cache, rows, rule).flatten(1)


def _decode_groups(
    rows: list[int], contexts: list[int], key_cache: torch.Tensor, window: int | None
) -> Iterator[tuple[list[int], list[int], int]]:
    """Group decode rows so that padding each to the group's longest wastes little: (rows, first slots, num slots)."""
    elements_per_slot = key_cache.shape[2] * key_cache.shape[3]
    lengths = {i: contexts[i] if window is None else min(window, contexts[i]) for i in rows}
    group: list[int] = []
    for i in sorted(rows, key=lambda row: -lengths[row]):
        longest = lengths[group[0]] if group else 0
        too_uneven = lengths[i] * MAX_PADDING + 16 < longest
        if group and (too_uneven or (len(group) + 1) * longest * elements_per_slot > MAX_GROUP_ELEMENTS):
            yield group, [contexts[j] - lengths[j] for j in group], longest
            group = []
        group.append(i)
    if group:
        yield group, [contexts[j] - lengths[j] for j in group], lengths[group[0]]


class _Heads:
    """One layer's caches and what its scores go through, for the length of one call."""

    def __init__(self, key_cache: torch.Tensor, value_cache: torch.Tensor, rule: Rule) -> None:
        self._key_cache, self._value_cache = key_cache, value_cache
        self._block_size, self._num_kv_heads = key_cache.shape[1], key_cache.shape[2]
        self._scale, self._window, self._soft_cap = rule.scale, rule.window, rule.soft_cap
        self._sinks = rule.exact_sinks

    def decode(
        self, q: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, first_slots: list[int], num_slots: int
    ) -> torch.Tensor:
        """One query a row, q `[rows, heads, dim]`; a row's keys are `num_slots` from its first slot on, at most."""
        first = torch.tensor(first_slots, device=q.device)
        positions = first[:, None] + torch.arange(num_slots, device=q.device)  # [rows, slots]
        hidden = positions >= contexts[:, None]
        # A padded position reads its row's first visible slot instead, which is there for certain.
        positions = torch.where(hidden, first[:, None], positions)
        blocks, offsets = tables.gather(1, positions // self._block_size).long(), positions % self._block_size
        keys = self._key_cache[blocks, offsets].float()  # [rows, slots, kv heads, dim]
        values = self._value_cache[blocks, offsets].float()
        queries = self._scale * q.float().unflatten(1, (self._num_kv_heads, -1))  # [rows, kv heads, group, dim]
        scores = torch.matmul(queries, keys.permute(0, 2, 3, 1))
        scores = self._cap(scores).masked_fill(hidden[:, None, None, :], -torch.inf)
        sinks = None if self._sinks is None else self._sinks.view(1, self._num_kv_heads, -1, 1)
        return _attend(scores, values.permute(0, 2, 1, 3), sinks).flatten(1, 2)

    def prefill(self, q: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
        """Several queries of one row, q `[queries, heads, dim]`, the last at position context - 1."""
        num_queries, num_heads, _ = q.shape
        out = q.new_zeros(num_queries, num_heads, self._value_cache.shape[3], dtype=torch.float32)
        before = context - num_queries  # position of the first query; below 0 its row has fewer keys than queries
        step = max(1, MAX_SCORES // max(1, num_heads * context))
        for begin in range(max(0, -before), num_queries, step):
            end = min(begin + step, num_queries)
            first = 0 if self._window is None else max(0, before + begin + 1 - self._window)
            out[begin:end] = self._prefill_part(q[begin:end], table, before + begin, first, before + end)
        return out

    def _prefill_part(self, q: torch.Tensor, table: torch.Tensor, position: int, first: int, last: int) -> torch.Tensor:
        """Queries at `position` and after, over the keys at first : last."""
        slots = torch.arange(first, last, device=q.device)
        blocks, offsets = table[slots // self._block_size].long(), slots % self._block_size
        keys = self._key_cache[blocks, offsets].float()  # [slots, kv heads, dim]
        values = self._value_cache[blocks, offsets].float()
        queries = self._scale * q.float().unflatten(1, (self._num_kv_heads, -1))
        queries = queries.permute(1, 2, 0, 3)  # [kv heads, group, queries, dim]
        group, num_queries = queries.shape[1:3]
        scores = torch.matmul(queries.flatten(1, 2), keys.permute(1, 2, 0)).unflatten(1, (group, num_queries))
        query_positions = torch.arange(position, position + num_queries, device=q.device)[:, None]
        hidden = slots > query_positions
        if self._window is not None:
            hidden = hidden | (slots <= query_positions - self._window)
        scores = self._cap(scores).masked_fill(hidden, -torch.inf)
        sinks = None if self._sinks is None else self._sinks.view(self._num_kv_heads, -1, 1, 1)
        attended = _attend(scores.flatten(1, 2), values.permute(1, 0, 2), _spread(sinks, num_queries))
        return attended.unflatten(1, (group, num_queries)).permute(2, 0, 1, 3).flatten(1, 2)

    def _cap(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self._soft_cap is None else self._soft_cap * torch.tanh(scores / self._soft_cap)


def _spread(sinks: torch.Tensor | None, num_queries: int) -> torch.Tensor | None:
    """`[kv heads, group, 1, 1]` to one for each query of each head: `[kv heads, group * queries, 1]`."""
    return None if sinks is None else sinks.expand(-1, -1, num_queries, 1).flatten(1, 2)


def _attend(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores `[..., queries, slots]` over the slots, times values `[..., slots, dim]`."""
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0.0)  # no key at all: exp(-inf - 0) is 0, not NaN
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return torch.matmul(weights, values) / total.masked_fill(total == 0, 1.0)
