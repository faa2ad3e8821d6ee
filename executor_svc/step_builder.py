"""Merges what several plans schedule into one step."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.step import Int32s, Step


def build_step(batch: ResidentBatch, plans: list[AppliedPlan]) -> Step:
    """One step over the rows of all plans, in their order. All of them have been applied, and nothing since."""
    rows = _merged([plan.rows for plan in plans])
    first = _merged([plan.first_positions for plan in plans])
    context_lens = _merged([plan.ends for plan in plans])
    num_known = _merged([plan.num_known for plan in plans])
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(context_lens - first, out=query_start[1:])
    block_size = batch.block_size
    width = -(-int(context_lens.max(initial=0)) // block_size)
    tables = batch.block_tables
    token_rows, positions = _rows_and_positions(rows, first, query_start)
    entries = positions // block_size
    offsets = positions - entries * block_size
    blocks = tables.reshape(-1).take(token_rows.astype(np.int64) * tables.shape[1] + entries)
    return Step(
        rows=rows,
        query_start=query_start,
        token_ids=_token_ids(batch, rows, first, num_known, query_start),
        positions=positions,
        slots=blocks.astype(np.int64) * block_size + offsets,  # a slot number may pass 32 bits
        block_tables=tables.take(rows, axis=0)[:, :width],
        context_lens=context_lens,
        samples=_merged_flags([plan.samples for plan in plans]),
        copy_sources=_merged([plan.copy_sources for plan in plans]),
        copy_destinations=_merged([plan.copy_destinations for plan in plans]),
    )


def _rows_and_positions(rows: Int32s, first: Int32s, query_start: Int32s) -> tuple[Int32s, Int32s]:
    """Row and position of each token of the step."""
    total = int(query_start[-1])
    if total == len(rows):
        return rows, first
    tokens = np.diff(query_start)
    offsets = np.repeat(first - query_start[:-1], tokens)
    return np.repeat(rows, tokens), offsets + np.arange(total, dtype=np.int32)


def _token_ids(batch: ResidentBatch, rows: Int32s, first: Int32s, num_known: Int32s, query_start: Int32s) -> Int32s:
    """Ids that are known; -1 for a token that was sampled, which the runner alone knows."""
    token_ids = np.full(int(query_start[-1]), -1, np.int32)
    for i in (first < num_known).nonzero()[0]:
        begin, end = query_start[i], query_start[i + 1]
        known = batch.known_ids(rows[i])[first[i] : first[i] + end - begin]
        token_ids[begin : begin + len(known)] = known
    return token_ids


def _merged(columns: list[Int32s]) -> Int32s:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _merged_flags(columns: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
