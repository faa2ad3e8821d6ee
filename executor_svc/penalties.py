"""Repetition, frequency and presence penalties: which tokens a row has seen, and what that does to its logits."""

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.step import Int32s
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Of one row: `in_prompt` bool `[vocab]`, `in_output` int32 `[vocab]`, how often each token is there."""

    in_prompt: torch.Tensor
    in_output: torch.Tensor

    @classmethod
    def of(cls, token_ids: Int32s, num_prompt: int, vocab_size: int, device: torch.device) -> "TokenCounts":
        """From all ids that are known, so that a row which begins again goes on as if it never had ended."""
        prompt, output = (np.bincount(ids, minlength=vocab_size) for ids in np.split(token_ids, [num_prompt]))
        return cls(
            torch.from_numpy(prompt[:vocab_size] > 0).to(device),
            torch.from_numpy(output[:vocab_size].astype(np.int32)).to(device),
        )

    def copy(self) -> "TokenCounts":
        return TokenCounts(self.in_prompt, self.in_output.clone())  # the prompt never changes again


class Penalties:
    """Token counts of the rows that use a penalty, and of no others."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._counts: dict[int, TokenCounts] = {}

    @staticmethod
    def wanted(sampling: executor_pb2.RowSampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def __contains__(self, row: int) -> bool:
        return row in self._counts

    def start(self, row: int, token_ids: Int32s, num_prompt: int) -> None:
        self._counts[row] = TokenCounts.of(token_ids, num_prompt, self._vocab_size, self._device)

    def end(self, row: int) -> None:
        self._counts.pop(row, None)

    def snapshot(self, row: int) -> TokenCounts | None:
        """The row's counts, to be given to a fork."""
        counts = self._counts.get(row)
        return counts and counts.copy()

    def restore(self, row: int, counts: TokenCounts) -> None:
        self._counts[row] = counts

    def clear(self) -> None:
        self._counts.clear()

    def apply(self, logits: torch.Tensor, row: int, sampling: executor_pb2.RowSampling) -> None:
        """Change one row's float32 logits `[vocab]` in place."""
        counts = self._counts[row]
        if sampling.repetition_penalty != 1:
            seen = counts.in_prompt | (counts.in_output > 0)
            penalty = sampling.repetition_penalty
            logits.copy_(torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits))
        if sampling.frequency_penalty != 0:
            logits.sub_(counts.in_output * sampling.frequency_penalty)
        if sampling.presence_penalty != 0:
            logits.sub_((counts.in_output > 0) * sampling.presence_penalty)

    def add(self, row: int, token: torch.Tensor) -> None:
        """Count a drawn token, a tensor `[1]` that may still be in the making on the device."""
        self._counts[row].in_output.index_add_(0, token.clamp_min(0), (token >= 0).int())
