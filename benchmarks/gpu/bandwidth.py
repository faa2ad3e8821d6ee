"""Decode attention beside a copy on the device: both can move no more bytes a second than the memory gives.

A decode step reads each key and value of its rows once and computes little, so its limit is the memory's. The copy
moves as many bytes, half of them read and half written. Both take turns, on data that is several times the cache.
"""

import random
from functools import partial

import torch

from benchmarks.gpu.backends import checked_backend, prepare
from benchmarks.gpu.batches import Batch, Heads, make_batch
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import copy_of, num_copies, ratio, release_memory, significant, take_turns, typical_us

BLOCK_SIZE = 16
REPEATS, TINY_REPEATS = 40, 2
# Rows are chosen so that each has as much to read: fewer key/value heads, more rows.
MANY_ROWS = {
    "64 rows, 32/8 heads x 128": (64, Heads(32, 8, 128)),
    "512 rows, 16/1 heads x 128": (512, Heads(16, 1, 128)),
    "64 rows, 16/16 heads x 128": (64, Heads(16, 16, 128)),
    "64 rows, 16/8 heads x 256": (64, Heads(16, 8, 256)),
}
CONTEXTS = (400, 4096)  # of those rows, evenly spread
LONG_CONTEXTS = (16_384, 65_536, 131_072)  # of a row alone


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    for name, (heads, contexts) in workloads(tiny=machine.tiny).items():
        report.attempt(name, partial(against_copy, heads, contexts, device))
        release_memory(device)


def workloads(*, tiny: bool) -> dict[str, tuple[Heads, list[int]]]:
    """Heads, and the context of each row."""
    if tiny:
        return {"3 rows, 4/2 heads x 64": (Heads(4, 2, 64), [9, 40, 33]), "1 row of 300": (Heads(4, 2, 64), [300])}
    chance = random.Random(0)
    many = {
        name: (heads, [chance.randint(*CONTEXTS) for _ in range(num_rows)])
        for name, (num_rows, heads) in MANY_ROWS.items()
    }
    return many | {f"1 row of {context}, 32/8 heads x 128": (Heads(32, 8, 128), [context]) for context in LONG_CONTEXTS}


def against_copy(heads: Heads, contexts: list[int], device: torch.device) -> dict[str, float]:
    """`of_copy`: bytes a second of keys and values, by those that a copy moves."""
    backend = checked_backend(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    rows = [(1, context) for context in contexts]

    def batch(seed: int) -> Batch:
        return make_batch(rows, heads, block_size=BLOCK_SIZE, dtype=dtype, device=device, seed=seed)

    first = batch(0)
    num_bytes = first.kv_bytes
    batches = [first, *(batch(seed) for seed in range(1, num_copies(num_bytes, device)))]
    times = take_turns(
        {
            "attention": [partial(Batch.attend, made, backend) for made in batches],
            "copy": [copy_of(num_bytes, device) for _ in batches],
        },
        REPEATS if device.type == "cuda" else TINY_REPEATS,
        device,
    )
    return {
        "of_copy": ratio(times, "copy", "attention"),
        "attention_us": typical_us(times["attention"]),
        "kv_mb": significant(num_bytes / 1e6),
        "attention_gb_s": significant(num_bytes / 1e3 / typical_us(times["attention"])),
        "copy_gb_s": significant(num_bytes / 1e3 / typical_us(times["copy"])),
    }
