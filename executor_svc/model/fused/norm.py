"""RMS norms: x / rms(x) · w or · (1 + w), in one pass and with one rounding."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from executor_svc.model.fused.agreement import agrees, first_that, given, in_fp32, is_as_good, made_up_rows
from executor_svc.model.fused.structure import is_plain, is_untouched
from kernels.cpu import norms

_ROWS = 6
_LARGEST_EPSILON = 0.1


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """`weight` `[width]`, or 1 + weight if `plus_one`; norms the last dimension of what it is given."""

    weight: torch.Tensor
    eps: float
    plus_one: bool
    level: str

    @property
    def factors(self) -> torch.Tensor:
        """What normed numbers are multiplied by, fp32 `[width]`."""
        return self.weight.float() + 1.0 if self.plus_one else self.weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return norms.rms_norm(x, self.weight, self.eps, plus_one=self.plus_one, level=self.level)


def understand(module: nn.Module, level: str) -> RMSNorm | None:
    """What `module` computes, if it is an RMS norm of the last dimension; else None. Its weight stays in it."""
    parameters = list(module.named_parameters())
    if len(parameters) != 1 or any(True for _ in module.children()) or not is_untouched(module):
        return None
    weight = parameters[0][1]
    if not is_plain(weight) or weight.dim() != 1 or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    rows = made_up_rows(_ROWS, len(weight), weight.dtype)
    exact_module = in_fp32(module)
    exact_weight = next(exact_module.parameters())
    own, exact = given(lambda: module(rows)), given(lambda: exact_module(rows.float()))
    if not isinstance(own, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return None
    found: RMSNorm | None = first_that(
        list(_variants(module, weight, level)),
        # As it was written, in fp32; then as it is to be served.
        lambda norm: (
            agrees(RMSNorm(exact_weight, norm.eps, norm.plus_one, level)(rows.float()), exact)
            and is_as_good(norm(rows), own, exact)
        ),
    )
    return found


def build(module: nn.Module, eps: float, *, plus_one: bool, level: str) -> RMSNorm:
    """What `module` computes, known to be an RMS norm of these. Raises ValueError where it has another number of
    weights than one."""
    (weight,) = module.parameters()
    return RMSNorm(weight, eps, plus_one, level)


def _variants(module: nn.Module, weight: torch.Tensor, level: str) -> Iterator[RMSNorm]:
    numbers = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < _LARGEST_EPSILON]
    for eps in numbers:
        for plus_one in (False, True):
            yield RMSNorm(weight, eps, plus_one, level)
