"""What the block table costs: the same kernel over the same numbers, with their blocks in any order, with them in
memory's order, and without a table, where a block's place is computed and not read.
"""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.backends import checked_backend, prepare
from benchmarks.gpu.bandwidth import REPEATS, TINY_REPEATS
from benchmarks.gpu.batches import Batch, Heads, make_batch
from benchmarks.gpu.compare import distance
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import Work, num_copies, ratio, release_memory, take_turns, typical_us
from kernels import Rule

BLOCK_SIZES = (16, 64, 256)


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    shapes = {
        "decode": (Heads(4, 2, 64), [(1, 40)] * 2) if machine.tiny else (Heads(32, 8, 128), [(1, 2048)] * 64),
        "prefill": (Heads(4, 2, 64), [(8, 24)]) if machine.tiny else (Heads(32, 8, 128), [(2048, 2048)] * 4),
    }
    for name, (heads, rows) in shapes.items():
        for block_size in BLOCK_SIZES[:1] if machine.tiny else BLOCK_SIZES:
            label = f"{name}, blocks of {block_size}"
            report.attempt(label, partial(with_and_without, heads, rows, block_size, device))
            release_memory(device)


def with_and_without(
    heads: Heads, rows: list[tuple[int, int]], block_size: int, device: torch.device
) -> dict[str, float]:
    """`shuffled_by_no_table`: time through a shuffled table by that without any; and both parts of it: what the table
    costs that counts up, and what any order costs beside it.

    All rows have equally many blocks. Raises ValueError, before anything is timed, where a batch has other results with
    its table than without.
    """
    backend = checked_backend(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16

    def batch(seed: int, shuffled: bool) -> Batch:
        return make_batch(rows, heads, block_size=block_size, dtype=dtype, device=device, seed=seed, shuffled=shuffled)

    copies = num_copies(batch(0, False).kv_bytes, device)
    ordered, shuffled = ([batch(seed, each) for seed in range(copies)] for each in (False, True))
    found = distance(without_table(ordered[0])(), ordered[0].attend(backend))
    if not found.within(dtype):
        raise ValueError(f"results with a table and without differ by {found.relative:.3g} of a vector's length")
    works: dict[str, list[Work]] = {
        "no_table": [without_table(made) for made in ordered],
        "ordered": [partial(Batch.attend, made, backend) for made in ordered],
        "shuffled": [partial(Batch.attend, made, backend) for made in shuffled],
    }
    times = take_turns(works, REPEATS if device.type == "cuda" else TINY_REPEATS, device)
    return {
        "shuffled_by_no_table": ratio(times, "shuffled", "no_table"),
        "ordered_by_no_table": ratio(times, "ordered", "no_table"),
        "shuffled_by_ordered": ratio(times, "shuffled", "ordered"),
        **{f"{name}_us": typical_us(seconds) for name, seconds in times.items()},
    }


def without_table(batch: Batch) -> Callable[[], torch.Tensor]:
    """Attention over an ordered batch, whose first row begins with block 1, that reads no table."""
    from kernels.triton.attention import contiguous_attention  # only here: nothing may import triton before main

    caches, rule = (batch.key_cache[1:], batch.value_cache[1:]), Rule(batch.q.shape[2] ** -0.5)
    return lambda: contiguous_attention(batch.q, *caches, batch.rows(), rule)
