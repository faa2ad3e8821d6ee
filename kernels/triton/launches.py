"""The launch of the attention kernel, and what its variants have in common."""

from dataclasses import dataclass
from functools import lru_cache
from math import e, log2
from typing import Any

import torch
import triton.language as tl

from kernels.attention import Rows, Rule
from kernels.triton.attention_kernel import attention_kernel
from kernels.triton.tiles import Tile, power_of_two

LOG2_E = log2(e)
DOT_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class Parts:
    """Results over parts of a context, to be merged. All fp32; memory of parts without keys is never written.

    values: `[num_queries, num_heads, splits, value_dim]`; tops, totals: `[num_queries, num_heads, splits]`.
    """

    values: torch.Tensor
    tops: torch.Tensor  # the part's largest score, in powers of two
    totals: torch.Tensor  # its sum of exponentials below that

    @classmethod
    def of(cls, q: torch.Tensor, num_queries: int, splits: int, value_dim: int) -> "Parts":
        num_heads = q.shape[1]
        values = q.new_empty(num_queries, num_heads, splits, value_dim, dtype=torch.float32)
        tops, totals = q.new_empty(2, num_queries, num_heads, splits, dtype=torch.float32)
        return cls(values, tops, totals)


def launch_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
    tile: Tile,
    *,
    into: torch.Tensor | Parts,
    has_table: bool = True,
    own_start: torch.Tensor | None = None,
) -> None:
    """Attention of checked arguments with a given tile. Into parts it goes without sinks: these are for the merge.

    `own_start` int32 `[num_rows]`: rows leave out what is before that block of theirs.
    """
    num_tokens, num_heads, _ = q.shape
    num_rows, table_width = rows.block_tables.shape
    constants = attention_constants(num_heads, key_cache.shape, value_cache.shape[3], dot_dtype(q, key_cache), tile)
    splits, values, tops, totals, sinks = 1, into, None, None, rule.sinks
    if isinstance(into, Parts):
        splits, values, tops, totals, sinks = into.tops.shape[2], into.values, into.tops, into.totals, None
    tables, table_stride = (rows.block_tables, rows.block_tables.stride(0)) if has_table else (None, table_width)
    attention_kernel[num_tiles(tile, num_tokens, num_rows), num_head_tiles(key_cache, tile, constants), splits](
        q, key_cache, value_cache, tables, rows.query_start, rows.context_lens, own_start, sinks, values, tops, totals,
        *score_factors(rule.scale, rule.soft_cap), rule.window or 0, table_width * key_cache.shape[1],
        num_tokens, num_rows, splits,
        *q.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], table_stride,
        HAS_TABLE=has_table, HAS_WINDOW=rule.window is not None, HAS_CAP=rule.soft_cap is not None,
        HAS_SINKS=sinks is not None, HAS_SHARED=own_start is not None, SPLIT=tops is not None,
        **constants, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True, maxnreg=tile.registers,
    )  # fmt: skip


def dot_dtype(q: torch.Tensor, key_cache: torch.Tensor) -> torch.dtype:
    return q.dtype if q.dtype == key_cache.dtype else torch.float32


def num_head_tiles(key_cache: torch.Tensor, tile: Tile, constants: dict[str, Any]) -> int:
    return int(key_cache.shape[2] * -(-constants["GROUP"] // tile.heads))


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
