"""A step's columns as they go to the device: by name, in the dtypes that the model and the kernels take.

A column that layers need besides (one entry a token, or one a row) is added here, in `StepTensors`, and in
`decode_graphs.PADDING` with the value of a row that is none.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.model.attention import StepTensors
from executor_svc.model.staging import Column
from executor_svc.step import Step
from kernels import Rows, SharedBlocks

SHARED = ("first", "end", "row_start", "rows", "own_start")


def step_columns(step: Step) -> dict[str, Column]:
    """All that a step without its sampling needs. Columns that it has no use for are left out."""
    columns = copy_columns(step)
    if not len(step.rows):
        return columns
    if (step.token_ids < 0).any():
        columns["token_rows"] = token_rows(step)
    columns |= {
        "token_ids": step.token_ids.astype(np.int64),
        "positions": step.positions.astype(np.int64),
        "slots": step.slots,
        "query_start": step.query_start,
        "context_lens": step.context_lens,
        "block_tables": step.block_tables,
    }
    if step.samples.any():
        columns["sampling_rows"] = step.drawing_rows.astype(np.int64)
        columns["last_tokens"] = step.query_start[1:][step.drawing_places].astype(np.int64) - 1
    if step.shared is not None:
        columns |= {f"shared_{name}": getattr(step.shared, name) for name in SHARED}
    if step.scored is not None:
        columns["scored_places"] = step.scored.places
        columns["scored_targets"] = step.scored.targets.astype(np.int64)
    return columns


def copy_columns(step: Step) -> dict[str, Column]:
    if not len(step.copy_sources):
        return {}
    return {
        "copy_sources": step.copy_sources.astype(np.int64),
        "copy_destinations": step.copy_destinations.astype(np.int64),
    }


def token_rows(step: Step) -> NDArray[np.int64]:
    """The row of each token: int64 `[num_tokens]`."""
    rows = step.rows.astype(np.int64)
    return rows if len(step.token_ids) == len(rows) else rows.repeat(np.diff(step.query_start))


def step_tensors(columns: Mapping[str, torch.Tensor]) -> StepTensors:
    """What the attention layers take of a step's columns."""
    shared = None
    if "shared_first" in columns:
        shared = SharedBlocks(**{name: columns[f"shared_{name}"] for name in SHARED})
    rows = Rows(columns["block_tables"], columns["query_start"], columns["context_lens"], shared)
    return StepTensors(columns["slots"], rows)
