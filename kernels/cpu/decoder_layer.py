"""Decoder layers whose parts are all native, in one call each.

Between two calls from Python all threads wait for some 10 us, and a layer of few tokens takes a millisecond.
"""

from dataclasses import dataclass

import torch

from kernels.attention import Rows, Rule
from kernels.checks import KernelInputError
from kernels.cpu.linear import PackedWeight, number_of
from kernels.cpu.plans import attention_plan
from kernels.projection import Projection


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm, as `kernels.cpu.norms.rms_norm` takes it."""

    weight: torch.Tensor
    eps: float
    plus_one: bool


@dataclass(frozen=True, slots=True)
class Linear:
    """A product, as `kernels.cpu.linear.linear` takes it."""

    weight: PackedWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norms:
    """Where a layer has them; None: not there."""

    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None


class DecoderLayer:
    """A layer of `width` hidden numbers: attention of what the `qkv` product makes of them, `output`, and a gated MLP.

    The results of both are added to what the layer is given, that of the MLP to the sum that attention made. Where the
    MLP is `parallel`, it takes what the layer is given, too. Weights, norms and caches may not be changed by others
    while they are in use. Raises KernelInputError for parts that do not fit each other.
    """

    def __init__(
        self,
        norms: Norms,
        qkv: Linear,
        projection: Projection,
        rule: Rule,
        output: Linear,
        gate_up: PackedWeight,
        activation: str,
        down: Linear,
        *,
        parallel: bool = False,
    ) -> None:
        heads = projection.num_heads * projection.head_dim
        width, inner = qkv.weight.inputs, gate_up.outputs
        for name, weight, outputs, inputs in (
            ("qkv", qkv.weight, projection.width, width),
            ("output", output.weight, width, heads),
            ("gate_up", gate_up, inner, width),
            ("down", down.weight, width, inner),
        ):
            if (weight.outputs, weight.inputs) != (outputs, inputs):
                raise KernelInputError(
                    f"{name}: is [{weight.outputs}, {weight.inputs}], must be [{outputs}, {inputs}] to fit the others"
                )
            if weight.gated != (name == "gate_up") or weight.ops is not qkv.weight.ops:
                raise KernelInputError(f"{name}: must be packed as the others, and gated if it is gate_up alone")
        rule.check(projection.num_heads, qkv.weight.panels.device)
        self._ops, self._num_heads, self._rule, self._width = qkv.weight.ops, projection.num_heads, rule, width
        placed = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
        products = qkv, output, Linear(gate_up), down
        self._made = self._ops.make_decoder_layer(
            [None if norm is None else norm.weight for norm in placed],
            [0.0 if norm is None else norm.eps for norm in placed],
            [norm is not None and norm.plus_one for norm in placed],
            parallel,
            [part for own in products for part in (own.weight.panels, own.weight.scales, own.weight.sums, own.bias)],
            [own.weight.outputs for own in products],
            number_of(activation),
            projection.head_dim,
            [projection.query_norm, projection.key_norm],
            projection.norm_eps,
            projection.rotary == "interleaved",
            rule.scale,
            rule.soft_cap or 0.0,
            rule.exact_sinks,
        )

    def __call__(
        self,
        x: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        """What the layer makes of `x` `[..., width]` bf16, one token a row: the same shape.

        cos and sin are fp32 and contiguous, `[num_tokens, rotated numbers]`, slots int64 `[num_tokens]`; caches are in
        the native layout. Raises ValueError, KernelInputError where it is the rows' shapes.
        """
        if x.shape[-1] != self._width or x.dtype != torch.bfloat16:
            raise KernelInputError(f"x: is {x.dtype} {list(x.shape)}, must be bfloat16 [..., {self._width}]")
        rows.check(x.device)
        num_tokens = x.numel() // self._width
        plan = attention_plan(self._ops, num_tokens, self._num_heads, key_cache, value_cache, rows, self._rule)
        made: torch.Tensor = self._ops.decoder_layer(self._made, x, cos, sin, slots, key_cache, value_cache, plan)
        return made
