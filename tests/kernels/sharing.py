"""Rows of a pool that have blocks in common, and what tells a kernel so."""

import itertools

import torch

from kernels import REFERENCE, Backend, SharedBlocks
from tests.kernels.pool import PLAIN, Pool


def share(pool: Pool, rows: list[int], first: int, end: int) -> None:
    """Give the rows the blocks first : end of the first of them, and what is in these."""
    block_size = pool.block_size
    like, others = rows[0], rows[1:]
    for row in others:
        pool.tables[row, first:end] = pool.tables[like, first:end]
        for own, common in zip(pool.rows[row][1:], pool.rows[like][1:], strict=True):
            own[first * block_size : end * block_size] = common[first * block_size : end * block_size]


def shared_blocks(segments: list[tuple[int, int, list[int]]], num_rows: int) -> SharedBlocks:
    """Of (first, end, rows), parents before their children."""
    own_start = [max((end for _, end, rows in segments if row in rows), default=0) for row in range(num_rows)]
    columns = (
        [first for first, _, _ in segments],
        [end for _, end, _ in segments],
        [0, *itertools.accumulate(len(rows) for _, _, rows in segments)],
        [row for _, _, rows in segments for row in rows],
        own_start,
    )
    return SharedBlocks(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def pool_that_shares(
    contexts: list[int], segments: list[tuple[int, int, list[int]]], *, backend: Backend = REFERENCE, **options: object
) -> tuple[Pool, SharedBlocks]:
    """Rows of one query; the segments are theirs. `contexts` are for blocks of 4, and in proportion for others."""
    by = scale(backend)
    rows = [(1, context * by) for context in contexts]
    pool = Pool(rows, backend=backend, **{"heads": 2, "kv_heads": 1, **options})
    for first, end, members in segments:
        share(pool, members, first, end)
    return pool, shared_blocks(segments, len(contexts))


def scale(backend: Backend) -> int:
    """How many times 4 tokens the backend's blocks have here."""
    return 1 if backend in PLAIN else 4
