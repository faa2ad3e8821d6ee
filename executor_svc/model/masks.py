"""What a model's attention mask says, found by asking for the rule instead of the mask.

Transformers makes a mask by a function registered under the attention's name, from a rule `(batch, head, query, key) ->
allowed`. Ours keeps the rule. It is then asked at telling places as far out as the model's longest sequence, where no
mask could be made, and must be a causal one, with a window or without.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from executor_svc.model.refusal import ModelRefused

MAX_MASK_LENGTH = 1 << 16  # rules are asked up to this position


class MaskChanged(Exception):
    """A model did something with its mask but hand it on, so which tokens its queries see is known to nobody else."""


class MaskRule:
    """Stands where a mask would be. Raises MaskChanged at any use but `window`."""

    def __init__(self, allows: Callable[..., torch.Tensor]) -> None:
        self._allows = allows

    def window(self, name: str, argument: int | None, max_model_len: int, device: torch.device) -> int | None:
        """The window that the rule amounts to, None for all tokens. Raises ModelRefused for any other rule.

        argument: the window that layer `name` passes beside its mask; None leaves it to the mask.
        """
        length = min(max_model_len, MAX_MASK_LENGTH)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        keys = torch.arange(length, device=device)[None]
        seen = int(self._allows(zero, zero, torch.full_like(keys[:, :1], length - 1), keys).sum())
        window = argument if argument is not None else seen if seen < length else None
        near = {0, 1, 2, length - 1} | {1 << bit for bit in range(length.bit_length())}
        near |= {(window or 0) * times + shift for times in (1, 2) for shift in (-1, 0, 1)}
        queries = torch.tensor(sorted(q for q in near if 0 <= q < length), device=device)[:, None]
        expected = keys <= queries
        if window is not None:
            expected = expected & (keys > queries - window)
        if not torch.equal(self._allows(zero, zero, queries, keys).expand_as(expected), expected):
            raise ModelRefused(
                f"{name} has an attention mask that is not a causal one with a window of {window}; "
                "which tokens its queries see cannot be expressed"
            )
        return window

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
