"""Repetition, frequency and presence penalties: which tokens a row has seen, and what that does to its logits."""

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.step import Int32s
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token is in the prompt and in the output of one row: int32 `[vocab]` each."""

    in_prompt: torch.Tensor
    in_output: torch.Tensor


class Penalties:
    """Token counts of the rows that use a penalty, and of no others. A row's counts lie in a place of two tables."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._in_output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    @staticmethod
    def wanted(sampling: executor_pb2.RowSampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def __contains__(self, row: int) -> bool:
        return row in self._places

    def start(self, row: int, token_ids: Int32s, num_prompt: int) -> None:
        """Count all ids that are known, so that a row which begins again goes on as if it had never ended."""
        prompt, output = (self._count(ids) for ids in np.split(token_ids, [num_prompt]))
        self.restore(row, TokenCounts(prompt, output))

    def end(self, row: int) -> None:
        place = self._places.pop(row, None)
        if place is not None:
            self._free.append(place)

    def clear(self) -> None:
        for row in list(self._places):
            self.end(row)

    def snapshot(self, row: int) -> TokenCounts | None:
        """The row's counts as they are now, to be given to a fork; None where it has none."""
        place = self._places.get(row)
        return None if place is None else TokenCounts(self._in_prompt[place].clone(), self._in_output[place].clone())

    def restore(self, row: int, counts: TokenCounts) -> None:
        self.end(row)
        if not self._free:
            self._grow()
        place = self._places[row] = self._free.pop()
        self._in_prompt[place] = counts.in_prompt
        self._in_output[place] = counts.in_output

    def apply(self, logits: torch.Tensor, rows: list[int], sampling: list[executor_pb2.RowSampling]) -> torch.Tensor:
        """float32 logits `[num_rows, vocab]` of rows that have counts, after their penalties."""
        places = [self._places[row] for row in rows]
        in_output = self._in_output[places]
        repetition = self._column([s.repetition_penalty for s in sampling])
        if any(s.repetition_penalty != 1 for s in sampling):
            seen = (self._in_prompt[places] + in_output) > 0
            logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - in_output * self._column([s.frequency_penalty for s in sampling])
        return logits - (in_output > 0) * self._column([s.presence_penalty for s in sampling])

    def add(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Count a drawn token a row: int64 `[num_rows]`, -1 for none; the values may still be in the making."""
        places = torch.tensor([self._places[row] for row in rows], device=self._device)
        # A row is there once, so no place is added to twice.
        self._in_output[places, tokens.clamp_min(0)] += (tokens >= 0).int()

    def _count(self, ids: Int32s) -> torch.Tensor:
        counts = np.bincount(ids, minlength=self._vocab_size)[: self._vocab_size]
        return torch.from_numpy(counts.astype(np.int32)).to(self._device)

    def _column(self, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)[:, None]

    def _grow(self) -> None:
        """Twice the places; never fewer than four."""
        old = len(self._in_prompt)
        more = torch.zeros(max(4, old), self._vocab_size, dtype=torch.int32, device=self._device)
        self._in_prompt = torch.cat([self._in_prompt, more])
        self._in_output = torch.cat([self._in_output, more])
        self._free.extend(range(old, len(self._in_prompt)))
