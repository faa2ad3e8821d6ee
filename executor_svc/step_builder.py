"""Merges what several plans schedule into one step."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.batch import AppliedPlan, ResidentBatch
from executor_svc.step import Int32s, Step


def build_step(batch: ResidentBatch, plans: list[AppliedPlan]) -> Step:
    """One step over the rows of all plans, in their order. All of them have been applied, and nothing since."""
    rows = _merged([plan.rows for plan in plans])
    first = _merged([plan.first_positions for plan in plans])
    tokens = _merged([plan.tokens for plan in plans])
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(tokens, out=query_start[1:])
    context_lens = first + tokens
    block_size = batch.block_size
    width = -(-int(context_lens.max(initial=0)) // block_size)
    tables = batch.block_tables
    token_rows, positions = _rows_and_positions(rows, first, tokens, query_start)
    entries = token_rows.astype(np.int64) * tables.shape[1] + positions // block_size
    blocks = tables.reshape(-1).take(entries).astype(np.int64)  # a slot number may pass 32 bits
    return Step(
        rows=rows,
        query_start=query_start,
        token_ids=_token_ids(batch, rows, first, query_start),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=tables.take(rows, axis=0)[:, :width],
        context_lens=context_lens,
        samples=_merged_flags([plan.samples for plan in plans]),
        copy_sources=_merged([plan.copy_sources for plan in plans]),
        copy_destinations=_merged([plan.copy_destinations for plan in plans]),
    )


def _rows_and_positions(rows: Int32s, first: Int32s, tokens: Int32s, query_start: Int32s) -> tuple[Int32s, Int32s]:
    """Row and position of each token of the step."""
    total = int(query_start[-1])
    if total == len(rows):
        return rows, first
    offsets = np.repeat(first - query_start[:-1], tokens)
    return np.repeat(rows, tokens), offsets + np.arange(total, dtype=np.int32)


def _token_ids(batch: ResidentBatch, rows: Int32s, first: Int32s, query_start: Int32s) -> Int32s:
    """Ids that are known; -1 for a token that was sampled, which the runner alone knows."""
    token_ids = np.full(int(query_start[-1]), -1, np.int32)
    for i in np.flatnonzero(first < batch.num_known[rows]):
        begin, end = query_start[i], query_start[i + 1]
        known = batch.known_ids(rows[i])[first[i] : first[i] + end - begin]
        token_ids[begin : begin + len(known)] = known
    return token_ids


def _merged(columns: list[Int32s]) -> Int32s:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _merged_flags(columns: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
