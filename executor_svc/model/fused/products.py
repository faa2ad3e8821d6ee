"""Products of a step's tokens with weights: packed where the CPU has native ones, else torch's own.

What is made here takes weights over: packed ones are in a layout of their own, so the originals can be let go.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from executor_svc.model.fused.agreement import ROUNDING
from executor_svc.model.fused.structure import Linear
from kernels.cpu import linear as native

_INT8_ROUNDING = 0.05
# Outputs, at most, of layers that keep 16 bits: little is gained, and which expert a token goes to may hang on them.
_NARROW = 256


@dataclass(frozen=True, slots=True)
class Product:
    """x · weightᵀ + bias (+ residual), `[..., inputs]` to `[..., outputs]`."""

    weight: native.PackedWeight | torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self.weight, native.PackedWeight):
            return native.linear(x, self.weight, self.bias, residual)
        made = functional.linear(x, self.weight, self.bias)
        return made if residual is None else residual + made

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """x · weightᵀ, in fp32 where the weight is packed: for who adds more before it is rounded."""
        if isinstance(self.weight, native.PackedWeight):
            return native.linear_sums(x, self.weight)
        return functional.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class Products:
    """How weights become products: natively at `level`, with weights in 8 bits if `int8`."""

    level: str
    int8: bool = False

    @property
    def rounding(self) -> float:
        """By how much a product may be off, relative."""
        return _INT8_ROUNDING if self.int8 else ROUNDING

    def are_native(self, dtype: torch.dtype) -> bool:
        return native.is_native(self.level, dtype)

    def make(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Product:
        """One product of weights `[outputs_i, inputs]` of one dtype, whose outputs come one after another."""
        if self.are_native(weights[0].dtype):
            int8 = self.int8 and sum(len(weight) for weight in weights) > _NARROW
            return Product(native.pack_many(weights, int8=int8, level=self.level), bias)
        return Product(weights[0] if len(weights) == 1 else torch.cat(list(weights)), bias)

    def of(self, linear: Linear) -> Product:
        return self.make([linear.weight], linear.bias)

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> native.PackedWeight:
        """For `native.gated`; where products are native."""
        return native.pack_gated(gate, up, int8=self.int8, level=self.level)
