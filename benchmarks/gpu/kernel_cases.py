"""The shapes and options that the kernels are checked with. Not every combination: each value meets many others."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.batches import Heads

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
GROUPS = ((8, 2), (16, 1), (6, 2), (7, 1), (4, 4), (32, 8), (3, 1), (8, 4))  # query heads, key/value heads
BLOCK_SIZES = (16, 32, 64, 128, 256, 24)
OPTIONS = (  # window, soft-cap, sinks
    (None, None, False),
    (100, None, False),
    (None, 5.0, False),
    (None, None, True),
    (64, 5.0, True),
    (1, None, False),
)


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` are (number of queries, context)."""

    dtype: torch.dtype
    heads: Heads
    block_size: int
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads.query}/{self.heads.kv} heads x {self.heads.dim}"
        if self.heads.of_values != self.heads.dim:
            heads += f" and {self.heads.of_values}"
        options = f"window {self.window}, soft-cap {self.soft_cap}, sinks {self.sinks}"
        return f"{self.dtype}, {heads}, blocks of {self.block_size}, {options}, rows {list(self.rows)}"


def decode_rows(block_size: int, longest: int) -> tuple[tuple[int, int], ...]:
    """One query each; contexts around the borders of blocks, one without a token, one long."""
    contexts = (1, block_size - 1, block_size, block_size + 1, 3 * block_size, 0, longest)
    return tuple((1, context) for context in contexts)


def mixed_rows(block_size: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Whole prompts, chunks after a cached part, and decode rows between them."""
    return (
        (1, block_size + 1), (block_size + 3, block_size + 3), (1, 1), (9, 2 * block_size), (1, longest),
        (longest // 3, longest // 3), (5, longest), (1, 0),
    )  # fmt: skip


def grid(dtypes: list[torch.dtype], *, tiny: bool) -> Iterator[Case]:
    """The cases for each dtype, those that differ most first."""
    longest, rounds = (70, 1) if tiny else (1500, 8)
    for step in range(rounds):
        for i, dim in enumerate(HEAD_DIMS):
            for j, dtype in enumerate(dtypes):
                n = i + 3 * j + 5 * step
                window, soft_cap, sinks = OPTIONS[n % len(OPTIONS)]
                query, kv = GROUPS[(n + step) % len(GROUPS)]
                block_size = BLOCK_SIZES[(n + 2 * step) % len(BLOCK_SIZES)]
                make_rows = (decode_rows, mixed_rows)[(i + step) % 2]
                case = Case(dtype, Heads(query, kv, dim), block_size, make_rows(block_size, longest))
                case = replace(case, window=window, soft_cap=soft_cap, sinks=sinks)
                yield _made_tiny(case) if tiny else case
    for dtype in dtypes:
        yield Case(dtype, Heads(4, 2, 192, 128), 16, mixed_rows(16, longest) if not tiny else ((1, 17), (3, 20)))
        if not tiny:
            # One long row: its context is split over the whole device.
            yield Case(dtype, Heads(8, 1, 128), 16, ((1, 40_000),))
            yield Case(dtype, Heads(32, 8, 128), 16, ((1, 20_000), (1, 300)), window=5000, sinks=True)


def _made_tiny(case: Case) -> Case:
    """The interpreter takes milliseconds for each program: blocks and rows as few and short as still say something."""
    block_size = min(case.block_size, 32)
    rows = ((1, block_size + 1), (3, 5), (1, 0), (2, 70)) if case.rows[1][0] > 1 else ((1, 1), (1, block_size), (1, 70))
    query = case.heads.query // case.heads.kv * min(case.heads.kv, 2)
    heads = Heads(query, min(case.heads.kv, 2), case.heads.dim)
    return replace(case, heads=heads, block_size=block_size, rows=rows, window=case.window and min(case.window, 40))
