"""The tokens of a step whose last hidden states are wanted. Of a prompt's others nothing is but keys and values, which
the last layer's attention writes: what that layer does after it is left out for them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Wanted:
    """What a model's last layer is told of a step; one for each model."""

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None

    @contextmanager
    def only(self, tokens: torch.Tensor) -> Iterator[None]:
        """Within, the model is run once, and its last layer may go on with `tokens`, int64, alone: see `heard`."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    @property
    def heard(self) -> bool:
        """Whether the layer does so; else it gives hidden states of all tokens."""
        return self._tokens is None

    def take(self) -> torch.Tensor | None:
        """For the last layer: the tokens that it is to go on with; None for all."""
        tokens, self._tokens = self._tokens, None
        return tokens
