"""The rules that ids and sampling parameters of a plan must meet, one function a rule.

Each raises PlanViolation and changes nothing.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan import PlanViolation
from executor_svc.step import Int32s
from executor_svc.token_rules import check_rules
from paged.v1 import executor_pb2

MAX_LOGPROBS = 1024
MAX_END_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the pool allow, in tokens and blocks."""

    vocab_size: int
    max_model_len: int
    block_size: int
    rope_switch_len: int = 0  # as in ModelFacts

    @property
    def blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)


def check_in_range(column: str, ids: Int32s, limit: int) -> None:
    if len(ids) and ids.view(np.uint32).max() >= limit:  # a negative id is a huge unsigned one
        bad = ids[(ids < 0) | (ids >= limit)][0]
        raise PlanViolation(column, f"id {bad}", f"must be in [0, {limit})")


def check_owned(column: str, ids: Int32s, owner: NDArray[np.int64], session: int) -> None:
    """Every id is within range and lent to the session."""
    if not len(ids):
        return
    try:
        owned = owner.take(ids.view(np.uint32)) == session  # a negative id is a huge unsigned one
    except IndexError:
        check_in_range(column, ids, len(owner))
        raise
    if np.count_nonzero(owned) < len(ids):
        raise PlanViolation(column, f"id {ids[~owned][0]}", "is not in this session's lease")


def check_unique(column: str, ids: Int32s) -> None:
    if len(ids) > 1:
        ordered = np.sort(ids)
        repeated = ordered[1:] == ordered[:-1]
        if repeated.any():
            raise PlanViolation(column, f"id {ordered[1:][repeated][0]} twice", "may be there once")


def check_disjoint(column: str, ids: Int32s, other: str, other_ids: Int32s) -> None:
    both = np.intersect1d(ids, other_ids)
    if len(both):
        raise PlanViolation(column, f"id {both[0]}", f"is in {other} too")


def check_live(column: str, rows: Int32s, live: Int32s) -> None:
    """`live` is 1 for a live row, else 0."""
    alive = live.take(rows)
    if not alive.all():
        raise PlanViolation(column, f"row {rows[alive.argmin()]}", "is not live")


def check_token_ids(column: str, ids: Int32s, limits: Limits) -> None:
    if len(ids) and ids.view(np.uint32).max() >= limits.vocab_size:
        position = int(np.flatnonzero(ids.view(np.uint32) >= limits.vocab_size)[0])
        raise PlanViolation(column, f"id {ids[position]} at {position}", f"must be in [0, {limits.vocab_size})")


def check_started(started: executor_pb2.StartedRow, token_ids: Int32s, blocks: Int32s, limits: Limits) -> None:
    """Counts of a started row fit one another and the model; ownership is checked elsewhere."""
    row, known = started.row, len(token_ids)
    if not 1 <= known <= limits.max_model_len:
        raise PlanViolation("started.token_ids", f"{known} ids in row {row}", f"must be 1 to {limits.max_model_len}")
    check_token_ids("started.token_ids", token_ids, limits)
    if not 1 <= started.num_prompt_tokens <= known:
        found = f"{started.num_prompt_tokens} in row {row}"
        raise PlanViolation("started.num_prompt_tokens", found, f"must be 1 to the {known} token_ids")
    if started.num_computed_tokens >= known:
        found = f"{started.num_computed_tokens} in row {row}"
        raise PlanViolation("started.num_computed_tokens", found, f"must be below the {known} token_ids")
    if len(blocks) > limits.blocks_per_row:
        raise PlanViolation("started.blocks", f"{len(blocks)} in row {row}", f"at most {limits.blocks_per_row}")
    if len(blocks) * limits.block_size < started.num_computed_tokens:
        found = f"{len(blocks)} in row {row}"
        raise PlanViolation("started.blocks", found, f"cannot hold {started.num_computed_tokens} computed tokens")
    check_unique("started.blocks", blocks)


_RANGES = (
    # name, lowest, highest, lowest is allowed
    ("temperature", 0.0, 100.0, True),
    ("top_p", 0.0, 1.0, False),
    ("min_p", 0.0, 1.0, True),
    ("repetition_penalty", 0.0, 10.0, False),
    ("presence_penalty", -2.0, 2.0, True),
    ("frequency_penalty", -2.0, 2.0, True),
)


def check_sampling(column: str, sampling: executor_pb2.RowSampling, limits: Limits) -> None:
    """Every parameter is finite and within the range that inference.proto names, or a little beyond."""
    for name, lowest, highest, closed in _RANGES:
        value = getattr(sampling, name)
        if not math.isfinite(value) or value > highest or value < lowest or (value == lowest and not closed):
            interval = f"{'[' if closed else '('}{lowest:g}, {highest:g}]"
            raise PlanViolation(f"{column}.{name}", f"{value:g}", f"must be in {interval}")
    if len(sampling.end_token_ids) > MAX_END_TOKENS:
        raise PlanViolation(f"{column}.end_token_ids", f"{len(sampling.end_token_ids)}", f"at most {MAX_END_TOKENS}")
    for token_id in sampling.end_token_ids:
        if token_id >= limits.vocab_size:
            raise PlanViolation(f"{column}.end_token_ids", f"id {token_id}", f"must be below {limits.vocab_size}")
    most = min(MAX_LOGPROBS, limits.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if sampling.HasField(name) and (wanted := getattr(sampling, name)) > most:
            raise PlanViolation(f"{column}.{name}", f"{wanted}", f"at most {most}")
    check_rules(column, sampling, limits.vocab_size)
