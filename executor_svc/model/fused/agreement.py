"""When a replacement may stand for a module: it must come as close as the module itself to what fp32 gives.

The module is evaluated a second time with weights and inputs in fp32: that is what its code means, free of rounding.
In fp32 a replacement must give that up to the order of summation. In 16 bits it may round elsewhere than the module
does, but must not end up farther away.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

EXACT = 3e-5  # relative, in fp32: sums of some thousand products in another order
ROUNDING = 2.0**-8  # of one result, in 16 bits
_T = TypeVar("_T")
_SLACK = 1.25  # of the module's own error
_SCALES = (1.0, 0.03, 20.0)  # rows of different sizes: an epsilon shows in small ones, a limit on values in large ones


def made_up_rows(num_rows: int, width: int, dtype: torch.dtype, *, scales: tuple[float, ...] = _SCALES) -> torch.Tensor:
    """Random input `[num_rows, width]`, the same each time."""
    rows = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width))
    return (rows * torch.tensor(scales).repeat(-(-num_rows // len(scales)))[:num_rows, None]).to(dtype)


def in_fp32(module: nn.Module) -> nn.Module:
    """A copy with weights in fp32, which shares nothing but the configuration."""
    config = getattr(module, "config", None)
    return copy.deepcopy(module, {} if config is None else {id(config): config}).float()


def values_in_fp32(values: Any) -> Any:
    """The same nest of tuples, lists and dicts, with floating point tensors in fp32."""
    if isinstance(values, torch.Tensor):
        return values.float() if values.is_floating_point() else values
    if isinstance(values, tuple | list):
        return type(values)(values_in_fp32(value) for value in values)
    if isinstance(values, dict):
        return {name: values_in_fp32(value) for name, value in values.items()}
    return values


def error(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative and root mean square, each vector along the last dimension counting alike."""
    if values.shape != exact.shape:
        return float("inf")
    off = (values.float() - exact.float()).norm(dim=-1) / exact.float().norm(dim=-1).clamp_min(1e-20)
    return float(off.square().mean().sqrt())


def agrees(values: torch.Tensor, exact: torch.Tensor) -> bool:
    """In fp32. NaN agrees with nothing."""
    return error(values, exact) <= EXACT


def is_as_good(replacement: torch.Tensor, own: torch.Tensor, exact: torch.Tensor, allowed: float = ROUNDING) -> bool:
    """Whether `replacement` may stand for `own`, where fp32 gives `exact`; in 16 bits an error of `allowed` always
    may."""
    if replacement.dtype != own.dtype:
        return False
    if own.dtype == torch.float32:
        return agrees(replacement, exact)
    return error(replacement, exact) <= max(_SLACK * error(own, exact), allowed)


def given(call: Callable[[], _T]) -> _T | None:
    """What code that is a model's own gives for made up input; None where it raises, for it takes other input."""
    try:
        return call()
    except Exception:  # noqa: BLE001 - whatever that code raises means the same
        return None


def first_that(candidates: list[Any], check: Callable[[Any], bool]) -> Any | None:
    """The first candidate that passes; one whose check raises does not."""
    for candidate in candidates:
        try:
            if check(candidate):
                return candidate
        except (RuntimeError, TypeError, ValueError, IndexError):  # shapes that do not fit together
            continue
    return None
