"""Linear layers that belong to nothing larger: the same product, of packed weights."""

import torch
from torch import nn
from torch.nn import functional

from executor_svc.model.fused.agreement import is_as_good, made_up_rows
from executor_svc.model.fused.observe import Seen
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.structure import Linear, as_linear

_ROWS = 5
_OUTPUTS_AT_ONCE = 8192  # in fp32: those of a whole output head would take more memory than the layer


def understand(module: nn.Module, seen: Seen, products: Products) -> Product | None:
    """What stands for the module's `forward`; None if it is no linear layer, or its products are not native. Its
    weights stay in it."""
    linear = as_linear(module)
    if linear is None or not seen.takes_one(module) or not products.are_native(linear.weight.dtype):
        return None
    rows = made_up_rows(_ROWS, linear.shape[1], linear.weight.dtype)
    product = products.of(linear)
    exact = _exact(linear, rows.float())
    return product if is_as_good(product(rows), module(rows), exact, products.rounding) else None


def _exact(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    parts = [functional.linear(rows, part.float()) for part in linear.weight.split(_OUTPUTS_AT_ONCE)]
    made = torch.cat(parts, dim=-1)
    return made if linear.bias is None else made + linear.bias.float()
