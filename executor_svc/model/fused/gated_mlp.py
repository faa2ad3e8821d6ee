"""Gated MLPs: down(activation(gate(x)) · up(x)), with gate and up in one product."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from executor_svc.model.fused.agreement import agrees, first_that, given, in_fp32, is_as_good, made_up_rows
from executor_svc.model.fused.observe import Seen
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.structure import Linear, as_linear, holds_only, is_untouched
from kernels.cpu import linear as native

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
_ROWS = 7


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """`[..., width]` to the same. `reading`: which of the ways to read the module this is, by number."""

    gate_up: native.PackedWeight
    down: Product
    activation: str
    reading: int

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(native.gated(x, self.gate_up, self.activation), residual)


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One way to read the module: `[inner, width]` twice, and what brings that back."""

    gate: torch.Tensor
    up: torch.Tensor
    down: Linear
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = ACTIVATIONS[self.activation](functional.linear(x, self.gate)) * functional.linear(x, self.up)
        return functional.linear(inner, self.down.weight, self.down.bias)


def understand(module: nn.Module, seen: Seen, products: Products) -> GatedMLP | None:
    """What `module` computes, if it is a gated MLP whose products are native; else None. Its weights stay in it."""
    linears = _linears(module)
    if len(linears) not in (2, 3) or not is_untouched(module) or not (seen.takes_one(module) and seen.is_free(module)):
        return None
    if not holds_only(module, [linear.module for linear in linears], own=[]) or not products.are_native(
        linears[0].weight.dtype
    ):
        return None
    rows, exact_module = made_up_rows(_ROWS, linears[0].shape[1], linears[0].weight.dtype), in_fp32(module)
    own, exact = given(lambda: module(rows[None])), given(lambda: exact_module(rows.float()[None]))
    if not isinstance(own, torch.Tensor) or not isinstance(exact, torch.Tensor):
        return None
    exact_readings = list(_readings(_linears(exact_module)))
    found = first_that(exact_readings, lambda reading: agrees(reading(rows.float())[None], exact))
    if found is None:
        return None
    mlp = build(module, products, exact_readings.index(found))
    return mlp if is_as_good(mlp(rows[None]), own, exact, products.rounding) else None


def build(module: nn.Module, products: Products, number: int) -> GatedMLP:
    """What `module` computes, read in the way of that number. Raises IndexError where it cannot be read so."""
    reading = list(_readings(_linears(module)))[number]
    gate_up = products.gated(reading.gate, reading.up)
    return GatedMLP(gate_up, products.of(reading.down), reading.activation, number)


def _linears(module: nn.Module) -> list[Linear]:
    return [linear for child in module.children() if (linear := as_linear(child)) is not None]


def _readings(linears: list[Linear]) -> Iterator[_Reading]:
    for activation in ACTIVATIONS:
        for down in linears:
            others = [linear for linear in linears if linear is not down]
            if any(linear.bias is not None for linear in others):
                continue
            for gate, up in itertools.permutations(_halves(others)):
                if gate.shape == up.shape == down.shape[::-1]:
                    yield _Reading(gate, up, down, activation)


def _halves(linears: list[Linear]) -> list[torch.Tensor]:
    if len(linears) == 2:
        return [linear.weight for linear in linears]
    return list(linears[0].weight.chunk(2))
