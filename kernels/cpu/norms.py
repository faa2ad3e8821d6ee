"""Norms over the last dimension, in fp32 inside and rounded once; native at every level, fp32, bf16 and fp16.

`level` says whose operations are used (None: those of this CPU's best). Weights have the dtype of `x`. Raises
ValueError for a shape or dtype that does not fit.
"""

import torch

from kernels.cpu.library import ops


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, plus_one: bool = False, level: str | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, `[..., size]`; with `plus_one` · (1 + weight)."""
    return ops(level).rms_norm(x, weight, eps, plus_one)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    plus_one: bool = False,
    level: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual before it is rounded, and that sum, rounded."""
    return ops(level).add_rms_norm(x, residual, weight, eps, plus_one)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *, level: str | None = None
) -> torch.Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias, `[..., size]`."""
    return ops(level).layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    *,
    level: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_norm` of x + residual before it is rounded, and that sum, rounded."""
    return ops(level).add_layer_norm(x, residual, weight, bias, eps)
