"""Log-probabilities of a prompt's own tokens, through the head a few at a time: all their logits at once would take
more memory than the rest of the step."""

import torch

from executor_svc.model.drawing import MAX_ELEMENTS
from executor_svc.model.forward import Head
from executor_svc.model.token_logprobs import NO_TOKEN, LogprobTensors, token_logprobs


def score_tokens(
    head: Head,
    places: torch.Tensor,
    targets: torch.Tensor,
    *,
    num_top: int,
    vocab_size: int,
    max_rows: int,
) -> LogprobTensors:
    """Of each of `targets` after the token at its place: int64 `[num_scored]` each, with `num_top` alternatives.

    `head` gives logits `[n, head's width]` of n places. No more than `max_rows` are looked at together, which is what a
    step of decode rows takes. Where logits are not finite there is no token, and the rank is 0.
    """
    step = max(1, min(max_rows, MAX_ELEMENTS // vocab_size))
    parts = []
    for begin in range(0, len(places), step):
        logits = head(places[begin : begin + step])[:, :vocab_size]
        finite = torch.isfinite(logits.amax(-1))
        own = targets[begin : begin + step].masked_fill(~finite, NO_TOKEN)
        parts.append(token_logprobs(logits, own, num_top))
    return LogprobTensors(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
