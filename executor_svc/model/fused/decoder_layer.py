"""Decoder layers: norms, attention, MLP and the additions between them, called without their modules, and each residual
added where the product before it is rounded; in one native call where all of the parts are native.

What a layer does with the results of its parts is found out with stand-ins for them, which compute something simple
and different from each other: the layer's own code is then an expression in fp32 that a candidate must equal.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from executor_svc.model.attention import layer_of
from executor_svc.model.fused.agreement import agrees, given, made_up_rows
from executor_svc.model.fused.attention import FusedAttention
from executor_svc.model.fused.gated_mlp import GatedMLP
from executor_svc.model.fused.heads import Turns
from executor_svc.model.fused.norm import RMSNorm
from executor_svc.model.fused.observe import NUM_TOKENS, Seen
from executor_svc.model.fused.products import Product
from executor_svc.model.fused.structure import is_untouched
from executor_svc.model.fused.wanted import Wanted
from kernels.cpu import decoder_layer as native
from kernels.cpu.caches import is_native
from kernels.cpu.linear import PackedWeight

Function = Callable[[torch.Tensor], torch.Tensor]
_TURNS = "position_embeddings"


@dataclass(frozen=True, slots=True)
class Order:
    """Which of a layer's norms (by number) come before and after attention and MLP; None for no norm.

    Where the MLP is `parallel`, it takes what the attention takes, and both are added to that.
    """

    before_attention: int | None
    after_attention: int | None
    before_mlp: int | None
    after_mlp: int | None
    parallel: bool

    def __call__(self, x: torch.Tensor, attention: Function, mlp: Function, norms: list[Function]) -> torch.Tensor:
        def normed(number: int | None, values: torch.Tensor) -> torch.Tensor:
            return values if number is None else norms[number](values)

        attended = normed(self.after_attention, attention(normed(self.before_attention, x)))
        between = x if self.parallel else x + attended
        made = normed(self.after_mlp, mlp(normed(self.before_mlp, between)))
        return x + attended + made if self.parallel else between + made


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """Stands for a decoder layer's `forward`. `num_results`: 0 where that returns no tuple. The result is of the tokens
    that `wanted` names, where it is given and names some. `native` is all of it in one call, if there is one."""

    attention: FusedAttention
    mlp: GatedMLP
    norms: list[RMSNorm]
    order: Order
    num_results: int
    native: native.DecoderLayer | None
    wanted: Wanted | None = None

    def __call__(self, hidden_states: torch.Tensor, position_embeddings: Turns | None = None, **_: object) -> Any:
        wanted, layer = None if self.wanted is None else self.wanted.take(), layer_of(self.attention.module)
        if self.native is not None and wanted is None and is_native(layer.key_cache):
            made = layer.attend_within(self.native, hidden_states, *self.attention.factors(position_embeddings))
        else:
            made = self._by_parts(hidden_states, position_embeddings, wanted)
        return (made, *[None] * (self.num_results - 1)) if self.num_results else made

    def _by_parts(
        self, hidden_states: torch.Tensor, position_embeddings: Turns | None, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        order, norms = self.order, self.norms
        x = hidden_states if order.before_attention is None else norms[order.before_attention](hidden_states)
        if wanted is not None:
            hidden_states = hidden_states.index_select(1, wanted)
        if order.after_attention is None:
            between = self.attention.attend(x, position_embeddings, hidden_states, wanted)
        else:
            attended = self.attention.attend(x, position_embeddings, None, wanted)
            between = hidden_states + norms[order.after_attention](attended)
        x = hidden_states if order.parallel else between
        if order.before_mlp is not None:
            x = norms[order.before_mlp](x)
        return self.mlp(x, between) if order.after_mlp is None else between + norms[order.after_mlp](self.mlp(x))


def understand(module: nn.Module, seen: Seen) -> FusedLayer | None:
    """What `module` computes, if it is made of parts that have been replaced and of nothing else; else None."""
    if not is_untouched(module) or not seen.takes_only(module, "hidden_states", _TURNS):
        return None
    if any(True for _ in module.parameters(recurse=False)):
        return None
    parts = [child for child in module.children() if "forward" in vars(child)]
    if any(True for child in module.children() if child not in parts for _ in child.parameters()):
        return None
    attention, mlps, norms = _replaced_children(module)
    if (len(attention), len(mlps)) != (1, 1) or 2 + len(norms) != len(parts):
        return None
    found = _order(module, attention[0], mlps[0], norms, seen.inputs[module])
    return None if found is None else build(module, *found)


def build(module: nn.Module, order: Order, num_results: int) -> FusedLayer:
    """What `module` computes of its replaced parts in that order. Raises ValueError where it has others."""
    (attention,), (mlp,), norms = _replaced_children(module)
    own = [vars(norm)["forward"] for norm in norms]
    parts = vars(attention)["forward"], vars(mlp)["forward"], own, order
    return FusedLayer(*parts, num_results, _native(*parts))


def _native(attention: FusedAttention, mlp: GatedMLP, norms: list[RMSNorm], order: Order) -> native.DecoderLayer | None:
    qkv, output, down = (_packed(product) for product in (attention.qkv, attention.output, mlp.down))
    if qkv is None or output is None or down is None:
        return None

    def norm(number: int | None) -> native.Norm | None:
        own = None if number is None else norms[number]
        return None if own is None else native.Norm(own.weight, own.eps, own.plus_one)

    places = order.before_attention, order.after_attention, order.before_mlp, order.after_mlp
    return native.DecoderLayer(
        native.Norms(*map(norm, places)),
        qkv,
        attention.projection,
        attention.rule,
        output,
        mlp.gate_up,
        mlp.activation,
        down,
        parallel=order.parallel,
    )


def _packed(product: Product) -> native.Linear | None:
    weight = product.weight
    return native.Linear(weight, product.bias) if isinstance(weight, PackedWeight) else None


def _replaced_children(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module], list[nn.Module]]:
    """Those that are attention layers, MLPs and norms."""

    def of(kind: type) -> list[nn.Module]:
        return [child for child in module.children() if isinstance(vars(child).get("forward"), kind)]

    return of(FusedAttention), of(GatedMLP), of(RMSNorm)


def _order(
    module: nn.Module, attention: nn.Module, mlp: nn.Module, norms: list[nn.Module], inputs: dict[str, Any]
) -> tuple[Order, int] | None:
    width = inputs["hidden_states"].shape[-1]
    hidden = made_up_rows(NUM_TOKENS, width, torch.float32, scales=(1.0,))[None]
    stand_ins = [_stand_in(number, width) for number in range(2 + len(norms))]
    results = vars(attention)["forward"].reading.num_results
    parts, kept = [attention, mlp, *norms], [vars(part)["forward"] for part in (attention, mlp, *norms)]
    for part, stand_in in zip(parts, stand_ins, strict=True):
        part.forward = _as_module(stand_in, results if part is attention else 0)
    with torch.inference_mode():
        made = given(lambda: type(module).forward(module, **inputs | {"hidden_states": hidden}))
    for part, own in zip(parts, kept, strict=True):
        part.forward = own
    result: object = made[0] if isinstance(made, tuple) else made
    if not isinstance(result, torch.Tensor):
        return None
    for order in _orders(len(norms)):
        if agrees(order(hidden, stand_ins[0], stand_ins[1], list(stand_ins[2:])), result):
            return order, len(made) if isinstance(made, tuple) else 0
    return None


def _orders(num_norms: int) -> Iterator[Order]:
    for a, b, c, d in itertools.permutations([*range(num_norms), *[None] * (4 - num_norms)]):
        yield from (Order(a, b, c, d, parallel) for parallel in (False, True))


def _stand_in(number: int, width: int) -> Function:
    numbers = torch.randn(2, width, generator=torch.Generator().manual_seed(number))
    return lambda x: torch.tanh(x * numbers[0]) + numbers[1]


def _as_module(function: Function, num_results: int) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        made = function(args[0] if args else kwargs["hidden_states"])
        return (made, *[None] * (num_results - 1)) if num_results else made

    return forward
