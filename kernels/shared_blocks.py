"""Blocks that several rows of a step have in common, so that they may be read once for all of them."""

from dataclasses import dataclass
from functools import cached_property

import torch

from kernels.checks import check_tensor


@dataclass(frozen=True)
class SharedBlocks:
    """Rows whose block tables begin alike, as segments; a hint: results are those without it, up to rounding.

    Segment s covers the blocks `first[s] : end[s]` of the tables of its members, the rows
    `rows[row_start[s] : row_start[s + 1]]`: two or more, each with exactly one query in the step. The segments of a row
    follow each other from block 0 on, without a gap, up to `own_start[row]`: the first of its blocks that is in no
    segment, 0 for a row that shares nothing. Segments may be nested as a tree is: the members of one that begins where
    another ends are all members of that other, and come after it.

    first, end: int32 `[num_segments]`; row_start: int32 `[num_segments + 1]`; rows: int32 `[row_start[-1]]`,
    or more of them, of which those behind mean nothing and are num_rows; own_start: int32 `[num_rows]`. On the caches'
    device.
    """

    first: torch.Tensor
    end: torch.Tensor
    row_start: torch.Tensor
    rows: torch.Tensor
    own_start: torch.Tensor

    @cached_property
    def by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where rows are members, row after row: `(places, start)`, both int32, `[len(rows)]` and `[num_rows + 1]`.

        Row r is in `rows` at `places[start[r] : start[r + 1]]`, in the order of its segments. Made once, on the device.
        """
        ordered, places = torch.sort(self.rows, stable=True)
        num_rows = self.own_start.shape[0]
        numbers = torch.arange(num_rows + 1, dtype=torch.int32, device=self.rows.device)
        return places.int(), torch.searchsorted(ordered, numbers, out_int32=True)

    def check(self, num_rows: int, device: torch.device) -> None:
        """Raises KernelInputError where these are not of `num_rows` rows on `device`."""
        num_segments = self.first.shape[0] if self.first.dim() else 0
        shapes = {"first": (num_segments,), "end": (num_segments,), "row_start": (num_segments + 1,)}
        for name, shape in {**shapes, "rows": (None,), "own_start": (num_rows,)}.items():
            check_tensor(f"shared.{name}", getattr(self, name), shape, (torch.int32,), device)
