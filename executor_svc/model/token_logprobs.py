"""Log-probabilities of drawn and most likely tokens, from the model's own logits."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.model.staging import Column
from executor_svc.step import Logprobs

NO_TOKEN = -1


class LogprobTensors(NamedTuple):
    """On the device: ids int64, values float32 `[num_rows, 1 + alternatives]`, the drawn token first; ranks int64."""

    ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


def token_logprobs(logits: torch.Tensor, drawn: torch.Tensor, num_top: int) -> LogprobTensors:
    """Of `[num_rows, vocab]` logits, with `num_top` alternatives a row, but no more than the vocabulary holds.

    drawn: int64 `[num_rows]`, -1 where a row's logits are not finite; such a row reports no token, -inf and rank 0.
    The rank of a token is 1 plus the number of tokens that are more likely.
    """
    finite = drawn >= 0
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, drawn.clamp_min(0)[:, None])
    ranks = torch.where(finite, (values > chosen).sum(-1) + 1, 0)
    top_values, top_ids = values.topk(min(num_top, logits.shape[1]), dim=-1)
    return LogprobTensors(
        torch.cat([drawn[:, None], top_ids.masked_fill(~finite[:, None], NO_TOKEN)], dim=1),
        torch.cat([chosen, top_values], dim=1).masked_fill(~finite[:, None], -torch.inf),
        ranks,
    )


def logprob_columns(ids: Column, values: Column, ranks: Column, *, num_top: NDArray[np.int64]) -> Logprobs:
    """The same on the host, with `num_top[i]` alternatives of row i."""
    # A row that asks for more than the vocabulary holds has the rest filled up, so that its columns keep their length.
    missing = max(0, int(num_top.max(initial=0)) + 1 - ids.shape[1])
    ids = np.pad(ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
    values = np.pad(values, ((0, 0), (0, missing)), constant_values=-np.inf)
    wanted = np.arange(ids.shape[1]) <= num_top[:, None]
    return Logprobs(
        ids=ids[wanted].astype(np.int32),
        values=values[wanted].astype(np.float32),
        ranks=ranks.astype(np.int32),
    )
