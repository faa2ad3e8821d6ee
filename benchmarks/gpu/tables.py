"""What the block table costs: the same kernel over the same rows, their blocks in memory's order or in any order."""

from functools import partial

import torch

from benchmarks.gpu.backends import checked_backend, prepare
from benchmarks.gpu.bandwidth import REPEATS, TINY_REPEATS
from benchmarks.gpu.batches import Batch, Heads, make_batch
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import num_copies, ratio, release_memory, take_turns, typical_us

BLOCK_SIZES = (16, 64, 256)


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    shapes = {
        "decode": (Heads(4, 2, 64), [(1, 40), (1, 33)]) if machine.tiny else (Heads(32, 8, 128), [(1, 2048)] * 64),
        "prefill": (Heads(4, 2, 64), [(8, 24)]) if machine.tiny else (Heads(32, 8, 128), [(2048, 2048)] * 4),
    }
    for name, (heads, rows) in shapes.items():
        for block_size in BLOCK_SIZES[:1] if machine.tiny else BLOCK_SIZES:
            label = f"{name}, blocks of {block_size}"
            report.attempt(label, partial(in_order_or_not, heads, rows, block_size, device))
            release_memory(device)


def in_order_or_not(
    heads: Heads, rows: list[tuple[int, int]], block_size: int, device: torch.device
) -> dict[str, float]:
    """`shuffled_by_ordered`: time through a shuffled table by that through one that counts up."""
    backend = checked_backend(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16

    def batch(name: str, seed: int) -> Batch:
        shuffled = name == "shuffled"
        return make_batch(rows, heads, block_size=block_size, dtype=dtype, device=device, seed=seed, shuffled=shuffled)

    copies = num_copies(batch("ordered", 0).kv_bytes, device)
    batches = {name: [batch(name, seed) for seed in range(copies)] for name in ("ordered", "shuffled")}
    times = take_turns(
        {name: [partial(Batch.attend, made, backend) for made in sets] for name, sets in batches.items()},
        REPEATS if device.type == "cuda" else TINY_REPEATS,
        device,
    )
    return {
        "shuffled_by_ordered": ratio(times, "shuffled", "ordered"),
        "ordered_us": typical_us(times["ordered"]),
        "shuffled_us": typical_us(times["shuffled"]),
    }
