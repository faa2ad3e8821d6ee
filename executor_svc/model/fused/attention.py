"""Attention layers: one product for queries, keys and values; their norms, rotation, cache and attention in one
operation; and the product that follows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor_svc.model.attention import layer_of
from executor_svc.model.fused.heads import HeadCounts, KeptFactors, Rotation, Turns
from executor_svc.model.fused.products import Product
from kernels import Projection, Rule


@dataclass(frozen=True, slots=True)
class NormReading:
    """Of a layer's child, by name, that is an RMS norm."""

    child: str
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class Reading:
    """What a layer computes, in plain values: which of its linear children (by number) do what, and with what.

    `grouped`: whether one weight holds each key head with its queries (`merged_orders`). `norms`: of queries and keys.
    `scale`, `soft_cap` and `sinks` (a parameter of the layer, by name) are what it gave to its attention function.
    `num_results`: 0 where it returns no tuple.
    """

    counts: HeadCounts
    qkv: tuple[int, ...]
    output: int
    grouped: bool
    norms: tuple[NormReading, NormReading] | None
    rotation: Rotation | None
    scale: float
    soft_cap: float | None
    sinks: str | None
    num_results: int


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Stands for the `forward` of `module`, on which its `PagedLayer` hangs; made by its `reading`."""

    module: nn.Module
    reading: Reading
    qkv: Product
    output: Product
    projection: Projection
    kept_factors: KeptFactors
    rule: Rule

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Turns | None = None, **_: object) -> Any:
        made, num_results = self.attend(hidden_states, position_embeddings, None), self.reading.num_results
        return (made, *[None] * (num_results - 1)) if num_results else made

    def attend(
        self,
        hidden_states: torch.Tensor,
        turns: Turns | None,
        residual: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: `[1, tokens, width]`; residual and the result likewise, of `wanted` alone if given."""
        attended = layer_of(self.module).attend_projected(
            self.qkv(hidden_states)[0], self.projection, *self.factors(turns), self.rule
        )
        if wanted is not None:
            attended = attended.index_select(0, wanted)
        return self.output(attended[None], residual)

    def factors(self, turns: Turns | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Cosines and sines, fp32 `[tokens, rotated numbers]`; none where nothing is rotated."""
        if self.reading.rotation is None or turns is None:
            return None, None
        return self.kept_factors.of(self.reading.rotation, turns)
