"""A plan as it came over the wire, read into columns: its shape is checked here, its meaning by the resident batch."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s
from paged.v1 import executor_pb2

_EMPTY = np.empty(0, np.int32)


class PlanViolation(Exception):
    """A plan breaks a rule of the plan stream. Names the column, the value found and the limit; ends the session."""

    def __init__(self, column: str, found: str, limit: str) -> None:
        super().__init__(f"{column}: {found}; {limit}")
        self.column = column


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """A plan's columns, int32 unless said otherwise; those that belong together have equal lengths."""

    fork_parents: Int32s
    fork_children: Int32s
    fork_sampling: list[executor_pb2.RowSampling]
    fork_tokens: Int32s | None  # None: the children go on with what their parents sampled
    ended_rows: Int32s
    started: list[executor_pb2.StartedRow]
    joined: list[executor_pb2.JoinedRow]
    appended_rows: Int32s
    appended_blocks: Int32s
    copy_rows: Int32s
    copy_sources: Int32s
    copy_destinations: Int32s
    scheduled_rows: Int32s
    scheduled_tokens: Int32s
    scheduled_samples: NDArray[np.bool_]
    mask_rows: Int32s
    masks: bytes  # as on the wire: how long one is depends on the vocabulary

    @property
    def moves_rows(self) -> bool:
        """Whether a row begins, ends or forks."""
        return bool(self.started or self.joined or len(self.ended_rows) or len(self.fork_children))


def read_int32s(column: str, data: bytes) -> Int32s:
    """The values of a wire column, not copied. Raises PlanViolation where bytes are left over."""
    if not data:
        return _EMPTY
    if len(data) % 4:
        raise PlanViolation(column, f"{len(data)} bytes", "must be a multiple of 4")
    return np.frombuffer(data, "<i4")


def read_plan(plan: executor_pb2.StepPlan) -> PlanColumns:
    """Raises PlanViolation where a column cannot be read or lengths do not fit."""
    parents = read_int32s("fork_parents", plan.fork_parents)
    children = read_int32s("fork_children", plan.fork_children)
    fork_sampling = list(plan.fork_sampling)
    fork_tokens = read_int32s("fork_tokens", plan.fork_tokens) if plan.fork_tokens else None
    appended_rows = read_int32s("appended_rows", plan.appended_rows)
    appended_blocks = read_int32s("appended_blocks", plan.appended_blocks)
    copy_rows = read_int32s("copy_rows", plan.copy_rows)
    copy_sources = read_int32s("copy_sources", plan.copy_sources)
    copy_destinations = read_int32s("copy_destinations", plan.copy_destinations)
    rows = read_int32s("scheduled_rows", plan.scheduled_rows)
    tokens = read_int32s("scheduled_tokens", plan.scheduled_tokens)
    samples = _read_flags("scheduled_samples", plan.scheduled_samples)
    _check_length("fork_children", len(children), "fork_parents", len(parents))
    _check_length("fork_sampling", len(fork_sampling), "fork_parents", len(parents))
    if fork_tokens is not None:
        _check_length("fork_tokens", len(fork_tokens), "fork_parents", len(parents))
    _check_length("appended_blocks", len(appended_blocks), "appended_rows", len(appended_rows))
    _check_length("copy_sources", len(copy_sources), "copy_rows", len(copy_rows))
    _check_length("copy_destinations", len(copy_destinations), "copy_rows", len(copy_rows))
    _check_length("scheduled_tokens", len(tokens), "scheduled_rows", len(rows))
    _check_length("scheduled_samples", len(samples), "scheduled_rows", len(rows))
    return PlanColumns(
        fork_parents=parents,
        fork_children=children,
        fork_sampling=fork_sampling,
        fork_tokens=fork_tokens,
        ended_rows=read_int32s("ended_rows", plan.ended_rows),
        started=list(plan.started),
        joined=list(plan.joined),
        appended_rows=appended_rows,
        appended_blocks=appended_blocks,
        copy_rows=copy_rows,
        copy_sources=copy_sources,
        copy_destinations=copy_destinations,
        scheduled_rows=rows,
        scheduled_tokens=tokens,
        scheduled_samples=samples,
        mask_rows=read_int32s("mask_rows", plan.mask_rows),
        masks=plan.masks,
    )


def _read_flags(column: str, data: bytes) -> NDArray[np.bool_]:
    flags = np.frombuffer(data, np.uint8)
    if len(flags) and flags.max() > 1:
        raise PlanViolation(column, f"byte {flags.max()}", "must be 0 or 1")
    return flags.view(np.bool_)


def _check_length(column: str, found: int, other: str, expected: int) -> None:
    if found != expected:
        raise PlanViolation(column, f"{found} entries", f"{other} has {expected}")
