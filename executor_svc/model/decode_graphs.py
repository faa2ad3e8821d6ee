"""Decode steps at fixed sizes, each recorded once and then replayed: launching a layer's kernels one by one takes a
host longer than a GPU needs for a few rows.

What was recorded reads and writes fixed addresses, so the step's columns are moved to fixed buffers first. A step of n
rows takes the next size on the ladder; the rows that are none compute token 0 at position 0 in slot 0, which lies in
block 0 and belongs to nobody, and see only that.

Some sizes are recorded once more for rows that have blocks in common. That takes two more launches a layer, which would
be lost where nothing is shared, and segments in columns of a fixed length: a step with more of them goes without.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor_svc.model.forward import Columns
from executor_svc.model.staging import Column, Layout
from executor_svc.model.step_columns import SHARED, copy_columns, token_rows
from executor_svc.step import SharedSegments, Step

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work to do and returns how to do it again, on the same addresses. Doing it twice must be harmless."""

# Columns with one entry a row, and what a row that is none has there.
PADDING: dict[str, tuple[np.dtype, int]] = {
    "token_ids": (np.dtype(np.int64), 0),
    "token_rows": (np.dtype(np.int64), 0),
    "positions": (np.dtype(np.int64), 0),
    "slots": (np.dtype(np.int64), 0),
    "context_lens": (np.dtype(np.int32), 1),
    "is_long": (np.dtype(np.bool_), 0),
}

# What more launches take, some 8 us a layer, is about what reading so many blocks takes: reckoned for 8 heads of 128 in
# 16 bits and blocks of 16 at 4 TB/s.
MIN_SAVED_BLOCKS = 512


