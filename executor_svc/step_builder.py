"""Lays one plan's schedule out as a step, and merges the steps of several plans."""

from collections.abc import Sequence

import numpy as np

from executor_svc.masking import merge_masks
from executor_svc.plan import PlanColumns
from executor_svc.scoring import merge_scored
from executor_svc.shared_segments import merge_segments
from executor_svc.step import Draws, Int32s, Step


def build_step(
    plan: PlanColumns,
    first: Int32s,
    ends: Int32s,
    num_known: Int32s,
    tables: Int32s,
    known: Sequence[Int32s],
    block_size: int,
) -> Step:
    """The step of a plan whose row i computes its tokens from position `first[i]` up to `ends[i]`, exclusive; the ids
    of those before `num_known[i]` came with the row's start. `tables` and `known` are all rows' tables and ids."""
    rows = plan.scheduled_rows
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(ends - first, out=query_start[1:])
    width = -(-int(ends.max(initial=0)) // block_size)
    token_rows, positions = _rows_and_positions(rows, first, query_start)
    entries = positions // block_size
    offsets = positions - entries * block_size
    blocks = tables.reshape(-1).take(token_rows.astype(np.int64) * tables.shape[1] + entries)
    return Step(
        rows=rows,
        query_start=query_start,
        token_ids=_token_ids(known, rows, first, num_known, query_start),
        positions=positions,
        slots=blocks.astype(np.int64) * block_size + offsets,  # a slot number may pass 32 bits
        block_tables=tables.take(rows, axis=0)[:, :width],
        context_lens=ends,
        samples=plan.scheduled_samples,
        copy_sources=plan.copy_sources,
        copy_destinations=plan.copy_destinations,
    )


def merge_steps(steps: list[Step]) -> Step:
    """One step over the rows of all, in their order."""
    if len(steps) == 1:
        return steps[0]
    width = max(step.block_tables.shape[1] for step in steps)
    num_tokens = np.cumsum([0, *(len(step.token_ids) for step in steps)], dtype=np.int32)
    starts = [step.query_start[:-1] + before for step, before in zip(steps, num_tokens[:-1], strict=True)]
    return Step(
        rows=np.concatenate([step.rows for step in steps]),
        query_start=np.concatenate([*starts, num_tokens[-1:]]),
        token_ids=np.concatenate([step.token_ids for step in steps]),
        positions=np.concatenate([step.positions for step in steps]),
        slots=np.concatenate([step.slots for step in steps]),
        block_tables=np.concatenate([widened(step.block_tables, width) for step in steps]),
        context_lens=np.concatenate([step.context_lens for step in steps]),
        samples=np.concatenate([step.samples for step in steps]),
        copy_sources=np.concatenate([step.copy_sources for step in steps]),
        copy_destinations=np.concatenate([step.copy_destinations for step in steps]),
        decodes=all(step.decodes for step in steps),
        draws=_merged_draws(steps),
        masks=merge_masks(steps),
        scored=merge_scored(steps, num_tokens[:-1].tolist()),
        shared=merge_segments(steps),
    )


def _merged_draws(steps: list[Step]) -> Draws | None:
    if all(step.draws is None for step in steps):
        return None
    first_rows = np.cumsum([0, *(len(step.rows) for step in steps)], dtype=np.int32)
    places = [step.drawing_places + before for step, before in zip(steps, first_rows[:-1], strict=True)]
    return Draws(
        np.concatenate([step.drawing_rows for step in steps]), np.concatenate(places).astype(np.int32, copy=False)
    )


def widened(tables: Int32s, width: int) -> Int32s:
    """Block tables of so many entries, zeros behind theirs; a tenth of the time of numpy's pad."""
    if tables.shape[1] == width:
        return tables
    wider = np.zeros((len(tables), width), np.int32)
    wider[:, : tables.shape[1]] = tables
    return wider


def _rows_and_positions(rows: Int32s, first: Int32s, query_start: Int32s) -> tuple[Int32s, Int32s]:
    """Row and position of each token of the step."""
    total = int(query_start[-1])
    if total == len(rows):
        return rows, first
    tokens = np.diff(query_start)
    offsets = np.repeat(first - query_start[:-1], tokens)
    return np.repeat(rows, tokens), offsets + np.arange(total, dtype=np.int32)


def _token_ids(known: Sequence[Int32s], rows: Int32s, first: Int32s, num_known: Int32s, query_start: Int32s) -> Int32s:
    """Ids that are known; -1 for a token that was sampled, which the runner alone knows."""
    token_ids = np.full(int(query_start[-1]), -1, np.int32)
    for i in (first < num_known).nonzero()[0]:
        begin, end = query_start[i], query_start[i + 1]
        ids = known[rows[i]][first[i] : first[i] + end - begin]
        token_ids[begin : begin + len(ids)] = ids
    return token_ids
