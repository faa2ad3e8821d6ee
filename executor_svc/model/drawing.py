"""From logits to one drawn token a row: temperature, top_k, top_p, min_p, and the draw.

Works on weights, `exp((logit - highest) / temperature)`: probabilities but for a factor, so that no temperature
overflows. The draw walks through the tokens by ascending id and takes the first whose running total passes
`u * total`; totals are float64. A token of weight 0 is never the first to pass.
"""

from dataclasses import dataclass

import torch

NUM_CANDIDATES = 1024  # enough for nearly every top_p; rows that need more are sorted in full
MAX_ELEMENTS = 1 << 24  # logits worked on at once: bounds the temporaries
MIN_TEMPERATURE = 1e-30  # below it, fp32 would divide by a denormal; every other token's weight is 0 long before


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Columns `[num_rows]`: float32, top_k int64 with the vocabulary's size for off, u float64 in [0, 1)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    u: torch.Tensor

    def at(self, rows: slice) -> "DrawParameters":
        return DrawParameters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.u[rows]
        )


def draw(logits: torch.Tensor, parameters: DrawParameters, *, filtered: bool) -> torch.Tensor:
    """One token id a row, int64 `[num_rows]`, from float32 logits `[num_rows, vocab]`; -inf is never drawn.

    `filtered` False promises that top_k, top_p and min_p are off in all rows. A row needs one finite logit and
    neither NaN nor +inf; what other rows get is undefined but harmless.
    """
    num_rows, vocab_size = logits.shape
    step = max(1, MAX_ELEMENTS // vocab_size)
    parts = []
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        part = parameters.at(rows)
        weights = _weights(logits[rows], part.temperature)
        if filtered:
            weights = filter_weights(weights, part)
        parts.append(_pick(weights, part.u))
    return torch.cat(parts) if parts else logits.new_empty(0, dtype=torch.int64)


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(MIN_TEMPERATURE)[:, None]
    return scaled.exp_()


def filter_weights(weights: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """The weights with those of tokens that top_k, then top_p, then min_p drop set to 0. Changes its argument.

    top_k keeps ties with the last token kept, as transformers does; top_p keeps the fewest, by weight and then by
    lower id; the most likely token always stays.
    """
    vocab_size = weights.shape[1]
    limited = parameters.top_k < vocab_size
    if limited.any():
        top_k = parameters.top_k.clamp(1, vocab_size)
        highest = weights.topk(int(top_k[limited].max()), dim=-1).values
        last_kept = highest.gather(1, (top_k - 1).clamp_max(highest.shape[1] - 1)[:, None])
        weights.masked_fill_((weights < last_kept) & limited[:, None], 0.0)
    nucleus = torch.nonzero(parameters.top_p < 1.0).flatten()
    if len(nucleus):
        weights[nucleus] = _keep_top_p(weights[nucleus], parameters.top_p[nucleus].double())
    return weights.masked_fill_(weights < parameters.min_p[:, None] * weights.amax(-1, keepdim=True), 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    enough = weights.sum(-1, dtype=torch.float64) * top_p
    values, ids = weights.topk(min(NUM_CANDIDATES, weights.shape[1]), dim=-1)
    kept, undecided = _nucleus(values, ids, enough, weights.shape[1])
    for row in torch.nonzero(undecided).flatten().tolist():
        everything = weights[row : row + 1].sort(dim=-1, descending=True, stable=True)
        kept[row] = _nucleus(everything.values, everything.indices, enough[row : row + 1], weights.shape[1])[0]
    return kept


def _nucleus(
    values: torch.Tensor, ids: torch.Tensor, enough: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the fewest tokens that reach `enough`, as `[rows, vocab]`; and rows for which `values` may not do."""
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)  # equal weights: lower id first
    ids = ids.gather(1, order)
    before = values.cumsum(-1, dtype=torch.float64) - values
    keep = before < enough[:, None]
    keep[:, 0] = True
    last = values.gather(1, keep.sum(-1, keepdim=True) - 1)[:, 0]
    undecided = (last == values[:, -1]) & (last > 0) & (values.shape[1] < vocab_size)
    kept = values.new_zeros(len(values), vocab_size).scatter_(1, ids, values * keep)
    return kept, undecided


def _pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    running = weights.cumsum(-1, dtype=torch.float64)
    total = running[:, -1]
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(running, target[:, None], right=True)[:, 0]
    return ids.clamp_max(weights.shape[1] - 1)  # only a row of NaN gets past the end
