"""One pass over a few tokens, in which is seen how each module is called, and by whom its weights are read."""

import inspect
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from executor_svc.model import looking
from executor_svc.model.fused.structure import WEIGHED
from executor_svc.model.looking import Heads

NAME = "paged_attention_observed"
NUM_TOKENS = 11
# What an attention layer may be handed besides hidden states and their turns: no number or flag changes what it does
# from one step to the next, and where tokens are is known.
_HARMLESS = {"attention_mask", "position_ids", "cache_position"}


@dataclass(slots=True)
class Seen:
    """`inputs`: of each module that is always called alike, the first call's arguments by name; `by_position`: which of
    these are passed without it. `attention`: what each layer passed to the attention function besides heads. `read`:
    modules whose weights others look at. `bound`: those whose weights must stay, for others use them.
    """

    inputs: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    by_position: dict[nn.Module, tuple[str, ...]] = field(default_factory=dict)
    attention: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    read: set[nn.Module] = field(default_factory=set)
    bound: set[nn.Module] = field(default_factory=set)

    def takes_only(self, module: nn.Module, *names: str) -> bool:
        """Whether the module was called with no more than those named, and what does not matter; by position at most
        the first of those named, in their order."""
        arguments, by_position = self.inputs.get(module), self.by_position.get(module, ())
        return (
            arguments is not None
            and by_position == names[: len(by_position)]
            and all(
                name in names or name in _HARMLESS or value is None or isinstance(value, bool | int | str)
                for name, value in arguments.items()
            )
        )

    def takes_one(self, module: nn.Module) -> bool:
        """Whether the module was called with a single tensor, by position."""
        arguments = self.inputs.get(module, {})
        is_one = [type(value) for value in arguments.values()] == [torch.Tensor]
        return is_one and self.by_position[module] == tuple(arguments)

    def is_free(self, module: nn.Module) -> bool:
        """Whether the module was called, and all weights in it are its own affair."""
        return module in self.inputs and not any(part in self.bound for part in module.modules())


def observe(model: PreTrainedModel, max_model_len: int) -> Seen:
    """Positions are spread over all that a sequence may have: what a layer does only far out is then in its inputs."""
    seen = Seen()
    looking.register(NAME)
    modules = list(model.modules())
    hooks = [module.register_forward_pre_hook(_keep_inputs(seen), with_kwargs=True) for module in modules]
    watched: list[nn.Module] = [module for module in modules if isinstance(module, WEIGHED)]
    for module in watched:
        module.__class__ = _watching(type(module))  # type: ignore[arg-type]  # a class is hashable
    positions = torch.linspace(0, max_model_len - 1, NUM_TOKENS).long()
    ids = torch.arange(NUM_TOKENS) % model.config.get_text_config().vocab_size
    try:
        looking.forward(model, NAME, _Attention(seen), ids, position_ids=positions[None])
    finally:
        for hook in hooks:
            hook.remove()
        for module in watched:
            module.__class__ = type(module).__bases__[0]
            if vars(module).pop(_READ, False):
                seen.read.add(module)
    seen.bound = seen.read | _sharing(model)
    return seen


def _sharing(model: nn.Module) -> set[nn.Module]:
    """Modules that have a parameter in common with another, or that are in several places."""
    owners: dict[int, list[nn.Module]] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return {module for sharing in owners.values() if len(sharing) > 1 for module in sharing}


def _keep_inputs(seen: Seen) -> Any:
    differently: set[nn.Module] = set()

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        except TypeError:
            return  # called as its signature does not say
        arguments: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            is_rest = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            arguments |= value if is_rest else {name: value}
        by_position = tuple(arguments)[: len(args)]
        alike = seen.inputs.setdefault(module, arguments).keys() == arguments.keys()
        if seen.by_position.setdefault(module, by_position) != by_position or not alike:
            differently.add(module)
        if module in differently:
            del seen.inputs[module]

    return keep


class _Attention:
    """Gives random vectors in place of attention."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def __call__(self, module: nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        self._seen.attention[module] = arguments
        query, _, value = heads
        return torch.randn_like(value[:, :1]).expand(-1, query.shape[1], -1, -1).transpose(1, 2).contiguous()


_READ = "_paged_weight_read"


@cache
def _watching(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that notes who reads `weight` outside of the module's own forward pass."""

    class Watching(kind):  # type: ignore[valid-type,misc]
        _inside = False

        @property
        def weight(self) -> Any:
            if not self._inside:
                self.__dict__[_READ] = True
            return self._parameters["weight"]

        @wraps(kind.forward)  # with its signature
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self._inside = True
            try:
                return super().forward(*args, **kwargs)
            finally:
                del self._inside

    return Watching
