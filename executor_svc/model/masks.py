"""What a model's attention mask says, found by asking for the rule instead of the mask.

Transformers makes a mask by a function registered under the attention's name, from a rule `(batch, head, query, key) ->
allowed`. Ours keeps the rule. It is then asked at telling places as far out as the model's longest sequence, where no
mask could be made, and must be a causal one, with a window or without. One query is asked at a time, so that a rule
of a million positions takes a few MiB and a third of a second on a CPU.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from executor_svc.model.refusal import ModelRefused

MAX_MASK_LENGTH = 1 << 20  # of longer sequences, rules are asked for a few keys of the last query only


class MaskChanged(Exception):
    """A model did something with its mask but hand it on, so which tokens its queries see is known to nobody else."""


class MaskRule:
    """Stands where a mask would be. Raises MaskChanged at any use but `window`."""

    def __init__(self, allows: Callable[..., torch.Tensor]) -> None:
        self._allows = allows
        # A model makes one mask for all layers of a type, so each is asked in full once.
        self._windows: dict[tuple[int | None, int], int | None] = {}

    def window(self, name: str, argument: int | None, max_model_len: int, device: torch.device) -> int | None:
        """The window that the rule amounts to, None for all tokens. Raises ModelRefused for any other rule.

        argument: the window that layer `name` passes beside its mask; None leaves it to the mask.
        """
        case = (argument, max_model_len)
        if case not in self._windows:
            self._windows[case] = self._find(name, argument, max_model_len, device)
        return self._windows[case]

    def _find(self, name: str, argument: int | None, max_model_len: int, device: torch.device) -> int | None:
        length, last = min(max_model_len, MAX_MASK_LENGTH), max_model_len - 1
        keys = torch.arange(length, device=device)
        seen = int(self._ask(length - 1, keys).sum())
        window = argument if argument is not None else seen if seen < length else None
        near = {0, 1, 2, length - 1} | {1 << bit for bit in range(length.bit_length())}
        near |= {(window or 0) * times + shift for times in (1, 2) for shift in (-1, 0, 1)}
        if not all(self._agrees(query, keys, window) for query in sorted(near) if 0 <= query < length):
            raise ModelRefused(
                f"{name} has an attention mask that is not a causal one with a window of {window}; "
                "which tokens its queries see cannot be expressed"
            )
        edge = max(0, last - (window or last))  # the last key not seen, if there is one
        if last >= length and not self._agrees(last, torch.tensor([0, edge, edge + 1, last], device=device), window):
            raise ModelRefused(
                f"{name} has an attention mask that is another one for sequences of more than {length} tokens; "
                f"set max_model_len to {length} or less"
            )
        return window

    def _ask(self, query: int, keys: torch.Tensor) -> torch.Tensor:
        """Which of `keys` `[n]` the query at that position sees: bool `[n]`."""
        zero = torch.zeros((), dtype=torch.int64, device=keys.device)
        return self._allows(zero, zero, torch.full_like(keys[:1], query), keys).expand_as(keys)

    def _agrees(self, query: int, keys: torch.Tensor, window: int | None) -> bool:
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        return torch.equal(self._ask(query, keys), expected)

    def __getitem__(self, index: object) -> "MaskRule":
        """All of it is the same rule; Gemma 4 asks for that."""
        if isinstance(index, tuple) and all(part in (slice(None), slice(0, None)) for part in index):
            return self
        raise MaskChanged

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise MaskChanged

    __getattr__ = __len__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __or__ = __invert__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise MaskChanged


def keep_rule(*, mask_function: Callable[..., torch.Tensor], **_: object) -> MaskRule:
    """A mask function for `AttentionMaskInterface`."""
    return MaskRule(mask_function)
