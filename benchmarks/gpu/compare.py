"""How far a result may be from the oracle's."""

from dataclasses import dataclass

import torch

# Of a head's output vector, of its length. fp32 with the tensor cores' tf32 would show about 5e-4.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Distance:
    """The worst of all output vectors: their elements' difference, and the vectors' by the length of the expected."""

    absolute: float
    relative: float

    def within(self, dtype: torch.dtype) -> bool:
        """NaN is within nothing."""
        return self.relative <= TOLERANCES[dtype]


def distance(out: torch.Tensor, expected: torch.Tensor) -> Distance:
    """Of `[..., dim]` tensors. Where zeros are expected, nothing else will do."""
    if out.shape != expected.shape:
        return Distance(float("inf"), float("inf"))
    if not out.numel():
        return Distance(0.0, 0.0)
    difference = out.double() - expected.double()
    lengths = expected.double().norm(dim=-1)
    relative = difference.norm(dim=-1) / lengths.clamp_min(1e-30)
    return Distance(float(difference.abs().max()), float(relative.max()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are equal, NaN to NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
