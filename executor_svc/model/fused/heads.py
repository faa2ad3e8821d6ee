"""How an attention layer makes heads of hidden states: one product, norms of queries and keys, and a rotation.

The ways are tried in plain torch and fp32 against what the layer itself hands to its attention function; the way that
gives the same is then served by one native operation.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from executor_svc.model.looking import Heads

Style = Literal["half", "interleaved"]
Turns = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Of queries, and of keys and values; all of `dim` numbers."""

    queries: int
    keys: int
    dim: int

    @property
    def sizes(self) -> list[int]:
        """Outputs of queries, keys and values."""
        return [self.queries * self.dim, self.keys * self.dim, self.keys * self.dim]

    @classmethod
    def of(cls, heads: Heads) -> "HeadCounts":
        """Raises ValueError where they differ in size."""
        query, key, value = heads
        if key.shape != value.shape or query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise ValueError("heads of queries, keys and values are of different sizes")
        return cls(query.shape[1], key.shape[1], query.shape[3])


def merged_orders(counts: HeadCounts) -> Iterator[torch.Tensor | None]:
    """Ways in which one weight may hold queries, keys and values: the order that puts its outputs as ours are (all
    queries, all keys, all values), None where they are so already."""
    yield None
    group = counts.queries // counts.keys
    outputs = torch.arange(sum(counts.sizes)).view(counts.keys, group + 2, counts.dim)  # each key head with its queries
    yield torch.cat([outputs[:, :group].flatten(), outputs[:, group].flatten(), outputs[:, group + 1].flatten()])


@dataclass(frozen=True, slots=True)
class Rotation:
    """Pairs of a head's first `2 · pairs` numbers are turned: those half of them apart, or each with its neighbour.

    A model hands on cosines and sines `[1, tokens, width]` with every angle once, or twice in one of two orders:
    `step` and `pairs` say which of them are the angles of the pairs in their order.
    """

    style: Style
    pairs: int
    step: int

    def factors(self, turns: Turns) -> Turns:
        """Cosines and sines of each of a head's turned numbers, as `kernels.Projection` takes them: fp32
        `[tokens, 2 · pairs]`."""
        cos, sin = (self._each(turn[0, :, : self.pairs * self.step : self.step].float()) for turn in turns)
        return cos, sin

    def _each(self, angles: torch.Tensor) -> torch.Tensor:
        return torch.cat((angles, angles), -1) if self.style == "half" else angles.repeat_interleave(2, -1)


def rotations(turns: object, dim: int) -> Iterator[Rotation | None]:
    """What may be done with the turns that a layer is handed; nothing among it."""
    if (
        isinstance(turns, tuple | list)
        and len(turns) == 2
        and all(isinstance(turn, torch.Tensor) and turn.dim() == 3 and turn.shape[0] == 1 for turn in turns)
        and turns[0].shape == turns[1].shape
    ):
        width = turns[0].shape[-1]
        doubled = [(width // 2, 1), (width // 2, 2)] if width % 2 == 0 else []
        for (pairs, step), style in itertools.product([*doubled, (width, 1)], ("half", "interleaved")):
            if 2 * pairs <= dim:
                yield Rotation(style, pairs, step)
    yield None


class KeptFactors:
    """Factors of the turns of a step, which its layers share. One for each model."""

    _MOST = 4  # a model has one rotary embedding, or one for each kind of layer

    def __init__(self) -> None:
        # With the turns themselves: while they are kept, no others have their identity.
        self._kept: list[tuple[Turns, Rotation, Turns]] = []

    def of(self, rotation: Rotation, turns: Turns) -> Turns:
        for (cos, _), made_by, factors in self._kept:
            if cos is turns[0] and made_by == rotation:
                return factors
        factors = rotation.factors(turns)
        self._kept = [(turns, rotation, factors), *self._kept[: self._MOST - 1]]
        return factors
