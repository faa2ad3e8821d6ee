"""`paged_attention`: from tensors to a launch. Only shapes, dtypes and strides are looked at."""

import torch

from kernels.attention import Rows, Rule, check_attention
from kernels.checks import KernelInputError
from kernels.triton.attention_kernel import merge_kernel
from kernels.triton.device import Device, check_device, check_last_stride
from kernels.triton.launches import Parts, dot_dtype, launch_attention
from kernels.triton.shared import attend_shared, shared_tile_and_splits
from kernels.triton.tiles import MAX_REGISTERS, Tile, kind_of, num_splits, power_of_two, tile_for

MAX_CONTEXT = 2**31 - 2**14  # positions are int32 on the device, those a step or an empty part past the end too


def paged_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
) -> torch.Tensor:
    """As `kernels.reference.paged_attention`; the last dimension of every tensor must be contiguous.

    Both products are computed in q's dtype where the cache has the same, else in fp32; sums are fp32. Shared blocks are
    read once in a batch with as many queries as rows; in others, where prompts take most of the time, for each row.
    """
    call = q, key_cache, value_cache, rows, rule
    own = tile_and_splits(*call)
    if rows.shared is not None and len(rows.shared.first) and q.shape[0] <= len(rows):
        common = shared_tile_and_splits(*call, rows.shared, check_device(q.device))
        return attend_shared(*call, rows.shared, own=own, common=common)
    return attend(*call, *own)


def contiguous_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
) -> torch.Tensor:
    """`paged_attention` without a table, to measure what a table costs: nothing that is served calls it.

    Of the rows' tables only the shape is looked at, `[num_rows, w]`: row i has the w blocks from i * w on, in order.
    """
    call = q, key_cache, value_cache, rows, rule
    return attend(*call, *tile_and_splits(*call), has_table=False)


def tile_and_splits(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
) -> tuple[Tile, int]:
    """What a batch of these shapes is best computed with. Raises KernelInputError for one that cannot be."""
    device = _check(q, key_cache, value_cache, rows, rule)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    num_rows, table_width = rows.block_tables.shape
    if table_width * block_size > MAX_CONTEXT:
        raise KernelInputError(
            f"block_tables: has {table_width} blocks of {block_size} tokens a row, must be of at most {MAX_CONTEXT} "
            "tokens in all; pass the columns that are used"
        )
    group = num_heads // num_kv_heads
    kind = kind_of(num_tokens, num_rows, group)
    dot = dot_dtype(q, key_cache)
    memory = device.shared_memory_bytes
    tile = tile_for(kind, group, head_dim, value_dim, dot, memory, capped=rule.soft_cap is not None)
    longest = table_width * block_size
    if rule.window is not None:
        longest = min(longest, rule.window + tile.queries - 1)
    likely_tiles = max(num_rows, -(-num_tokens // tile.queries))
    num_programs = likely_tiles * num_kv_heads * -(-group // tile.heads)
    return tile, num_splits(num_programs, longest, device.num_processors)


def _check(q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule) -> Device:
    check_attention(q, key_cache, value_cache, rows, rule)
    device = check_device(q.device, q.dtype, key_cache.dtype)
    named = {"q": q, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in (named if rule.sinks is None else named | {"sinks": rule.sinks}).items():
        check_last_stride(name, tensor)
    rows.once("strides", lambda: _check_strides(rows))
    return device


def _check_strides(rows: Rows) -> None:
    for name in ("block_tables", "query_start", "context_lens"):
        check_last_stride(name, getattr(rows, name))
    if rows.shared is not None:
        for name in ("first", "end", "row_start", "rows", "own_start"):
            check_last_stride(f"shared.{name}", getattr(rows.shared, name))


def attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
    tile: Tile,
    splits: int,
    *,
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
    launch_attention(q, key_cache, value_cache, rows, rule, tile, into=parts or out, has_table=has_table)
    if parts is not None:
        merge_kernel[(num_tokens, num_heads)](
            parts.values, parts.tops, parts.totals, rule.sinks, out, splits, HAS_SINKS=rule.sinks is not None,
            VALUE_DIM=value_dim, BLOCK_V=power_of_two(value_dim), BLOCK_S=power_of_two(splits),
            num_warps=4, enable_fp_fusion=True, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
    return out
