"""What attention is told besides heads and caches: the rows of a step, and the rule of a layer.

All layers of a step have the same rows and in all steps a layer has the same rule, so what a backend makes of either it
makes once and keeps with it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from kernels.checks import FLOAT_DTYPES, KernelInputError, check_caches, check_tensor
from kernels.shared_blocks import SharedBlocks

Made = TypeVar("Made")


@dataclass(frozen=True)
class Rows:
    """The rows of a call, whose queries lie side by side.

    Row i's queries are at `query_start[i] : query_start[i + 1]`; they are the last tokens of its `context_lens[i]`.
    block_tables: int32 `[num_rows, most blocks]`; entries past a row's context are never read. query_start: int32
    `[num_rows + 1]`, from 0 on; tokens after its last entry belong to no row. context_lens: int32 `[num_rows]`.
    `shared` tells of blocks that rows have in common, which a backend may make nothing of.

    On the host the numbers in these tensors may not change once a call has been given them: other numbers are other
    rows. A device that reads them itself, as in a recorded step, reads whatever is there by then.
    """

    block_tables: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    shared: SharedBlocks | None = None
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.context_lens)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` gave when it was first asked for under `key`."""
        if key not in self._kept:
            self._kept[key] = make()
        made: Made = self._kept[key]
        return made

    def check(self, device: torch.device) -> None:
        """Raises KernelInputError, of tensors that kernels on `device` cannot take."""
        self.once(("checked", device), lambda: self._check(device))

    def _check(self, device: torch.device) -> None:
        check_tensor("context_lens", self.context_lens, (None,), (torch.int32,), device)
        num_rows = len(self)
        check_tensor("query_start", self.query_start, (num_rows + 1,), (torch.int32,), device)
        check_tensor("block_tables", self.block_tables, (num_rows, None), (torch.int32,), device)
        if self.shared is not None:
            self.shared.check(num_rows, device)


@dataclass(frozen=True)
class Rule:
    """How a layer's queries attend.

    Scores are `q·k * scale`, capped to `soft_cap * tanh(score / soft_cap)`. A query at position p sees the positions
    in (p - window, p]. `sinks` `[num_heads]` join each head's softmax as a key without a value.

    Raises KernelInputError.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise KernelInputError(f"window: is {self.window}, must be at least 1, or None for the whole context")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise KernelInputError(f"soft_cap: is {self.soft_cap}, must be above 0, or None for no cap")

    @cached_property
    def exact_sinks(self) -> torch.Tensor | None:
        """`sinks` in fp32, side by side; converted once."""
        return None if self.sinks is None else self.sinks.detach().float().contiguous()

    def check(self, num_heads: int, device: torch.device) -> None:
        """Raises KernelInputError where the rule is not one of a layer of so many query heads."""
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (num_heads,), FLOAT_DTYPES, device)


def check_attention(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
) -> None:
    """What backends with caches as the reference's ask for. Raises KernelInputError."""
    check_caches(key_cache, value_cache)
    check_tensor("q", q, (None, None, key_cache.shape[3]), FLOAT_DTYPES, key_cache.device)
    check_call(q, key_cache.shape[2], rows, rule)


def check_call(q: torch.Tensor, num_kv_heads: int, rows: Rows, rule: Rule) -> None:
    """What every backend asks for beside the caches; q `[num_tokens, num_heads, ...]` is on their device."""
    if q.shape[1] % num_kv_heads:
        raise KernelInputError(f"q: {q.shape[1]} heads cannot be shared out over {num_kv_heads} key/value heads")
    rows.check(q.device)
    rule.check(q.shape[1], q.device)
