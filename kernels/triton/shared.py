"""`paged_attention` where rows have blocks in common: these are attended to once for all rows that have them, then what
each row has besides, and the results are merged."""

import torch

from kernels.attention import Rows, Rule
from kernels.shared_blocks import SharedBlocks
from kernels.triton.device import Device
from kernels.triton.launches import (
    Parts,
    attention_constants,
    dot_dtype,
    launch_attention,
    num_head_tiles,
    num_tiles,
    score_factors,
)
from kernels.triton.shared_kernel import merge_shared_kernel, shared_kernel
from kernels.triton.tiles import MAX_REGISTERS, ROOMY_BYTES, Tile, kind_of, num_splits, power_of_two, tile_for


def shared_tile_and_splits(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
    shared: SharedBlocks,
    device: Device,
) -> tuple[Tile, int]:
    """What the segments are best computed with: as rows with as many queries as they have members."""
    block_size, num_kv_heads = key_cache.shape[1:3]
    group, num_segments, num_members = q.shape[1] // num_kv_heads, len(shared.first), len(shared.rows)
    head_dim, value_dim, memory = q.shape[2], value_cache.shape[3], device.shared_memory_bytes
    if max(head_dim, value_dim) > 256:
        memory = min(memory, ROOMY_BYTES - 1)  # of tiles with more rows the registers would spill
    kind, dot = kind_of(num_members, num_segments, group), dot_dtype(q, key_cache)
    tile = tile_for(kind, group, head_dim, value_dim, dot, memory, capped=rule.soft_cap is not None)
    likely_tiles = max(num_segments, -(-num_members // tile.queries))
    longest = rows.block_tables.shape[1] * block_size
    if rule.window is not None:
        longest = min(longest, rule.window)
    return tile, num_splits(likely_tiles * num_kv_heads * -(-group // tile.heads), longest, device.num_processors)


def attend_shared(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
    shared: SharedBlocks,
    *,
    own: tuple[Tile, int],
    common: tuple[Tile, int],
) -> torch.Tensor:
    """`paged_attention` of checked arguments; tile and number of parts for what rows have of their own, and for what
    they have in common."""
    num_tokens, num_heads, _ = q.shape
    value_dim = value_cache.shape[3]
    out = q.new_empty(num_tokens, num_heads, value_dim)
    if out.numel() == 0:
        return out
    own_parts = Parts.of(q, num_tokens, own[1], value_dim)
    launch_attention(q, key_cache, value_cache, rows, rule, own[0], into=own_parts, own_start=shared.own_start)
    tile, splits = common
    parts = Parts.of(q, len(shared.rows), splits, value_dim)
    constants = attention_constants(num_heads, key_cache.shape, value_dim, dot_dtype(q, key_cache), tile)
    grid = num_tiles(tile, len(shared.rows), len(shared.first)), num_head_tiles(key_cache, tile, constants), splits
    shared_kernel[grid](
        q, key_cache, value_cache, rows.block_tables, rows.query_start, rows.context_lens,
        shared.first, shared.end, shared.row_start, shared.rows, parts.values, parts.tops, parts.totals,
        *score_factors(rule.scale, rule.soft_cap), rule.window or 0, len(shared.first), splits,
        *q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], rows.block_tables.stride(0),
        HAS_WINDOW=rule.window is not None, HAS_CAP=rule.soft_cap is not None,
        **constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, maxnreg=tile.registers,
    )  # fmt: skip
    merge_shared_kernel[num_tokens, num_heads](
        rows.query_start, own_parts.values, own_parts.tops, own_parts.totals, parts.values, parts.tops, parts.totals,
        *shared.by_row, rule.sinks, out, len(rows), own[1], splits,
        HAS_SINKS=rule.sinks is not None, VALUE_DIM=value_dim, BLOCK_V=power_of_two(value_dim),
        num_warps=4, enable_fp_fusion=True, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out
