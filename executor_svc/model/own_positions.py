"""Finds attention layers that count the positions of their tokens instead of taking them from position_ids.

In a step the tokens of many sequences lie side by side, so what a layer counts is the place in the step. A comparison
of results need not show it: Llama 4 scales queries by the logarithm of their position over 8192, which is 1 for all
short sequences. So what is looked for is the counting, between the layer's beginning and its attention.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CountingLayers(TorchFunctionMode):
    """While entered, notes the layers that make a range as long as the step. `attending` must be called by the hook."""

    def __init__(self, layers: Iterable[torch.nn.Module], num_tokens: int) -> None:
        super().__init__()
        self._layers, self._num_tokens = list(layers), num_tokens
        self._inside: torch.nn.Module | None = None
        self._handles: list[Any] = []
        self.found: list[torch.nn.Module] = []

    def __enter__(self) -> "CountingLayers":
        self._handles = [layer.register_forward_pre_hook(self._begin) for layer in self._layers]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def attending(self) -> None:
        """The layer has come to its attention."""
        self._inside = None

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        counts = function is torch.arange and result.numel() == self._num_tokens
        if counts and self._inside is not None:
            self.found.append(self._inside)
        return result

    def _begin(self, module: torch.nn.Module, _: object) -> None:
        self._inside = module
