"""Masks of allowed ids, applied to logits on the device."""

import torch

from executor_svc.model.drawing import MAX_ELEMENTS


def forbid(logits: torch.Tensor, places: torch.Tensor, allowed: torch.Tensor, num_masked: int) -> None:
    """Set the logits of ids that are not allowed to -inf, in place. Waits for nothing.

    logits: float `[num_rows, vocab]`. places: int64 `[num_masked]`, rows. allowed: uint8 `[num_masked, >= vocab / 8]`;
    id i is allowed by bit i % 8 of byte i // 8.
    """
    vocab_size = logits.shape[1]
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    step = max(1, MAX_ELEMENTS // vocab_size)  # rows at once: bounds the temporaries
    for begin in range(0, num_masked, step):
        part = slice(begin, min(begin + step, num_masked))
        forbidden = ((allowed[part].unsqueeze(-1) >> bits) & 1).flatten(1)[:, :vocab_size] == 0
        rows = places[part]
        logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))
