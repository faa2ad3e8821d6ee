"""A rank's share of a linear layer as an ordinary layer, so that what holds for those holds for it: other kernels may
take its place, as in one process.

transformers marks shares as such (DTensor) and gives each module a `forward` of its own that moves inputs and outputs
between ranks. A layer that has some of the outputs and hands them to one that has the inputs of the same numbers has
nothing to move; the other one sums. All that is spread in another way stays as transformers made it.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from executor_svc.model.fused.products import Product


class SummedLinear(nn.Module):
    """A linear layer of which each rank has some of the inputs: the sum of what all ranks make of theirs."""

    def __init__(self, own: nn.Linear, bias: nn.Parameter | None, group: dist.ProcessGroup) -> None:
        """`own` has no bias, for that is added once."""
        super().__init__()
        self.own = own
        self.bias = bias
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        return self.own.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = vars(self.own).get("forward")
        made: torch.Tensor = product.sums(input) if isinstance(product, Product) else self.own(input)
        if made.device.type == "cpu":  # whose products are native on one rank may not be so on another
            made = made.float()
        dist.all_reduce(made, group=self._group)
        return (made if self.bias is None else made + self.bias).to(input.dtype)


def make_plain(model: PreTrainedModel) -> int:
    """Returns how many layers are ordinary now."""
    plan: dict[str, str] = model.tp_plan
    changed = 0
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if type(module) is not nn.Linear or style not in ("colwise", "rowwise"):
            continue
        if not isinstance(module.weight, DTensor):
            continue
        mesh = module.weight.device_mesh
        _take_share(module)
        if style == "rowwise":
            bias = module.bias
            module.register_parameter("bias", None)
            parent, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(parent), own_name, SummedLinear(module, bias, mesh.get_group()))
        changed += 1
    return changed


def _take_share(module: nn.Linear) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            module.register_parameter(name, nn.Parameter(parameter.to_local(), requires_grad=False))
    own: dict[str, Any] = vars(module)
    own.pop("forward", None)  # transformers' own; that of the class shows again
    module.out_features, module.in_features = module.weight.shape
