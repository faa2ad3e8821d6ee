"""Runs a model with an attention function that is told, for one pass, what to do with each call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

_ATTRIBUTE = "paged_look"

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Look(Protocol):
    """What a pass does with each call of the attention function."""

    def __call__(self, module: torch.nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        """heads: query, key and value, `[1, heads, tokens, dim]`. Returns `[1, tokens, heads, value dim]`."""
        ...


def register(name: str, mask_function: Callable[..., object] | None = None) -> None:
    """Make `name` an attention implementation for passes; without a mask function its layers get no mask."""
    AttentionInterface.register(name, _hook)
    if mask_function is not None:
        AttentionMaskInterface.register(name, mask_function)


def forward(model: PreTrainedModel, name: str, look: Look, tokens: torch.Tensor, **inputs: object) -> torch.Tensor:
    """One pass over `tokens` `[num_tokens]`. Returns logits `[num_tokens, vocab]`. The model keeps `name`."""
    logits: torch.Tensor = _run(model, model, name, look, tokens, inputs).logits[0]
    return logits


def without_logits(model: PreTrainedModel, name: str, look: Look, tokens: torch.Tensor, **inputs: object) -> Any:
    """The same without the model's head. Returns what the rest of the model does."""
    return _run(model, model.base_model, name, look, tokens, inputs)


@contextmanager
def at(module: torch.nn.Module, look: Look) -> Iterator[None]:
    """While it lasts, calls of `module` alone go to `look`; its model must have been run here before."""
    setattr(module, _ATTRIBUTE, look)
    try:
        yield
    finally:
        delattr(module, _ATTRIBUTE)


def _run(
    model: PreTrainedModel, part: Any, name: str, look: Look, tokens: torch.Tensor, inputs: dict[str, object]
) -> Any:
    model.set_attn_implementation(name)
    modules = list(model.modules())
    for module in modules:
        setattr(module, _ATTRIBUTE, look)
    try:
        with torch.inference_mode():
            return part(input_ids=tokens[None], use_cache=False, **inputs)
    finally:
        for module in modules:
            delattr(module, _ATTRIBUTE)


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    look: Look = getattr(module, _ATTRIBUTE)
    return look(module, (query, key, value), attention_mask, arguments), None
