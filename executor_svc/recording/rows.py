"""The resident rows as if each had started just now: what a recording begins with.

The batch has their lengths and blocks. What it has not is kept here: where the prompt ends, sampling parameters, and,
if they are recorded, the ids that were sampled.
"""

from dataclasses import dataclass

import numpy as np

from executor_svc.applied_plan import Forks, RowChanges
from executor_svc.batch import ResidentBatch
from executor_svc.leases import Ownership
from executor_svc.step import Int32s
from paged.v1 import executor_pb2, recording_pb2

_FIRST_WIDTH = 64
_NO_SAMPLING = executor_pb2.RowSampling()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Of all live rows. Columns int32 `[num_live]`, sessions int64; nothing in it changes any more."""

    step: int
    rows: Int32s
    sessions: np.ndarray
    num_tokens: Int32s
    num_prompt: Int32s
    num_computed: Int32s
    ends_sampled: np.ndarray
    num_blocks: Int32s
    tables: Int32s  # [num_live, width]
    sampling: list[executor_pb2.RowSampling]
    token_ids: Int32s | None  # [num_live, width]; None: not recorded

    def message(self) -> recording_pb2.Keyframe:
        return recording_pb2.Keyframe(step=self.step, rows=map(self._live_row, range(len(self.rows))))

    def _live_row(self, i: int) -> recording_pb2.LiveRow:
        num_tokens = int(self.num_tokens[i])
        ids = np.zeros(num_tokens, "<i4") if self.token_ids is None else self.token_ids[i, :num_tokens]
        started = executor_pb2.StartedRow(
            row=int(self.rows[i]),
            token_ids=ids.astype("<i4").tobytes(),
            num_prompt_tokens=int(self.num_prompt[i]),
            num_computed_tokens=int(self.num_computed[i]),
            blocks=self.tables[i, : self.num_blocks[i]].astype("<i4").tobytes(),
            sampling=self.sampling[i],
        )
        return recording_pb2.LiveRow(
            session=int(self.sessions[i]), row=started, ends_sampled=bool(self.ends_sampled[i])
        )


class RecordedRows:
    """Follows the steps of a batch. `note_changes` before a step's tokens are known, `note_tokens` after."""

    def __init__(self, batch: ResidentBatch, ownership: Ownership, *, with_ids: bool) -> None:
        num_rows = len(ownership.of_row)
        self._batch = batch
        self._ownership = ownership
        self._num_prompt = np.zeros(num_rows, np.int32)
        self._sampling = [_NO_SAMPLING] * num_rows
        self._ids = np.zeros((num_rows, _FIRST_WIDTH), np.int32) if with_ids else None
        self._lengths = np.zeros(num_rows, np.int64)

    def note_changes(self, changes: RowChanges) -> None:
        """What a plan has changed, in its order."""
        self._fork(changes.forks)
        for start in changes.starts:
            self._num_prompt[start.row] = start.num_prompt
            self._sampling[start.row] = start.sampling
            if self._ids is not None:
                self._grow(len(start.token_ids))
                self._ids[start.row, : len(start.token_ids)] = start.token_ids
                self._lengths[start.row] = len(start.token_ids)
        self._fork(changes.joined)

    def note_tokens(self, rows: Int32s, sampled: Int32s) -> None:
        """These have been sampled, each for its row."""
        if self._ids is None or not len(rows):
            return
        places = self._lengths[rows]
        self._grow(int(places.max()) + 1)
        self._ids[rows, places] = np.maximum(sampled, 0)
        self._lengths[rows] = places + 1

    def snapshot(self, step: int) -> Snapshot:
        """What the batch holds before this step. All plans before must have been settled in it."""
        batch = self._batch
        rows = np.flatnonzero(batch.live).astype(np.int32)
        num_tokens = (batch.num_known + batch.num_sampled)[rows]
        num_computed, num_blocks = batch.num_computed[rows], batch.num_blocks[rows]
        return Snapshot(
            step=step,
            rows=rows,
            sessions=self._ownership.of_row[rows],
            num_tokens=num_tokens,
            num_prompt=self._num_prompt[rows],
            num_computed=num_computed,
            ends_sampled=(batch.num_sampled[rows] > 0) & (num_computed == num_tokens - 1),
            num_blocks=num_blocks,
            tables=batch.block_tables[rows, : int(num_blocks.max(initial=0))],
            sampling=[self._sampling[row] for row in rows],
            token_ids=None if self._ids is None else self._ids[rows, : int(num_tokens.max(initial=0))],
        )

    def _fork(self, forks: Forks) -> None:
        if not len(forks.children):
            return
        for child, sampling in zip(forks.children.tolist(), forks.sampling, strict=True):
            self._sampling[child] = sampling
        self._num_prompt[forks.children] = self._num_prompt[forks.parents]
        if self._ids is not None:
            self._ids[forks.children] = self._ids[forks.parents]
            self._lengths[forks.children] = self._lengths[forks.parents]
            if forks.tokens is not None:
                self._ids[forks.children, self._lengths[forks.children] - 1] = forks.tokens

    def _grow(self, length: int) -> None:
        if self._ids is not None and length > self._ids.shape[1]:
            longer = np.zeros((len(self._ids), max(length, 2 * self._ids.shape[1])), np.int32)
            longer[:, : self._ids.shape[1]] = self._ids
            self._ids = longer
