"""How a step's attention is cut up: made for the first of its layers, and kept with its rows."""

from typing import Any

import torch

from kernels.attention import Rows, Rule
from kernels.shared_blocks import SharedBlocks


def attention_plan(
    ops: Any,
    num_tokens: int,
    num_heads: int,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    rows: Rows,
    rule: Rule,
) -> torch.Tensor:
    """What the operations `ops` of a level are given: alike in all layers with such blocks and the same window."""
    window = rule.window or 0

    def make() -> torch.Tensor:
        tables = dense(rows.block_tables)
        batch = tables, tables.stride(0), rows.query_start.contiguous(), rows.context_lens.contiguous()
        sizes = num_tokens, num_heads, key_cache, value_cache, window
        plan: torch.Tensor = ops.plan_attention(*batch, _segments(rows.shared), *sizes)
        return plan

    return rows.once((ops, num_tokens, num_heads, key_cache.shape[1:], value_cache.shape[1:], window), make)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the last dimension's elements side by side."""
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()


def _segments(shared: SharedBlocks | None) -> list[torch.Tensor]:
    if shared is None or len(shared.first) == 0:
        return []
    columns = shared.first, shared.end, shared.row_start, shared.rows, shared.own_start
    return [column.contiguous() for column in columns]