def ladder(max_rows: int) -> list[int]:
    """Sizes from 1 to `max_rows`, each of those above 4 at most half as large again as the one before."""
    sizes = [1, 2, 4]
    while sizes[-1] < max_rows:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(4 if sizes[-1] < 8 else 8, power // 4))
    return [size for size in sizes if size < max_rows] + [max_rows]


def recordings(max_rows: int) -> list[tuple[int, bool]]:
    """(size, whether for rows that share) of each recording, in their order: the largest first, for the others then fit
    into memory that it has used. For rows that share, powers of two from 4 on will do: what they save is much."""
    sizes = ladder(max_rows)
    shared = [size for size in sizes if size >= 4 and (size & (size - 1) == 0 or size == max_rows)]
    return sorted([*((size, False) for size in sizes), *((size, True) for size in shared)], reverse=True)


def shared_lengths(size: int) -> dict[str, int]:
    """Of the columns of shared blocks for so many rows: as many segments as rows in pairs make, each row in two of them
    on average."""
    return {"first": size // 2, "end": size // 2, "row_start": size // 2 + 1, "rows": 2 * size, "own_start": size}


class DecodeGraphs:
    """The recorded sizes of one runner.

    `logits` computes a step of decode rows from columns on the device: `[num_rows, head's width]`. `table_width` is
    the most blocks that a row may have; `long_rope` says whether the model turns keys of long rows otherwise.
    """

    def __init__(
        self,
        logits: Callable[[Columns], torch.Tensor],
        *,
        max_rows: int,
        table_width: int,
        device: torch.device,
        long_rope: bool,
    ) -> None:
        self.min_saved_blocks = MIN_SAVED_BLOCKS
        self._compute = logits
        self._recordings = recordings(max_rows)
        self._sizes = ladder(max_rows)
        self._shared_sizes = sorted(size for size, shares in self._recordings if shares)
        self._padding = {name: value for name, (_, value) in PADDING.items() if long_rope or name != "is_long"}
        lengths = {f"shared_{name}": length for name, length in shared_lengths(max_rows).items()}
        layout = Layout(
            {name: (PADDING[name][0], (max_rows,)) for name in self._padding}
            | {name: (np.dtype(np.int32), (length,)) for name, length in lengths.items()}
        )
        self._packed = np.zeros(layout.num_bytes, np.uint8)
        self._on_host = layout.arrays(self._packed)
        self._on_device = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        self._columns = layout.tensors(self._on_device)
        for name, value in self._padding.items():
            self._columns[name].fill_(value)
        self._columns["query_start"] = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._columns["block_tables"] = torch.zeros(max_rows, table_width, dtype=torch.int32, device=device)
        self._logits: torch.Tensor | None = None
        self._replays: dict[tuple[int, bool], Callable[[], None]] = {}

    @property
    def sizes(self) -> list[int]:
        """What has been recorded, ascending."""
        return sorted({size for size, _ in self._replays})

    def record(self, recorder: Recorder) -> None:
        for size, shares in self._recordings:
            self._replays[size, shares] = recorder(
                lambda size=size, shares=shares: self._run_size(size, shares)  # type: ignore[misc]
            )

    def fit(self, step: Step) -> bool:
        """Whether the step is one of decode rows that all sample, of a size that has been recorded."""
        num_rows = len(step.rows)
        return (
            0 < num_rows <= self._sizes[-1]
            and len(self._replays) == len(self._recordings)
            and len(step.token_ids) == num_rows
            and step.block_tables.shape[1] <= self._columns["block_tables"].shape[1]
            and step.all_draw
            and step.scored is None
        )

    def columns(self, step: Step, long: Mapping[str, Column]) -> dict[str, Column]:
        """A step that fits, as it goes to the device; `long` is empty or has the column `is_long`."""
        num_rows, (size, shares) = len(step.rows), self._recording_for(step)
        rows = token_rows(step)
        values: dict[str, NDArray[Any]] = {
            "token_ids": step.token_ids,
            "token_rows": rows,
            "positions": step.positions,
            "slots": step.slots,
            "context_lens": step.context_lens,
            **long,
        }
        for name, padding in self._padding.items():
            column = self._on_host[name]
            column[:num_rows] = values[name]
            column[num_rows:size] = padding
        if shares and step.shared is not None:
            self._set_shared(step.shared, size)
        tables = np.zeros((size, step.block_tables.shape[1]), np.int32)
        tables[:num_rows] = step.block_tables
        return copy_columns(step) | {"decode": self._packed, "block_tables": tables, "sampling_rows": rows}

    def run(self, columns: Columns, step: Step) -> torch.Tensor:
        """Logits of a step's rows, `[num_rows, head's width]`, valid until the next call."""
        tables = columns["block_tables"]
        self._on_device.copy_(columns["decode"])
        self._columns["block_tables"][: len(tables), : tables.shape[1]].copy_(tables)
        self._replays[self._recording_for(step)]()
        if self._logits is None:
            raise RuntimeError("a size was recorded without being run")
        return self._logits[: len(step.rows)]

    def _recording_for(self, step: Step) -> tuple[int, bool]:
        num_rows, shared = len(step.rows), step.shared
        if shared is not None and self._shared_sizes and num_rows <= self._shared_sizes[-1]:
            size = _next(self._shared_sizes, num_rows)
            lengths = shared_lengths(size)
            fits = len(shared.first) <= lengths["first"] and len(shared.rows) <= lengths["rows"]
            if fits and shared.num_saved_blocks >= self.min_saved_blocks:
                return size, True
        return _next(self._sizes, num_rows), False

    def _set_shared(self, shared: SharedSegments, size: int) -> None:
        num_segments, num_members = len(shared.first), len(shared.rows)
        padding = {"first": 0, "end": 0, "row_start": num_members, "rows": size, "own_start": 0}
        used = {"first": num_segments, "end": num_segments, "row_start": num_segments + 1, "rows": num_members}
        for name, length in shared_lengths(size).items():
            column, end = self._on_host[f"shared_{name}"], used.get(name, len(shared.own_start))
            column[:end] = getattr(shared, name)
            column[end:length] = padding[name]

    def _run_size(self, size: int, shares: bool) -> None:
        columns = {name: self._columns[name][:size] for name in self._padding}
        columns["query_start"] = self._columns["query_start"][: size + 1]
        columns["block_tables"] = self._columns["block_tables"][:size]
        if shares:
            lengths = shared_lengths(size)
            columns |= {f"shared_{name}": self._columns[f"shared_{name}"][: lengths[name]] for name in SHARED}
        logits = self._compute(columns)
        if self._logits is None:  # the first run is of the largest size, and comes before any recording
            self._logits = torch.empty_like(logits)
        self._logits[:size].copy_(logits)


def _next(sizes: list[int], num_rows: int) -> int:
    return sizes[int(np.searchsorted(sizes, num_rows))]
