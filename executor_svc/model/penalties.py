"""Repetition, frequency and presence penalties: which tokens a row has seen, and what that does to its logits."""

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.model.sampling_rows import NO_PLACE
from executor_svc.model.staging import Staging
from executor_svc.step import Int32s
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token is in the prompt and in the output of one row: int32 `[vocab]` each."""

    in_prompt: torch.Tensor
    in_output: torch.Tensor


class Penalties:
    """Token counts of the rows that use a penalty, and of no others; each row's lie in a place of two tables."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._staging = Staging(device)
        self._free: list[int] = []
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def wanted(sampling: executor_pb2.RowSampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def start(self, token_ids: Int32s, num_prompt: int) -> int:
        """Count all ids that are known, so that a row which begins again goes on as if it had never ended.

        Returns the place of the counts.
        """
        place = self._take_place()
        for table, ids in zip((self._in_prompt, self._in_output), np.split(token_ids, [num_prompt]), strict=True):
            known = ids[ids < self._vocab_size].astype(np.int64)
            counts = table[place].zero_()
            if len(known):
                on_device = self._staging.to_device({"ids": known, "ones": np.ones(len(known), np.int32)})
                counts.scatter_add_(0, on_device["ids"], on_device["ones"])
        return place

    def end(self, place: int) -> None:
        """The place is free again; NO_PLACE is none."""
        if place != NO_PLACE:
            self._free.append(place)

    def clear(self) -> None:
        self._free = list(range(len(self._in_prompt)))

    def snapshot(self, place: int) -> TokenCounts | None:
        """The counts as they are now, to be given to a fork; None for NO_PLACE."""
        if place == NO_PLACE:
            return None
        return TokenCounts(self._in_prompt[place].clone(), self._in_output[place].clone())

    def restore(self, counts: TokenCounts) -> int:
        """Returns the place of a copy."""
        place = self._take_place()
        self._in_prompt[place].copy_(counts.in_prompt)
        self._in_output[place].copy_(counts.in_output)
        return place

    def apply(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        *,
        repetition: torch.Tensor | None,
        frequency: torch.Tensor,
        presence: torch.Tensor,
    ) -> torch.Tensor:
        """float32 logits `[num_rows, vocab]` after the penalties of the rows whose counts are at `places`.

        places: int64 `[num_rows]`; penalties: float32 `[num_rows]`, repetition None where no row has one.
        """
        in_output = self._in_output.index_select(0, places)
        if repetition is not None:
            factor = repetition[:, None]
            seen = (self._in_prompt.index_select(0, places) + in_output) > 0
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        logits = logits - in_output * frequency[:, None]
        return logits - (in_output > 0) * presence[:, None]

    def add(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a drawn token a row, int64 `[num_rows]` each; -1 for none. The values may still be in the making."""
        # A row is there once, so no place is added to twice.
        self._in_output[places, tokens.clamp_min(0)] += (tokens >= 0).int()

    def _take_place(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        """Twice the places; never fewer than four."""
        old = len(self._in_prompt)
        more = torch.zeros(max(4, old), self._vocab_size, dtype=torch.int32, device=self._device)
        self._in_prompt = torch.cat([self._in_prompt, more])
        self._in_output = torch.cat([self._in_output, more])
        self._free.extend(range(old, len(self._in_prompt)))
