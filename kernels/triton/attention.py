"""`paged_attention`: from tensors to a launch. Only shapes, dtypes and strides are looked at."""

from functools import lru_cache
from math import e, log2
from typing import Any

import torch
import triton.language as tl

from kernels.checks import KernelInputError, check_attention
from kernels.triton.attention_kernel import attention_kernel, merge_kernel
from kernels.triton.device import check_device, check_last_stride
from kernels.triton.tiles import MAX_REGISTERS, Tile, kind_of, num_splits, power_of_two, tile_for

LOG2_E = log2(e)
MAX_CONTEXT = 2**31 - 2**14  # positions are int32 on the device, those a step or an empty part past the end too
DOT_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


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
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`; the last dimension of every tensor must be contiguous.

    Both products are computed in q's dtype where the cache has the same, else in fp32; sums are fp32.
    """
    tensors = q, key_cache, value_cache, block_tables, query_start, context_lens
    tile, splits = tile_and_splits(*tensors, window=window, soft_cap=soft_cap, sinks=sinks)
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
) -> tuple[Tile, int]:
    """What a batch of these shapes is best computed with. Raises KernelInputError for one that cannot be."""
    check_attention(q, key_cache, value_cache, block_tables, query_start, context_lens, window, soft_cap, sinks)
    device = check_device(q.device, q.dtype, key_cache.dtype)
    named = {"q": q, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables}
    named |= {"query_start": query_start, "context_lens": context_lens}
    for name, tensor in named.items():
        check_last_stride(name, tensor)
    if sinks is not None:
        check_last_stride("sinks", sinks)
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
    shared = device.shared_memory_bytes
    tile = tile_for(kind, group, head_dim, value_dim, dot, shared, capped=soft_cap is not None)
    longest = table_width * block_size if window is None else min(table_width * block_size, window + tile.queries - 1)
    likely_tiles = max(num_rows, -(-num_tokens // tile.queries))
    num_programs = likely_tiles * num_kv_heads * -(-group // tile.heads)
    return tile, num_splits(num_programs, longest, device.num_processors)


def dot_dtype(q: torch.Tensor, key_cache: torch.Tensor) -> torch.dtype:
    return q.dtype if q.dtype == key_cache.dtype else torch.float32


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
    constants = attention_constants(num_heads, key_cache.shape, value_dim, dot_dtype(q, key_cache), tile)
    num_rows, table_width = block_tables.shape
    parts, tops, totals = out, None, None
    if splits > 1:
        parts = q.new_empty(num_tokens, num_heads, splits, value_dim, dtype=torch.float32)
        tops, totals = q.new_empty(2, num_tokens, num_heads, splits, dtype=torch.float32)
    score_scale, score_cap = score_factors(scale, soft_cap)
    tables, table_stride = (block_tables, block_tables.stride(0)) if has_table else (None, table_width)
    grid = (
        num_tiles(tile, num_tokens, num_rows),
        key_cache.shape[2] * -(-constants["GROUP"] // tile.heads),
        splits,
    )
    attention_kernel[grid](
        q, key_cache, value_cache, tables, query_start, context_lens, sinks, parts, tops, totals,
        score_scale, score_cap, window or 0, table_width * key_cache.shape[1],
        num_tokens, num_rows, splits,
        *q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], table_stride,
        HAS_TABLE=has_table, HAS_WINDOW=window is not None, HAS_CAP=soft_cap is not None, HAS_SINKS=sinks is not None,
        SPLIT=splits > 1,
        **constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, maxnreg=tile.registers,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(num_tokens, num_heads)](
            parts, tops, totals, sinks, out, splits, HAS_SINKS=sinks is not None,
            **merge_constants(value_dim, splits), num_warps=4, enable_fp_fusion=True, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out


def num_tiles(tile: Tile, num_tokens: int, num_rows: int) -> int:
    """No batch of these shapes has more tiles: each row's last one may be part filled, as may that behind all rows."""
    return num_tokens if tile.queries == 1 else num_tokens // tile.queries + num_rows + 1


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What the kernel multiplies a product with, and the cap, both for powers of two."""
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    return scale * 2.0 * LOG2_E / soft_cap, soft_cap * LOG2_E


@lru_cache(maxsize=256)
def attention_constants(
    num_heads: int, key_cache_shape: torch.Size, value_dim: int, dot: torch.dtype, tile: Tile
) -> dict[str, Any]:
    """What the attention kernel is compiled for, besides its options."""
    _, block_size, num_kv_heads, head_dim = key_cache_shape
    return {
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_kv_heads,
        "GROUP_TILE": tile.heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_V": power_of_two(value_dim),
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.block_m,
        "BLOCK_Q": tile.queries,
        "TILE_N": tile.keys,
        "DOT": DOT_DTYPES[dot],
    }


def merge_constants(value_dim: int, splits: int) -> dict[str, int]:
    return {"VALUE_DIM": value_dim, "BLOCK_V": power_of_two(value_dim), "BLOCK_S": power_of_two(splits)}
