"""Which of a step's tokens are looked at for log-probabilities of a prompt: those that one of its tokens follows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s, Scored, Step


def find_scored(
    step: Step, first: Int32s, ends: Int32s, known: Sequence[Int32s], num_prompt: Int32s, num_top: Int32s
) -> Scored | None:
    """Of a step whose row i computes positions `first[i]` up to `ends[i]`, exclusive; None where there are none.

    Of all rows: `known` ids that came with their start, `num_prompt` of them the prompt, and `num_top` alternatives
    wanted, negative where the row asks for nothing.
    """
    rows = step.rows
    asking = np.flatnonzero((num_top[rows] >= 0) & (first < num_prompt[rows] - 1))
    if not len(asking):
        return None
    places: list[NDArray[np.int64]] = []
    targets: list[Int32s] = []
    for i in asking.tolist():
        row, begin = rows[i], int(first[i])
        count = min(int(ends[i]), int(num_prompt[row]) - 1) - begin
        places.append(step.query_start[i] + np.arange(count, dtype=np.int64))
        targets.append(known[row][begin + 1 : begin + 1 + count])
    wanted = num_top[rows[asking]].astype(np.int64)
    return Scored(np.concatenate(places), np.concatenate(targets), wanted.repeat([len(ids) for ids in targets]))


def merge_scored(steps: Sequence[Step], num_tokens_before: Sequence[int]) -> Scored | None:
    """Those of all steps, where step i's tokens come after `num_tokens_before[i]` others."""
    scored = [(step.scored, before) for step, before in zip(steps, num_tokens_before, strict=True)]
    present = [(own, before) for own, before in scored if own is not None]
    if not present:
        return None
    return Scored(
        np.concatenate([own.places + before for own, before in present]),
        np.concatenate([own.targets for own, _ in present]),
        np.concatenate([own.num_top for own, _ in present]),
    )
