"""`paged_attention`: from tensors to a launch. Only shapes, dtypes and strides are looked at."""

import torch

from kernels.checks import KernelInputError, check_attention
from kernels.shared_blocks import SharedBlocks
from kernels.triton.attention_kernel import merge_kernel
from kernels.triton.device import check_device, check_last_stride
from kernels.triton.launches import Parts, dot_dtype, launch_attention
from kernels.triton.shared import attend_shared, shared_tile_and_splits
from kernels.triton.tiles import MAX_REGISTERS, Tile, kind_of, num_splits, power_of_two, tile_for

MAX_CONTEXT = 2**31 - 2**14  # positions are int32 on the device, those a step or an empty part past the end too


def paged_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    shared: SharedBlocks | None = None,
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`; the last dimension of every tensor must be contiguous.

    Both products are computed in q's dtype where the cache has the same, else in fp32; sums are fp32. Shared blocks are
    read once in a batch with as many queries as rows; in others, where prompts take most of the time, for each row.
    """
    tensors = q, key_cache, value_cache, block_tables, query_start, context_lens
    tile, splits = tile_and_splits(*tensors, window=window, soft_cap=soft_cap, sinks=sinks, shared=shared)
    if shared is not None and len(shared.first) and q.shape[0] <= block_tables.shape[0]:
        facts = check_device(q.device)
        common = shared_tile_and_splits(*tensors[:4], shared, facts, window=window, soft_cap=soft_cap)
        return attend_shared(
            *tensors, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
            shared=shared, own=(tile, splits), common=common,
        )  # fmt: skip
    return attend(*tensors, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, tile=tile, splits=splits)


def contiguous_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """`paged_attention` without a table, to measure what a table costs: nothing that is served calls it.

    Of `block_tables` only the shape is looked at, `[num_rows, w]`: row i has the w blocks from i * w on, in order.
    """
    tensors = q, key_cache, value_cache, block_tables, query_start, context_lens
    tile, splits = tile_and_splits(*tensors, window=None, soft_cap=None, sinks=None)
    return attend(
        *tensors, scale=scale, window=None, soft_cap=None, sinks=None, tile=tile, splits=splits, has_table=False
    )


def tile_and_splits(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    shared: SharedBlocks | None = None,
) -> tuple[Tile, int]:
    """What a batch of these shapes is best computed with. Raises KernelInputError for one that cannot be."""
    check_attention(q, key_cache, value_cache, block_tables, query_start, context_lens, window, soft_cap, sinks, shared)
    device = check_device(q.device, q.dtype, key_cache.dtype)
    named = {"q": q, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables}
    named |= {"query_start": query_start, "context_lens": context_lens}
    for name, tensor in named.items():
        check_last_stride(name, tensor)
    if sinks is not None:
        check_last_stride("sinks", sinks)
    if shared is not None:
        for name in ("first", "end", "row_start", "rows", "own_start"):
            check_last_stride(f"shared.{name}", getattr(shared, name))
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    num_rows, table_width = block_tables.shape
    if table_width * block_size > MAX_CONTEXT:
        raise KernelInputError(
            f"block_tables: has {table_width} blocks of {block_size} tokens a row, must be of at most {MAX_CONTEXT} "
            "tokens in all; pass the columns that are used"
        )
    group = num_heads // num_kv_heads
    kind = kind_of(num_tokens, num_rows, group)
    dot = dot_dtype(q, key_cache)
    memory = device.shared_memory_bytes
    tile = tile_for(kind, group, head_dim, value_dim, dot, memory, capped=soft_cap is not None)
    longest = table_width * block_size if window is None else min(table_width * block_size, window + tile.queries - 1)
    likely_tiles = max(num_rows, -(-num_tokens // tile.queries))
    num_programs = likely_tiles * num_kv_heads * -(-group // tile.heads)
    return tile, num_splits(num_programs, longest, device.num_processors)


def attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    tile: Tile,
    splits: int,
    has_table: bool = True,
) -> torch.Tensor:
    """`paged_attention` of checked arguments with a given tile, each context in `splits` parts.

    `has_table` False: as `contiguous_attention`.
    """
    num_tokens, num_heads, _ = q.shape
    value_dim = value_cache.shape[3]
    out = q.new_empty(num_tokens, num_heads, value_dim)
    if out.numel() == 0:
        return out
    parts = Parts.of(q, num_tokens, splits, value_dim) if splits > 1 else None
    launch_attention(
        q, key_cache, value_cache, block_tables, query_start, context_lens,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, tile=tile, into=parts or out, has_table=has_table,
    )  # fmt: skip
    if parts is not None:
        merge_kernel[(num_tokens, num_heads)](
            parts.values, parts.tops, parts.totals, sinks, out, splits, HAS_SINKS=sinks is not None,
            VALUE_DIM=value_dim, BLOCK_V=power_of_two(value_dim), BLOCK_S=power_of_two(splits),
            num_warps=4, enable_fp_fusion=True, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out
