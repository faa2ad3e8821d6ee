"""From the output of an attention layer's merged projection to queries, keys and values: norm and rotary embedding."""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.checks import FLOAT_DTYPES, KernelInputError, check_tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """What an attention layer does to its projected heads before it attends.

    A token's heads are those of queries, then of keys, then of values, all `head_dim` wide. Queries and keys are
    normed, head by head: divided by their root mean square and multiplied by `query_norm` or `key_norm`, fp32
    `[head_dim]`, where there is one. Then the first dimensions of each are rotated, as many as cos and sin have: pairs
    are `half` of those apart, or neighbours (`interleaved`). Raises KernelInputError.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6
    rotary: Literal["half", "interleaved"] = "half"

    def __post_init__(self) -> None:
        for name, weight in self._norms:
            check_tensor(name, weight, (self.head_dim,), (torch.float32,), weight.device)

    @property
    def _norms(self) -> list[tuple[str, torch.Tensor]]:
        norms = ("query_norm", self.query_norm), ("key_norm", self.key_norm)
        return [(name, weight) for name, weight in norms if weight is not None]

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def check(self, qkv: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
        """Raises KernelInputError."""
        check_tensor("qkv", qkv, (None, self.width), FLOAT_DTYPES, qkv.device)
        for name, weight in self._norms:
            if weight.device != qkv.device:
                raise KernelInputError(f"{name}: is on {weight.device}, must be on {qkv.device} as qkv is")
        if cos is None and sin is None:
            return
        if cos is None or sin is None:
            raise KernelInputError(
                f"{'cos' if cos is None else 'sin'}: is missing, the other is there; give both or none"
            )
        check_tensor("cos", cos, (len(qkv), None), FLOAT_DTYPES, qkv.device)
        check_tensor("sin", sin, tuple(cos.shape), FLOAT_DTYPES, qkv.device)
        if cos.shape[1] > self.head_dim or cos.shape[1] % 2:
            raise KernelInputError(f"cos: has {cos.shape[1]} dimensions, must be even and at most {self.head_dim}")

    def heads(
        self, qkv: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[num_tokens, heads, head_dim]` in qkv's dtype, computed in fp32."""
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        q, k, v = qkv.unflatten(1, (-1, self.head_dim)).float().split(sizes, 1)
        q = self._rotated(self._normed(q, self.query_norm), cos, sin)
        k = self._rotated(self._normed(k, self.key_norm), cos, sin)
        return q.to(qkv.dtype), k.to(qkv.dtype), v.to(qkv.dtype)

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return heads
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.norm_eps) * weight

    def _rotated(self, heads: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
        if cos is None or sin is None:
            return heads
        rotated, rest = heads[..., : cos.shape[1]], heads[..., cos.shape[1] :]
        if self.rotary == "half":
            first, second = rotated.chunk(2, -1)
            turned = torch.cat([-second, first], -1)
        else:
            turned = torch.stack([-rotated[..., 1::2], rotated[..., ::2]], -1).flatten(-2)
        return torch.cat([rotated * cos.float()[:, None] + turned * sin.float()[:, None], rest], -1)
