"""What a module is made of: linear layers, and everything that would make a replacement unsafe."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

WEIGHED = (nn.Linear, Conv1D, nn.Embedding)


@dataclass(frozen=True, slots=True)
class Linear:
    """The weights of a linear layer: `weight` `[outputs, inputs]`, `bias` `[outputs]` or None."""

    module: nn.Module
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


def is_untouched(module: nn.Module) -> bool:
    """Whether calling the module runs its class's `forward` and nothing else: no hook, no other `forward`."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def as_linear(module: nn.Module) -> Linear | None:
    """The module as a linear layer; None if it is none, or none that may be replaced (quantised, sharded, hooked)."""
    if type(module) not in (nn.Linear, Conv1D) or not is_untouched(module):
        return None
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if weight is None or not is_plain(weight) or (bias is not None and not is_plain(bias)):
        return None
    if bias is not None and bias.dtype != weight.dtype:
        return None
    return Linear(module, weight if isinstance(module, nn.Linear) else weight.t(), bias)


def is_plain(tensor: object) -> bool:
    """A parameter of floating point on the CPU, and no tensor of another kind in its place."""
    return (
        type(tensor) is nn.Parameter
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_floating_point()
    )


def holds_only(module: nn.Module, parts: list[nn.Module], own: list[nn.Parameter]) -> bool:
    """Whether all parameters below `module` are those of `parts`, or among `own`."""
    known = {id(parameter) for part in parts for parameter in part.parameters()} | {id(parameter) for parameter in own}
    return all(id(parameter) in known for parameter in module.parameters())


def let_go(module: nn.Module) -> list[torch.Tensor]:
    """Take the weights of all linear layers and embeddings in `module` out of them, and its children out of it; returns
    the weights.

    Empty ones are left behind: who asks a model for its type looks at the first parameter.
    """
    taken = []
    for part in module.modules():
        if isinstance(part, WEIGHED):
            taken.append(part.weight.detach())
            part.weight = nn.Parameter(part.weight.new_empty(0), requires_grad=False)
    for name, _ in list(module.named_children()):
        delattr(module, name)
    return taken
