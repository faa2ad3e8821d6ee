"""What sampling knows of each live row, as columns on the host: a step gathers its rows at once.

Parameters are read from their message when a row begins, and never again.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s
from paged.v1 import executor_pb2

NO_LOGPROBS = -1
NO_PLACE = -1
_FEWEST_ROWS = 64

ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("index", np.uint64),
        ("num_prompt", np.int64),
        ("min_tokens", np.int64),
        ("top_k", np.int64),  # the vocabulary's size for off
        # Its places in the tables of `Penalties`, `AddedLogits` and `BannedSequences`, or NO_PLACE.
        ("counts", np.int64),
        ("added", np.int64),
        ("banned", np.int64),
        ("num_logprobs", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("live", np.bool_),
        ("greedy", np.bool_),
        ("has_ends", np.bool_),
    ]
)


class TablePlaces(NamedTuple):
    """Of one row; NO_PLACE where it has no use for a table."""

    counts: int = NO_PLACE
    added: int = NO_PLACE
    banned: int = NO_PLACE


class SamplingRows:
    """Columns of ROW by row number. As many rows as have been named so far."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows = np.zeros(_FEWEST_ROWS, ROW)
        self._ends: dict[int, NDArray[np.int64]] = {}

    def set(self, row: int, sampling: executor_pb2.RowSampling, num_prompt: int, places: TablePlaces) -> None:
        """A sequence begins in the row."""
        if row >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros(row + 1, ROW)])
        ends = [token for token in sampling.end_token_ids if token < self._vocab_size]
        self._ends[row] = np.array(ends, np.int64)
        self._rows[row] = (
            sampling.seed,
            sampling.index,
            num_prompt,
            sampling.min_tokens,
            min(sampling.top_k or self._vocab_size, self._vocab_size),
            *places,
            sampling.logprobs if sampling.HasField("logprobs") else NO_LOGPROBS,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            True,
            sampling.temperature == 0 or sampling.top_k == 1,
            bool(ends),
        )

    def num_prompt(self, row: int) -> int:
        return int(self._rows["num_prompt"][row])

    def places(self, row: int) -> TablePlaces:
        """A row that is free has none."""
        if row >= len(self._rows) or not self._rows["live"][row]:
            return TablePlaces()
        return TablePlaces(*(int(self._rows[name][row]) for name in TablePlaces._fields))

    def end(self, row: int) -> None:
        if row < len(self._rows):
            self._rows["live"][row] = False
            self._ends.pop(row, None)

    def clear(self) -> None:
        self._rows["live"] = False
        self._ends.clear()

    def take(self, rows: Int32s) -> NDArray[np.void]:
        """ROW `[num_rows]`, a copy. Raises KeyError for a row that is not live."""
        if len(rows) and rows.max() >= len(self._rows):
            raise KeyError(int(rows.max()))
        taken = self._rows.take(rows)
        if not taken["live"].all():
            raise KeyError(int(rows[~taken["live"]][0]))
        return taken

    def ends_of(self, row: int) -> NDArray[np.int64]:
        """End tokens of a live row that the model has."""
        return self._ends[row]
