"""From logits to one drawn token a row: temperature, top_k, top_p, min_p, and the draw.

Works on weights, `exp((logit - highest) / temperature)`: probabilities but for a factor, so that no temperature
overflows. The draw walks through the tokens by ascending id and takes the first whose running total passes
`u * total`. Running totals are float64, over sums of CHUNK tokens in fp32. A token of weight 0 is never the first to
pass.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

CHUNK = 512  # tokens whose weights are added up before running totals are made: so those are few
NUM_CANDIDATES = 1024  # enough for nearly every top_p; rows that need more are sorted in full
MAX_ELEMENTS = 1 << 24  # logits worked on at once: bounds the temporaries
MIN_TEMPERATURE = 1e-30  # below it, fp32 would divide by a denormal; every other token's weight is 0 long before


@dataclass(frozen=True, slots=True)
class DrawPart:
    """Rows that are drawn together, and what their parameters ask for; known without a look at the device."""

    rows: slice
    largest_top_k: int  # 0 where no row has one
    nucleus: slice  # of the rows that have a top_p, those in this part
    min_p: bool  # whether any row has one


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Columns on the device; those that no row needs are None.

    temperature, min_p: float32 `[num_rows]`; u: float64 `[num_rows]` in [0, 1); top_k: int64 `[num_rows]`, the
    vocabulary's size for off. nucleus: int64, the rows that have a top_p, ascending; top_p: float32, one for each.
    """

    temperature: torch.Tensor
    u: torch.Tensor
    top_k: torch.Tensor | None = None
    nucleus: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


def draw_parts(
    top_k: NDArray[np.int64], nucleus: NDArray[np.int64], min_p: NDArray[np.float32], vocab_size: int
) -> list[DrawPart]:
    """Shares rows out over parts of at most MAX_ELEMENTS logits. Columns as in `DrawParameters`, of all rows."""
    step = max(1, MAX_ELEMENTS // vocab_size)
    parts = []
    for begin in range(0, len(top_k), step):
        rows = slice(begin, min(begin + step, len(top_k)))
        limits = top_k[rows][top_k[rows] < vocab_size]
        first, last = np.searchsorted(nucleus, (rows.start, rows.stop)).tolist()
        parts.append(DrawPart(rows, int(limits.max(initial=0)), slice(first, last), bool((min_p[rows] > 0).any())))
    return parts


def draw(logits: torch.Tensor, parameters: DrawParameters, parts: list[DrawPart]) -> torch.Tensor:
    """One token id a row, int64 `[num_rows]`, from float32 logits `[num_rows, vocab]`; -inf is never drawn.

    `parts` cover all rows. A row needs one finite logit and neither NaN nor +inf; what other rows get is undefined
    but harmless.
    """
    drawn = []
    for part in parts:
        weights = _weights(logits[part.rows], parameters.temperature[part.rows])
        drawn.append(_pick(filter_weights(weights, parameters, part), parameters.u[part.rows]))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(MIN_TEMPERATURE)[:, None]
    return scaled.exp_()


def filter_weights(weights: torch.Tensor, parameters: DrawParameters, part: DrawPart) -> torch.Tensor:
    """The part's weights with those of tokens that top_k, then top_p, then min_p drop set to 0. Changes its argument.

    top_k keeps ties with the last token kept, as transformers does; top_p keeps the fewest, by weight and then by
    lower id; the most likely token always stays.
    """
    if part.largest_top_k and parameters.top_k is not None:
        top_k = parameters.top_k[part.rows]
        highest = weights.topk(part.largest_top_k, dim=-1).values
        last_kept = highest.gather(1, (top_k - 1).clamp_max(part.largest_top_k - 1)[:, None])
        weights.masked_fill_((weights < last_kept) & (top_k < weights.shape[1])[:, None], 0.0)
    if parameters.nucleus is not None and parameters.top_p is not None and part.nucleus.stop > part.nucleus.start:
        top_p = parameters.top_p[part.nucleus].double()
        if len(top_p) == len(weights):
            weights = _keep_top_p(weights, top_p)
        else:
            rows = parameters.nucleus[part.nucleus] - part.rows.start
            weights.index_copy_(0, rows, _keep_top_p(weights.index_select(0, rows), top_p))
    if part.min_p and parameters.min_p is not None:
        too_small = weights < parameters.min_p[part.rows][:, None] * weights.amax(-1, keepdim=True)
        weights.masked_fill_(too_small, 0.0)
    return weights


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """A few candidates mostly do, and on a CPU that is quick to see; elsewhere to look would be to wait."""
    enough = _chunk_sums(weights).sum(-1) * top_p
    few = weights.device.type == "cpu" and weights.shape[1] > NUM_CANDIDATES
    return _keep_of_few(weights, enough) if few else _keep_of_all(weights, enough)


def _keep_of_all(weights: torch.Tensor, enough: torch.Tensor) -> torch.Tensor:
    ordered = weights.sort(dim=-1, descending=True, stable=True)  # equal weights: lower id first
    return _nucleus(ordered.values, ordered.indices, enough, weights.shape[1])[0]


def _keep_of_few(weights: torch.Tensor, enough: torch.Tensor) -> torch.Tensor:
    values, ids = weights.topk(NUM_CANDIDATES, dim=-1)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)  # equal weights: lower id first
    kept, last = _nucleus(values, ids.gather(1, order), enough, weights.shape[1])
    undecided = (last == values[:, -1]) & (last > 0)
    for row in torch.nonzero(undecided).flatten().tolist():
        kept[row : row + 1] = _keep_of_all(weights[row : row + 1], enough[row : row + 1])
    return kept


