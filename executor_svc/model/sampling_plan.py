"""How one step samples: everything that the device must not be asked, decided on the host from the rows' parameters."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.model.drawing import DrawPart, draw_parts
from executor_svc.model.randomness import random_uniform
from executor_svc.model.sampling_rows import NO_LOGPROBS, NO_PLACE, SamplingRows
from executor_svc.model.staging import Column
from executor_svc.step import Int32s, Masks


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """`columns` go to the device; the rest stays. Places are rows of the logits, ascending.

    drawn: places that draw; penalised: places that have token counts; ruled: those to whose logits something is added;
    watched: those that must not complete a sequence; asking: places that report log-probabilities.
    """

    num_rows: int
    drawn: NDArray[np.int64]
    parts: list[DrawPart]
    penalised: NDArray[np.int64]
    repeats: bool  # whether a repetition penalty is among them
    ruled: NDArray[np.int64]
    watched: NDArray[np.int64]
    num_masked: int  # places that draw from some ids alone
    num_held_back: int  # (place, end token) pairs that must not be drawn yet
    asking: NDArray[np.int64]
    num_top: NDArray[np.int64]  # `[num_asking]`; alternatives that each reports
    columns: dict[str, Column]

    @property
    def changes_logits(self) -> bool:
        """Whether any row has something to do with `RowTables`."""
        return bool(len(self.penalised) or len(self.ruled) or len(self.watched))

    @property
    def takes_the_likeliest(self) -> bool:
        """Whether every row takes the token of its largest logit as the model gives it, and nobody asks for more."""
        return not (len(self.drawn) or len(self.asking) or self.changes_logits or self.num_masked or self.num_held_back)


def plan_sampling(
    rows: SamplingRows, ids: Int32s, positions: Int32s, vocab_size: int, masks: Masks | None = None
) -> SamplingPlan:
    """`ids` int32 `[num_rows]` are the sampling rows, `positions` those of the tokens to be drawn."""
    state = rows.take(ids)
    columns: dict[str, Column] = {}
    drawn = np.flatnonzero(~state["greedy"])
    parts: list[DrawPart] = []
    if len(drawn):
        parts = _plan_draw(state if len(drawn) == len(state) else state[drawn], positions[drawn], vocab_size, columns)
        columns["sample_drawn"] = drawn
    penalised = np.flatnonzero(state["counts"] != NO_PLACE)
    repeats = False
    if len(penalised):
        columns["sample_penalised"] = penalised
        columns["sample_counts"] = state["counts"][penalised]
        for name in ("repetition", "frequency", "presence"):
            columns[f"sample_{name}"] = state[name][penalised]
        repeats = bool((columns["sample_repetition"] != 1).any())
    ruled = np.flatnonzero(state["added"] != NO_PLACE)
    if len(ruled):
        columns["sample_ruled"], columns["sample_added"] = ruled, state["added"][ruled]
    watched = np.flatnonzero(state["banned"] != NO_PLACE)
    if len(watched):
        columns["sample_watched"], columns["sample_banned"] = watched, state["banned"][watched]
    if masks is not None:
        columns["sample_masked"] = masks.places.astype(np.int64)
        columns["sample_masks"] = masks.allowed
    held_back = _held_back(rows, ids, state, positions, vocab_size)
    if len(held_back):
        columns["sample_held_back"] = held_back
    asking = np.flatnonzero(state["num_logprobs"] != NO_LOGPROBS)
    if len(asking):
        columns["sample_asking"] = asking
    return SamplingPlan(
        num_rows=len(ids),
        drawn=drawn,
        parts=parts,
        penalised=penalised,
        repeats=repeats,
        ruled=ruled,
        watched=watched,
        num_masked=0 if masks is None else len(masks.places),
        num_held_back=len(held_back),
        asking=asking,
        num_top=state["num_logprobs"][asking],
        columns=columns,
    )


def _plan_draw(
    state: NDArray[np.void], positions: Int32s, vocab_size: int, columns: dict[str, Column]
) -> list[DrawPart]:
    """Adds the columns of the rows that draw, and says how."""
    columns["sample_u"] = random_uniform(state["seed"], state["index"], positions)
    columns["sample_temperature"] = state["temperature"]
    top_k, top_p, min_p = state["top_k"], state["top_p"], state["min_p"]
    nucleus = np.flatnonzero(top_p < 1)
    if (top_k < vocab_size).any():
        columns["sample_top_k"] = top_k
    if len(nucleus):
        columns["sample_nucleus"] = nucleus
        columns["sample_top_p"] = top_p[nucleus]
    if (min_p > 0).any():
        columns["sample_min_p"] = min_p
    return draw_parts(top_k, nucleus, min_p, vocab_size)


def _held_back(
    rows: SamplingRows, ids: Int32s, state: NDArray[np.void], positions: Int32s, vocab_size: int
) -> NDArray[np.int64]:
    """Places in the flattened logits of end tokens that `min_tokens` holds back."""
    too_early = state["has_ends"] & (positions - state["num_prompt"] < state["min_tokens"])
    if not too_early.any():
        return np.empty(0, np.int64)
    return np.concatenate([place * vocab_size + rows.ends_of(int(ids[place])) for place in np.flatnonzero(too_early)])
