"""Sequences of several tokens that a row must not complete: its last tokens are kept, and compared, on the device."""

from collections.abc import Sequence

import numpy as np
import torch

from executor_svc.model.places import Places
from executor_svc.model.staging import Staging
from executor_svc.step import Int32s
from executor_svc.token_rules import MAX_BANNED_TOKENS

NUM_RECENT = MAX_BANNED_TOKENS - 1
_ANY, _NONE, _NEVER = -1, -2, -3  # in a beginning: any token; of a row: no token there; in a beginning that is none


class BannedSequences:
    """Tables by place, for the rows that have such sequences alone.

    `recent` int32 `[places, NUM_RECENT]`: the row's last tokens, the latest last. Of each of its sequences `begins`
    int32 `[places, sequences, NUM_RECENT]` has all but the last token, against the right, and `lasts` int64
    `[places, sequences]` that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._staging = Staging(device)
        self._places = Places()
        self._recent = torch.zeros(0, NUM_RECENT, dtype=torch.int32, device=device)
        self._begins = torch.zeros(0, 1, NUM_RECENT, dtype=torch.int32, device=device)
        self._lasts = torch.zeros(0, 1, dtype=torch.int64, device=device)

    def start(self, sequences: Sequence[Int32s], token_ids: Int32s) -> int:
        """A row begins with these known tokens. Returns its place."""
        recent = np.full(NUM_RECENT, _NONE, np.int32)
        last = token_ids[-NUM_RECENT:]
        recent[NUM_RECENT - len(last) :] = last
        place = self._set_sequences(sequences)
        self._recent[place].copy_(self._staging.to_device({"recent": recent})["recent"])
        return place

    def fork(self, sequences: Sequence[Int32s], recent: torch.Tensor) -> int:
        """A row begins with the tokens of another, as `snapshot` gave them. Returns its place."""
        place = self._set_sequences(sequences)
        self._recent[place].copy_(recent)
        return place

    def snapshot(self, place: int) -> torch.Tensor:
        return self._recent[place].clone()

    def end(self, place: int) -> None:
        self._places.give_back(place)

    def clear(self) -> None:
        self._places.clear()

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Set to -inf, in `rows` of contiguous float32 logits `[num_rows, vocab]`, what would complete a sequence.

        int64 `[num_watched]` each.
        """
        begins = self._begins.index_select(0, places)
        recent = self._recent.index_select(0, places)[:, None]
        completes = ((begins == recent) | (begins == _ANY)).all(-1)
        at = rows[:, None] * logits.shape[1] + self._lasts.index_select(0, places)
        added = torch.zeros_like(at, dtype=logits.dtype).masked_fill(completes, -torch.inf)
        logits.view(-1).index_add_(0, at.view(-1), added.view(-1))

    def add(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """A drawn token a row, int64 `[num_watched]` each; -1 for none."""
        recent = self._recent.index_select(0, places)
        self._recent.index_copy_(0, places, torch.cat([recent[:, 1:], tokens[:, None].int()], dim=1))

    def _set_sequences(self, sequences: Sequence[Int32s]) -> int:
        place = self._places.take()
        self._make_room(place + 1, len(sequences))
        width = self._begins.shape[1]
        begins = np.full((width, NUM_RECENT), _NEVER, np.int32)
        lasts = np.zeros(width, np.int64)
        for i, sequence in enumerate(sequences):
            begins[i] = _ANY
            begins[i, NUM_RECENT - len(sequence) + 1 :] = sequence[:-1]
            lasts[i] = sequence[-1]
        on_device = self._staging.to_device({"begins": begins, "lasts": lasts})
        self._begins[place].copy_(on_device["begins"])
        self._lasts[place].copy_(on_device["lasts"])
        return place

    def _make_room(self, num_places: int, num_sequences: int) -> None:
        """Tables grow by doubling; what was not there before never completes anything."""
        old_places, old_width = self._lasts.shape
        places = old_places if num_places <= old_places else max(4, 2 * old_places)
        width = old_width if num_sequences <= old_width else max(num_sequences, 2 * old_width)
        if (places, width) == (old_places, old_width):
            return
        more = (0, width - old_width, 0, places - old_places)
        self._recent = torch.nn.functional.pad(self._recent, (0, 0, 0, places - old_places), value=_NONE)
        self._begins = torch.nn.functional.pad(self._begins, (0, 0, *more), value=_NEVER)
        self._lasts = torch.nn.functional.pad(self._lasts, more)