def _nucleus(
    values: torch.Tensor, ids: torch.Tensor, enough: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the fewest tokens that reach `enough`, as `[rows, vocab]`, and the smallest of them, `[rows]`.

    values, ids: `[rows, candidates]`, the heaviest first.
    """
    before = values.cumsum(-1, dtype=torch.float64) - values
    keep = before < enough[:, None]
    keep[:, 0] = True
    last = values.gather(1, keep.sum(-1, keepdim=True) - 1)[:, 0]
    return values.new_zeros(len(values), vocab_size).scatter_(1, ids, values * keep), last


def _pick(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The chunk that the draw falls into, then the token in it."""
    vocab_size = weights.shape[1]
    chunk, rest = _passed(_chunk_sums(weights), u)
    first = chunk * CHUNK
    ids = first[:, None] + torch.arange(min(CHUNK, vocab_size), device=weights.device)
    inside = weights.gather(1, ids.clamp_max(vocab_size - 1)).double()
    running = inside.masked_fill_(ids >= vocab_size, 0.0).cumsum(-1)
    # By sums of another order the chunk's total is another one, by a few roundings.
    target = torch.minimum(rest, _below(running[:, -1]))
    return (first + _first_above(running, target)).clamp_max(vocab_size - 1)  # only a row of NaN gets past the end


def _passed(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of float64 weights `[rows, n]`: the first whose running total passes `u * total`, and by how much that target
    passes the total before it. int64 and float64, `[rows]`."""
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = torch.minimum(u * total, _below(total))
    place = _first_above(running, target).clamp_max(weights.shape[1] - 1)  # only a row of NaN gets past the end
    before = running.gather(1, place[:, None])[:, 0] - weights.gather(1, place[:, None])[:, 0]
    return place, (target - before).clamp_min(0.0)


def _first_above(running: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(running, target[:, None], right=True)[:, 0]


def _below(total: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(total, torch.zeros_like(total))


def _chunk_sums(weights: torch.Tensor) -> torch.Tensor:
    """float64 `[rows, ceil(vocab / CHUNK)]`"""
    whole = weights.shape[1] // CHUNK * CHUNK
    sums = weights[:, :whole].unflatten(1, (-1, CHUNK)).sum(-1) if whole else weights[:, :0]
    if whole < weights.shape[1]:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)
    return sums.double()
