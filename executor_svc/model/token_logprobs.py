"""Log-probabilities of drawn and most likely tokens, from the model's own logits."""

import numpy as np
import torch

from executor_svc.step import Int32s, Logprobs

NO_TOKEN = -1


def token_logprobs(logits: torch.Tensor, drawn: torch.Tensor, num_top: Int32s) -> Logprobs:
    """Columns for rows of `[num_rows, vocab]` logits, `num_top[i]` alternatives each.

    drawn: int64 `[num_rows]`, -1 where a row's logits are not finite; such a row reports no token, -inf and rank 0.
    The rank of a token is 1 plus the number of tokens that are more likely.
    """
    finite = drawn >= 0
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, drawn.clamp_min(0)[:, None])
    ranks = torch.where(finite, (values > chosen).sum(-1) + 1, 0)
    most = min(int(num_top.max(initial=0)), logits.shape[1])
    top_values, top_ids = values.topk(most, dim=-1)
    ids = torch.cat([drawn[:, None], top_ids.masked_fill(~finite[:, None], NO_TOKEN)], dim=1).cpu().numpy()
    columns = torch.cat([chosen, top_values], dim=1).masked_fill(~finite[:, None], -torch.inf).cpu().numpy()
    # A row that asks for more than the vocabulary holds has the rest filled up, so that its columns keep their length.
    missing = int(num_top.max(initial=0)) - most
    ids = np.pad(ids, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
    columns = np.pad(columns, ((0, 0), (0, missing)), constant_values=-np.inf)
    wanted = np.arange(ids.shape[1]) <= num_top[:, None]
    return Logprobs(
        ids=ids[wanted].astype(np.int32),
        values=columns[wanted].astype(np.float32),
        ranks=ranks.cpu().numpy().astype(np.int32),
    )
