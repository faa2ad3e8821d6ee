"""Blocks that rows have in common: whether reading them once gives what reading them for each row does, and what it
gains."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.backends import REFERENCE, checked_backend, checked_dtypes, prepare
from benchmarks.gpu.bandwidth import REPEATS, TINY_REPEATS
from benchmarks.gpu.batches import Batch, Heads, make_batch
from benchmarks.gpu.compare import distance
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import Work, num_copies, ratio, release_memory, take_turns, typical_us
from kernels import Backend, Rule, SharedBlocks

BLOCK_SIZE = 16
ALL = {"window": 45, "soft_cap": 0.7, "sinks": True}
OPTIONS: tuple[dict[str, Any], ...] = ({}, ALL, {"window": 70}, {"soft_cap": 0.7}, {"sinks": True})


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    options = 2 if machine.tiny else len(OPTIONS)
    for dtype in checked_dtypes(device):
        for heads in (Heads(4, 2, 64), Heads(7, 1, 80), Heads(16, 1, 256))[: 1 if machine.tiny else 3]:
            for group in (2,) if machine.tiny else (2, 5, 40):
                report.attempt(
                    f"{heads.query} heads of {heads.dim}, {group} rows, {dtype}",
                    partial(worst_error, checked_backend(device), heads, group, dtype, device, OPTIONS[:options]),
                )
    shapes = [(2, 3, 2)] if machine.tiny else [(4, 256, 8), (64, 64, 8), (256, 64, 8)]
    for num_rows, shared, own in shapes:
        label = f"{num_rows} rows, {shared} blocks in common, {own} of their own"
        heads = Heads(4, 2, 64) if machine.tiny else Heads(32, 8, 128)
        report.attempt(label, partial(grouped_and_ordinary, heads, num_rows, shared, own, device))
        release_memory(device)


def sharing_rows(
    heads: Heads, num_rows: int, shared: int, own: int, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Batch, SharedBlocks]:
    """Decode rows with `shared` blocks in common and up to `own` more each; and one row without any in common."""
    contexts = [(1, (shared + own) * BLOCK_SIZE - i % BLOCK_SIZE) for i in range(num_rows)]
    batch = make_batch([*contexts, (1, 5)], heads, block_size=BLOCK_SIZE, dtype=dtype, device=device, seed=seed)
    batch.block_tables[1:num_rows, :shared] = batch.block_tables[0, :shared].clone()
    own_start = [shared] * num_rows + [0]
    columns = [0], [shared], [0, num_rows], list(range(num_rows)), own_start
    return batch, SharedBlocks(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def worst_error(
    backend: Backend,
    heads: Heads,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    all_options: Sequence[dict[str, Any]] = OPTIONS,
) -> dict[str, float]:
    """Of all options, by a vector's length. Raises ValueError where one is off."""
    batch, shared = sharing_rows(heads, num_rows, 4, 2, dtype=dtype, device=device)
    worst = 0.0
    for options in all_options:
        sinks = torch.linspace(-2, 3, heads.query, device=device) if options.get("sinks") else None
        rule = Rule(heads.dim**-0.5, **{**options, "sinks": sinks})
        expected = batch.attend(REFERENCE, rule)
        found = distance(batch.attend(backend, rule, shared), expected)
        if not found.within(dtype):
            raise ValueError(f"with {options or 'no options'} off by {found.relative:.3g} of a vector's length")
        worst = max(worst, found.relative)
    return {"relative_error": worst}


def grouped_and_ordinary(heads: Heads, num_rows: int, shared: int, own: int, device: torch.device) -> dict[str, float]:
    """`grouped_by_ordinary`: time when told of the blocks in common by that when not."""
    backend = checked_backend(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    kv_bytes = sharing_rows(heads, num_rows, shared, own, dtype=dtype, device=device)[0].kv_bytes
    footprint = kv_bytes * (shared + num_rows * own) // (num_rows * (shared + own))
    made = [
        sharing_rows(heads, num_rows, shared, own, dtype=dtype, device=device, seed=seed)
        for seed in range(num_copies(footprint, device))
    ]
    works: dict[str, list[Work]] = {
        "grouped": [partial(batch.attend, backend, shared=segments) for batch, segments in made],
        "ordinary": [partial(batch.attend, backend) for batch, _ in made],
    }
    times = take_turns(works, REPEATS if device.type == "cuda" else TINY_REPEATS, device)
    return {
        "grouped_by_ordinary": ratio(times, "grouped", "ordinary"),
        **{f"{name}_us": typical_us(seconds) for name, seconds in times.items()},
    }
