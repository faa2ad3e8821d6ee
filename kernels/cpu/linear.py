"""Linear layers, gated pairs of them, and the greedy output head over packed weights.

A weight is packed once, from all that it merges, and its original can then be let go. Products take bf16 rows, add up
in fp32, and round once, after bias, activation and residual. Levels whose instructions multiply bf16 use those; the
others widen weights to fp32 on their way through the registers. Rows of a result may lie further apart than they are
long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.checks import KernelInputError
from kernels.cpu.library import BuildError, ops

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu")  # as numbered in csrc/activation.h


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight `[outputs, inputs]` as the products of one level read it; csrc/panels.h draws it.

    A gated one holds two of `[outputs, inputs]`. `scales` and `sums` belong to int8 weights.
    """

    panels: torch.Tensor
    outputs: int
    inputs: int
    gated: bool
    scales: torch.Tensor | None
    sums: torch.Tensor | None
    ops: Any

    @property
    def num_bytes(self) -> int:
        parts = (self.panels, self.scales, self.sums)
        return sum(part.nbytes for part in parts if part is not None)


def is_native(level: str | None, dtype: torch.dtype) -> bool:
    """Whether `level` (None: this CPU's best) has products for weights and activations of `dtype`."""
    try:
        return dtype == torch.bfloat16 and ops(level) is not None
    except BuildError:
        return False


def pack(weight: torch.Tensor, *, int8: bool = False, level: str | None = None) -> PackedWeight:
    """`weight` is `[outputs, inputs]` bf16.

    With `int8`, rounded to 8 bits with a scale for each output, NaN for one that is not finite; at most 133,144 inputs.
    """
    return pack_many([weight], int8=int8, level=level)


def pack_many(weights: Sequence[torch.Tensor], *, int8: bool = False, level: str | None = None) -> PackedWeight:
    """Weights `[outputs_i, inputs]` bf16 as one, whose outputs come one after another; they are not joined first."""
    return _packed(weights, gated=False, int8=int8, level=level)


def pack_gated(gate: torch.Tensor, up: torch.Tensor, *, int8: bool = False, level: str | None = None) -> PackedWeight:
    """Two weights `[outputs, inputs]` bf16 for `gated`; slices of a merged one will do."""
    return _packed([gate, up], gated=True, int8=int8, level=level)


def _packed(weights: Sequence[torch.Tensor], *, gated: bool, int8: bool, level: str | None) -> PackedWeight:
    native = ops(level)
    scales = sums = None
    if int8:
        panels, scales, sums = native.pack_int8(weights, gated)
    else:
        panels = native.pack(weights, gated)
    outputs = weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights)
    return PackedWeight(panels, outputs, weights[0].shape[1], gated, scales, sums, native)


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(x · weightᵀ + bias) + residual, `[..., inputs]` to `[..., outputs]`, all bf16.

    `out` is written where it is given, and may be `residual`; both may be rows of a wider tensor.
    Raises KernelInputError for a shape or dtype that does not fit.
    """
    _check(x, weight, gated=False)
    number = number_of(activation)
    return weight.ops.linear(x, weight.panels, weight.scales, weight.sums, weight.outputs, bias, residual, number, out)


def linear_sums(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x · weightᵀ in fp32, `[..., inputs]` bf16 to `[..., outputs]`: for who adds more before it is rounded."""
    _check(x, weight, gated=False)
    return weight.ops.linear_sums(x, weight.panels, weight.scales, weight.sums, weight.outputs)


def gated(x: torch.Tensor, weight: PackedWeight, activation: str) -> torch.Tensor:
    """activation(x · gateᵀ) * (x · upᵀ), `[..., inputs]` to `[..., outputs]`, of a weight from `pack_gated`."""
    _check(x, weight, gated=True)
    number = number_of(activation)
    return weight.ops.gated(x, weight.panels, weight.scales, weight.sums, weight.outputs, number)


def linear_argmax(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    soft_cap: float | None = None,
    num_outputs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the output that is largest, and whether all of them are finite: `[rows]` int64 and bool.

    What `argmax` of `linear(x, weight, bias)` gives, the first of equal ones, but the outputs are never in memory. A
    `soft_cap` c stands for c · tanh(logits / c) computed in bf16. Only the first `num_outputs` outputs count.
    """
    _check(x, weight, gated=False)
    outputs = weight.outputs if num_outputs is None else num_outputs
    if not 0 < outputs <= weight.outputs:
        raise KernelInputError(f"num_outputs: is {outputs}, must be from 1 to {weight.outputs}")
    return weight.ops.linear_argmax(x, weight.panels, weight.scales, weight.sums, outputs, bias, soft_cap)


def unpack_rows(weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    """The weights of outputs `ids`, any shape int64, as `[*ids.shape, inputs]` bf16: an embedding kept in the head."""
    if weight.gated:
        raise KernelInputError("weight: is gated; its rows cannot be looked up")
    return weight.ops.unpack_rows(weight.panels, weight.scales, ids, weight.outputs, weight.inputs)


def _check(x: torch.Tensor, weight: PackedWeight, *, gated: bool) -> None:
    if weight.gated != gated:
        raise KernelInputError(f"weight: is {'' if weight.gated else 'not '}gated, must {'' if gated else 'not '}be")
    if x.dim() == 0 or x.shape[-1] != weight.inputs:
        raise KernelInputError(f"x: shape is {list(x.shape)}, must be [..., {weight.inputs}]")


def number_of(activation: str) -> int:
    """As the operations know it. Raises KernelInputError."""
    if activation not in ACTIVATIONS:
        raise KernelInputError(f"activation: is {activation}, must be one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS.index(activation)
