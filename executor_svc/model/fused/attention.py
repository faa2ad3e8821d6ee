"""Attention layers: one product for queries, keys and values; their norms, rotation, cache and attention in one
operation; and the product that follows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor_svc.model.attention import layer_of
from executor_svc.model.fused.heads import KeptFactors, Rotation, Turns
from executor_svc.model.fused.products import Product
from kernels import Projection, Rule


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Stands for the `forward` of `module`, on which its `PagedLayer` hangs. `rule` is of what the module gave to its
    attention function. `num_results`: 0 where it returns no tuple."""

    module: nn.Module
    qkv: Product
    output: Product
    projection: Projection
    rotation: Rotation | None
    kept_factors: KeptFactors
    rule: Rule
    num_results: int

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Turns | None = None, **_: object) -> Any:
        made = self.attend(hidden_states, position_embeddings, None)
        return (made, *[None] * (self.num_results - 1)) if self.num_results else made

    def attend(
        self,
        hidden_states: torch.Tensor,
        turns: Turns | None,
        residual: torch.Tensor | None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: `[1, tokens, width]`; residual and the result likewise, of `wanted` alone if given."""
        cos, sin = None, None
        if self.rotation is not None and turns is not None:
            cos, sin = self.kept_factors.of(self.rotation, turns)
        attended = layer_of(self.module).attend_projected(
            self.qkv(hidden_states)[0], self.projection, cos, sin, self.rule
        )
        if wanted is not None:
            attended = attended.index_select(0, wanted)
        return self.output(attended[None], residual)
